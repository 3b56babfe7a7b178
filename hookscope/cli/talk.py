"""What is printed: results to stdout, everything else to stderr, colour for terminals only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE_S = 1.0


def say(line: str) -> None:
    """A line of results, on stdout."""
    _put(sys.stdout, _printable(line) + "\n")


def say_json(obj: Any) -> None:
    """An object as JSON, on stdout."""
    from hookscope.output.manifest import encoded, to_json

    with _reader_may_leave(sys.stdout):
        sys.stdout.flush()
        sys.stdout.buffer.write(encoded(to_json(obj)))
        sys.stdout.buffer.flush()


def complain(kind: str, message: str, hint: str = "") -> None:
    """`error: ...` or `warning: ...`, and `hint: ...` under it, on stderr."""
    finish()
    lines = [f"{_coloured(kind)}: {_printable(message)}"]
    if hint:
        lines.append(f"{_coloured('hint')}: {_printable(hint)}")
    _put(sys.stderr, "\n".join(lines) + "\n")
    finish()


def finish() -> None:
    """Everything said so far is out."""
    for stream in (sys.stdout, sys.stderr):
        with _reader_may_leave(stream):
            stream.flush()


def probability(value: float) -> str:
    """`.72`, `1.00`."""
    text = f"{value:.2f}"
    return text[1:] if text.startswith("0") else text


def top_line(record: Mapping[str, Any], count: int = 3) -> str:
    """A picture and its best classes: `cat.png  Egyptian cat .72, tabby .13`."""
    best = [
        f"{top['label'] or 'class ' + str(top['class'])} {probability(top['probability'])}"
        for top in record["top"]
    ]
    return "  ".join(filter(None, (record["path"], ", ".join(best[:count]))))


class ProgressBar:
    """A bar on stderr for what takes longer than a second; nothing where stderr is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._silent = quiet or not sys.stderr.isatty()
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """`done` of `total` pictures are finished."""
        if self._silent or time.monotonic() - self._started < _PATIENCE_S:
            return
        if self._bar is None:
            self._bar = _new_bar()
            self._task = self._bar.add_task("pictures", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done)


def print_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout that fits the terminal; unbroken lines where stdout is none.

    `columns`: heading and `left` or `right`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        _print_plain(columns, rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, side in columns:
        justify: Any = side
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    console.print(table)


def _print_plain(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    lines = [[heading for heading, _ in columns], *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        cells = (
            cell.rjust(width) if side == "right" else cell.ljust(width)
            for cell, width, (_, side) in zip(line, widths, columns, strict=True)
        )
        say("  ".join(cells).rstrip())


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _put(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    with _reader_may_leave(stream):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def _reader_may_leave(stream: TextIO) -> Iterator[None]:
    """A closed pipe, as of `| head`, silences the stream; it ends no work and changes no exit code."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _coloured(kind: str) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return kind
    return f"\033[1;{'31' if kind == 'error' else '33' if kind == 'warning' else '36'}m{kind}\033[0m"


def _printable(text: str) -> str:
    """One line without control characters: names of files and layers are foreign text."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
