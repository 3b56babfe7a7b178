"""What probes hand over: plain numbers, no modules, pixels or files. `output` decides how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hookscope.layers import Site

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]


class MapStatus(StrEnum):
    """Whether a map means anything."""

    OK = "ok"
    BLANK = "blank"
    NEGATIVE_ONLY = "negative-only"
    ZERO_GRADIENT = "zero-gradient"
    NON_FINITE = "non-finite"
    UNDEFINED = "undefined"


@dataclass(frozen=True)
class Target:
    """What a map explains in one picture: `name` as asked for (`top1`, `285`, `norm`), and what it came to.

    `index`: the class, `None` where it is none. `box`: of a detection, (left, top, right, bottom) in pixels of the
    model's input. `against`: classes whose scores are subtracted. `missing`: why this picture has no such thing,
    `""` where it has.
    """

    name: str
    index: int | None = None
    label: str = ""
    score: float | None = None
    probability: float | None = None
    box: tuple[float, float, float, float] | None = None
    against: tuple[int, ...] = ()
    missing: str = ""

    def __str__(self) -> str:
        if self.index is None:
            return self.label or self.name
        return self.label or f"class {self.index}"


@dataclass(frozen=True)
class Tiles:
    """Channels of one layer for one picture.

    `values`: (K, h, w) float32, exactly what the layer returned for the K chosen `channels`.
    `shape`: the layer's whole output for this picture, batch axis left out, in the model's own layout.
    `minimum`, `maximum`: over all finite values of all channels of the layer, not only the chosen ones.
    `selection`: which channels these are, in words (`all`, `64 of 256 by variance`).
    """

    image: int
    site: Site
    type: str
    shape: tuple[int, ...]
    layout: str
    channels: tuple[int, ...]
    total_channels: int
    selection: str
    values: Floats
    minimum: float
    maximum: float
    status: MapStatus = MapStatus.OK


@dataclass(frozen=True)
class Heat:
    """One map over one picture.

    `values`: (h, w) float32 at the layer's resolution, the raw scale kept; `method` says how it was made.
    `target`: the class it explains, `None` where it explains none.
    `minimum`, `maximum`: over the finite values; of a `negative-only` map before its ReLU.
    `signed`: values below zero are kept and mean something. `covers`: which shares of the map's height and width,
    from the top left, lie on the picture; the rest is padding that the model added.
    `scores`: how well the map explains, by name, where that was measured. `vmax`: the value of the highest colour,
    where it is not the map's own maximum.
    """

    kind: str
    image: int
    site: Site
    method: str
    values: Floats
    minimum: float
    maximum: float
    status: MapStatus = MapStatus.OK
    target: Target | None = None
    signed: bool = False
    covers: tuple[float, float] = (1.0, 1.0)
    scores: Mapping[str, float] = field(default_factory=dict)
    vmax: float | None = None

    @property
    def peak(self) -> float:
        """The greatest finite value, of a signed map the greatest magnitude; 0 where none is above 0."""
        import numpy as np

        finite = self.values[np.isfinite(self.values)]
        return float(np.max(np.abs(finite) if self.signed else finite, initial=0))


@dataclass(frozen=True)
class Sheet:
    """All maps of one picture, to be seen side by side."""

    image: int
    heats: tuple[Heat, ...]
    kind: str = "gradcam"


@dataclass(frozen=True)
class Pair:
    """One map as an earlier run had it and as it is now.

    `before`, `now`: (h, w) float32, raw, each at its own resolution. `scores`: how alike they are, by name.
    `signed`, `covers`: as of a `Heat`, the same for both.
    """

    image: int
    site: Site
    method: str
    target: Target | None
    before: Floats
    now: Floats
    scores: Mapping[str, float] = field(default_factory=dict)
    signed: bool = False
    covers: tuple[float, float] = (1.0, 1.0)
    kind: str = "compare"


@dataclass(frozen=True)
class Table:
    """Rows of plain values under named columns; `title` and `notes` are for people, `data` for scripts.

    `scores`: the few numbers that sum it up, for the manifest.
    """

    kind: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Features of consecutive pictures: one row each, in every array.

    `arrays`: by the site's name, (rows, ...), torch tensors on the CPU. `rows`: each picture's place in the run, path
    and label. `number`: of the shard in the run; `part`: of the shard, where pictures of several sizes part it.
    `format`: `safetensors` or `npz`.
    """

    number: int
    part: int
    arrays: Mapping[str, Tensor]
    rows: tuple[tuple[int, str, int | str | None], ...]
    format: str = "safetensors"
    kind: str = "extract"

    @property
    def stem(self) -> str:
        """What its file is called, without an ending."""
        return f"shard-{self.number:05d}" + (f"-{self.part}" if self.part else "")
