"""Baselines of figures, read: from their file, or from an output directory of the command that holds one.

What it reads is not trusted: every field must be what it is in ours. What the fields mean is each command's own.
It writes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hookscope.checks.baseline import readable
from hookscope.checks.measured import Made, short
from hookscope.errors import UsageError
from hookscope.output.journal import MANIFEST
from hookscope.wording import counted, one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Fields = TypeVar("Fields", bound=DataclassInstance)

Kept = TypeVar("Kept")

_HINT = "--update-baseline makes one there from this run"
_AGAIN = "make it again with --update-baseline"
_LARGEST_BYTES = 64 << 20
_LONGEST = 160
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS = {"str": str, "bool": bool, "int": int}


@dataclass(frozen=True)
class DocumentKind:
    """The baseline of one command: what its figures are in words, and how their document is known."""

    command: str
    figures: str
    schema: int = 1

    @property
    def kind(self) -> str:
        """What the document says that it is."""
        return f"{self.command}-baseline"

    @property
    def file(self) -> str:
        """What it is called in an output directory of the command."""
        return f"{self.kind}.json"

    def read(self, path: str | Path, made_of: Callable[[Mapping[str, Any], Reader], Kept]) -> Kept:
        """The baseline in a file, in an output directory of the command, or beside its manifest.

        Args:
            path: of any of these.
            made_of: makes it of the document's fields, by a reader that refuses those which cannot be.

        Raises:
            UsageError: there is none, or it is not what hookscope writes; the hint says how to make one.
        """
        name, place = str(path), Path(path)
        with readable(name, _HINT):
            if not place.exists():
                raise UsageError(f"the baseline {name!r} does not exist", _HINT)
            if place.is_dir() or place.name == MANIFEST:
                return made_of(self._parsed(self._listed(place), name), Reader(name))
            if not place.is_file():
                raise UsageError(f"the baseline {name!r} is neither a file nor a directory", _HINT)
            if place.stat().st_size > _LARGEST_BYTES:
                raise UsageError(
                    f"the baseline {name!r} is too large to be one: {place.stat().st_size} bytes", _AGAIN
                )
            return made_of(self._parsed(place.read_bytes(), name), Reader(name))

    def to_update(
        self, path: str | Path, made_of: Callable[[Mapping[str, Any], Reader], Kept]
    ) -> Kept | None:
        """The baseline that a run with --update-baseline is to replace; `None` where there is none yet.

        Raises:
            UsageError: the path is a directory, or a file that is no baseline: that is not overwritten.
        """
        name, place = str(path), Path(path)
        with readable(name, _HINT):
            if place.is_dir() or place.name == MANIFEST:
                raise UsageError(
                    f"{name!r} is an output directory", f"--update-baseline takes a file, such as {self.file}"
                )
            return self.read(path, made_of) if place.exists() else None

    def _listed(self, place: Path) -> bytes:
        """The document that an output directory lists."""
        from hookscope.checks.baseline import Baseline

        run = Baseline.read(place)
        found = [one for one in run.artifacts if one.path.rpartition("/")[2] == self.file]
        if len(found) != 1:
            raise UsageError(
                f"the baseline {run.path!r} holds {counted(len(found), 'file')} {self.file}",
                f"give the output directory of one 'hookscope {self.command}'",
            )
        return run.content(found[0])

    def _parsed(self, data: bytes, name: str) -> Mapping[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the baseline {name!r} is no JSON: {one_line(error)}", _AGAIN) from error
        if not isinstance(found, dict) or found.get("kind") != self.kind:
            raise UsageError(f"the baseline {name!r} holds no {self.figures} of hookscope", _HINT)
        if type(found.get("schema")) is not int or found["schema"] != self.schema:
            schema = short(found.get("schema"))
            raise UsageError(
                f"the baseline {name!r} has schema {schema}, and {self.schema} is what can be read", _AGAIN
            )
        return found


class Reader:
    """Fields of a foreign document that must be what they are in ours; `at` is the way to them, for messages.

    Every method raises `UsageError` where a field is something else.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def made(self, found: Mapping[str, Any]) -> Made:
        """By what the figures were made."""
        made = self.table(found, "made", "")
        versions = self.table(made, "versions", "made.")
        return Made(
            self.text(made, "model", "made."),
            self.text(made, "weights", "made."),
            {key: self.text(versions, key, "made.versions.") for key in versions},
        )

    def measured(self, found: Mapping[str, Any], kind: type[Fields]) -> Fields:
        """How they were measured: a dataclass of strings, whole numbers and truth values."""
        table = self.table(found, "measured", "")
        for field in fields(kind):
            if type(table.get(field.name)) is not _KINDS[str(field.type)]:
                raise self.broken(f"measured.{field.name}", table.get(field.name))
        return kind(**{field.name: table[field.name] for field in fields(kind)})

    def table(self, found: Mapping[str, Any], key: str, at: str) -> dict[str, Any]:
        """A table of anything."""
        value = found.get(key)
        if not isinstance(value, dict):
            raise self.broken(f"{at}{key}", value)
        return value

    def text(self, found: Mapping[str, Any], key: str, at: str) -> str:
        """Words."""
        value = found.get(key)
        if not isinstance(value, str):
            raise self.broken(f"{at}{key}", value)
        return value

    def must(self, found: Mapping[str, Any], key: str, at: str) -> float:
        """A number that is there."""
        value = self.number(found, key, at)
        if value is None:
            raise self.broken(f"{at}{key}", value)
        return value

    def number(self, found: Mapping[str, Any], key: str, at: str) -> float | None:
        """A number, or that there is none."""
        value = found.get(key, "")
        if value is None:
            return None
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.broken(f"{at}{key}", found.get(key))
        try:
            return float(value)
        except OverflowError as error:
            raise self.broken(f"{at}{key}", "a number out of range") from error

    def broken(self, key: str, value: Any) -> UsageError:
        """The error for a field."""
        name = key if len(key) <= _LONGEST else f"{key[:_LONGEST]}…"
        return UsageError(f"the baseline {self.name!r} is broken: {name} is {short(value)}", _AGAIN)
