"""A step's numbers as its record: what was read from the devices, under the parameters' names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hookscope.gradreport import FROZEN
from hookscope.layers import Status
from hookscope.magnitudes import Magnitude, norm_of_norms
from hookscope.monitor.records import ParamFigures
from hookscope.monitor.watched import Watched


@dataclass(frozen=True)
class StepNumbers:
    """Of every watched parameter, in their order: its gradient, its weights, and the change of a step.

    `changes`: empty where updates are not measured.
    """

    gradients: Sequence[Magnitude | None]
    weights: Sequence[Magnitude | None]
    changes: Sequence[Magnitude | None] = ()


def parameter_figures(
    watched: Sequence[Watched], numbers: StepNumbers, norm: float
) -> dict[str, ParamFigures]:
    """The figures of every parameter by name."""
    changes = numbers.changes or [None] * len(watched)
    rows = zip(watched, numbers.gradients, numbers.weights, changes, strict=True)
    return {
        one.name: _figures(gradient, weight, change, norm, frozen=not one.parameter.requires_grad)
        for one, gradient, weight, change in rows
    }


def layer_figures(
    layers: Mapping[str, Sequence[int]], numbers: StepNumbers, norm: float
) -> dict[str, ParamFigures]:
    """The figures of every layer's own parameters together: those that have a gradient."""
    return {name: _together(at, numbers, norm) for name, at in layers.items()}


def total_norm(gradients: Sequence[Magnitude | None], norm: float) -> float | None:
    """The norm of all gradients laid end to end; `None` where there is none."""
    known = [size.of(norm) for size in gradients if size is not None]
    return norm_of_norms(known, norm) if known else None


def _together(positions: Sequence[int], numbers: StepNumbers, norm: float) -> ParamFigures:
    held = [at for at in positions if numbers.gradients[at] is not None]
    gradient = _laid_together([numbers.gradients[at] for at in held])
    # Where there is no gradient the weights are those of all, so that the norm is never of nothing.
    weight = _laid_together([numbers.weights[at] for at in held or positions])
    change = _laid_together([numbers.changes[at] for at in held]) if numbers.changes else None
    return _figures(gradient, weight, change, norm, frozen=False)


def _laid_together(sizes: Sequence[Magnitude | None]) -> Magnitude | None:
    """Of tensors laid end to end; entries that could not be counted stay so."""
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    broken = [size.non_finite for size in known]
    largest = [size.largest for size in known if size.largest is not None]
    l1 = [size.l1 for size in known if size.l1 is not None]
    return Magnitude(
        norm_of_norms([size.norm for size in known], 2.0),
        norm_of_norms(largest, math.inf) if len(largest) == len(known) else None,
        -1 if -1 in broken else sum(broken),
        sum(size.count for size in known),
        math.fsum(l1) if len(l1) == len(known) else None,
    )


def _figures(
    gradient: Magnitude | None,
    weight: Magnitude | None,
    change: Magnitude | None,
    norm: float,
    *,
    frozen: bool,
) -> ParamFigures:
    weight_norm = weight.of(norm) if weight is not None else math.nan
    update = (
        change.norm / weight.norm if change is not None and weight is not None and weight.norm > 0 else None
    )
    if gradient is None:
        status = FROZEN if frozen else str(Status.NO_GRAD_PATH)
        return ParamFigures(None, weight_norm, None, update, 0, None, status)
    value = gradient.of(norm)
    return ParamFigures(
        norm=value,
        weight_norm=weight_norm,
        ratio=value / weight_norm if weight_norm > 0 else None,
        update_ratio=update,
        non_finite=gradient.non_finite,
        rms=gradient.rms,
        status=_status(gradient),
        count=gradient.count,
    )


def _status(size: Magnitude) -> str:
    if size.non_finite or not math.isfinite(size.norm):
        return str(Status.NON_FINITE)
    return str(Status.ZERO_GRADIENT if size.norm == 0 else Status.OK)
