"""Who is told of records and events: the sinks, and whoever asked to be called, warned or stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from hookscope.errors import UsageError
from hookscope.monitor.events import GradientEvent, GradientWarning
from hookscope.monitor.records import Event, StepRecord
from hookscope.monitor.sinks import Sink

OnEvent = Callable[[Event], object] | str | None


class Teller:
    """Tells sinks first, then `on_event`.

    Args:
        on_event: a callable, `"warn"`, `"raise"`, or nothing.

    Raises:
        UsageError: it is none of these.
    """

    def __init__(self, on_event: OnEvent) -> None:
        if not (on_event is None or callable(on_event) or on_event in ("warn", "raise")):
            raise UsageError(f"on_event={on_event!r} is unknown", "a callable, 'warn', 'raise' or None")
        self.sinks: tuple[Sink, ...] = ()
        self._on_event = on_event

    def tell(self, record: StepRecord, events: Sequence[Event], *, together: bool) -> None:
        """One more record, and what began at its step; `together`: other processes train in step with this one.

        Raises:
            GradientEvent: the first event, where events are to be raised.
        """
        for sink in self.sinks:
            sink.record(record)
            for event in events:
                sink.event(event)
        for event in events:
            # Of an event that only this process knows, the others would wait for it for ever.
            self._react(event, stops=self._on_event == "raise" and not (event.local and together))

    def _react(self, event: Event, *, stops: bool) -> None:
        if stops:
            raise GradientEvent(event)
        if callable(self._on_event):
            self._on_event(event)
        elif self._on_event is not None:
            warnings.warn(f"step {event.step}: {event.message}", GradientWarning, stacklevel=2)
