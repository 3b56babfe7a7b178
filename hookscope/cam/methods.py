"""The methods by name: how each makes a map, what it needs, what it costs and when to take it.

What `--method` and its help are made from. Loads no torch; the formulas themselves are in `formulas`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hookscope.cam.formulas import (
    ablationcam,
    cam,
    eigencam,
    eigengradcam,
    elementwise,
    fullgrad,
    gradcam,
    gradcam_plusplus,
    hirescam,
    layercam,
    masks,
    most_varied,
    saliency,
    scorecam,
    smoothgrad,
    smoothgradcam_plusplus,
    xgradcam,
)
from hookscope.errors import UsageError, near_misses

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "METHODS", "Kind", "Method", "ablationcam", "cam", "eigencam", "eigengradcam", "elementwise", "fullgrad",
    "gradcam", "gradcam_plusplus", "hirescam", "layercam", "masks", "method", "most_varied", "saliency", "scorecam",
    "smoothgrad", "smoothgradcam_plusplus", "xgradcam",
]  # fmt: skip


class Kind(StrEnum):
    """What a method's `compute` is given."""

    GRADIENT = "gradient"
    """(activation, gradient)"""
    ACTIVATION = "activation"
    """(activation)"""
    NOISY = "noisy"
    """(activation, moments): the means over noisy inputs of g, g^2 and g^3"""
    MASKED = "masked"
    """(activation, scores, channels): the scores of the picture seen through channels"""
    ABLATED = "ablated"
    """(activation, score, ablated): the score, and the scores with each channel set to 0"""
    INPUT = "input"
    """(gradient), of the model's input"""
    BIASES = "biases"
    """(terms, size): gradient times input, then gradient times bias of every layer"""


@dataclass(frozen=True)
class Method:
    """A class-activation method.

    `compute` gives a signed (N, h, w) map; `rectified` says that only what is above 0 is drawn. `summary`: what it
    computes; `needs`: of the model; `cost`: on top of one forward pass; `when`: to take it. `noisy`: its gradients
    are means over noisy inputs.
    """

    name: str
    kind: Kind
    compute: Callable[..., Tensor]
    summary: str
    paper: str
    needs: str
    cost: str
    when: str
    rectified: bool = True
    noisy: bool = False

    @property
    def class_free(self) -> bool:
        """Whether it makes one map a picture, of no class."""
        return self.kind is Kind.ACTIVATION

    @property
    def on_input(self) -> bool:
        """Whether its map has the input's resolution and is of no layer."""
        return self.kind in (Kind.INPUT, Kind.BIASES)

    @property
    def needs_gradient(self) -> bool:
        """Whether it needs a backward pass."""
        return self.kind in (Kind.GRADIENT, Kind.NOISY, Kind.INPUT, Kind.BIASES)


_ANY = "any layer with positions"
_BACKWARD = "one backward pass a class"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "gradcam", Kind.GRADIENT, gradcam, "channels weighted by their mean gradient",
            "Selvaraju et al. 2017", _ANY, _BACKWARD, "the one that others are compared with",
        ),
        Method(
            "gradcam++", Kind.GRADIENT, gradcam_plusplus,
            "channels weighted by their positive gradients, those of small area more",
            "Chattopadhay et al. 2018", "a layer whose output is >= 0", _BACKWARD,
            "several objects of the class in a picture",
        ),
        Method(
            "xgradcam", Kind.GRADIENT, xgradcam, "channels weighted by the gradient where they are active",
            "Fu et al. 2020", "a layer whose output is >= 0", _BACKWARD,
            "Grad-CAM at layers whose gradient varies over the picture",
        ),
        Method(
            "hirescam", Kind.GRADIENT, hirescam, "positions weighted by their own gradient",
            "Draelos & Carin 2020", _ANY, _BACKWARD,
            "the map should show only places that the score depends on",
        ),
        Method(
            "elementwise", Kind.GRADIENT, elementwise, "hirescam of what speaks for the class alone",
            "Gildenblat et al. 2021", _ANY, _BACKWARD, "evidence against the class should cancel nothing",
        ),
        Method(
            "layercam", Kind.GRADIENT, layercam, "positions weighted by their positive gradient",
            "Jiang et al. 2021", _ANY, _BACKWARD, "fine maps of early layers",
        ),
        Method(
            "eigengradcam", Kind.GRADIENT, eigengradcam,
            "first principal component of gradient times activation",
            "Gildenblat et al. 2021", _ANY, _BACKWARD, "a smoother hirescam",
        ),
        Method(
            "cam", Kind.GRADIENT, cam, "channels weighted by the classifier's own weights",
            "Zhou et al. 2016", "the last layer before global average pooling and one Linear layer", _BACKWARD,
            "the exact share of each position in the score",
        ),
        Method(
            "eigencam", Kind.ACTIVATION, eigencam, "first principal component of the activation",
            "Muhammad & Yeasin 2020", _ANY, "no further pass, one map for all classes",
            "what the layer sees, whatever the class",
        ),
        Method(
            "smoothgradcam++", Kind.NOISY, smoothgradcam_plusplus, "gradcam++ of gradients averaged over noise",
            "Omeiza et al. 2019", "a layer whose output is >= 0", "a forward and a backward pass a noisy input",
            "gradcam++ changes with small noise", noisy=True,
        ),
        Method(
            "scorecam", Kind.MASKED, scorecam, "channels weighted by the score of the picture seen through them",
            "Wang et al. 2020", _ANY, "one forward pass a channel",
            "gradients vanish or cannot be had",
        ),
        Method(
            "ablationcam", Kind.ABLATED, ablationcam, "channels weighted by how much the score drops without them",
            "Desai & Ramaswamy 2020", _ANY, "one pass a channel from the layer on",
            "gradients vanish or cannot be had, and masked pictures mislead the model",
        ),
        Method(
            "saliency", Kind.INPUT, saliency, "largest gradient of a pixel's colours, either sign",
            "Simonyan et al. 2014", "an input with a gradient", _BACKWARD, "single pixels, of no layer",
            rectified=False,
        ),
        Method(
            "smoothgrad", Kind.INPUT, smoothgrad, "saliency of gradients averaged over noise",
            "Smilkov et al. 2017", "an input with a gradient", "a forward and a backward pass a noisy input",
            "saliency is grainy", rectified=False, noisy=True,
        ),
        Method(
            "fullgrad", Kind.BIASES, fullgrad, "the input's and every bias's share in the score",
            "Srinivas & Fleuret 2019", "ReLU nets, whose shares add up to the score", _BACKWARD,
            "the whole net, not one layer", rectified=False,
        ),
    )
}  # fmt: skip
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
