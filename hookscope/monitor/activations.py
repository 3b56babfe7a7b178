"""Gradients at what layers return, reduced as they pass: moments of one step, and over all steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site, Status
from hookscope.magnitudes import greatest, same_memory
from hookscope.monitor.measuring import moments
from hookscope.monitor.records import ActivationFigures


@dataclass(frozen=True)
class Moments:
    """Sums over entries: how many, their sum and L2 norm, the largest absolute one; `non_finite` -1: not counted."""

    count: int
    total: float
    norm: float
    maximum: float
    non_finite: int = 0

    def figures(self) -> ActivationFigures:
        """The same as figures."""
        if not self.count:
            return ActivationFigures(0.0, 0.0, 0.0, 0.0, 0.0, 0, status=Status.ZERO_GRADIENT)
        mean, rms = self.total / self.count, self.norm / math.sqrt(self.count)
        # Both are rounded: of equal entries the difference may be a hair below zero.
        off = (rms - abs(mean)) * (rms + abs(mean)) if math.isfinite(rms) else math.nan
        return ActivationFigures(
            norm=self.norm,
            mean=mean,
            deviation=math.sqrt(off) if off > 0 else (0.0 if off <= 0 else math.nan),
            maximum=self.maximum,
            rms=rms,
            count=self.count,
            non_finite=self.non_finite,
            status=_status(self.norm, self.non_finite),
        )

    def times(self, factor: float) -> Moments:
        """Of every entry times a positive factor."""
        return Moments(
            self.count, self.total * factor, self.norm * factor, self.maximum * factor, self.non_finite
        )


def merged(found: Iterable[Moments]) -> Moments:
    """The moments of all entries laid end to end."""
    whole = Moments(0, 0.0, 0.0, 0.0)
    for one in found:
        unknown = -1 in (whole.non_finite, one.non_finite)
        whole = Moments(
            whole.count + one.count,
            whole.total + one.total,
            math.hypot(whole.norm, one.norm),
            greatest(whole.maximum, one.maximum),
            -1 if unknown else whole.non_finite + one.non_finite,
        )
    return whole


class ActivationProbe(Probe):
    """Keeps three numbers on the device for every gradient that passes while it is `listening`."""

    needs = Needs(gradients=True)

    def __init__(self, layers: frozenset[str]) -> None:
        self.layers = layers
        self.listening = False
        self._kept: dict[Site, list[tuple[Tensor, int, int]]] = {}
        self._latest: tuple[Tensor, tuple[Tensor, int, int]] | None = None

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        if not self.listening:
            return
        if self._latest is None or not same_memory(self._latest[0], tensor):
            # A block and its last layer return the same tensor: it is reduced once.
            self._latest = (tensor, moments(tensor))
        self._kept.setdefault(site, []).append(self._latest[1])

    def rest(self) -> None:
        """The backward pass is over: let go of the latest gradient."""
        self._latest = None

    def take(self) -> dict[Site, list[tuple[Tensor, int, int]]]:
        """What was kept since it was last taken."""
        kept, self._kept, self._latest = self._kept, {}, None
        return kept


def moments_of(
    kept: Mapping[Site, list[tuple[Tensor, int, int]]], values: Iterable[list[float]], scale: float
) -> dict[Site, Moments]:
    """The numbers of one step, micro-batches together; `values`: of the tensors, in their order."""
    values = iter(values)
    return {
        site: merged(_moments(next(values), count, broken) for _, count, broken in found).times(1 / scale)
        for site, found in kept.items()
    }


def _moments(values: list[float], count: int, broken: int) -> Moments:
    total, norm, top = values
    if broken < 0 and math.isfinite(norm):
        broken = 0
    return Moments(count, total, norm, top, broken)


def _status(norm: float, non_finite: int) -> str:
    if non_finite or not math.isfinite(norm):
        return str(Status.NON_FINITE)
    return str(Status.ZERO_GRADIENT if norm == 0 else Status.OK)
