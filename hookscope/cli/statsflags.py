"""The flags of `stats`, and the task that they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.checks.statrules import LIMITS, RULES
from hookscope.cli.dataflags import DataFlags
from hookscope.cli.drawing import drawing_of
from hookscope.cli.gateflags import GateFlags, fail_on_option, limits_option
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from hookscope.cli.session import Shared
    from hookscope.job import Drawing
    from hookscope.tasks import Task


@dataclass(frozen=True)
class _KeptFlags:
    """What is kept of every tensor."""

    threshold: Annotated[
        float, typer.Option(metavar="X", help="A unit is dead that was never above X; 0 is ReLU's own.")
    ] = 0.0
    histogram: Annotated[
        bool, typer.Option("--histogram/--no-histogram", help="Histograms and quantiles, of a sample.")
    ] = True
    sample: Annotated[
        int, typer.Option(min=1, metavar="N", help="Values drawn of each picture and tensor, by --seed.")
    ] = 2048
    spectrum: Annotated[
        bool,
        typer.Option(
            "--spectrum",
            help="Also ranks and correlations of the channels: needs memory for each pair of them.",
        ),
    ] = False


@dataclass(frozen=True)
class StatsFlags(GateFlags, DataFlags, _KeptFlags):
    """What `stats` adds."""

    fail_on: Annotated[str, fail_on_option(RULES)] = "error"
    limits: Annotated[list[str], limits_option(LIMITS)] = field(default_factory=list)

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.probes.stats import Wanted
        from hookscope.tasks.stats import StatsOptions, StatsTask

        if not math.isfinite(self.threshold):
            raise UsageError(f"--threshold {self.threshold:g} is no number", "0 is ReLU's own")
        wanted = Wanted(self.threshold, self.histogram, self.spectrum, shared.run.seed, self.sample)
        options = StatsOptions(
            layer=tuple(shared.layers.layer),
            exclude=tuple(shared.layers.exclude),
            wanted=wanted,
            gate=self.gate_options(shared),
        )
        return StatsTask(options)

    def drawing(self) -> Drawing:
        """Nothing is drawn on pictures."""
        return drawing_of("viridis", 0.6, "original", None, overlay=False)
