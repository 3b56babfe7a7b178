"""Artefacts to files: for each kind, which files, under which names, with which records.

Owns file names and records; `render` makes pixels, `encode` and `tables` bytes, `directory` the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from hookscope.artifacts import Heat, Table, Tiles
from hookscope.images import View
from hookscope.output import encode, tables
from hookscope.output.directory import OutputDir
from hookscope.output.manifest import encoded
from hookscope.output.names import safe_name, slug
from hookscope.render import grid, heat, overlay
from hookscope.wording import ranges

Record = dict[str, Any]

_HEAT_SIDE_PX = 384


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
    """How pictures are drawn and encoded, as the flags of the same names say."""

    cmap: str = "viridis"
    scale: str = "channel"
    columns: int | None = None
    alpha: float = 0.6
    view: str = "original"
    grid_format: str = "png"
    heat_format: str = "png"
    overlay_format: str = "jpg"
    raw: bool = False


@dataclass(frozen=True)
class _File:
    """A file to be: what stands behind the stem, which part of the artefact it is, and what makes its bytes."""

    ending: str
    part: str
    make: Callable[[], bytes]


@dataclass(frozen=True)
class _Plan:
    """What an artefact becomes: files of one stem, with one record but for their parts."""

    stem: str
    files: Sequence[_File]
    record: Record


Writing = Callable[[], tuple[Record, ...]]
"""Draws, encodes and writes an artefact's files, in any thread, and gives their records."""


def prepared(out: OutputDir, artefact: Tiles | Heat, place: Place, options: PictureOptions) -> Writing:
    """The writing of the artefact's files, by the plan of its kind.

    The files' names are given out here, so that they follow the order of these calls, whatever the threads do.
    """
    plan = PLANS[type(artefact)](artefact, place, options)
    names = out.reserve(plan.stem, [file.ending for file in plan.files])
    return partial(_write_all, out, names, plan)


def write_table(
    out: OutputDir, table: Table, *, name: str = "", formats: Sequence[str] = ("csv", "json")
) -> tuple[Record, ...]:
    """The records of the table in each of the formats, as `name` (`/` between folders; the kind where empty)."""
    stem = "/".join(map(safe_name, (name or table.kind).split("/")))
    files = [_File(f".{kind}", "table", partial(_table, table, kind)) for kind in formats]
    names = out.reserve(stem, [file.ending for file in files])
    record = {"kind": table.kind, "status": "ok", "scores": table.scores}
    return _write_all(out, names, _Plan(stem, files, record))


def write_summary(out: OutputDir, pages: Sequence[Table], *, name: str) -> Record:
    """The record of one Markdown page with all the tables."""
    text = "\n".join(tables.to_markdown(page) for page in pages)
    (path,) = out.reserve(name, [".md"])
    return out.write(path, encoded(text), kind=pages[0].kind, part="summary", format="md", status="ok")


def write_document(out: OutputDir, name: str, data: bytes, *, kind: str) -> Record:
    """The record of a file that was encoded elsewhere, such as a plot."""
    stem, _, ending = name.rpartition(".")
    (path,) = out.reserve(stem, [f".{ending}"])
    return out.write(path, data, kind=kind, part="plot", format=ending, status="ok")


def _plan_tiles(tiles: Tiles, place: Place, options: PictureOptions) -> _Plan:
    """The grid and, with `raw`, a safetensors file with the values."""
    files = [_File(f".{options.grid_format}", "grid", partial(_grid, tiles, place, options))]
    if options.raw:
        files.append(_File(".safetensors", "raw", partial(_raw_tiles, tiles)))
    record = _record(tiles, place, "featuremaps") | {
        "channels": ranges(tiles.channels),
        "selection": tiles.selection,
        "total_channels": tiles.total_channels,
    }
    return _Plan(_stem(place, safe_name(str(tiles.site))), files, record)


def _plan_heat(drawn: Heat, place: Place, options: PictureOptions) -> _Plan:
    """The overlay (where there is a picture), the heat map and the raw values."""
    files = [
        _File(f".heat.{options.heat_format}", "heatmap", partial(_heat, drawn, place, options)),
        _File(".npy", "raw", partial(encode.npy, drawn.values)),
    ]
    if place.picture is not None and place.view is not None:
        drawing = partial(_overlay, drawn, place.picture, place.view, options)
        files.insert(0, _File(f".overlay.{options.overlay_format}", "overlay", drawing))
    record = _record(drawn, place, drawn.kind) | _target(drawn)
    return _Plan(_stem(place, _heat_name(drawn)), files, record)


PLANS: dict[type, Callable[[Any, Place, PictureOptions], _Plan]] = {Tiles: _plan_tiles, Heat: _plan_heat}
"""What each kind of artefact becomes; a new kind is one function and one entry here."""


def _write_all(out: OutputDir, names: Sequence[str], plan: _Plan) -> tuple[Record, ...]:
    return tuple(
        out.write(name, file.make(), **plan.record, part=file.part, format=file.ending.rpartition(".")[2])
        for name, file in zip(names, plan.files, strict=True)
    )


def _table(table: Table, kind: str) -> bytes:
    return encoded(tables.table(table, kind))


def _grid(tiles: Tiles, place: Place, options: PictureOptions) -> bytes:
    picture = grid.draw(
        tiles, title=place.title, columns=options.columns, cmap=options.cmap, scale=_scale(tiles, options)
    )
    return encode.picture(picture, options.grid_format)


def _heat(drawn: Heat, place: Place, options: PictureOptions) -> bytes:
    picture = heat.draw(drawn, title=place.title, cmap=options.cmap, size=_heat_size(drawn, place))
    return encode.picture(picture, options.heat_format)


def _overlay(drawn: Heat, picture: Image.Image, view: View, options: PictureOptions) -> bytes:
    over = overlay.draw(drawn, picture, view, alpha=options.alpha, cmap=options.cmap, where=options.view)
    return encode.picture(over, options.overlay_format)


def _record(artefact: Tiles | Heat, place: Place, kind: str) -> Record:
    return {
        "kind": kind,
        "image": place.image,
        "layer": artefact.site.layer,
        "call": artefact.site.call,
        "output": artefact.site.output,
        "method": None,
        "target": None,
        "label": "",
        "min": artefact.minimum,
        "max": artefact.maximum,
        "status": artefact.status,
    }


def _target(drawn: Heat) -> Record:
    if drawn.target is None:
        return {"method": drawn.method}
    return {"method": drawn.method, "target": drawn.target.index, "label": drawn.target.label}


def _heat_name(drawn: Heat) -> str:
    parts = [safe_name(str(drawn.site)), slug(drawn.method)]
    if drawn.target is not None:
        label = f"-{slug(drawn.target.label)}" if drawn.target.label else ""
        parts.append(f"{drawn.target.index}{label}")
    return ".".join(parts)


def _stem(place: Place, name: str) -> str:
    return f"{place.folder}/{name}" if place.folder else name


def _scale(tiles: Tiles, options: PictureOptions) -> str:
    """A channel of a single value has no range of its own."""
    return "layer" if tiles.values.shape[1:] == (1, 1) else options.scale


def _heat_size(drawn: Heat, place: Place) -> tuple[int, int]:
    """Width and height of the picture, its longer side fixed, in the shape of what the model saw."""
    width, height = place.view.size if place.view else drawn.values.shape[::-1]
    scale = _HEAT_SIDE_PX / max(width, height)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def _raw_tiles(tiles: Tiles) -> bytes:
    values = np.asarray(tiles.values, dtype=np.float32)
    return encode.safetensors({str(tiles.site): values}, {"channels": ranges(tiles.channels)})
