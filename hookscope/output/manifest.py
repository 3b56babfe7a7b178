"""The manifest: what a run was asked, what it saw and which files it wrote; and the JSON it is written in.

It must not open files, and it holds nothing that differs between two equal runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

SCHEMA = 1

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """One run, ready for JSON; the README describes every field."""

    command: str
    versions: Mapping[str, str]
    model: Record = field(default_factory=dict)
    options: Record = field(default_factory=dict)
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    images: Sequence[Record] = ()
    layers: Sequence[Record] = ()
    artifacts: Sequence[Record] = ()
    findings: Sequence[Record] = ()
    warnings: Sequence[str] = ()
    schema: int = SCHEMA


def to_json(obj: Any) -> str:
    """The object as JSON text: keys sorted, indented, a number that is not finite as a string.

    Takes dataclasses, enums, paths, sets, numpy scalars and arrays beside what JSON knows.

    Raises:
        TypeError: something in it has no plain form.
    """
    return json.dumps(plain(obj), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_json_line(obj: Any) -> str:
    """The same on a single line."""
    return json.dumps(plain(obj), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def encoded(text: str) -> bytes:
    """JSON text as UTF-8; a lone surrogate, as in a file name that is not UTF-8, as its JSON escape."""
    return text.encode("utf-8", "backslashreplace")


def plain(obj: Any) -> Any:
    """The object in dicts, lists, strings, finite numbers, booleans and `None`."""
    if isinstance(obj, Enum):
        return plain(obj.value)
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else str(float(obj))
    if isinstance(obj, PurePath):
        return obj.as_posix()
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {item.name: plain(getattr(obj, item.name)) for item in dataclasses.fields(obj)}
    return _plain_collection(obj)


def _plain_collection(obj: Any) -> Any:
    if isinstance(obj, Mapping):
        return {_key(key): plain(value) for key, value in obj.items()}
    if isinstance(obj, Set):
        return sorted((plain(item) for item in obj), key=repr)
    if isinstance(obj, Sequence):
        return [plain(item) for item in obj]
    if hasattr(obj, "dtype") and hasattr(obj, "tolist"):  # numpy, without importing it
        return plain(obj.tolist())
    raise TypeError(f"{type(obj).__name__} has no plain form: {obj!r}")


def _key(key: Any) -> str:
    return str(key.value) if isinstance(key, Enum) else str(key)
