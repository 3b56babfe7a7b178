"""`GradientMonitor` as a callback of Lightning's `Trainer`. Needs the extra `lightning`.

from hookscope.adapters.lightning import GradientMonitorCallback

watching = GradientMonitorCallback(every=50, log="runs/x")
Trainer(callbacks=[watching]).fit(model)
watching.report()
"""

from __future__ import annotations

from typing import Any

from hookscope.adapters.following import Following
from hookscope.monitor.records import StepRecord
from hookscope.monitor.sinks import CallbackSink

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install 'hookscope[lightning]'") from error

TOTAL = "gradients/total-norm"


class GradientMonitorCallback(Following, Callback):
    """Monitors `fit` from its first step to its end, errors included.

    Lightning runs backward inside the optimiser's step, so `on_event="raise"` stops after the step, not before it.

    Args:
        optimizer: which of the trainer's, where there are several: its steps count.
        to_logger: the total norm goes to the trainer's loggers too, as `gradients/total-norm`.
        options: of `GradientMonitor`; the scaler of mixed precision is found by itself.
    """

    def __init__(self, *, optimizer: int = 0, to_logger: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._which, self._to_logger = optimizer, to_logger

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers
        optimizer = optimizers[self._which] if optimizers else None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        sinks = [CallbackSink(_to_loggers(trainer))] if self._to_logger and trainer.loggers else []
        self.begin(trainer.strategy.model or pl_module, optimizer, scaler, sinks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()


def _to_loggers(trainer: Trainer) -> Any:
    def log(record: StepRecord) -> None:
        if record.total_norm is not None:
            for logger in trainer.loggers:
                logger.log_metrics({TOTAL: record.total_norm}, step=trainer.global_step)

    return log
