"""The flags of `gradnorm`, and the task that they mean."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.checks.gradrules import LIMITS, RULES
from hookscope.cli.dataflags import DATA, DataFlags
from hookscope.cli.drawing import Alpha, Cmap, Format, View, drawing_of
from hookscope.cli.gateflags import GATE, GateFlags, fail_on_option, limits_option
from hookscope.errors import UsageError
from hookscope.losses import LOSSES, LossFunction

if TYPE_CHECKING:
    from hookscope.cli.session import Shared
    from hookscope.job import Drawing
    from hookscope.tasks import Task


@dataclass(frozen=True)
class _LossFlags:
    """What is differentiated, of what."""

    loss: Annotated[
        str,
        typer.Option(
            metavar="|".join((*LOSSES, "file.py:callable")),
            rich_help_panel=DATA,
            help="A mean over the pictures.",
        ),
    ] = "cross_entropy"
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="ID|LABEL",
            rich_help_panel=DATA,
            help="True class; else folders, else the prediction.",
        ),
    ] = None
    train_mode: Annotated[
        bool,
        typer.Option(
            "--train-mode",
            rich_help_panel=DATA,
            help="Dropout active, batch norm by the batch; all put back.",
        ),
    ] = False
    norm: Annotated[str, typer.Option(metavar="1|2|inf", help="Which norm of a gradient.")] = "2"
    maps: Annotated[
        bool,
        typer.Option(
            "--maps",
            help="Also gradient sizes on the pictures, at the layers of -l or at each resolution's first.",
        ),
    ] = False


@dataclass(frozen=True)
class GradnormFlags(GateFlags, DataFlags, _LossFlags):
    """What `gradnorm` adds."""

    fail_on: Annotated[str, fail_on_option(RULES)] = "error"
    limits: Annotated[list[str], limits_option(LIMITS)] = field(default_factory=list)
    max_norm: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=GATE, help="Fail when the total norm is above X."),
    ] = None
    min_norm: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=GATE, help="Fail when the total norm is below X."),
    ] = None
    cmap: Cmap = "inferno"
    alpha: Alpha = 0.6
    view: View = "original"
    format: Format = None

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.magnitudes import parse_norm
        from hookscope.tasks.gradnorm import GradnormOptions, GradnormTask

        if self.maps and self.data is not None:
            raise UsageError("--maps draws on pictures, and --data has none", "leave one of them out")
        if self.target is not None and self.data is not None:
            raise UsageError(
                "--target is a class for every picture, and --data has its own", "leave one of them out"
            )
        limits = {"max-norm": self.max_norm, "min-norm": self.min_norm}
        for name, value in limits.items():
            if value is not None and not value >= 0:
                raise UsageError(f"--{name} {value:g} is no limit", "a limit is a number of 0 or more")
        gate = self.gate_options(shared, {name: value for name, value in limits.items() if value is not None})
        options = GradnormOptions(
            layer=tuple(shared.layers.layer),
            exclude=tuple(shared.layers.exclude),
            loss=_loaded(self.loss) if ":" in self.loss else self.loss,
            loss_name=self.loss,
            target=self.target,
            norm=parse_norm(self.norm),
            train_mode=self.train_mode,
            maps=self.maps,
            seed=shared.run.seed,
            gate=gate,
        )
        return GradnormTask(options)

    def drawing(self) -> Drawing:
        """How the maps are drawn."""
        drawing = drawing_of(self.cmap, self.alpha, self.view, self.format, overlay=self.maps)
        return replace(drawing, overlay=self.maps)


def _loaded(spec: str) -> LossFunction:
    from hookscope.models.user import resolved

    with resolved(spec) as found:
        if not callable(found):
            raise UsageError(
                f"the loss {spec!r} is no callable", "it takes the model's output and the targets"
            )
        return found  # type: ignore[no-any-return]
