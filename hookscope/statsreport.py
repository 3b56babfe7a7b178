"""What passed through a model over a data set: for every place the distribution of its values, whole and by channel.

Plain results. They are made by `activations`, judged by `checks.stats` and written by `tasks.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.layers import Site

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookscope.probes.finiteness import FirstNonFinite
    from hookscope.spectrum import Spectrum
    from hookscope.streaming import Histogram

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class ChannelStats:
    """The distribution of each of C channels; all arrays are (C,).

    `axis`: of the tensor, batch first. `count`: finite entries. `mean`, `std` (population), `maximum`, `minimum`,
    `energy` (the mean square): float64 over the finite entries, `nan` where there are none. `alive`: entries above the
    report's threshold, whose first is never counted twice. `saturated`: entries at a bound of the layer's function,
    `None` where it has none.
    """

    axis: int
    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    maximum: NDArray[np.float64]
    minimum: NDArray[np.float64]
    energy: NDArray[np.float64]
    alive: NDArray[np.int64]
    saturated: NDArray[np.int64] | None = None

    @property
    def channels(self) -> int:
        """How many there are."""
        return len(self.mean)


@dataclass(frozen=True)
class Distribution:
    """All values that passed at one place: moments over the finite entries, counts over all.

    `count`: entries, of which `non_finite` are not finite and `zeros` are 0. `std`: of the population. `histogram`: of
    a sample; `None` where it was not asked for. `channels`: `None` where the channel axis is not known.
    """

    count: int
    non_finite: int
    zeros: int
    mean: float = math.nan
    std: float = math.nan
    minimum: float = math.nan
    maximum: float = math.nan
    histogram: Histogram | None = None
    channels: ChannelStats | None = None


@dataclass(frozen=True)
class StatsRow:
    """One tensor that a layer received (`side` input, before any in-place op) or returned (`output`).

    `site.output` is the path in the arguments or in the output. `depth`: the place in the order in which calls ended,
    `None` for a layer that was never called. `shape`: of the first picture's, batch first, as 1. `same_as`: the place,
    `(site, side)`, whose very tensor this is; the distribution is the same object, reduced once. `kind`: what the
    layer does to values: `relu`, `relu6`, `sigmoid`, `tanh`, `hardsigmoid`, `hardtanh`, `norm` or `""`. `spectrum`: of
    the channels' covariance, where it was asked for.
    """

    site: Site
    side: str
    type: str
    status: str
    depth: int | None = None
    shape: tuple[int, ...] = ()
    layout: str = ""
    kind: str = ""
    same_as: tuple[Site, str] | None = None
    distribution: Distribution | None = None
    spectrum: Spectrum | None = None

    @property
    def place(self) -> str:
        """Its name: the site's for an output, with `<` behind it for an input."""
        return f"{self.site}<" if self.side == INPUT else str(self.site)


@dataclass(frozen=True)
class StatsReport:
    """Distributions of the chosen layers' inputs and outputs over `pictures`, in execution order, uncalled ones last.

    `threshold`: what a unit must be above to be alive. `first_non_finite`: the first layer at which a value was not
    finite, `None` where all were.
    """

    pictures: int
    batches: int
    rows: Sequence[StatsRow]
    threshold: float = 0.0
    seed: int = 0
    first_non_finite: FirstNonFinite | None = None

    @property
    def inputs(self) -> tuple[StatsRow, ...]:
        """What layers received."""
        return tuple(row for row in self.rows if row.side == INPUT)

    @property
    def outputs(self) -> tuple[StatsRow, ...]:
        """What layers returned."""
        return tuple(row for row in self.rows if row.side == OUTPUT)
