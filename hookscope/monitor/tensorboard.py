"""A monitor's records under TensorBoard's tags: which figures, under which names. `output` writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hookscope.monitor.records import Event, ParamFigures, StepRecord
from hookscope.output.tensorboard import TensorBoard

TOTAL = "gradients/total-norm"
NON_FINITE = "gradients/non-finite"
SCALE = "gradients/loss-scale"
SKIPPED = "gradients/skipped"

_FIGURES = {
    "gradient-norm": "norm",
    "weight-norm": "weight_norm",
    "gradient-to-weight": "ratio",
    "update-ratio": "update_ratio",
}
"""First part of a tag, and the figure under it; the second part is the layer's or the parameter's name."""


class TensorBoardSink:
    """Writes the total norm, the figures of each layer and site, and events, at their steps.

    A figure that was not measured, or is not defined, has no point at that step.

    Args:
        directory: of the run, as TensorBoard calls it.
        parameters: each parameter besides the layers that own them.
        first_step: added to the steps of records, where training goes on from an earlier one.

    Raises:
        UsageError: TensorBoard's package is not installed.
        OutputError: the directory is a file.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, parameters: bool = False, first_step: int = 0
    ) -> None:
        self._board = TensorBoard(directory)
        self._parameters = parameters
        self._first = first_step

    def record(self, record: StepRecord) -> None:
        values = _totals(record) | _figures(record.layers)
        values |= {f"activation-gradient/{site}": float(one.norm) for site, one in record.activations.items()}
        values |= {f"activation-gradient-max/{site}": one.maximum for site, one in record.activations.items()}
        if self._parameters:
            # A layer that is called as a parameter of another is does not hide it.
            values = _figures(record.parameters) | values
        self._board.scalars(values, record.step + self._first)

    def event(self, event: Event) -> None:
        words = f"**{event.kind}** at step {event.step}: {event.message}"
        self._board.text(f"events/{event.kind}", words, event.step + self._first)

    def close(self) -> None:
        self._board.close()


def _totals(record: StepRecord) -> dict[str, float]:
    lost = [one.non_finite for one in record.parameters.values()]
    values = {
        # One of them could not be counted: there is one at least.
        NON_FINITE: float(sum(max(number, 1) if number else 0 for number in lost)),
        SKIPPED: float(record.skipped),
    }
    if record.total_norm is not None:
        values[TOTAL] = record.total_norm
    return values | ({SCALE: record.scale} if record.scale != 1 else {})


def _figures(places: Mapping[str, ParamFigures]) -> dict[str, float]:
    return {
        f"{group}/{name}": value
        for group, figure in _FIGURES.items()
        for name, one in places.items()
        if (value := getattr(one, figure)) is not None
    }
