"""The flags of each probing command, and the task that they mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.cli.drawing import Alpha, Cmap, Format, View, drawing_of
from hookscope.errors import UsageError, check_choice
from hookscope.losses import LOSSES, LossFunction

if TYPE_CHECKING:
    from hookscope.cli.session import Shared
    from hookscope.job import Drawing
    from hookscope.tasks import Task


@dataclass(frozen=True)
class FeatureMapsFlags:
    """What `featuremaps` adds."""

    channels: Annotated[
        str | None,
        typer.Option(metavar="all|top:K|random:K|0-15,40", help="Which channels; top is by variance."),
    ] = None
    max_channels: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="At most N channels a layer, by variance; 64 without --channels."
        ),
    ] = None
    scale: Annotated[
        str, typer.Option(metavar="channel|layer", help="Colour range: each channel's own, or the layer's.")
    ] = "channel"
    columns: Annotated[int | None, typer.Option(min=1, metavar="N", help="Columns of the grid.")] = None
    overlay: Annotated[bool, typer.Option("--overlay", help="Also the mean activation on the picture.")] = (
        False
    )
    raw: Annotated[bool, typer.Option("--raw", help="Also the values, as safetensors.")] = False
    cmap: Cmap = "viridis"
    alpha: Alpha = 0.6
    view: View = "original"
    format: Format = None

    @property
    def baseline(self) -> None:
        """Nothing is compared with."""

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.tasks.featuremaps import FeatureMapsOptions, FeatureMapsTask

        options = FeatureMapsOptions(
            layer=tuple(shared.layers.layer),
            exclude=tuple(shared.layers.exclude),
            channels=self.channels,
            max_channels=self.max_channels,
            overlay=self.overlay,
            seed=shared.run.seed,
        )
        return FeatureMapsTask(options)

    def drawing(self) -> Drawing:
        """How the grids are drawn."""
        from hookscope.render.grid import SCALES

        check_choice("--scale", self.scale, SCALES)
        drawing = drawing_of(self.cmap, self.alpha, self.view, self.format, overlay=self.overlay)
        picture = replace(drawing.picture, scale=self.scale, columns=self.columns, raw=self.raw)
        return replace(drawing, picture=picture)


@dataclass(frozen=True)
class GradnormFlags:
    """What `gradnorm` adds."""

    loss: Annotated[
        str, typer.Option(metavar="|".join((*LOSSES, "file.py:callable")), help="A mean over the pictures.")
    ] = "cross_entropy"
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", metavar="ID|LABEL", help="True class; else folders, else the prediction."
        ),
    ] = None
    max_norm: Annotated[
        float | None, typer.Option(metavar="X", help="Fail (exit 1) when the total norm is above X.")
    ] = None

    @property
    def baseline(self) -> None:
        """Nothing is compared with."""

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.tasks.gradnorm import GradnormOptions, GradnormTask, check_max_norm

        check_max_norm(self.max_norm)
        options = GradnormOptions(
            layer=tuple(shared.layers.layer) or ("**",),
            exclude=tuple(shared.layers.exclude),
            loss=_loaded(self.loss) if ":" in self.loss else self.loss,
            loss_name=self.loss,
            target=self.target,
            max_norm=self.max_norm,
        )
        return GradnormTask(options)

    def drawing(self) -> Drawing:
        """Nothing is drawn on pictures."""
        from hookscope.job import Drawing

        return Drawing()


def _loaded(spec: str) -> LossFunction:
    from hookscope.models.user import resolved

    with resolved(spec) as found:
        if not callable(found):
            raise UsageError(
                f"the loss {spec!r} is no callable", "it takes the model's output and the targets"
            )
        return found  # type: ignore[no-any-return]
