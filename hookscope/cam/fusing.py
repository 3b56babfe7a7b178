"""One map made of the maps of several layers. Knows no layer; loads torch only when it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.errors import check_choice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fusion:
    """A way to make one map of several: its name, what it gives, and how.

    `compute` takes (L, h, w) in [0, 1]. `from_least`: whether the least value of each map becomes 0.
    """

    name: str
    summary: str
    compute: Callable[[Tensor], Tensor]
    from_least: bool = False


def fused(maps: Sequence[Tensor], how: str) -> Tensor:
    """(h, w) float32 in [0, 1], on the finest of the maps' grids: one map of several layers' maps.

    Each map's negative part is cut and the rest divided by its own maximum, with no minimum taken off: a uniform
    positive map is 1 everywhere, and one with nothing above 0 is 0. A map that is not finite makes the result NaN.

    Args:
        maps: (h_i, w_i) float32 each, signed, at least one.
        how: a name in `HOW`.

    Raises:
        UsageError: `how` is none of them.
    """
    check_choice("fusion", how, HOW)
    size = (max(each.shape[0] for each in maps), max(each.shape[1] for each in maps))
    return HOW[how].compute(_stacked([_scaled(each, HOW[how].from_least) for each in maps], size))


def mean(maps: Tensor) -> Tensor:
    """Each position's mean over the layers."""
    return maps.mean(dim=0)


def maximum(maps: Tensor) -> Tensor:
    """Each position's greatest value over the layers, as LayerCAM joins its own.

    Jiang et al., LayerCAM: Exploring Hierarchical Class Activation Maps for Localization, IEEE TIP 2021; there
    every map is first brightened by a scaled tanh, which is not done here.
    """
    return maps.amax(dim=0)


def refine(maps: Tensor) -> Tensor:
    """The product over the layers of maps from their least (0) to their greatest value (1): where all agree.

    The idea of RefineCAM: How to Evaluate and Refine your CAM, arXiv:2605.14641. A uniform positive map counts as 1.
    """
    return maps.prod(dim=0)


HOW: dict[str, Fusion] = {
    fusion.name: fusion
    for fusion in (
        Fusion("mean", "the mean over the layers", mean),
        Fusion("max", "the greatest value over the layers", maximum),
        Fusion("refine", "the product over the layers: where all of them agree", refine, from_least=True),
    )
}
"""Every way by name; the flag and its help are made from this."""


def _scaled(one: Tensor, from_least: bool) -> Tensor:
    """Before any resizing, whose rounding would make a uniform map's least and greatest value differ."""
    if not one.isfinite().all():
        return one.new_full(one.shape, float("nan"))
    positive = one.clamp(min=0)
    low, high = positive.aminmax()
    if from_least and low < high:
        positive, high = positive - low, high - low
    return positive / high.where(high != 0, 1.0)


def _stacked(maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    import torch
    from torch.nn.functional import interpolate

    same = (interpolate(each[None, None], size=size, mode="bilinear", align_corners=False) for each in maps)
    return torch.cat(list(same)).squeeze(1)
