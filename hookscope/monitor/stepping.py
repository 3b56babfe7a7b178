"""The measuring of one training step: what is kept on the devices between backward and the optimiser's step.

It reads gradients and weights, and waits for the devices once a step. It knows no hooks and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hookscope.layers import Site
from hookscope.magnitudes import Magnitude, scaled
from hookscope.monitor.activations import ActivationProbe, Moments, merged, moments_of
from hookscope.monitor.measuring import Sizes, magnitudes, orders_for, read, sizes
from hookscope.monitor.parallel import local, made_whole
from hookscope.monitor.records import Point, StepRecord
from hookscope.monitor.scaling import Scaling
from hookscope.monitor.stepfigures import StepNumbers, layer_figures, parameter_figures, total_norm
from hookscope.monitor.watched import Watched, by_layer


@dataclass(frozen=True)
class Taken:
    """Gradients as they were at one moment: their sizes and the loss scale, unread; the sites' own sums."""

    gradients: Sizes
    scale: Tensor
    activations: dict[Site, list[tuple[Tensor, int, int]]]
    point: Point


@dataclass(frozen=True)
class Done:
    """One measured step: its record, and what a report needs of it."""

    record: StepRecord
    sizes: tuple[Magnitude | None, ...]
    activations: dict[Site, Moments]


