"""What a model's own weights say that some methods need: the classifier behind global pooling, and every bias.

Reads modules and their weights; it runs nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.cam.outputs import raw_scores
from hookscope.cam.scores import Score, objective
from hookscope.errors import UsageError
from hookscope.layers import OutputInfo, Site, modules_by_name
from hookscope.nested import rebuilt, tensors_in

_ADDING = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
)
"""Layers that add their parameter `bias` to what they return."""


class PooledHead:
    """Whether a layer is pooled globally straight into the linear classifier, as class activation mapping needs.

    There, and only there, the gradient of a score is the same at every position, and its sum over them is the
    classifier's row for that class. Both are looked at.

    Args:
        weight: (K, C) of the classifier, `None` where there is none.
        key: which tensor of the output holds the scores.
    """

    def __init__(self, weight: Tensor | None, key: str | None) -> None:
        self._weight = weight
        self._key = key
        self._expected: dict[str, Tensor] = {}

    def learn(self, scores: Iterable[Score], output: Any) -> None:
        """Note which rows of the classifier each score is made of, for the pictures of this output."""
        self._expected = {}
        if self._weight is None:
            return
        for score in scores:
            by_logit = _gradient_by_logit(score, output, self._key)
            if by_logit is not None and by_logit.shape[1] == len(self._weight):
                self._expected[score.name] = by_logit.double() @ self._weight.double()

    def check(self, site: Site, activation: Tensor, gradient: Tensor, objective: str) -> None:
        """Nothing, where `cam` has a meaning.

        Raises:
            UsageError: it has none; the layer cannot serve.
        """
        summed, expected = gradient.double().sum(dim=(2, 3)), self._expected.get(objective)
        if expected is not None and expected.shape == summed.shape:
            mean = gradient.mean(dim=(2, 3), keepdim=True)
            # As coarse as half precision: what else there may be is off by far more.
            slack = 0.02 * expected.abs().amax(dim=1)
            uneven = (gradient - mean).abs().amax(dim=(1, 2, 3)) * gradient[0, 0].numel()
            if bool(((summed - expected).abs().amax(dim=1) <= slack).all() and (uneven <= slack).all()):
                return
        raise UsageError(
            f"cam cannot be made of {site}: it is not pooled globally straight into one linear classifier",
            "gradcam is the same where that holds, and has a meaning everywhere",
        )


def classifier_weight(model: nn.Module, infos: Mapping[Site, OutputInfo]) -> Tensor | None:
    """(K, C) weight of the linear layer that was called last on one row a picture; `None` where there is none."""
    modules = modules_by_name(model)
    for site, info in reversed(list(infos.items())):
        module = modules[site.layer]
        if isinstance(module, nn.Linear) and len(info.shape) == 2:
            return module.weight.detach()
    return None


def biases(model: nn.Module) -> dict[str, Tensor]:
    """(C,) what every layer adds to its output, by its name: a bias, or what a batch norm in eval mode comes to."""
    found = {}
    for name, module in modules_by_name(model).items():
        bias = _bias(module)
        if bias is not None and bias.dim() == 1:
            found[name] = bias.detach().float()
    return found


def _bias(module: nn.Module) -> Tensor | None:
    if not isinstance(module, _ADDING):
        return None  # what another class does with a parameter of that name is not known
    bias = module._parameters.get("bias")
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.running_mean is None:
        return bias
    assert module.running_var is not None
    scale = torch.rsqrt(module.running_var.float() + module.eps)
    if module.weight is not None:
        scale = scale * module.weight.detach().float()
    shift = -module.running_mean.float() * scale
    return shift if bias is None else shift + bias.detach().float()


def _gradient_by_logit(score: Score, output: Any, key: str | None) -> Tensor | None:
    """(N, K) the gradient of the score by every class score; `None` where there are no class scores."""
    with torch.enable_grad():
        leaves = {
            path: tensor.detach().clone().requires_grad_()
            for path, tensor in tensors_in(output)
            if tensor.is_floating_point()
        }
        again = rebuilt(output, leaves)
        try:
            raw = raw_scores(again, key)
        except UsageError:
            return None
        asked = objective(score)
        if asked is None:
            return None
        total = asked.scalar(again)
        (gradient,) = torch.autograd.grad(total, [raw], allow_unused=True)
    return gradient if gradient is None or gradient.dim() == 2 else gradient[:, None]
