"""What is kept of one place where tensors pass: all that a report says of it, whatever the order of the batches.

Merges, and goes from one process to another; reduces no tensor itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from hookscope.layers import Site
from hookscope.spectrum import Covariance
from hookscope.streaming import Histogram, Moments, Partial

Place = tuple[Site, str]
"""A site, and which side of it: `input` or `output`."""


@dataclass
class Part:
    """One tensor of a pass, reduced, and the places where it was met; as `Kept` otherwise."""

    shape: tuple[int, ...]
    layout: str
    axis: int | None
    partial: Partial
    histogram: Histogram | None
    covariance: Covariance | None
    storage: StorageWeakRef
    places: list[Place] = field(default_factory=list)


@dataclass
class Kept:
    """What is kept of one place.

    `first`: a number of the first batch in the data set that had a tensor there. `shape`: of that tensor, without the
    pictures' axis; `layout` too, `""` where its channels are not known. `axis`: of the channels, `None` where it is
    not known or is not the same in every batch, all values being one channel then.
    """

    first: int
    shape: tuple[int, ...]
    layout: str
    axis: int | None
    moments: Moments
    histogram: Histogram | None = None
    covariance: Covariance | None = None

    @classmethod
    def of(cls, part: Part, first: int) -> Kept:
        """Of one tensor, of the batch with that number."""
        channels = len(part.partial.count)
        moments = Moments(channels, bounded=part.partial.saturated is not None)
        moments.add(part.partial)
        return cls(first, part.shape, part.layout, part.axis, moments, part.histogram, part.covariance)

    def add(self, part: Part, first: int) -> None:
        """One more tensor, of the batch with that number."""
        if self._is_like(part.axis, len(part.partial.count)):
            self.moments.add(part.partial)
            self._add_rest(part, first)
        else:
            self.merge(Kept.of(part, first))

    def merge(self, other: Kept) -> None:
        """Take in all that is kept of other batches; `other` stays as it is."""
        if self._is_like(other.axis, other.moments.channels):
            self.moments.merge(other.moments)
        else:
            # Another number of channels: it is as many every time, or there are none to speak of.
            self.moments = self.moments.collapsed()
            self.moments.merge(other.moments.collapsed())
            self.axis, self.covariance = None, None
        self._add_rest(other, other.first)

    def copy(self) -> Kept:
        """The same, to go on by itself."""
        return Kept.from_state(self.state())

    def state(self) -> dict[str, Any]:
        """All of it, plain and picklable, for `from_state`."""
        return {
            **{name: getattr(self, name) for name in ("first", "shape", "layout", "axis")},
            "moments": self.moments.state(),
            "histogram": None if self.histogram is None else (self.histogram.counts, self.histogram.complete),
            "covariance": None if self.covariance is None else self.covariance.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Kept:
        """What a `state` is of."""
        histogram, covariance = state["histogram"], state["covariance"]
        return cls(
            state["first"],
            state["shape"],
            state["layout"],
            state["axis"],
            Moments.from_state(state["moments"]),
            None if histogram is None else Histogram(*histogram),
            None if covariance is None else Covariance.from_state(covariance),
        )

    def _is_like(self, axis: int | None, channels: int) -> bool:
        return axis == self.axis and channels == self.moments.channels

    def _add_rest(self, other: Part | Kept, first: int) -> None:
        if first < self.first:
            self.first, self.shape, self.layout = first, other.shape, other.layout
        if self.axis is None:
            self.layout = ""
        if self.histogram is not None and other.histogram is not None:
            self.histogram = self.histogram.merged(other.histogram)
        if self.covariance is not None and other.covariance is not None:
            self.covariance.merge(other.covariance)
        else:
            self.covariance = None
