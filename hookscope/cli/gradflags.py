"""The flags of `gradnorm`, and the task that they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.checks.findings import SEVERITIES
from hookscope.checks.gradrules import LIMITS, RULES
from hookscope.checks.rules import assignments
from hookscope.cli.drawing import Alpha, Cmap, Format, View, drawing_of
from hookscope.errors import UsageError
from hookscope.losses import LOSSES, LossFunction

if TYPE_CHECKING:
    from hookscope.cli.flags import LayerFlags
    from hookscope.cli.session import Shared
    from hookscope.job import Drawing
    from hookscope.tasks import Task

_GATE = "Gate"
_DATA = "Data"
_RULES = ", ".join(rule.name for rule in RULES)
_LIMITS = ", ".join(limit.name for limit in LIMITS)


@dataclass(frozen=True)
class GradnormFlags:
    """What `gradnorm` adds."""

    loss: Annotated[
        str,
        typer.Option(
            metavar="|".join((*LOSSES, "file.py:callable")),
            rich_help_panel=_DATA,
            help="A mean over the pictures.",
        ),
    ] = "cross_entropy"
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="ID|LABEL",
            rich_help_panel=_DATA,
            help="True class; else folders, else the prediction.",
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            metavar="file.py:callable",
            rich_help_panel=_DATA,
            help="Batches of (input, target) instead of pictures.",
        ),
    ] = None
    batches: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_DATA, help="At most N batches.")
    ] = None
    train_mode: Annotated[
        bool,
        typer.Option(
            "--train-mode",
            rich_help_panel=_DATA,
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
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="error|warn|RULE,...",
            rich_help_panel=_GATE,
            help=f"Which findings exit with 1. {_RULES}.",
        ),
    ] = "error"
    max_norm: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=_GATE, help="Fail when the total norm is above X."),
    ] = None
    min_norm: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=_GATE, help="Fail when the total norm is below X."),
    ] = None
    severity: Annotated[
        list[str],
        typer.Option(
            metavar="[GLOB:]RULE=LEVEL",
            rich_help_panel=_GATE,
            help=f"{', '.join(SEVERITIES)}; repeatable, a table in a configuration.",
        ),
    ] = field(default_factory=list)
    limits: Annotated[
        list[str],
        typer.Option(
            metavar="[GLOB:]NAME=X",
            rich_help_panel=_GATE,
            help=f"{_LIMITS}; repeatable, a table in a configuration.",
        ),
    ] = field(default_factory=list)
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR", rich_help_panel=_GATE, help="Fail on drift from an earlier run's figures."
        ),
    ] = None
    update_baseline: Annotated[
        bool,
        typer.Option(
            "--update-baseline", rich_help_panel=_GATE, help="Write this run's figures to --baseline."
        ),
    ] = False
    cmap: Cmap = "inferno"
    alpha: Alpha = 0.6
    view: View = "original"
    format: Format = None

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.magnitudes import parse_norm
        from hookscope.tasks.gradgate import GateOptions
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
        gate = GateOptions(
            fail_on=self.fail_on,
            severity=assignments(self.severity, "--severity"),
            limits={
                **assignments(self.limits, "--limits"),
                **{name: value for name, value in limits.items() if value is not None},
            },
            baseline=self.baseline,
            update_baseline=self.update_baseline,
            precision=shared.model.precision,
            layers=_layers(shared.layers),
            # GitHub wants paths from the repository's root, wherever in it the step runs.
            root=Path(os.environ.get("GITHUB_WORKSPACE") or "."),
        )
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


def _layers(flags: LayerFlags) -> str:
    """Which layers are chosen, in words, for a baseline."""
    chosen, without = ", ".join(flags.layer) or "**", ", ".join(flags.exclude)
    return f"{chosen} without {without}" if without else chosen


def _loaded(spec: str) -> LossFunction:
    from hookscope.models.user import resolved

    with resolved(spec) as found:
        if not callable(found):
            raise UsageError(
                f"the loss {spec!r} is no callable", "it takes the model's output and the targets"
            )
        return found  # type: ignore[no-any-return]
