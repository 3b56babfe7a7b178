"""A monitor that begins and ends with somebody else's training. Knows no framework."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from hookscope.errors import NothingMeasured
from hookscope.monitor.monitor import GradientMonitor
from hookscope.monitor.report import MonitorReport
from hookscope.monitor.sinks import Sink

Log = str | os.PathLike[str] | Sink | Sequence[Sink] | None


class Following:
    """Holds the monitor of the present or latest training: `monitor`, `None` before any.

    `close()`, or the end of a `with` block, takes its hooks away whatever has become of the training.

    Args:
        options: of `GradientMonitor`, all but the model and the optimiser.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.monitor: GradientMonitor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(
        self, model: nn.Module, optimizer: Optimizer | None, scaler: Any = None, sinks: Sequence[Sink] = ()
    ) -> None:
        """A training begins: the monitor of an earlier one is closed, and a new one runs.

        `scaler`: where the options name none. `sinks`: besides those of the options.

        Raises:
            UsageError: the options do not fit the model.
        """
        from hookscope.monitor.sinks import opened

        self.close()
        options = {"scaler": scaler, **self.options}
        if sinks:
            options["log"] = [*sinks, *opened(options.get("log"))]
        self.monitor = GradientMonitor(model, optimizer, **options).start()

    def close(self) -> None:
        """The training is over; report, events and history stay."""
        if self.monitor is not None:
            self.monitor.close()

    def report(self) -> MonitorReport:
        """The report of the present or latest training.

        Raises:
            NothingMeasured: there was none.
        """
        if self.monitor is None:
            raise NothingMeasured("no training has begun", "give the callback to a trainer, and train")
        return self.monitor.report()
