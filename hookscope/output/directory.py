"""The output directory: every file is written beside its place and renamed, and listed as it is finished.

Owns what may be written, replaced and deleted. It must not know what is in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import threading
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from hookscope.errors import OutputError
from hookscope.output.journal import JOURNAL, MANIFEST, TEMPORARY, Contents, Owner, inspect, is_inside
from hookscope.output.manifest import SCHEMA, Manifest, encoded, plain, to_json, to_json_line

_ELSEWHERE = "name another file, or see who may write there"


class OutputDir:
    """A directory that one run writes: `check`, `begin`, then `reserve` and `write` for each file, `finish`.

    Names are given in the order of the calls of `reserve`; `write` may be called by any thread, in any order.

    One that hookscope did not make, or that holds what no manifest or journal lists, is only added to.
    One that is wholly ours is replaced with `overwrite`, or where it is the `default_place`.
    """

    def __init__(
        self, path: Path, *, command: str, overwrite: bool = False, default_place: bool = False
    ) -> None:
        self.path = path
        self.command = command
        self._replace = overwrite or default_place
        self._lock = threading.Lock()
        self._counter = itertools.count(1)
        self._records: list[dict[str, Any]] = []
        self._taken = {_folded(MANIFEST), _folded(JOURNAL)}
        self._reserved: set[str] = set()
        self._root: Path | None = None

    @property
    def records(self) -> tuple[dict[str, Any], ...]:
        """The records of all files written so far, by path."""
        with self._lock:
            return tuple(sorted(self._records, key=lambda record: str(record["path"])))

    @property
    def unfinished(self) -> bool:
        """Whether this run has begun and its journal still lies there."""
        return self._root is not None and (self.path / JOURNAL).is_file()

    def check(self) -> None:
        """Nothing, where the directory can be written; changes nothing.

        Raises:
            OutputError: it cannot, or it holds an earlier run that is not to be replaced.
        """
        self._judged()

    def begin(self) -> None:
        """The directory exists, holds nothing of an earlier run of ours, and has a journal.

        Raises:
            OutputError: as `check`, or it cannot be written.
        """
        contents = self._judged()
        with _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if contents.owner is Owner.OURS:
                _clear(self.path, contents.files)
            head = {"command": self.command, "hookscope": _own_version(), "schema": SCHEMA}
            journal = self.path / JOURNAL
            with self._written_beside(journal, encoded(to_json_line(head).rstrip("\n"))) as temporary:
                os.replace(temporary, journal)
        self._root = self.path.resolve()

    def reserve(self, stem: str, endings: Sequence[str]) -> tuple[str, ...]:
        """One name for each ending, all of the same stem, for `write` to use once each.

        Where this run has given out any of them already, in any case of letters, the stem gets `-2`, `-3` and
        so on for all.

        Raises:
            OutputError: a name leaves the directory.
        """
        with self._lock:
            for tail in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
                names = tuple(self._checked(f"{stem}{tail}{ending}") for ending in endings)
                if self._taken.isdisjoint(map(_folded, names)):
                    break
            self._taken.update(map(_folded, names))
            self._reserved.update(names)
        return names

    def write(self, name: str, data: bytes, **record: Any) -> dict[str, Any]:
        """The file's record, with its `path` (relative, `/` between) and `sha256`, once the file is whole.

        Raises:
            OutputError: the file exists already, or it cannot be written.
        """
        with self._lock:
            if name not in self._reserved:
                raise RuntimeError(f"reserve() comes before write(), and {name!r} is not reserved")
            self._reserved.remove(name)
        target = self.path / name
        full = {**plain(record), "path": name, "sha256": hashlib.sha256(data).hexdigest()}
        with _explained(target):
            self._make_folder(target)
            with self._written_beside(target, data) as temporary, self._lock:
                # The journal's line comes first: a file that is there but not listed would be a stranger's.
                _append_line(self.path / JOURNAL, full)
                os.replace(temporary, target)
                self._records.append(full)
        return full

    def finish(self, manifest: Manifest | Mapping[str, Any]) -> Path:
        """The manifest's path, once it lies there, listing every file written, and the journal is gone.

        Raises:
            OutputError: it cannot be written.
        """
        fields = _fields(manifest)
        fields["artifacts"] = _merged(self.records, fields["artifacts"])
        target = self.path / MANIFEST
        with _explained(target):
            with self._written_beside(target, encoded(to_json(fields))) as temporary:
                os.replace(temporary, target)
            (self.path / JOURNAL).unlink()
        return target

    def _judged(self) -> Contents:
        with _explained(self.path):
            _check_place(self.path)
            contents = inspect(self.path)
        if contents.owner is Owner.OURS and not self._replace:
            raise OutputError(
                f"{str(self.path)!r} holds {_earlier(contents)}", "give --overwrite or another -o"
            )
        if contents.owner is Owner.FOREIGN and {MANIFEST, JOURNAL} & set(contents.files):
            raise _mixed(self.path, contents)
        return contents

    def _checked(self, name: str) -> str:
        if not is_inside(name) or PurePosixPath(name).name.startswith(TEMPORARY):
            raise OutputError(f"{name!r} is no name for a file in {str(self.path)!r}", "use a relative path")
        return PurePosixPath(name).as_posix()

    def _make_folder(self, target: Path) -> None:
        if self._root is None:
            raise RuntimeError("begin() comes before write()")
        if not target.parent.resolve().is_relative_to(self._root):
            raise OutputError(
                f"{str(target.parent)!r} is a link out of the output directory", "remove the link"
            )
        if os.path.lexists(target):
            raise OutputError(f"{str(target)!r} exists and was not written by this run", "choose another -o")
        target.parent.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _written_beside(self, target: Path, data: bytes) -> Iterator[Path]:
        """A temporary file with the data, in the target's folder; gone afterwards unless it was renamed."""
        temporary = target.parent / f"{TEMPORARY}{os.getpid()}-{next(self._counter)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path, hint: str = "choose another directory with -o") -> Iterator[None]:
    """An `OSError` inside becomes an `OutputError` with the path and the system's reason."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(path)
        if Path(where).name.startswith(TEMPORARY):
            where = str(path)
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {where!r}: {reason}", hint) from error


def _check_place(path: Path) -> None:
    """Raises an `OSError` or `OutputError` when no directory can be made or written there."""
    nearest = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise OutputError(f"{str(nearest)!r} is not a directory", "choose another directory with -o")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(13, os.strerror(13), str(nearest))


def _clear(directory: Path, files: tuple[str, ...]) -> None:
    """Deletes the files, those that say whose they are last, and the folders that this leaves empty."""
    for name in sorted(files, key=lambda name: name in (MANIFEST, JOURNAL)):
        (directory / name).unlink()
    folders = {folder for name in files for folder in PurePosixPath(name).parents[:-1]}
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            (directory / folder).rmdir()


def _append_line(journal: Path, record: dict[str, Any]) -> None:
    # The line end comes first, so that a line torn by a full disk spoils only itself.
    with open(journal, "ab") as file:
        file.write(encoded("\n" + to_json_line(record).rstrip("\n")))


def _merged(written: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of all files written, with what the manifest says of them besides, by path."""
    known = {str(record["path"]): dict(record) for record in written}
    for record in given:
        known.setdefault(str(record["path"]), {}).update(record)
    return [known[path] for path in sorted(known)]


