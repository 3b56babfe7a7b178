"""Distributions of what layers receive and return, over any number of batches, each tensor reduced once.

A tensor that is one layer's output and the next one's input is the same memory at the same version: the places share
what is kept of it, until a pass in which they are two. It is told which axis is whose, and never sees a module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.probes.finiteness import FORWARD, FirstNonFinite
from hookscope.reductions import Bounds, Reducer, Sampler, is_measurable
from hookscope.spectrum import Covariance
from hookscope.statsreport import INPUT, OUTPUT
from hookscope.streaming import Histogram, Moments, Partial

Place = tuple[Site, str]


@dataclass(frozen=True)
class Wanted:
    """What is kept of each place beside its moments."""

    threshold: float = 0.0
    histogram: bool = True
    spectrum: bool = False
    seed: int = 0
    sample: int = 2048


@dataclass
class Kept:
    """What is kept of one place. `shape`: of the first tensor there, without the pictures' axis."""

    shape: tuple[int, ...]
    layout: str
    axis: int | None
    moments: Moments
    histogram: Histogram | None = None
    covariance: Covariance | None = None

    def add(self, part: _Part) -> None:
        """One more batch."""
        if self._is_like(part.axis, len(part.partial.count)):
            self.moments.add(part.partial)
        else:
            other = Moments(len(part.partial.count), bounded=part.partial.saturated is not None)
            other.add(part.partial)
            self._mix(other)
        self._add_sample(part.histogram)
        self._add_covariance(part.covariance)

    def merge(self, other: Kept) -> None:
        """Take in all that another process has kept of the place."""
        if self._is_like(other.axis, other.moments.channels):
            self.moments.merge(other.moments)
        else:
            self._mix(other.moments)
        self._add_sample(other.histogram)
        self._add_covariance(other.covariance)

    def copy(self) -> Kept:
        """The same, to go on by itself."""
        return Kept.from_state(self.state())

    def state(self) -> dict[str, Any]:
        """All of it, plain and picklable, for `from_state`."""
        return {
            "shape": self.shape,
            "layout": self.layout,
            "axis": self.axis,
            "moments": self.moments.state(),
            "histogram": None if self.histogram is None else (self.histogram.counts, self.histogram.complete),
            "covariance": None if self.covariance is None else self.covariance.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Kept:
        """What a `state` is of."""
        histogram, covariance = state["histogram"], state["covariance"]
        return cls(
            state["shape"],
            state["layout"],
            state["axis"],
            Moments.from_state(state["moments"]),
            None if histogram is None else Histogram(*histogram),
            None if covariance is None else Covariance.from_state(covariance),
        )

    def _is_like(self, axis: int | None, channels: int) -> bool:
        return axis == self.axis and channels == self.moments.channels

    def _mix(self, other: Moments) -> None:
        """Take in another number of channels: it is as many every time, or there are none to speak of."""
        self.moments = self.moments.collapsed()
        self.moments.merge(other.collapsed())
        self.axis, self.layout, self.covariance = None, "", None

    def _add_sample(self, histogram: Histogram | None) -> None:
        if self.histogram is not None and histogram is not None:
            self.histogram = self.histogram.merged(histogram)

    def _add_covariance(self, covariance: Covariance | None) -> None:
        if self.covariance is not None and covariance is not None:
            self.covariance.merge(covariance)
        else:
            self.covariance = None


@dataclass
class _Part:
    """One tensor of the pass, reduced, and the places where it was met."""

    shape: tuple[int, ...]
    layout: str
    axis: int | None
    partial: Partial
    histogram: Histogram | None
    covariance: Covariance | None
    storage: StorageWeakRef
    places: list[Place] = field(default_factory=list)


class StatsProbe(Probe):
    """Reduces all that the chosen layers receive and return; read it by `places`, `kept` and `order`.

    Args:
        layout: `(site, side, shape) -> layout` of a tensor that a layer returned or received.
        bounds: by layer, where its function is saturated.
        wanted: what is kept.
        layers: that it hears of (`None`: all attached).
    """

    needs = Needs(inputs=True, outputs=True)

    def __init__(
        self,
        layout: Callable[[Site, str, tuple[int, ...]], str],
        bounds: Mapping[str, Bounds],
        wanted: Wanted,
        layers: frozenset[str] | None = None,
    ) -> None:
        self.layers = layers
        self.wanted = wanted
        self.pictures = self.batches = 0
        self.first_non_finite: FirstNonFinite | None = None
        self.order: dict[Site, None] = {}
        self.unmeasured: dict[Place, str] = {}
        self._layout, self._bounds = layout, bounds
        self._reducer, self._sampler = Reducer(wanted.threshold), Sampler(wanted.seed, wanted.sample)
        self._cells: list[Kept] = []
        self._cell_of: dict[Place, int] = {}
        self._sharing: Counter[int] = Counter()
        self._first_picture = -1
        self._numbers: Sequence[int] = ()
        self._expected: Sequence[int] | None = None
        self._parts: list[_Part] = []
        self._seen: dict[tuple[Any, ...], _Part] = {}
        self._not_finite: set[tuple[str, int]] = set()

    def expect(self, numbers: Sequence[int]) -> None:
        """The places in the data set of the pictures of the next pass; without it they are counted on."""
        self._expected = tuple(numbers)

    def begin(self, pictures: int) -> None:
        counted = range(self.pictures, self.pictures + pictures)
        self._numbers = tuple(counted) if self._expected is None else self._expected
        self._parts, self._seen = [], {}
        self._not_finite.clear()

    def on_input(self, site: Site, tensor: Tensor) -> None:
        part = self._met(site, INPUT, tensor)
        if part is not None and part.partial.non_finite:
            self._not_finite.add((site.layer, site.call))

    def on_output(self, site: Site, tensor: Tensor) -> None:
        self.order.setdefault(site)
        part = self._met(site, OUTPUT, tensor)
        if part is not None and part.partial.non_finite:
            self._blame(site, part.partial.non_finite, tensor.numel())

    def finish_batch(self) -> None:
        """The pass is done, whole: what was seen of it counts from now on."""
        for part in self._parts:
            for cell in self._cells_of(part):
                cell.add(part)
        self.pictures += len(self._numbers)
        self.batches += 1
        self._parts, self._seen, self._expected = [], {}, None

    def places(self) -> Sequence[Place]:
        """Where a tensor was met, in the order in which that happened first."""
        return tuple(self._cell_of)

    def kept(self, place: Place) -> Kept:
        """What is kept of a place."""
        return self._cells[self._cell_of[place]]

    def share(self) -> dict[str, Any]:
        """All that was seen, plain and picklable, for another process's `absorb`."""
        return {
            "pictures": self.pictures,
            "batches": self.batches,
            "first": self.first_non_finite,
            "order": tuple(self.order),
            "unmeasured": dict(self.unmeasured),
            "cells": [cell.state() for cell in self._cells],
            "cell_of": dict(self._cell_of),
        }

    def absorb(self, shared: Mapping[str, Any]) -> None:
        """Take in what another process has seen; places stay one that are one in both."""
        self.pictures += shared["pictures"]
        self.batches += shared["batches"]
        self.first_non_finite = _earlier(self.first_non_finite, shared["first"])
        self.order |= dict.fromkeys(shared["order"])
        self.unmeasured |= shared["unmeasured"]
        theirs = [Kept.from_state(state) for state in shared["cells"]]
        groups: dict[int, list[Place]] = {}
        for place, cell in shared["cell_of"].items():
            groups.setdefault(cell, []).append(place)
        # Places that only this process has met are not those that the other has met as well.
        self._apart([place for place in self._cell_of if place not in shared["cell_of"]])
        for cell, places in groups.items():
            known = [place for place in places if place in self._cell_of]
            for own in self._apart(known):
                self._cells[own].merge(theirs[cell])
            self._new([place for place in places if place not in self._cell_of], theirs[cell].copy())

    def _met(self, site: Site, side: str, tensor: Tensor) -> _Part | None:
        place = (site, side)
        if not is_measurable(tensor):
            self.unmeasured[place] = "complex" if tensor.is_complex() else "not-dense"
            return None
        key = _identity(tensor)
        part = self._seen.get(key) if key is not None else None
        if part is None:
            part = self._reduced(place, tensor)
            self._parts.append(part)
            if key is not None:
                self._seen[key] = part
        part.places.append(place)
        return part

    def _reduced(self, place: Place, tensor: Tensor) -> _Part:
        site, side = place
        layout = self._layout(site, side, tuple(tensor.shape))
        axis = layout.index("C") if "C" in layout and len(layout) == tensor.dim() else None
        bounds = self._bounds.get(site.layer) if side == OUTPUT else None
        histogram = None
        if self.wanted.histogram:
            histogram = self._sampler.sample(tensor, f"{site}{'<' if side == INPUT else ''}", self._numbers)
        return _Part(
            tuple(tensor.shape[1:]),
            layout if axis is not None else "",
            axis,
            self._reducer.reduce(tensor, axis, bounds),
            histogram,
            _covariance(tensor, axis) if self.wanted.spectrum and axis is not None else None,
            _storage(tensor),
        )

    def _blame(self, site: Site, entries: int, count: int) -> None:
        cause = "received" if (site.layer, site.call) in self._not_finite else "layer"
        batch = self.batches if self._expected is None else min(self._expected, default=0)
        if self.first_non_finite is None or batch < self._first_picture:
            self._first_picture = batch
            self.first_non_finite = FirstNonFinite(FORWARD, site, cause, self.batches, entries, count)

    def _cells_of(self, part: _Part) -> list[Kept]:
        """Those of the part's places: places that have been one so far and are two now go on apart."""
        known = [place for place in part.places if place in self._cell_of]
        found = [self._cells[own] for own in self._apart(known)]
        new = [place for place in part.places if place not in self._cell_of]
        if new:
            found.append(self._new(new, self._empty(part)))
        return found

    def _apart(self, places: Sequence[Place]) -> Iterable[int]:
        """The cells of these places, which share them with no other place from now on."""
        groups: dict[int, list[Place]] = {}
        for place in places:
            groups.setdefault(self._cell_of[place], []).append(place)
        for own, inside in groups.items():
            if len(inside) < self._sharing[own]:
                self._sharing[own] -= len(inside)
                self._new(inside, self._cells[own].copy())
        return list(dict.fromkeys(self._cell_of[place] for place in places))

    def _new(self, places: Sequence[Place], cell: Kept) -> Kept:
        if places:
            self._cells.append(cell)
            self._cell_of |= dict.fromkeys(places, len(self._cells) - 1)
            self._sharing[len(self._cells) - 1] = len(places)
        return cell

    def _empty(self, part: _Part) -> Kept:
        channels = len(part.partial.count)
        return Kept(
            part.shape,
            part.layout,
            part.axis,
            Moments(channels, bounded=part.partial.saturated is not None),
            Histogram() if part.histogram is not None else None,
            Covariance(channels) if part.covariance is not None else None,
        )


def _covariance(tensor: Tensor, axis: int) -> Covariance:
    made = Covariance(tensor.shape[axis])
    made.add(tensor.movedim(axis, -1).flatten(0, -2))
    made.settle()
    return made


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for two tensors that are the same values in the same memory; `None` where that cannot be known."""
    if tensor.is_inference():
        return None
    storage = _storage(tensor)
    where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return storage.cdata, *where, tensor._version


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Of the tensor's memory; as long as it is held, no other memory has its `cdata`."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _earlier(one: FirstNonFinite | None, other: FirstNonFinite | None) -> FirstNonFinite | None:
    found = [first for first in (one, other) if first is not None]
    return min(found, key=lambda first: first.batch, default=None)
