"""A text file that grows by whole lines and is never replaced: one that is there is continued. Knows no format."""

from __future__ import annotations

import os
from pathlib import Path

from hookscope.errors import OutputError
from hookscope.output.directory import append_text


class LineFile:
    """Lines are on disk when `add` returns; after one that a kill tore, the next begins on its own.

    Args:
        path: its folder is made where it is not there.
        header: the first line, with its line end; of a file that has lines already it must be the first.

    Raises:
        OutputError: it cannot be written, or its first line is another.
    """

    def __init__(self, path: str | os.PathLike[str], header: str = "") -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            first, whole = _seen(self.path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write {str(path)!r}: {reason}", "name another file") from error
        if first and header and first != header:
            raise OutputError(f"{str(path)!r} begins with {first.strip()[:60]!r}", "name another file")
        self.add(header if not first else "" if whole else "\n")

    def add(self, text: str) -> None:
        """The text, which ends in a line end, stands at the end of the file.

        Raises:
            OutputError: it cannot be written.
        """
        append_text(self.path, text)


def _seen(path: Path) -> tuple[str, bool]:
    """The first line of a file, `""` of none, and whether its last one is whole."""
    if not path.exists():
        return "", True
    with path.open("rb") as file:
        first = file.readline(4096).decode("utf-8", "replace")
        file.seek(-1 if first else 0, os.SEEK_END)
        return first, file.read() in (b"\n", b"")
