"""Features of layers, a row for each picture: copied, pooled or picked in the hook, and carried to the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hookscope.errors import UsageError, check_choice
from hookscope.hooks import Needs, Probe
from hookscope.layers import OutputInfo, Site

REDUCTIONS = ("none", "avg", "max", "flatten", "cls")
"""What is kept of a picture's values: all, their mean or maximum over the positions, all in a row, the class token."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What features may be stored as, beside what the layer returned."""

_POSITIONS = {
    "NCHW": (2, 3),
    "NHWC": (1, 2),
    "NPTC": (1, 2),
    "NCL": (2,),
    "NCDHW": (2, 3, 4),
    "NTC": (1,),
    "NC": (),
}


@dataclass(frozen=True)
class Features:
    """What is kept of a layer's output. `max_size`: larger maps are averaged down to that height and width.

    `dtype`: `None` is the layer's own.
    """

    reduce: str = "none"
    max_size: tuple[int, int] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_choice("the reduction", self.reduce, REDUCTIONS)
        if self.max_size is not None and min(self.max_size) < 1:
            raise UsageError(f"a largest size of {self.max_size} is none", "1 or more, such as 7x7")

    def missing(self, info: OutputInfo) -> str:
        """Why there are none of that output, `""` where there are."""
        if info.layout == "" and (self.reduce in ("avg", "max", "cls") or self.max_size is not None):
            return "its layout is not known"
        if self.reduce == "cls" and _prefix(info) < 1:
            return "it has no class token"
        if self.reduce in ("avg", "max") and info.dtype.startswith(("complex", "bool")):
            return f"it is {info.dtype}"
        return ""

    def of(self, tensor: Tensor, info: OutputInfo) -> Tensor:
        """(N, ...), a tensor of its own: the features of N pictures.

        Mean and maximum are over the positions: of tokens over those of the picture, without class and register
        tokens. Means of half precision are made in float32.
        """
        values = tensor.detach()
        if self.max_size is not None:
            values = _shrunk(values, info, self.max_size)
        if self.reduce == "cls":
            values = values[:, 0]
        elif self.reduce in ("avg", "max"):
            values = _over_positions(values, info, mean=self.reduce == "avg")
        elif self.reduce == "flatten":
            values = values.flatten(1)
        return values.to(self.dtype or values.dtype, copy=True, memory_format=torch.contiguous_format)


class ExtractProbe(Probe):
    """Keeps the features of each pass until they are taken.

    Args:
        outputs: the sites, and what is known of each.
        features: what is kept of a site's output.
    """

    needs = Needs(outputs=True)

    def __init__(self, outputs: Mapping[Site, OutputInfo], features: Features) -> None:
        self.layers = frozenset(site.layer for site in outputs)
        self.overflows: dict[Site, int] = {}
        self._outputs, self._features = outputs, features
        self._made: dict[Site, Tensor] = {}
        self._pictures = 0

    def begin(self, pictures: int) -> None:
        self._pictures = pictures
        self._made = {}

    def on_output(self, site: Site, tensor: Tensor) -> None:
        info = self._outputs.get(site)
        if info is None or tensor.dim() != len(info.shape) or tensor.shape[0] != self._pictures:
            return
        made = self._features.of(tensor, info)
        if self._features.dtype is not None and self._features.dtype != tensor.dtype:
            lost = int((~made.isfinite()).sum()) - int((~tensor.isfinite()).sum())
            if lost > 0:
                self.overflows[site] = self.overflows.get(site, 0) + lost
        self._made[site] = made.cpu()

    def take(self) -> dict[Site, Tensor]:
        """(N, ...) for each site of the latest pass, on the CPU; a site that it did not have is left out."""
        made, self._made = self._made, {}
        return made


def _prefix(info: OutputInfo) -> int:
    """How many tokens come before those of the picture."""
    return info.grid[2] if info.layout == "NTC" and info.grid is not None else 0


def _over_positions(values: Tensor, info: OutputInfo, *, mean: bool) -> Tensor:
    axes = _POSITIONS[info.layout]
    if not axes:
        return values
    if info.layout == "NTC":
        values = values[:, _prefix(info) :]
    if not mean:
        return values.amax(axes)
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    if not values.is_floating_point():
        wide = torch.float64
    found = values.mean(axes, dtype=wide)
    return found.to(values.dtype) if values.is_floating_point() else found


def _shrunk(values: Tensor, info: OutputInfo, size: tuple[int, int]) -> Tensor:
    """Maps averaged down (adaptive average pooling) where they are larger, in the layout they had."""
    if info.layout == "NCHW":
        return _pooled(values, size)
    if info.layout == "NHWC":
        return _pooled(values.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)
    if info.layout != "NTC" or info.grid is None:
        return values
    height, width, prefix = info.grid
    patches = torch.unflatten(values[:, prefix:].transpose(1, 2), 2, (height, width))
    pooled = _pooled(patches, size)
    if pooled.shape == patches.shape:
        return values
    return torch.cat([values[:, :prefix], pooled.flatten(2).transpose(1, 2)], dim=1)


def _pooled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    height, width = min(maps.shape[2], size[0]), min(maps.shape[3], size[1])
    if (height, width) == tuple(maps.shape[2:]):
        return maps
    found = functional.adaptive_avg_pool2d(maps.float(), (height, width))
    return found.to(maps.dtype) if maps.is_floating_point() else found
