"""Artefacts to files: for each kind, which files, under which names, with which records.

Owns file names and records; `pictures` and `tables` make bytes, `directory` the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hookscope.artifacts import Heat, Pair, Sheet, Table, Tiles
from hookscope.output import encode, pictures, tables
from hookscope.output.directory import OutputDir
from hookscope.output.manifest import encoded
from hookscope.output.names import map_name, safe_name
from hookscope.output.pictures import PictureOptions as PictureOptions
from hookscope.output.pictures import Place as Place
from hookscope.render import overlay
from hookscope.wording import ranges

Record = dict[str, Any]

Artefact = Tiles | Heat | Sheet | Pair
"""What is written for one picture."""


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


@dataclass(frozen=True)
class Writing:
    """Draws, encodes and writes an artefact's files, in any thread, and gives their records.

    `names`: of the files, relative to the directory. `artefact`: what is written. `shown`: is given each file's part
    and bytes once it is written.
    """

    out: OutputDir
    names: tuple[str, ...]
    plan: _Plan
    artefact: Artefact
    shown: Callable[[str, bytes], None] | None = None

    def __call__(self) -> tuple[Record, ...]:
        return _write_all(self.out, self.names, self.plan, self.shown)


def prepared(out: OutputDir, artefact: Artefact, place: Place, options: PictureOptions) -> Writing:
    """The writing of the artefact's files, by the plan of its kind.

    The files' names are given out here, so that they follow the order of these calls, whatever the threads do.
    """
    plan = PLANS[type(artefact)](artefact, place, options)
    return Writing(out, out.reserve(plan.stem, [file.ending for file in plan.files]), plan, artefact)


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


def write_document(out: OutputDir, name: str, data: bytes, *, kind: str, part: str = "plot") -> Record:
    """The record of a file that was encoded elsewhere, such as a plot."""
    stem, _, ending = name.rpartition(".")
    (path,) = out.reserve(stem, [f".{ending}"])
    return out.write(path, data, kind=kind, part=part, format=ending, status="ok")


def _plan_tiles(tiles: Tiles, place: Place, options: PictureOptions) -> _Plan:
    """The grid and, with `raw`, a safetensors file with the values."""
    files = [_File(f".{options.grid_format}", "grid", partial(pictures.grid_bytes, tiles, place, options))]
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
        _File(f".heat.{options.heat_format}", "heatmap", partial(pictures.heat_bytes, drawn, place, options)),
        _File(".npy", "raw", partial(encode.npy, drawn.values)),
    ]
    if place.picture is not None and place.view is not None:
        drawing = partial(pictures.overlay_bytes, drawn, place.picture, place.view, options)
        files.insert(0, _File(f".overlay.{options.overlay_format}", "overlay", drawing))
    wanted = [file for file in files if not options.parts or file.part in options.parts]
    record = _record(drawn, place, drawn.kind) | _explained(drawn, place)
    return _Plan(_stem(place, map_name(drawn)), wanted, record)


def _plan_sheet(sheet: Sheet, place: Place, options: PictureOptions) -> _Plan:
    """All the picture's maps on one page; nothing without the picture."""
    files = []
    if place.picture is not None and place.view is not None:
        drawing = partial(pictures.sheet_bytes, sheet, place.picture, place.view, place, options)
        files.append(_File(f".{options.heat_format}", "sheet", drawing))
    record = {"kind": sheet.kind, "image": place.image, "layer": None, "method": None, "target": None}
    return _Plan(_stem(place, "sheet"), files, record | {"label": "", "status": "ok"})


def _plan_pair(both: Pair, place: Place, options: PictureOptions) -> _Plan:
    """Earlier and present map side by side."""
    files = [_File(f".{options.heat_format}", "pair", partial(pictures.pair_bytes, both, place, options))]
    record = {
        "kind": both.kind,
        "image": place.image,
        "layer": both.site.layer,
        "call": both.site.call,
        "output": both.site.output,
        "status": "ok",
    }
    return _Plan(_stem(place, f"{both.kind}.{map_name(both)}"), files, record | _explained(both, place))


PLANS: dict[type, Callable[[Any, Place, PictureOptions], _Plan]] = {
    Tiles: _plan_tiles,
    Heat: _plan_heat,
    Sheet: _plan_sheet,
    Pair: _plan_pair,
}
"""What each kind of artefact becomes; a new kind is one function and one entry here."""


def _write_all(
    out: OutputDir,
    names: Sequence[str],
    plan: _Plan,
    shown: Callable[[str, bytes], None] | None = None,
) -> tuple[Record, ...]:
    records = []
    for name, file in zip(names, plan.files, strict=True):
        data, kind = file.make(), file.ending.rpartition(".")[2]
        records.append(out.write(name, data, **plan.record, part=file.part, format=kind))
        if shown is not None:
            shown(file.part, data)
    return tuple(records)


def _table(table: Table, kind: str) -> bytes:
    return encoded(tables.table(table, kind))


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


def _explained(drawn: Heat | Pair, place: Place) -> Record:
    """What the map explains and how well."""
    record: Record = {"method": drawn.method, "scores": drawn.scores}
    target = drawn.target
    if target is None:
        return record | {"target": None, "label": ""}
    # A target that is no class has only its name to be known by.
    named = target.name if target.index is None else target.index
    record |= {"target": named, "label": target.label, "asked": target.name}
    if target.against:
        record["against"] = target.against
    if target.box is not None and place.view is not None:
        record["box"] = [round(edge, 2) for edge in overlay.placed(target.box, place.view)]
    return record


def _stem(place: Place, name: str) -> str:
    return f"{place.folder}/{name}" if place.folder else name


def _raw_tiles(tiles: Tiles) -> bytes:
    values = np.asarray(tiles.values, dtype=np.float32)
    return encode.safetensors({str(tiles.site): values}, {"channels": ranges(tiles.channels)})
