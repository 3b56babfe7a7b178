"""Whose a directory is: what an earlier manifest or journal lists, and what really lies there.

Reads and judges only; it never changes a file. What an old manifest lists is not trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

MANIFEST = "manifest.json"
JOURNAL = ".hookscope.jsonl"
TEMPORARY = ".hookscope-tmp-"


class Owner(Enum):
    """Whose a directory is. `OURS`: hookscope wrote and listed every file in it."""

    NOBODY = "nobody"
    OURS = "ours"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Contents:
    """What lies in a directory. `files`: relative paths of all; `strangers`: those that nothing lists."""

    owner: Owner
    files: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()


def inspect(directory: Path) -> Contents:
    """Whose the directory is, and the files in it; one that is missing or empty is nobody's.

    Raises:
        OSError: it cannot be read.
    """
    if not directory.exists():
        return Contents(Owner.NOBODY)
    files = tuple(sorted(_files(directory, "")))
    if not files:
        return Contents(Owner.NOBODY)
    listed = _listed(directory)
    strangers = tuple(name for name in files if name not in listed and not _is_temporary(directory, name))
    ours = bool(listed) and not strangers and all(map(is_inside, listed))
    return Contents(Owner.OURS if ours else Owner.FOREIGN, files, strangers)


def is_inside(name: str) -> bool:
    """Whether a listed path stays in the directory: relative, no `..`, on POSIX and on Windows."""
    if not name or "\0" in name:
        return False
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.anchor or ".." in path.parts for path in paths)


def _files(directory: Path, prefix: str) -> Iterator[str]:
    """Relative paths of everything that is not a folder; links are not followed, and count as files."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), f"{name}/")
            else:
                yield name


def _listed(directory: Path) -> frozenset[str]:
    """All paths that the manifest and the journal list, themselves included; empty where neither is ours."""
    listed: set[str] = set()
    manifest = _manifest(directory)
    if manifest is not None:
        listed |= {MANIFEST, *_paths(manifest["artifacts"])}
    journal = _journal(directory)
    if journal:
        listed |= {JOURNAL, *_paths(journal[1:])}
    return (
        frozenset(name for name in listed if not (directory / name).is_symlink()) if listed else frozenset()
    )


def _manifest(directory: Path) -> dict[str, Any] | None:
    found = _parsed(_text(directory / MANIFEST))
    ours = (
        isinstance(found, dict)
        and isinstance(found.get("versions"), dict)
        and "hookscope" in found["versions"]
        and isinstance(found.get("artifacts"), list)
    )
    return found if ours else None


def _journal(directory: Path) -> list[dict[str, Any]]:
    """The journal's lines, its head first; a line torn by a kill is left out. Empty where it is not ours."""
    lines = [_parsed(line) for line in _text(directory / JOURNAL).split("\n")]
    if not lines or not isinstance(lines[0], dict) or "hookscope" not in lines[0]:
        return []
    records = [line for line in lines[1:] if isinstance(line, dict) and isinstance(line.get("path"), str)]
    return [lines[0], *records]


def _paths(records: Iterable[Any]) -> set[str]:
    return {str(record["path"]) for record in records if isinstance(record, dict) and "path" in record}


def _is_temporary(directory: Path, name: str) -> bool:
    return PurePosixPath(name).name.startswith(TEMPORARY) and not (directory / name).is_symlink()


def _text(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        return ""
    return path.read_text("utf-8", "replace")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
