"""A baseline of gradient figures, read: from its file, or from an output directory of `gradnorm` that holds one.

What it reads is not trusted. It writes nothing; what counts as a change is for `graddrift`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.checks.baseline import readable
from hookscope.checks.gradfigures import KIND, SCHEMA, Figure, Figures, GradBaseline, Made, Measured, short
from hookscope.errors import UsageError
from hookscope.output.journal import MANIFEST
from hookscope.wording import counted, one_line

if TYPE_CHECKING:
    pass

FILE = "gradnorm-baseline.json"
"""What the document is called in an output directory of `gradnorm`."""

_HINT = "--update-baseline makes one there from this run"
_AGAIN = "make it again with --update-baseline"
_LARGEST_BYTES = 64 << 20
_LONGEST = 160
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read(path: str | Path) -> GradBaseline:
    """The baseline in a file, in an output directory of `gradnorm`, or beside its manifest.

    Raises:
        UsageError: there is none, or it is not what hookscope writes; the hint says how to make one.
    """
    name, place = str(path), Path(path)
    with readable(name, _HINT):
        if not place.exists():
            raise UsageError(f"the baseline {name!r} does not exist", _HINT)
        if place.is_dir() or place.name == MANIFEST:
            return _parsed(_listed(place), name)
        if not place.is_file():
            raise UsageError(f"the baseline {name!r} is neither a file nor a directory", _HINT)
        if place.stat().st_size > _LARGEST_BYTES:
            raise UsageError(
                f"the baseline {name!r} is too large to be one: {place.stat().st_size} bytes", _AGAIN
            )
        return _parsed(place.read_bytes(), name)


def to_update(path: str | Path) -> GradBaseline | None:
    """The baseline that a run with --update-baseline is to replace; `None` where there is none yet.

    Raises:
        UsageError: the path is a directory, or a file that is no baseline: that is not overwritten.
    """
    name, place = str(path), Path(path)
    with readable(name, _HINT):
        if place.is_dir() or place.name == MANIFEST:
            raise UsageError(
                f"{name!r} is an output directory", f"--update-baseline takes a file, such as {FILE}"
            )
        return read(path) if place.exists() else None


def _listed(place: Path) -> bytes:
    """The document that an output directory lists."""
    from hookscope.checks.baseline import Baseline

    run = Baseline.read(place)
    found = [one for one in run.artifacts if one.path.rpartition("/")[2] == FILE]
    if len(found) != 1:
        raise UsageError(
            f"the baseline {run.path!r} holds {counted(len(found), 'file')} {FILE}",
            "give the output directory of one 'hookscope gradnorm'",
        )
    return run.content(found[0])


def _parsed(data: bytes, name: str) -> GradBaseline:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the baseline {name!r} is no JSON: {one_line(error)}", _AGAIN) from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UsageError(f"the baseline {name!r} holds no gradient figures of hookscope", _HINT)
    if type(found.get("schema")) is not int or found["schema"] != SCHEMA:
        schema = short(found.get("schema"))
        raise UsageError(
            f"the baseline {name!r} has schema {schema}, and {SCHEMA} is what can be read", _AGAIN
        )
    return _Reader(name).baseline(found)


class _Reader:
    """Fields of a foreign document that must be what they are in ours."""

    def __init__(self, name: str) -> None:
        self._name = name

    def baseline(self, found: Mapping[str, Any]) -> GradBaseline:
        made = self._table(found, "made", "")
        versions = self._table(made, "versions", "made.")
        return GradBaseline(
            measured=self._measured(self._table(found, "measured", "")),
            made=Made(
                self._text(made, "model", "made."),
                self._text(made, "weights", "made."),
                {key: self._text(versions, key, "made.versions.") for key in versions},
            ),
            figures=Figures(
                self._must(found, "loss", ""),
                self._must(found, "total", ""),
                self._figures(found, "parameters"),
                self._figures(found, "layers"),
            ),
            path=self._name,
        )

    def _measured(self, table: Mapping[str, Any]) -> Measured:
        kinds = {"str": str, "bool": bool, "int": int}
        for field in fields(Measured):
            if type(table.get(field.name)) is not kinds[str(field.type)]:
                raise self._broken(f"measured.{field.name}", table.get(field.name))
        return Measured(**{field.name: table[field.name] for field in fields(Measured)})

    def _figures(self, found: Mapping[str, Any], key: str) -> dict[str, Figure]:
        table = self._table(found, key, "")
        made = {}
        for name in table:
            record, at = self._table(table, name, f"{key}."), f"{key}.{short(name)}."
            made[name] = Figure(
                self._number(record, "norm", at),
                self._number(record, "rms", at),
                self._text(record, "status", at),
                self._text(record, "shape", at),
            )
        return made

    def _table(self, found: Mapping[str, Any], key: str, at: str) -> dict[str, Any]:
        value = found.get(key)
        if not isinstance(value, dict):
            raise self._broken(f"{at}{key}", value)
        return value

    def _text(self, found: Mapping[str, Any], key: str, at: str) -> str:
        value = found.get(key)
        if not isinstance(value, str):
            raise self._broken(f"{at}{key}", value)
        return value

    def _must(self, found: Mapping[str, Any], key: str, at: str) -> float:
        value = self._number(found, key, at)
        if value is None:
            raise self._broken(f"{at}{key}", value)
        return value

    def _number(self, found: Mapping[str, Any], key: str, at: str) -> float | None:
        value = found.get(key, "")
        if value is None:
            return None
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._broken(f"{at}{key}", found.get(key))
        try:
            return float(value)
        except OverflowError as error:
            raise self._broken(f"{at}{key}", "a number out of range") from error

    def _broken(self, key: str, value: Any) -> UsageError:
        name = key if len(key) <= _LONGEST else f"{key[:_LONGEST]}…"
        return UsageError(f"the baseline {self._name!r} is broken: {name} is {short(value)}", _AGAIN)
