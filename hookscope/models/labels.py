"""`--labels`: class names from a text or JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError, near_misses

_MAX_CLASSES = 1_000_000


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names in the order of their ids.

    The file has a name per line, or is JSON: a list, `{id: name}`, `{id: [code, name]}` or `{name: id}`. An
    id that is left out is called `class N`.

    Raises:
        UsageError: the file is missing or is none of these.
    """
    text = _text(path.expanduser())
    if text.lstrip()[:1] in ("[", "{"):
        return _from_json(path, text)
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if not any(lines):
        raise UsageError(f"the labels file {str(path)!r} is empty", "write one class name per line")
    return tuple(lines)


def _text(path: Path) -> str:
    if not path.is_file():
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"there is no labels file {str(path)!r}", near_misses(path.name, siblings))
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the labels file {str(path)!r}: {error}", "write UTF-8 text") from error


def _from_json(path: Path, text: str) -> tuple[str, ...]:
    try:
        data = json.loads(text)
        names = list(map(_name, data)) if isinstance(data, list) else _by_id(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"the labels file {str(path)!r} is not understood: {error}",
            'write a name per line, or JSON: ["a", "b"] or {"0": "a", "1": "b"}',
        ) from error
    if not names:
        raise UsageError(f"the labels file {str(path)!r} is empty", "write one class name per line")
    return tuple(names)


def _by_id(data: dict[str, Any]) -> list[str]:
    if data and all(isinstance(value, int) for value in data.values()):
        data = {str(value): key for key, value in data.items()}
    names = {int(key): _name(value) for key, value in data.items()}
    if any(not 0 <= index < _MAX_CLASSES for index in names):
        raise ValueError(f"class ids must lie in 0..{_MAX_CLASSES - 1}")
    return [names.get(index, f"class {index}") for index in range(max(names, default=-1) + 1)]


def _name(value: Any) -> str:
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no class name")
    return value
