"""What is printed: results to stdout, everything else to stderr, colour for terminals only."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE_S = 1.0
# Characters of a table's cell, but for the first column's.
_CELL = 22


def open_streams() -> None:
    """There is a stdout and a stderr to write to, even where the shell has closed one (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it stays open to the end


def say(line: str) -> None:
    """A line of results, on stdout."""
    _put(sys.stdout, _printable(line) + "\n")


def put_line(stream: TextIO, line: str) -> None:
    """A line for a machine that reads the log, as it is."""
    _put(stream, line + "\n")


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


@contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """What the user's own code prints meanwhile, in any thread, goes to stderr."""
    aside: Any = _Aside()
    with redirect_stdout(aside):
        yield


class _Aside:
    """Stderr in the place of stdout, silent once its reader has left: a `print` must not end the model."""

    def write(self, text: str) -> int:
        with _reader_may_leave(sys.stderr):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with _reader_may_leave(sys.stderr):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class ProgressBar:
    """A bar on stderr for what takes longer than a second; nothing where stderr is no terminal.

    It appears by itself, from a thread of its own, and is gone when its block ends.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.shown = not quiet and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._timer = threading.Timer(_PATIENCE_S, self._appear)
        self._timer.daemon = True
        self._state: dict[str, Any] = {"description": "loading", "completed": 0, "total": None}
        self._ended = False
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressBar:
        if self.shown:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._bar is not None:
                self._bar.stop()

    def update(self, what: str, done: int, total: int | None) -> None:
        """`done` of `total` are finished of what is being done now; `None`: nobody knows of how many."""
        with self._lock:
            self._state = {"description": what, "completed": done, "total": total}
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], **self._state)

    def _appear(self) -> None:
        bar = _new_bar()
        with self._lock:
            # The run may have ended while rich was imported.
            if not self._ended:
                bar.add_task(**self._state)
                bar.start()
                self._bar = bar


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
    for at, (heading, side) in enumerate(columns):
        justify: Any = side
        # A name must be read whole, whatever it takes; of the rest, enough to be known by.
        if at == 0:
            table.add_column(heading, justify=justify, overflow="fold")
        else:
            table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis", max_width=_CELL)
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
    """A closed pipe, as of `| head`, silences the stream; it ends no work and changes no exit code.

    So does whatever keeps stderr from being written. A disk too full for stdout, where results go, is raised, once.
    """
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise


def _coloured(kind: str) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return kind
    return f"\033[1;{'31' if kind == 'error' else '33' if kind == 'warning' else '36'}m{kind}\033[0m"


def _printable(text: str) -> str:
    """One line without control characters: names of files and layers are foreign text."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
