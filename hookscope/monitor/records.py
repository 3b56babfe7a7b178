"""What a monitored training step is written down as: figures of a step, and events. Plain values; it computes nothing.

Figures are of the gradients as backward left them: after the all-reduce of data parallel, before clipping, divided by
the loss scale where a scaler is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hookscope.layers import Site


class Kind(StrEnum):
    """What an event tells of."""

    NON_FINITE = "non-finite"
    EXPLODED = "exploded"
    VANISHED = "vanished"
    SPIKE = "spike"
    MAX_NORM = "max-norm"
    DRIFT = "drift"


class Point(StrEnum):
    """Where in a step gradients were read: as backward left them, or as the optimiser got them (maybe clipped)."""

    BACKWARD = "after-backward"
    STEP = "at-step"


@dataclass(frozen=True)
class ParamFigures:
    """The gradient of one parameter, or of all that a layer owns itself, in one step.

    `norm`, `weight_norm`: in the monitor's norm; `norm` is `None` where there is no gradient, which is not zero.
    `ratio`: norm / weight norm; `update_ratio`: the L2 norm of the step's real change / that of the weights before
    it; both are `None` where not measured or not defined (weights all zero). `rms`: root mean square of the gradient's
    `count` entries. `non_finite`: how many of them are not finite; -1 where some are and they could not be counted.
    `status`: `ok`, `zero-gradient`, `non-finite`, `no-grad-path` (no gradient came), `frozen`.
    """

    norm: float | None
    weight_norm: float
    ratio: float | None = None
    update_ratio: float | None = None
    non_finite: int = 0
    rms: float | None = None
    status: str = "ok"
    count: int = 0


@dataclass(frozen=True)
class ActivationFigures:
    """The gradient at what a layer returned, in one step: of all micro-batches together, on this process alone.

    `norm`: L2. `mean`, `deviation`, `rms`: over the gradient's `count` entries. `maximum`: the largest absolute one.
    `non_finite`: how many are not finite, -1 where they could not be counted; the others are then `nan` or `inf`.
    """

    norm: float
    mean: float
    deviation: float
    maximum: float
    rms: float
    count: int
    non_finite: int = 0
    status: str = "ok"


@dataclass(frozen=True)
class StepRecord:
    """All figures of one measured step, counted from 0.

    `total_norm`: of all measured parameters, tied ones once; `None` where none had a gradient. `parameters`: by name,
    in model order. `layers`: by the layer that owns them itself, not those below it. `activations`: in the order in
    which backward reached them. `norm`: 1, 2 or infinity. `scale`: the loss scale that was divided out. `skipped`:
    the scaler left this step out, so nothing was updated.
    """

    step: int
    total_norm: float | None
    parameters: Mapping[str, ParamFigures]
    layers: Mapping[str, ParamFigures] = field(default_factory=dict)
    activations: Mapping[Site, ActivationFigures] = field(default_factory=dict)
    norm: float = 2.0
    point: str = Point.BACKWARD
    scale: float = 1.0
    skipped: bool = False


@dataclass(frozen=True)
class Event:
    """Something that began at this step, at the first place in the order of backward where it is so.

    `name`: a parameter, the text of a site, or `""` for the whole model; `layer`: the layer that is or owns it.
    `value`, `limit`: what was compared; `nan` where nothing was. `mean`, `deviation`, `maximum`: of the gradient at
    the layer's output, where activations are watched. `parameter_norm`: of the gradients of the layer's parameters.
    `others`: further places of which the same is true. `local`: of this process alone, as activations are.
    """

    kind: Kind
    step: int
    name: str
    layer: str
    value: float
    limit: float
    message: str
    severity: str = "warn"
    mean: float | None = None
    deviation: float | None = None
    maximum: float | None = None
    parameter_norm: float | None = None
    others: tuple[str, ...] = ()
    local: bool = False