def _mixed(path: Path, contents: Contents) -> OutputError:
    hint = "choose another directory with -o"
    if contents.strangers:
        names = _few(contents.strangers)
        return OutputError(
            f"{str(path)!r} holds a manifest or journal beside files it does not list: {names}", hint
        )
    return OutputError(f"{str(path)!r} holds a manifest or journal that cannot be trusted", hint)


def _fields(manifest: Manifest | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(manifest, Manifest):
        manifest = {item.name: getattr(manifest, item.name) for item in dataclasses.fields(manifest)}
    given = plain(manifest)
    # Without these the directory would not be recognised as ours.
    versions = {"hookscope": _own_version(), **given.get("versions", {})}
    return {"schema": SCHEMA, "artifacts": [], **given, "versions": versions}


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _earlier(contents: Contents) -> str:
    return "an interrupted run" if JOURNAL in contents.files else "the results of an earlier run"


def _few(names: tuple[str, ...]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown}, …" if len(names) > 3 else shown


def _own_version() -> str:
    try:
        return version("hookscope")
    except PackageNotFoundError:
        return "unknown"


def replace_file(path: Path, data: bytes) -> None:
    """The file outside an output directory holds these bytes, whole or as before.

    Raises:
        OutputError: it cannot be written.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with _explained(path, _ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """The text stands at the end of the file.

    Raises:
        OutputError: it cannot be written.
    """
    with _explained(path, _ELSEWHERE), open(path, "ab") as file:
        file.write(text.encode("utf-8", "backslashreplace"))
