"""Artefacts as encoded pictures: which drawing, in which size and colours, as which bytes.

It must not know files, names or records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.artifacts import Heat, Pair, Sheet, Tiles
from hookscope.images import View
from hookscope.output import encode
from hookscope.render import contact, grid, heat, overlay, pair

_HEAT_SIDE_PX, _PAIR_SIDE_PX = 384, 256
_PLAIN_CMAP, _SIGNED_CMAP = "turbo", "RdBu_r"


@dataclass(frozen=True)
class Place:
    """Where a picture's files go and what it is.

    `folder`: relative, `/` between, `""` for the top. `image`: the picture's path in the manifest.
    `picture`, `view`: the original (RGB, upright) and what the model saw of it; without them, no overlay.
    `note`: what a reader of the picture must know of the model, such as that its weights are random.
    """

    folder: str = ""
    image: str = ""
    picture: Image.Image | None = None
    view: View | None = None
    note: str = ""

    @property
    def title(self) -> str:
        """The picture's path and the note."""
        return " · ".join(filter(None, (self.image, self.note)))


@dataclass(frozen=True)
class PictureOptions:
    """How pictures are drawn and encoded, as the flags of the same names say.

    A signed map has a diverging table in the place of maps' usual one. `parts`: which files a map becomes (`overlay`,
    `heatmap`, `raw`), all where empty.
    """

    cmap: str = "viridis"
    scale: str = "channel"
    columns: int | None = None
    alpha: float = 0.6
    view: str = "original"
    grid_format: str = "png"
    heat_format: str = "png"
    overlay_format: str = "jpg"
    raw: bool = False
    parts: tuple[str, ...] = ()


def grid_bytes(tiles: Tiles, place: Place, options: PictureOptions) -> bytes:
    picture = grid.draw(
        tiles, title=place.title, columns=options.columns, cmap=options.cmap, scale=_scale(tiles, options)
    )
    return encode.picture(picture, options.grid_format)


def heat_bytes(drawn: Heat, place: Place, options: PictureOptions) -> bytes:
    picture = heat.draw(
        drawn,
        title=place.title,
        cmap=_cmap(drawn, options),
        size=_size(drawn.values, place, _HEAT_SIDE_PX),
        input_size=place.view.size if place.view else None,
    )
    return encode.picture(picture, options.heat_format)


def overlay_bytes(drawn: Heat, picture: Image.Image, view: View, options: PictureOptions) -> bytes:
    over = overlay.draw(
        drawn,
        picture,
        view,
        alpha=options.alpha,
        cmap=_cmap(drawn, options),
        where=options.view,
    )
    return encode.picture(over, options.overlay_format)


def sheet_bytes(
    sheet: Sheet, picture: Image.Image, view: View, place: Place, options: PictureOptions
) -> bytes:
    cells = [contact.Cell(drawn, _cmap(drawn, options)) for drawn in sheet.heats]
    page = contact.draw(
        cells, picture, view, title=place.image, note=place.note, alpha=options.alpha, where=options.view
    )
    return encode.picture(page, options.heat_format)


def pair_bytes(both: Pair, place: Place, options: PictureOptions) -> bytes:
    named = (
        heat.layers_said(str(both.site)),
        both.method,
        heat.target_said(both.target) if both.target else "",
    )
    seen = overlay.seen(place.picture, place.view) if place.picture and place.view else None
    page = pair.draw(
        both.before,
        both.now,
        title=" · ".join(filter(None, named)),
        lines=(place.image, heat.scores_said(both.scores)),
        size=_size(both.now, place, _PAIR_SIDE_PX),
        cmap=_cmap(both, options),
        picture=seen,
        signed=both.signed,
        covers=both.covers,
        note=place.note,
    )
    return encode.picture(page, options.heat_format)


def _cmap(drawn: Heat | Pair, options: PictureOptions) -> str:
    return _SIGNED_CMAP if drawn.signed and options.cmap == _PLAIN_CMAP else options.cmap


def _scale(tiles: Tiles, options: PictureOptions) -> str:
    """A channel of a single value has no range of its own."""
    return "layer" if tiles.values.shape[1:] == (1, 1) else options.scale


def _size(values: NDArray[np.float32], place: Place, side_px: int) -> tuple[int, int]:
    """Width and height of a drawn map, its longer side given, in the shape of what the model saw."""
    width, height = place.view.size if place.view else values.shape[::-1]
    scale = side_px / max(width, height)
    return max(round(width * scale), 1), max(round(height * scale), 1)
