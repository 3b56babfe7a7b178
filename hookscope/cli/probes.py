"""The flags of each probing command, and the task that they mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.cli.drawing import Alpha, Cmap, Format, View, drawing_of
from hookscope.errors import check_choice

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

    @property
    def data(self) -> None:
        """Pictures are drawn on."""

    @property
    def batches(self) -> None:
        """All of them."""

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
