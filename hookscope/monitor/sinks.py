"""Where a monitor's records go: what a sink is, and the sinks that a path means."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from hookscope.errors import OutputError, UsageError
from hookscope.monitor.records import Event, StepRecord

RECORDS = "gradients.jsonl"
"""What the records are called in a directory."""


class LogWarning(UserWarning):
    """A log could not be written and goes no further; the training does."""


@runtime_checkable
class Sink(Protocol):
    """Takes records and events in the order of steps, as they are made; `close` is called once, at the end."""

    def record(self, record: StepRecord) -> None:
        """The figures of one more measured step."""

    def event(self, event: Event) -> None:
        """Something that began; the step's record has been given already."""

    def close(self) -> None:
        """Nothing more will come."""


class CallbackSink:
    """Calls functions: `on_record` with every record, `on_event` with every event. What they raise stops the training.

    The event's own `on_event` of a monitor can warn and raise besides; this one is for a sink among others.
    """

    def __init__(
        self,
        on_record: Callable[[StepRecord], object] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        self._on_record, self._on_event = on_record, on_event

    def record(self, record: StepRecord) -> None:
        if self._on_record is not None:
            self._on_record(record)

    def event(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def close(self) -> None:
        """Nothing is held."""


class Steadfast:
    """The sink, until its place cannot be written: then one `LogWarning`, and no further call but `close`.

    A full disk ends a log. It does not end days of training.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._failed = False

    def record(self, record: StepRecord) -> None:
        self._try(lambda: self.sink.record(record))

    def event(self, event: Event) -> None:
        self._try(lambda: self.sink.event(event))

    def close(self) -> None:
        self._failed = False  # what is open is closed, and where that fails it is said
        self._try(self.sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except OutputError as error:
            self._failed = True
            warnings.warn(f"the log of gradients ends here: {error}", LogWarning, stacklevel=4)


def opened(log: object) -> tuple[Sink, ...]:
    """The sinks that `log` means: none, one, several, or those of a path.

    `FILE.jsonl` and `FILE.csv` are these. Any other path is a directory, with `gradients.jsonl` and, where its package
    is installed, TensorBoard's events. Of several processes that train together only the first writes to a path.

    Raises:
        UsageError: it is none of these.
        OutputError: the path cannot be written.
    """
    if log is None:
        return ()
    if isinstance(log, str | os.PathLike):
        return tuple(map(Steadfast, _of_path(log))) if _is_first() else ()
    if isinstance(log, Sink):
        return (Steadfast(log),)
    if isinstance(log, Sequence) and all(isinstance(one, Sink) for one in log):
        return tuple(map(Steadfast, log))
    raise UsageError(f"log={log!r} is no sink", "a path, a sink, or a sequence of them")


def _of_path(log: str | os.PathLike[str]) -> list[Sink]:
    from hookscope.monitor.files import CsvSink, JsonlSink
    from hookscope.monitor.tensorboard import TensorBoardSink
    from hookscope.output.tensorboard import is_installed

    path = Path(log)
    if not os.fspath(log):
        raise UsageError("log='' names no place", "a directory, FILE.jsonl or FILE.csv")
    if path.suffix == ".csv":
        return [CsvSink(path)]
    if path.suffix == ".jsonl":
        return [JsonlSink(path)]
    return [JsonlSink(path / RECORDS), *([TensorBoardSink(path)] if is_installed() else [])]


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
