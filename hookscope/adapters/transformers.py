"""`GradientMonitor` as a callback of Hugging Face's `Trainer`. Needs the extra `transformers`.

    from hookscope.adapters.transformers import GradientMonitorCallback

    with GradientMonitorCallback(every=50, log="runs/x") as watching:
        Trainer(model, arguments, callbacks=[watching], ...).train()
    watching.report()

`Trainer` tells its callbacks of no exception; the `with` block (or `close`) makes sure that no hook is left behind.
"""

from __future__ import annotations

from typing import Any

from hookscope.adapters.following import Following

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("transformers is not installed: pip install 'hookscope[transformers]'") from error

TOTAL = "hookscope/total-norm"
EVENTS = "hookscope/events"


class GradientMonitorCallback(Following, TrainerCallback):
    """Monitors `train` from its first step to its end.

    What `Trainer` logs gets the latest total norm and the number of events so far, in its history and for the
    callbacks that come after this one.

    Args:
        options: of `GradientMonitor`; the scaler of mixed precision is found by itself.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        wrapped = given.get("optimizer")
        # Accelerate's wrapper is an Optimizer in name only: it has no hooks of its own.
        self.begin(given["model"], getattr(wrapped, "optimizer", wrapped), getattr(wrapped, "scaler", None))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self.close()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self.monitor is None or self.monitor.last is None or self.monitor.last.total_norm is None:
            return
        figures = {TOTAL: self.monitor.last.total_norm, EVENTS: len(self.monitor.events)}
        if state.log_history:
            state.log_history[-1].update(figures)
        given.get("logs", {}).update(figures)
