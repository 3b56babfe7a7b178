"""The methods: from a layer's activation and the score's gradient to a raw map.

Each is one function `(activation, gradient) -> map` of (N, C, h, w) float32 tensors to (N, h, w), before the
final ReLU, which `rectified` methods share. Uses tensors' own methods only, so that `--help` can list the
registry without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.errors import UsageError, near_misses

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Method:
    """A class-activation method: its name, what it computes, and in a line what it is good for."""

    name: str
    compute: Callable[[Tensor, Tensor], Tensor]
    summary: str
    paper: str


def gradcam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Channels weighted by their mean gradient: sum_k mean_ij(g_kij) A_k.

    Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization,
    ICCV 2017, eq. 1 and 2.
    """
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    return (weights * activation).sum(dim=1)


def layercam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Every position weighted by its own positive gradient: sum_k ReLU(g_kij) A_kij.

    Jiang et al., LayerCAM: Exploring Hierarchical Class Activation Maps for Localization, IEEE TIP 2021,
    eq. 4 to 6.
    """
    return (gradient.clamp(min=0) * activation).sum(dim=1)


METHODS = {
    method.name: method
    for method in (
        Method("gradcam", gradcam, "channels weighted by their mean gradient", "Selvaraju et al. 2017"),
        Method("layercam", layercam, "positions weighted by their positive gradient", "Jiang et al. 2021"),
    )
}
"""Every method by name; `--method` and its help are made from this."""


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        UsageError: there is none; the nearest names are in the hint.
    """
    if name not in METHODS:
        hint = near_misses(name, METHODS) or f"methods: {', '.join(METHODS)}"
        raise UsageError(f"unknown method {name!r}", hint)
    return METHODS[name]
