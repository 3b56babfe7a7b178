"""The flags of how pictures are drawn, and what they mean."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.errors import check_choice
from hookscope.render.colour import names as colour_names

if TYPE_CHECKING:
    from hookscope.job import Drawing

_CMAPS = ", ".join(colour_names())

Cmap = Annotated[str, typer.Option(metavar="NAME", help=f"Colours: {_CMAPS}.")]
Alpha = Annotated[float, typer.Option(min=0, max=1, metavar="A", help="Strength of the overlay, 0 to 1.")]
View = Annotated[
    str, typer.Option(metavar="original|input", help="Draw on the whole picture, or on what the model saw.")
]
Format = Annotated[
    str | None, typer.Option(metavar="png|jpg|webp", help="Of every picture; overlays are jpg, the rest png.")
]


def drawing_of(cmap: str, alpha: float, view: str, picture_format: str | None, *, overlay: bool) -> Drawing:
    """How the pictures of a command are drawn.

    Raises:
        UsageError: a value that is none of the choices.
    """
    from hookscope.job import Drawing
    from hookscope.output.encode import FORMATS
    from hookscope.output.writers import PictureOptions
    from hookscope.render.overlay import VIEWS

    check_choice("--cmap", cmap, colour_names())
    check_choice("--view", view, VIEWS)
    options = PictureOptions(cmap=cmap, alpha=alpha, view=view)
    if picture_format is not None:
        check_choice("--format", picture_format, FORMATS)
        options = replace(
            options, grid_format=picture_format, heat_format=picture_format, overlay_format=picture_format
        )
    return Drawing(options, overlay=overlay)