class Stepping:
    """Takes figures when told to, and makes records of them.

    Args:
        watched: the parameters.
        norm: 1, 2 or infinity.
        scaling: what to divide gradients by.
        probe: keeps activations' gradients; `None`: nobody does.
        updates: keeps a copy of every watched parameter from before each measured step.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        norm: float,
        scaling: Scaling,
        probe: ActivationProbe | None,
        *,
        updates: bool,
    ) -> None:
        self._watched = tuple(watched)
        self._layers = by_layer(watched)
        self._norm = norm
        self._scaling = scaling
        self._probe = probe
        self._updates = updates
        self._taken: list[Taken] = []
        self._weights: Sizes | None = None
        self._before: list[Tensor] = []

    @property
    def waiting(self) -> bool:
        """Whether gradients were taken of which no record has been made."""
        return bool(self._taken)

    def take(self, point: Point) -> None:
        """Keep the sizes of the gradients that are there; those of an earlier micro-batch are parts of them."""
        gradients = self._sized([local(one.parameter.grad) for one in self._watched], orders_for(self._norm))
        if self._probe is not None:
            self._probe.rest()
        activations = self._probe.take() if self._probe is not None else {}
        device = self._watched[0].parameter.device
        # At the step itself a scaler has divided already.
        scaling = self._scaling if point is Point.BACKWARD else Scaling(None)
        taken = Taken(gradients, scaling.now(device), activations, point)
        if self._taken and not self._scaling.active:
            earlier = self._taken.pop().activations
            sites = dict.fromkeys((*earlier, *activations))
            both = {site: [*earlier.get(site, ()), *activations.get(site, ())] for site in sites}
            taken = replace(taken, activations=both)
        self._taken.append(taken)

    def left_out(self) -> bool:
        """Whether the scaler has left out the step that was taken last; waits for the device."""
        if not (self._taken and self._scaling.active):
            return False
        scale = self._taken[-1].scale
        return bool(self._scaling.now(scale.device) < scale)

    def weigh(self) -> None:
        """Keep the sizes of the weights, and copies of them where updates are measured."""
        values = self._parameters()
        self._weights = self._sized(values, orders_for(self._norm))
        if self._updates:
            shaped = [value for value in values if value is not None]
            if len(self._before) != len(shaped):
                self._before = [torch.empty_like(value) for value in shaped]
            with torch.no_grad():
                torch._foreach_copy_(self._before, shaped)

    def finish(self, step: int, *, stepped: bool = True) -> list[Done]:
        """The records of the steps that were taken: those that the scaler left out, and the one now.

        Args:
            step: the number of the first.
            stepped: whether the last is a step that was taken; else it is one only if the scaler left it out.
        """
        taken, self._taken = self._taken, []
        if not taken:
            return []
        if self._weights is None:
            self.weigh()
        weights, self._weights = self._weights, None
        assert weights is not None
        found = [*(one.gradients for one in taken), weights]
        if self._updates:
            found.append(self._changes())
        made_whole(found, [one.parameter for one in self._watched])
        scales = [one.scale for one in taken]
        if not stepped:
            scales.append(self._scaling.now(scales[0].device))
        return self._done(step, _numbers(taken, found, scales))

    def forget(self) -> None:
        """Let go of all that was kept."""
        self._taken.clear()
        self._before.clear()
        self._weights = None
        if self._probe is not None:
            self._probe.take()

    def _done(self, step: int, numbers: _Numbers) -> list[Done]:
        made: list[Done] = []
        carried: dict[Site, Moments] = {}
        for at, taken in enumerate(numbers.taken):
            following = numbers.scales[at + 1 : at + 2]
            # A scaler that left a step out lowers its scale, and nothing else does.
            skipped = bool(following) and following[0] < numbers.scales[at]
            carried = _together(carried, numbers.activations[at])
            if skipped or not following:
                made.append(self._one(step + len(made), taken, numbers, at, carried, skipped=skipped))
                carried = {}
        return made

    def _one(
        self,
        step: int,
        taken: Taken,
        numbers: _Numbers,
        at: int,
        moments: dict[Site, Moments],
        *,
        skipped: bool,
    ) -> Done:
        scale = numbers.scales[at]
        gradients = [None if size is None else scaled(size, 1 / scale) for size in numbers.gradients[at]]
        changes: Sequence[Magnitude | None] = numbers.changes
        if skipped and self._updates:
            changes = [
                None if size is None else replace(size, norm=0.0, non_finite=0) for size in numbers.weights
            ]
        found = StepNumbers(gradients, numbers.weights, changes)
        record = StepRecord(
            step=step,
            total_norm=total_norm(gradients, self._norm),
            parameters=parameter_figures(self._watched, found, self._norm),
            layers=layer_figures(self._layers, found, self._norm),
            activations={site: one.figures() for site, one in moments.items()},
            norm=self._norm,
            point=taken.point,
            scale=scale,
            skipped=skipped,
        )
        return Done(record, tuple(gradients), moments)

    def _changes(self) -> Sizes:
        """Sizes of what the step changed; the copies are used up."""
        values = self._parameters()
        with torch.no_grad():
            torch._foreach_sub_(self._before, [value for value in values if value is not None])
        copies = iter(self._before)
        return self._sized([None if value is None else next(copies) for value in values], (2.0,))

    def _sized(self, values: Sequence[Tensor | None], orders: tuple[float, ...]) -> Sizes:
        found = sizes(values, orders)
        # Of the whole parameter, where this process has a part of it only.
        found.counts = [
            None if value is None else one.parameter.numel()
            for value, one in zip(values, self._watched, strict=True)
        ]
        return found

    def _parameters(self) -> list[Tensor | None]:
        """The values on this process; `None` of a lazy one that has none yet."""
        return [None if is_lazy(one.parameter) else local(one.parameter.detach()) for one in self._watched]


@dataclass(frozen=True)
class _Numbers:
    """All that was read of what was taken, in one go. `scales`: of each, and the present one where it is to tell."""

    taken: list[Taken]
    gradients: list[list[Magnitude | None]]
    weights: list[Magnitude | None]
    changes: list[Magnitude | None]
    scales: list[float]
    activations: list[dict[Site, Moments]]


def _numbers(taken: list[Taken], found: list[Sizes], scales: list[Tensor]) -> _Numbers:
    parts = [norms for one in found for _, norms in one.parts]
    sums = [tensor for one in taken for kept in one.activations.values() for tensor, _, _ in kept]
    values = iter(read([*scales, *parts, *sums]))
    known = [next(values)[0] for _ in scales]
    made = [magnitudes(one, [next(values) for _ in one.parts]) for one in found]
    activations = [
        moments_of(one.activations, values, scale) for one, scale in zip(taken, known, strict=False)
    ]
    count = len(taken)
    rest = made[count + 1 :]
    return _Numbers(taken, made[:count], made[count], rest[0] if rest else [], known, activations)


def _together(one: dict[Site, Moments], other: dict[Site, Moments]) -> dict[Site, Moments]:
    """The moments of two micro-batches."""
    sites = dict.fromkeys((*one, *other))
    return {site: merged(found[site] for found in (one, other) if site in found) for site in sites}
