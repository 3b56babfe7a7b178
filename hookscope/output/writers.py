"""Artefacts to files: for each kind, which files, under which names, with which records.

Owns file names and records; `render` makes pixels, `encode` and `tables` bytes, `directory` the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from hookscope.artifacts import Heat, Table, Tiles
from hookscope.images import View
from hookscope.output import encode, tables
from hookscope.output.directory import OutputDir
from hookscope.output.names import safe_name, slug
from hookscope.render import grid, heat, overlay

Record = dict[str, Any]

_HEAT_SIDE_PX = 384


@dataclass(frozen=True)
class Place:
    """Where a picture's files go and what it is.

    `folder`: relative, `/` between, `""` for the top. `image`: the picture's path in the manifest.
    `picture`, `view`: the original (RGB, upright) and what the model saw of it; without them, no overlay.
    """

    folder: str = ""
    image: str = ""
    picture: Image.Image | None = None
    view: View | None = None


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


def write_tiles(out: OutputDir, tiles: Tiles, place: Place, options: PictureOptions) -> tuple[Record, ...]:
    """The records of the grid and, with `raw`, of a safetensors file with the values."""
    stem = _stem(place, safe_name(str(tiles.site)))
    record = _record(tiles, place, "featuremaps") | {
        "channels": ranges(tiles.channels),
        "selection": tiles.selection,
        "total_channels": tiles.total_channels,
    }
    picture = grid.draw(
        tiles, title=place.image, columns=options.columns, cmap=options.cmap, scale=options.scale
    )
    files = [(f"{stem}.{options.grid_format}", encode.picture(picture, options.grid_format), "grid")]
    if options.raw:
        files.append((f"{stem}.safetensors", _raw_tiles(tiles), "raw"))
    return _write_all(out, files, record)


def write_heat(
    out: OutputDir, drawn: Heat, place: Place, options: PictureOptions, *, vmax: float | None = None
) -> tuple[Record, ...]:
    """The records of the overlay (where there is a picture), the heat map and the raw values.

    `vmax`: the value of the highest colour, for maps that are to be compared.
    """
    stem = _stem(place, _heat_name(drawn))
    files = []
    if place.picture is not None and place.view is not None:
        over = overlay.draw(
            drawn,
            place.picture,
            place.view,
            alpha=options.alpha,
            cmap=options.cmap,
            where=options.view,
            vmax=vmax,
        )
        kind = options.overlay_format
        files.append((f"{stem}.overlay.{kind}", encode.picture(over, kind), "overlay"))
    alone = heat.draw(drawn, title=place.image, cmap=options.cmap, size=_heat_size(drawn, place), vmax=vmax)
    kind = options.heat_format
    files.append((f"{stem}.heat.{kind}", encode.picture(alone, kind), "heatmap"))
    files.append((f"{stem}.npy", encode.npy(drawn.values), "raw"))
    return _write_all(out, files, _record(drawn, place, drawn.kind) | _target(drawn))


def write_table(
    out: OutputDir, table: Table, *, name: str = "", formats: Sequence[str] = ("csv", "json")
) -> tuple[Record, ...]:
    """The records of the table in each of the formats, as `name` (`/` between folders; the kind where empty)."""
    stem = "/".join(map(safe_name, (name or table.kind).split("/")))
    files = [
        (f"{stem}.{kind}", tables.table(table, kind).encode("utf-8", "backslashreplace"), "table")
        for kind in formats
    ]
    return _write_all(out, files, {"kind": table.kind, "status": "ok"})


def write_summary(out: OutputDir, pages: Sequence[Table], *, name: str) -> Record:
    """The record of one Markdown page with all the tables."""
    text = "\n".join(tables.to_markdown(page) for page in pages)
    data = text.encode("utf-8", "backslashreplace")
    return out.write(f"{name}.md", data, kind=pages[0].kind, part="summary", format="md", status="ok")


def write_document(out: OutputDir, name: str, data: bytes, *, kind: str) -> Record:
    """The record of a file that was encoded elsewhere, such as a plot."""
    return out.write(name, data, kind=kind, part="plot", format=name.rpartition(".")[2], status="ok")


def write(
    out: OutputDir, artefact: Tiles | Heat | Table, place: Place, options: PictureOptions
) -> tuple[Record, ...]:
    """The records of the artefact's files, by the writer of its kind."""
    return WRITERS[type(artefact)](out, artefact, place, options)


WRITERS: dict[type, Callable[[OutputDir, Any, Place, PictureOptions], tuple[Record, ...]]] = {
    Tiles: write_tiles,
    Heat: write_heat,
    Table: lambda out, table, place, options: write_table(out, table),
}
"""The writer for each kind of artefact; a new kind is one function and one line here."""


def ranges(numbers: Sequence[int]) -> str:
    """The numbers as `--channels` takes them: `0-15,40`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _write_all(out: OutputDir, files: Sequence[tuple[str, bytes, str]], record: Record) -> tuple[Record, ...]:
    return tuple(
        out.write(name, data, **record, part=part, format=name.rpartition(".")[2])
        for name, data, part in files
    )


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


def _heat_size(drawn: Heat, place: Place) -> tuple[int, int]:
    """Width and height of the picture, its longer side fixed, in the shape of what the model saw."""
    width, height = place.view.size if place.view else drawn.values.shape[::-1]
    scale = _HEAT_SIDE_PX / max(width, height)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def _raw_tiles(tiles: Tiles) -> bytes:
    values = np.asarray(tiles.values, dtype=np.float32)
    return encode.safetensors({str(tiles.site): values}, {"channels": ranges(tiles.channels)})
