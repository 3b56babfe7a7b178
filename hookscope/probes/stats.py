"""Distributions of what layers receive and return, over any number of batches, each tensor reduced once.

A tensor that is one layer's output and the next one's input is the same memory at the same version: the places share
what is kept of it, until a pass in which they are two. It is told which axis is whose, and never sees a module.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.probes.finiteness import FORWARD, FirstNonFinite
from hookscope.probes.kept import Kept, Part, Place
from hookscope.reductions import Bounds, Reducer, is_measurable
from hookscope.sampling import Sampler
from hookscope.spectrum import Covariance
from hookscope.statsreport import INPUT, OUTPUT


@dataclass(frozen=True)
class Wanted:
    """What is kept of each place beside its moments.

    `threshold`: what a unit must be above to be alive. `sample`: how many values are drawn of each picture and tensor
    at most, for a histogram; `seed` decides which.
    """

    threshold: float = 0.0
    histogram: bool = True
    spectrum: bool = False
    seed: int = 0
    sample: int = 2048


@dataclass
class _Pass:
    """What one pass gave so far: tensors, also by their memory; places in order; what is not finite in whose input."""

    parts: list[Part] = field(default_factory=list)
    seen: dict[tuple[Any, ...], Part] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    refused: dict[Place, str] = field(default_factory=dict)
    not_finite: set[tuple[str, int]] = field(default_factory=set)
    blamed: FirstNonFinite | None = None


class StatsProbe(Probe):
    """Reduces all that the chosen layers receive and return; read it by `places`, `order` and `kept`.

    The same batches give the same, whatever their order and over however many probes they are spread.

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
        self.pictures = 0
        self.unmeasured: dict[Place, str] = {}
        self._layout, self._bounds = layout, bounds
        self._reducer, self._sampler = Reducer(wanted.threshold), Sampler(wanted.seed, wanted.sample)
        # Eight bytes a batch are all that grows: what number a batch had is asked when others' batches are known.
        self._starts = array("q")
        self._first: tuple[int, FirstNonFinite] | None = None
        self._when: dict[Place, tuple[int, int]] = {}
        self._cells: list[Kept] = []
        self._cell_of: dict[Place, int] = {}
        self._sharing: Counter[int] = Counter()
        self._numbers: Sequence[int] = ()
        self._expected: Sequence[int] | None = None
        self._pass = _Pass()

    @property
    def batches(self) -> int:
        """How many are done."""
        return len(self._starts)

    @property
    def first_non_finite(self) -> FirstNonFinite | None:
        """The first output with an entry that is not finite, in the data set's order of batches."""
        if self._first is None:
            return None
        number, found = self._first
        return replace(found, batch=sum(start < number for start in self._starts))

    def expect(self, numbers: Sequence[int]) -> None:
        """The places in the data set of the pictures of the next pass; without it they are counted on."""
        self._expected = tuple(numbers)

    def begin(self, pictures: int) -> None:
        counted = range(self.pictures, self.pictures + pictures)
        self._numbers = tuple(counted) if self._expected is None else self._expected
        self._pass = _Pass()

    def on_input(self, site: Site, tensor: Tensor) -> None:
        part = self._met(site, INPUT, tensor)
        if part is not None and part.partial.non_finite:
            self._pass.not_finite.add((site.layer, site.call))

    def on_output(self, site: Site, tensor: Tensor) -> None:
        part = self._met(site, OUTPUT, tensor)
        if part is not None and part.partial.non_finite and self._pass.blamed is None:
            cause = "received" if (site.layer, site.call) in self._pass.not_finite else "layer"
            self._pass.blamed = FirstNonFinite(
                FORWARD, site, cause, 0, part.partial.non_finite, tensor.numel()
            )

    def finish_batch(self) -> None:
        """The pass is done, whole: what was seen of it counts from now on."""
        number = min(self._numbers, default=0)
        for part in self._pass.parts:
            self._keep(part, number)
        for at, place in enumerate(self._pass.places):
            self._when[place] = min(self._when.get(place, (number, at)), (number, at))
        self.unmeasured |= self._pass.refused
        if self._pass.blamed is not None:
            self._first = _earlier(self._first, (number, self._pass.blamed))
        self.pictures += len(self._numbers)
        self._starts.append(number)
        self._expected = None
        self._pass = _Pass()

    def places(self) -> Sequence[Place]:
        """Where a tensor was met, in the order in which that happened first."""
        return sorted(self._when, key=self._when.__getitem__)

    def order(self) -> Sequence[Site]:
        """What layers returned, in the order in which calls ended first."""
        return [site for site, side in self.places() if side == OUTPUT]

    def kept(self, place: Place) -> Kept:
        """What is kept of a place that is not in `unmeasured`."""
        return self._cells[self._cell_of[place]]

    def share(self) -> dict[str, Any]:
        """All that was seen, plain and picklable, for another probe's `absorb`."""
        return {
            "pictures": self.pictures,
            "starts": self._starts,
            "first": self._first,
            "when": self._when,
            "unmeasured": self.unmeasured,
            "cells": [cell.state() for cell in self._cells],
            "cell_of": self._cell_of,
        }

    def absorb(self, shared: Mapping[str, Any]) -> None:
        """Take in what another has seen of other batches; places stay one that are one in both."""
        self.pictures += shared["pictures"]
        self._starts.extend(shared["starts"])
        self._first = _earlier(self._first, shared["first"])
        for place, when in shared["when"].items():
            self._when[place] = min(self._when.get(place, when), when)
        self.unmeasured |= shared["unmeasured"]
        theirs = [Kept.from_state(state) for state in shared["cells"]]
        groups: dict[int, list[Place]] = {}
        for place, cell in shared["cell_of"].items():
            groups.setdefault(cell, []).append(place)
        # Places that only this one has met are not those that the other has met as well.
        self._apart([place for place in self._cell_of if place not in shared["cell_of"]])
        for cell, places in groups.items():
            for own in self._apart(self._known(places)):
                self._cells[own].merge(theirs[cell])
            self._new(self._unknown(places), theirs[cell])

    def _met(self, site: Site, side: str, tensor: Tensor) -> Part | None:
        place = (site, side)
        self._pass.places.append(place)
        if not is_measurable(tensor):
            self._pass.refused[place] = "complex" if tensor.is_complex() else "not-dense"
            return None
        key = _identity(tensor)
        part = self._pass.seen.get(key) if key is not None else None
        if part is None:
            part = self._reduced(place, tensor)
            self._pass.parts.append(part)
            if key is not None:
                self._pass.seen[key] = part
        elif self._knows_more(place, tensor, part):
            # Such as the model's input, of which only the first convolution knows which axis is whose.
            vars(part).update(vars(self._reduced(place, tensor)) | {"places": part.places})
        part.places.append(place)
        return part

    def _knows_more(self, place: Place, tensor: Tensor, part: Part) -> bool:
        if part.axis is None and self._axis(place, tensor)[0] is not None:
            return True
        return part.partial.saturated is None and self._bounds_at(place) is not None

    def _reduced(self, place: Place, tensor: Tensor) -> Part:
        site, side = place
        axis, layout = self._axis(place, tensor)
        histogram = None
        if self.wanted.histogram:
            name = f"{site}<" if side == INPUT else str(site)
            histogram = self._sampler.sample(tensor, name, self._numbers)
        return Part(
            tuple(tensor.shape[1:]),
            layout,
            axis,
            self._reducer.reduce(tensor, axis, self._bounds_at(place)),
            histogram,
            _covariance(tensor, axis) if self.wanted.spectrum and axis is not None else None,
            _storage(tensor),
        )

    def _axis(self, place: Place, tensor: Tensor) -> tuple[int | None, str]:
        """The channels' axis and the layout; `None` and `""` where it is not certain."""
        layout = self._layout(*place, tuple(tensor.shape))
        fits = "C" in layout and len(layout) == tensor.dim()
        return (layout.index("C"), layout) if fits else (None, "")

    def _bounds_at(self, place: Place) -> Bounds | None:
        site, side = place
        return self._bounds.get(site.layer) if side == OUTPUT else None

    def _keep(self, part: Part, number: int) -> None:
        """Add it to all its places: those that have been one so far and are two now go on apart."""
        for own in self._apart(self._known(part.places)):
            self._cells[own].add(part, number)
        new = self._unknown(part.places)
        if new:
            self._new(new, Kept.of(part, number))

    def _known(self, places: Iterable[Place]) -> list[Place]:
        return [place for place in dict.fromkeys(places) if place in self._cell_of]

    def _unknown(self, places: Iterable[Place]) -> list[Place]:
        return [place for place in dict.fromkeys(places) if place not in self._cell_of]

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

    def _new(self, places: Sequence[Place], cell: Kept) -> None:
        if places:
            self._cells.append(cell)
            self._cell_of |= dict.fromkeys(places, len(self._cells) - 1)
            self._sharing[len(self._cells) - 1] = len(places)


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


def _earlier(
    one: tuple[int, FirstNonFinite] | None, other: tuple[int, FirstNonFinite] | None
) -> tuple[int, FirstNonFinite] | None:
    found = [first for first in (one, other) if first is not None]
    return min(found, key=lambda first: first[0], default=None)
