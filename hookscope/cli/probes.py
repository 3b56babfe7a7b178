"""The flags of each probing command, and the task that they mean."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.cam.methods import METHODS
from hookscope.errors import UsageError, check_choice
from hookscope.losses import LOSSES, LossFunction
from hookscope.render.colour import names as colour_names

if TYPE_CHECKING:
    from hookscope.cli.session import Shared
    from hookscope.run import Drawing
    from hookscope.tasks import Task

_CMAPS = ", ".join(colour_names())
_METHODS = "; ".join(f"{method.name}: {method.summary}" for method in METHODS.values())

Cmap = Annotated[str, typer.Option(metavar="NAME", help=f"Colours: {_CMAPS}.")]
Alpha = Annotated[float, typer.Option(min=0, max=1, metavar="A", help="Strength of the overlay, 0 to 1.")]
View = Annotated[
    str, typer.Option(metavar="original|input", help="Draw on the whole picture, or on what the model saw.")
]
Format = Annotated[
    str | None, typer.Option(metavar="png|jpg|webp", help="Of every picture; overlays are jpg, the rest png.")
]


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
        drawing = _drawing(self.cmap, self.alpha, self.view, self.format, overlay=self.overlay)
        picture = replace(drawing.picture, scale=self.scale, columns=self.columns, raw=self.raw)
        return replace(drawing, picture=picture)


@dataclass(frozen=True)
class GradcamFlags:
    """What `gradcam` adds."""

    method: Annotated[
        list[str], typer.Option("--method", "-m", metavar="NAME", help=f"Repeatable. {_METHODS}.")
    ] = field(default_factory=lambda: ["gradcam"])
    target: Annotated[
        list[str],
        typer.Option("--target", "-t", metavar="top1|top:K|ID|LABEL", help="Classes to explain, repeatable."),
    ] = field(default_factory=lambda: ["top1"])
    cmap: Cmap = "turbo"
    alpha: Alpha = 0.6
    view: View = "original"
    format: Format = None

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.tasks.gradcam import GradcamOptions, GradcamTask

        options = GradcamOptions(
            layer=tuple(shared.layers.layer),
            exclude=tuple(shared.layers.exclude),
            method=tuple(self.method),
            target=tuple(self.target),
        )
        return GradcamTask(options)

    def drawing(self) -> Drawing:
        """How the maps are drawn."""
        return _drawing(self.cmap, self.alpha, self.view, self.format, overlay=True)


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
        from hookscope.run import Drawing

        return Drawing()


def _loaded(spec: str) -> LossFunction:
    from hookscope.models.user import resolved

    with resolved(spec) as found:
        if not callable(found):
            raise UsageError(
                f"the loss {spec!r} is no callable", "it takes the model's output and the targets"
            )
        return found  # type: ignore[no-any-return]


def _drawing(cmap: str, alpha: float, view: str, picture_format: str | None, *, overlay: bool) -> Drawing:
    from hookscope.output.encode import FORMATS
    from hookscope.output.writers import PictureOptions
    from hookscope.render.overlay import VIEWS
    from hookscope.run import Drawing

    check_choice("--cmap", cmap, colour_names())
    check_choice("--view", view, VIEWS)
    options = PictureOptions(cmap=cmap, alpha=alpha, view=view)
    if picture_format is not None:
        check_choice("--format", picture_format, FORMATS)
        options = replace(
            options, grid_format=picture_format, heat_format=picture_format, overlay_format=picture_format
        )
    return Drawing(options, overlay=overlay)
