"""Which picture files a command line means: files, directories and globs to a list without repetition.

It looks at names, never into a file. What names nothing is recorded and does not stop the others; the caller
decides what that is worth.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hookscope.images.decoding import readable_extensions, reason
from hookscope.images.naming import folder_keys, shown_paths

_DOUBLE_STAR = re.compile(r"(?:^|(?<=/))\*\*(?:/|$)")

OnError = Callable[[str, str, str], None]
"""Told a path as typed, what failed, in words that go before the path, and why (may be empty)."""


@dataclass(frozen=True)
class ImageRef:
    """One picture of a run, not yet read.

    `path`: what people are shown, always with `/`. `file`: what to open. `key`: folder name for its outputs,
    unique in the run. `label`: class index where the picture came from a dataset.
    """

    index: int
    path: str
    file: Path
    key: str
    label: int | None = None


@dataclass(frozen=True)
class ImageFailure:
    """Something asked for that gives no picture: its path as shown, and the reason in one line."""

    path: str
    error: str


@dataclass(frozen=True)
class Found:
    """The pictures in order, and what was asked for in vain."""

    refs: tuple[ImageRef, ...]
    failures: tuple[ImageFailure, ...]


def find(specs: Sequence[str], limit: int | None = None) -> Found:
    """The pictures that files, directories and globs name, each file once, at most `limit` of them.

    A directory is searched through, a glob may hold `**`; both give pictures sorted by code point, hidden
    ones left out. What exists under the very name is taken as that, even where the name could be a glob.
    """
    search = Search(limit)
    for spec in specs:
        search.add(spec)
    return search.found()


class Search:
    """Gathers pictures spec by spec; `found()` is the result."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._taken: dict[tuple[str, int | None], str] = {}
        self._failed: list[tuple[str, str, str]] = []

    def add(self, spec: str, label: int | None = None) -> None:
        """Take the pictures of one file, directory or glob; record it where there are none."""
        failed_before = len(self._failed)
        empty = True
        for path in _files(spec, self._fail):
            empty = False
            if self._full():
                break
            self._taken.setdefault((os.path.realpath(path), label), path)
        if empty and len(self._failed) == failed_before:
            self._fail(spec, *_why_nothing(spec))

    def found(self) -> Found:
        """What was gathered so far, named."""
        typed = list(self._taken.values())
        shown = shown_paths([*typed, *(path for path, *_ in self._failed)])
        keys = folder_keys(shown[: len(typed)])
        refs = [
            ImageRef(index, shown[index], Path(typed[index]), keys[index], label)
            for index, (_, label) in enumerate(self._taken)
        ]
        failures = [
            ImageFailure(path, f"{what} {path!r}: {why}" if why else f"{what} {path!r}")
            for path, (_, what, why) in zip(shown[len(typed) :], self._failed, strict=True)
        ]
        return Found(tuple(refs), tuple(failures))

    def _full(self) -> bool:
        return self._limit is not None and len(self._taken) >= self._limit

    def _fail(self, path: str, what: str, why: str = "") -> None:
        self._failed.append((path, what, why))


def is_hidden(name: str) -> bool:
    """Whether a file or folder name is one that searches pass over."""
    return name.startswith(".")


def _files(spec: str, on_error: OnError) -> Iterator[str]:
    """Paths of the files a spec means, none where it means nothing."""
    if os.path.isdir(spec):
        yield from _pictures_below(spec, on_error)
    elif os.path.exists(spec):
        yield spec
    elif _is_glob(spec):
        yield from _files_of_glob(spec, on_error)


def _files_of_glob(pattern: str, on_error: OnError) -> Iterator[str]:
    # `*.dat` asks for such files by name; `*` asks for the pictures among what is there, as a directory does.
    any_kind = _names_extension(pattern)
    for path in sorted(set(_expand(pattern, on_error)), key=_parts):
        if os.path.isdir(path):
            yield from _pictures_below(path, on_error)
        elif any_kind or _is_picture(path):
            yield path


def _expand(pattern: str, on_error: OnError) -> Iterator[str]:
    """Paths that match; `**` as a whole segment spans directories, and never runs round a loop of links."""
    # The standard `glob` follows looping links forty levels deep, in every combination of them.
    cut = _DOUBLE_STAR.search(pattern)
    if cut is None:
        yield from glob.iglob(pattern)
        return
    head, tail = pattern[: cut.start()], pattern[cut.end() :]
    for top in glob.iglob(head) if head else [""]:
        if not tail:
            yield top or os.curdir
            continue
        for path, is_directory in _walk(top, on_error, set()):
            if is_directory:
                yield from _expand(os.path.join(glob.escape(path), tail), on_error)


def _pictures_below(directory: str, on_error: OnError) -> Iterator[str]:
    for path, is_directory in _walk(directory, on_error, set()):
        if not is_directory and _is_picture(path):
            yield path


def _walk(directory: str, on_error: OnError, seen: set[str]) -> Iterator[tuple[str, bool]]:
    """Everything below that is not hidden, the directory itself first: (path, whether it is a directory).

    Depth first, sorted by code point; no directory twice, however many links lead to it.
    """
    real = os.path.realpath(directory)
    if real in seen:
        return
    seen.add(real)
    yield directory, True
    for name in _listing(directory, on_error):
        path = os.path.join(directory, name)
        if os.path.isdir(path):
            yield from _walk(path, on_error, seen)
        else:
            yield path, False


def _listing(directory: str, on_error: OnError) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory or os.curdir) if not is_hidden(name))
    except OSError as error:
        on_error(directory, "cannot search directory", reason(error))
        return []


def _is_picture(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in readable_extensions()


def _is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[")


def _names_extension(pattern: str) -> bool:
    extension = os.path.splitext(pattern)[1]
    return len(extension) > 1 and not _is_glob(extension)


def _parts(path: str) -> list[str]:
    return path.split(os.sep)


def _why_nothing(spec: str) -> tuple[str, str]:
    if os.path.isdir(spec):
        return "no pictures in directory", ""
    if _is_glob(spec):
        return "no picture matches", ""
    return "cannot read picture", _why_missing(spec)


def _why_missing(path: str) -> str:
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        return reason(error)
    return "it was not there a moment ago"
