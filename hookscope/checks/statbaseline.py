"""A baseline of distributions, read: from its file, or from an output directory of `stats` that holds one.

What it reads is not trusted. It writes nothing; what counts as a change is for `statdrift`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookscope.checks.documents import DocumentKind, Reader
from hookscope.checks.measured import short
from hookscope.checks.statfigures import SCHEMA, Figure, Figures, Measured, StatsBaseline

DOCUMENT = DocumentKind("stats", "activation figures", SCHEMA)

FILE = DOCUMENT.file
"""What the document is called in an output directory of `stats`."""


def read(path: str | Path) -> StatsBaseline:
    """The baseline in a file, in an output directory of `stats`, or beside its manifest.

    Raises:
        UsageError: there is none, or it is not what hookscope writes; the hint says how to make one.
    """
    return DOCUMENT.read(path, _baseline)


def to_update(path: str | Path) -> StatsBaseline | None:
    """The baseline that a run with --update-baseline is to replace; `None` where there is none yet.

    Raises:
        UsageError: the path is a directory, or a file that is no baseline: that is not overwritten.
    """
    return DOCUMENT.to_update(path, _baseline)


def _baseline(found: Mapping[str, Any], reader: Reader) -> StatsBaseline:
    measured = reader.measured(found, Measured)
    places = reader.table(found, "places", "")
    same = reader.table(found, "same", "")
    return StatsBaseline(
        measured=measured,
        made=reader.made(found),
        figures=Figures(
            {name: _figure(places, name, measured.bins, reader) for name in places},
            {name: reader.text(same, name, "same.") for name in same},
        ),
        path=reader.name,
    )


def _figure(places: Mapping[str, Any], name: str, bins: int, reader: Reader) -> Figure:
    record, at = reader.table(places, name, "places."), f"places.{short(name)}."
    return Figure(
        reader.text(record, "status", at),
        reader.text(record, "shape", at),
        reader.text(record, "layout", at),
        reader.number(record, "mean", at),
        reader.number(record, "deviation", at),
        reader.number(record, "zeros", at),
        _whole(record, "count", at, reader),
        _whole(record, "sampled", at, reader),
        *_bins(record, at, bins, reader),
    )


def _whole(record: Mapping[str, Any], key: str, at: str, reader: Reader) -> int:
    value = record.get(key)
    if type(value) is not int or value < 0:
        raise reader.broken(f"{at}{key}", value)
    return value


def _bins(
    record: Mapping[str, Any], at: str, bins: int, reader: Reader
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Cuts that ascend among the fine bins, and a share of 0 to 1 for each coarse bin."""
    cuts, shares = record.get("cuts"), record.get("shares")
    if not isinstance(cuts, list) or not all(type(cut) is int and 0 < cut < bins for cut in cuts):
        raise reader.broken(f"{at}cuts", cuts)
    if sorted(set(cuts)) != cuts:
        raise reader.broken(f"{at}cuts", cuts)
    if not isinstance(shares, list) or not all(type(one) in (int, float) and 0 <= one <= 1 for one in shares):
        raise reader.broken(f"{at}shares", shares)
    if len(shares) not in ((len(cuts) + 1,) if cuts else (0, 1)):
        raise reader.broken(f"{at}shares", shares)
    return tuple(cuts), tuple(map(float, shares))
