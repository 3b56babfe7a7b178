"""A gradient report as rows that rules look at alike: a place, a gradient's size, or why there is none.

It measures and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.checks.rules import Place
from hookscope.layers import Status

if TYPE_CHECKING:
    from hookscope.gradreport import GradReport, LayerGrad, ParamGrad
    from hookscope.magnitudes import Magnitude

_MISSING = {
    "frozen": "it is frozen",
    Status.NOT_CALLED: "it was never called",
    Status.BYPASSED: "its parameters are used without calling it",
    Status.NO_TENSOR: "it returned no tensor",
    Status.NO_GRAD_PATH: "it has no gradient",
    "undefined": "its gradient cannot be seen",
}


@dataclass(frozen=True)
class Row:
    """One gradient and where it is; `missing` says why there is none. `words`: what it is a gradient of."""

    place: Place
    size: Magnitude | None
    missing: str
    words: str

    @property
    def rms(self) -> float | None:
        """The RMS of a gradient that is finite and above zero."""
        known = self.size is not None and not broken(self.size) and self.size.norm > 0
        return self.size.rms if known and self.size is not None else None

    @property
    def unfit(self) -> str:
        """Why it has no RMS to compare."""
        if self.size is None:
            return self.missing
        if broken(self.size):
            return "its gradient is not finite"
        return "" if self.size.norm > 0 else "its gradient is exactly zero"


def places(report: GradReport) -> tuple[Place, ...]:
    """All that a glob may mean, in the report."""
    return tuple(row.place for row in (*parameter_rows(report), *layer_rows(report)))


def parameter_rows(report: GradReport) -> Iterator[Row]:
    """Every parameter, in model order."""
    types = {row.site.layer: row.type for row in report.layers}
    for row in report.parameters:
        place = Place(row.name, row.layer, types.get(row.layer, ""), row.aliases)
        yield Row(place, row.gradient, _missing_parameter(row), "the gradient")


def layer_rows(report: GradReport) -> Iterator[Row]:
    """The output of every call of every layer, in execution order, those never called last."""
    for row in report.layers:
        # What cannot be seen may hold a part of the gradient, which is no figure of the layer.
        size = None if row.status == "undefined" else row.output_grad
        yield Row(_layer_place(row), size, _MISSING.get(row.status, row.status), "the gradient at its output")


def _layer_place(row: LayerGrad) -> Place:
    return Place(str(row.site), row.site.layer, row.type)


def _missing_parameter(row: ParamGrad) -> str:
    return (
        "its layer was never called"
        if row.status == Status.NOT_CALLED
        else _MISSING.get(row.status, row.status)
    )


def broken(size: Magnitude) -> bool:
    """Whether an entry, or the norm, is not finite."""
    return size.non_finite > 0 or not math.isfinite(size.norm)
