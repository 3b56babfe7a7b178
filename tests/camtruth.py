"""Class-activation maps by the plainest means: nets of four kinds, and every method written out with plain torch.

A layer is looked at by one forward hook that puts a leaf in its place, and changed by one that puts other values
there; pictures and channels are perturbed one at a time. Of hookscope only the noise is used, which must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from nets import seeded
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from hookscope.cam.rounds import noisy

SAMPLES, NOISE = 3, 0.15


class Convolutional(nn.Module):
    """Three convolutions, one of them behind a batch norm that has seen data; pooled, then one linear layer."""

    def __init__(self, inplace=False, widths=(6, 8, 7), colours=3):
        super().__init__()
        one, two, three = widths
        self.a, self.act_a = nn.Conv2d(colours, one, 3, padding=1), nn.ReLU(inplace)
        self.pool = nn.MaxPool2d(2)
        self.b, self.bn, self.act_b = nn.Conv2d(one, two, 3, padding=1), nn.BatchNorm2d(two), nn.ReLU(inplace)
        self.c, self.act_c = nn.Conv2d(two, three, 3, padding=1, stride=2), nn.ReLU(inplace)
        self.fc = nn.Linear(three, 5)
        for values in (self.bn.running_mean, self.bn.bias.data):
            nn.init.normal_(values, std=0.3)
        for values in (self.bn.running_var, self.bn.weight.data):
            nn.init.uniform_(values, 0.5, 1.5)

    def forward(self, x):
        x = self.pool(self.act_a(self.a(x)))
        x = self.act_b(self.bn(self.b(x)))
        return self.fc(self.act_c(self.c(x)).mean((2, 3)))


def vit():
    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5
    )
    nn.init.normal_(model.heads.head.weight)  # an untrained one is all zero
    return _with_biases(model)


def swin():
    model = SwinTransformer(
        patch_size=[4, 4], embed_dim=12, depths=[1, 2], num_heads=[2, 2], window_size=[4, 4], num_classes=5
    )
    for values in model.parameters():
        if values.dim() > 1:
            nn.init.normal_(values, std=values[0].numel() ** -0.5)  # torchvision's own are nearly zero
    return _with_biases(model)


def _with_biases(model):
    for name, values in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(values, std=0.2)
    return model


def _as_it_is(tensor):
    return tensor


def _tokens(tensor):
    return tensor[:, 1:].transpose(1, 2).unflatten(2, (4, 4))


def _channels_last(tensor):
    return tensor.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Subject:
    """A net and a layer of it; `grid` views what the layer returns as (N, C, h, w), without a class token."""

    make: Callable[[], nn.Module]
    layer: str
    grid: Callable[[torch.Tensor], torch.Tensor] = _as_it_is

    def model(self):
        return seeded(self.make)


SUBJECTS = {
    "in place after the layer": Subject(lambda: Convolutional(True), "bn"),
    "nothing in place": Subject(lambda: Convolutional(False), "bn"),
    "behind a relu": Subject(lambda: Convolutional(True), "act_b"),
    "vit block": Subject(vit, "encoder.layers.encoder_layer_1", _tokens),
    "vit norm": Subject(vit, "encoder.layers.encoder_layer_1.ln_1", _tokens),
    "swin": Subject(swin, "features.3.0", _channels_last),
}


def pictures(count=2, seed=1, colours=3, size=32):
    return torch.randn(count, colours, size, size, generator=torch.Generator().manual_seed(seed))


Score = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""(M,) of an output whose rows are of these pictures of the batch."""


def of_classes(classes, against=()) -> Score:
    """The logit of each picture's class, less 0.6 of the mean of some others (FinerCAM)."""

    def score(output, who):
        own = torch.stack([output[row, classes[picture]] for row, picture in enumerate(who)])
        return own - 0.6 * output[:, list(against)].mean(1) if against else own

    return score


# A layer, seen and changed.


def split(model, layer, x):
    """What the layer returned, as a leaf, and the output of what comes after it."""
    seen = []

    def hook(module, args, output):
        seen.append(output.detach().clone().requires_grad_())
        return seen[-1].clone()  # what comes after may write to it

    with _hooked(model, layer, hook), torch.enable_grad():
        output = model(x)
    return seen[0], output


def continued(model, layer, x, values):
    """The output with other values in the layer's place."""
    with _hooked(model, layer, lambda module, args, output: values), torch.no_grad():
        return model(x)


class _hooked:
    def __init__(self, model, layer, hook):
        self.handle = model.get_submodule(layer).register_forward_hook(hook)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.handle.remove()


def pair(subject, model, x, score):
    """(activation, gradient) of the layer, (N, C, h, w) float64."""
    leaf, output = split(model, subject.layer, x)
    (gradient,) = torch.autograd.grad(score(output, [*range(len(x))]).sum(), leaf)
    return subject.grid(leaf.detach()).double(), subject.grid(gradient).double()


# The formulas.


def _weighted(weights, a):
    return (weights[:, :, None, None] * a).sum(1)


def _shared(part, whole):
    """0 of nothing, as for a dead channel."""
    return torch.where(whole == 0, 0.0, part / torch.where(whole == 0, 1.0, whole))


def _plusplus(a, g, g2, g3):
    alpha = _shared(g2, 2 * g2 + a.sum((2, 3), keepdim=True) * g3)
    return _weighted((alpha * g.relu()).sum((2, 3)), a)


def _component(a):
    found = []
    for each in a.numpy():
        matrix = each.reshape(len(each), -1).T
        strongest = matrix @ np.linalg.svd(matrix, full_matrices=False)[2][0]
        found.append((strongest if strongest.sum() >= 0 else -strongest).reshape(each.shape[1:]))
    return torch.from_numpy(np.stack(found))


BY_GRADIENT = {
    "gradcam": lambda a, g: _weighted(g.mean((2, 3)), a),
    "gradcam++": lambda a, g: _plusplus(a, g, g**2, g**3),
    "xgradcam": lambda a, g: _weighted(_shared((g * a).sum((2, 3)), a.sum((2, 3))), a),
    "hirescam": lambda a, g: (g * a).sum(1),
    "elementwise": lambda a, g: (g * a).relu().sum(1),
    "layercam": lambda a, g: (g.relu() * a).sum(1),
    "eigengradcam": lambda a, g: _component(g * a),
}


def _eigencam(subject, model, x, score):
    return _component(subject.grid(split(model, subject.layer, x)[0].detach()).double())


def _smoothgradcam_plusplus(subject, model, x, score):
    activation, _ = pair(subject, model, x, score)
    slopes = torch.stack([pair(subject, model, each, score)[1] for each in noisy(x, SAMPLES, NOISE, 0)])
    return _plusplus(activation, slopes.mean(0), (slopes**2).mean(0), (slopes**3).mean(0))


def _scorecam(subject, model, x, score, top=None):
    activation = subject.grid(split(model, subject.layer, x)[0].detach())
    maps = []
    for picture, one in enumerate(activation):
        order = sorted(range(len(one)), key=lambda k: -float(one[k].double().var(unbiased=False)))
        tried = [k for k in (order[:top] if top else order) if one[k].min() < one[k].max()]  # no mask, no say
        scores = []
        for k in tried:
            mask = F.interpolate(one[None, None, k], size=x.shape[2:], mode="bilinear", align_corners=False)
            mask = (mask - mask.min()) / (mask.max() - mask.min())
            with torch.no_grad():
                scores.append(score(model(x[picture : picture + 1] * mask), [picture]))
        weights = torch.cat(scores).double().softmax(0)
        maps.append(sum(w * one[k].double() for w, k in zip(weights, tried, strict=True)))
    return torch.stack(maps)


def _ablationcam(subject, model, x, score):
    leaf = split(model, subject.layer, x)[0].detach()
    maps = []
    for picture in range(len(x)):
        one, values = x[picture : picture + 1], leaf[picture : picture + 1]
        with torch.no_grad():
            whole = score(model(one), [picture]).double()
        total = 0.0
        for k, channel in enumerate(subject.grid(values)[0].double()):
            changed = values.clone()
            subject.grid(changed)[:, k] = 0
            without = score(continued(model, subject.layer, one, changed), [picture]).double()
            total = total + (whole - without) / whole.abs() * channel
        maps.append(total)
    return torch.stack(maps)


def at_input(model, x, score):
    """The gradient of the score at the input."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(score(model(leaf.clone()), [*range(len(x))]).sum(), leaf)[0].double()


def _saliency(subject, model, x, score):
    return at_input(model, x, score).abs().amax(1)


def _smoothgrad(subject, model, x, score):
    slopes = [at_input(model, each, score) for each in noisy(x, SAMPLES, NOISE, 0)]
    return torch.stack(slopes).mean(0).abs().amax(1)


def shares(model, x, score):
    """Input times gradient, then bias times gradient of every layer with a bias, in the layers' own layouts."""
    kept = []

    def hook(module, args, output):
        kept.append((module, output))
        return output.clone()  # what comes after may write to it

    biased = (nn.Conv2d, nn.Linear, nn.LayerNorm, nn.BatchNorm2d)
    handles = [
        module.register_forward_hook(hook)
        for module in model.modules()
        if isinstance(module, biased) and module.bias is not None
    ]
    leaf = x.clone().requires_grad_()
    total = score(model(leaf.clone()), [*range(len(x))]).sum()
    for handle in handles:
        handle.remove()
    slopes = torch.autograd.grad(total, [leaf, *(output for _, output in kept)])
    terms = [slopes[0].double() * x.double()]
    for (module, _), slope in zip(kept, slopes[1:], strict=True):
        bias = module.bias.detach().double()
        if isinstance(module, nn.BatchNorm2d):
            # What a batch norm in eval mode adds: its bias, and what comes of taking off the mean.
            scale = module.weight.detach().double() / (module.running_var.double() + module.eps).sqrt()
            bias = bias - scale * module.running_mean.double()
        by_channel = isinstance(module, nn.Conv2d | nn.BatchNorm2d)
        terms.append(slope.double() * (bias[:, None, None] if by_channel else bias))
    return terms, kept


def _fullgrad(subject, model, x, score):
    terms, kept = shares(model, x, score)
    total = 0.0
    for term, module in zip(terms, [None, *(module for module, _ in kept)], strict=True):
        if term.dim() < 3:
            continue  # behind the pooling: of no place
        if isinstance(module, nn.Linear | nn.LayerNorm):
            term = _tokens(term) if term.dim() == 3 else _channels_last(term)
        size = term.abs()
        low, high = size.amin((1, 2, 3), keepdim=True), size.amax((1, 2, 3), keepdim=True)
        extent = torch.where(high == low, 1.0, high - low)
        scaled = ((size - low) / extent).sum(1, keepdim=True)
        total = total + F.interpolate(scaled, size=x.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    return total


def _cam(subject, model, x, score):
    """Of a net whose layer is pooled into `fc`."""
    activation = split(model, subject.layer, x)[0].detach().double()
    rows = torch.eye(len(model.fc.weight))  # the logits' own gradient says which rows the score is made of
    leaf = rows[:1].expand(len(x), -1).clone().requires_grad_()
    (share,) = torch.autograd.grad(score(leaf, [*range(len(x))]).sum(), leaf)
    return _weighted(share.double() @ model.fc.weight.detach().double(), activation)


_OTHERS = {
    "cam": _cam,
    "eigencam": _eigencam,
    "smoothgradcam++": _smoothgradcam_plusplus,
    "scorecam": _scorecam,
    "ablationcam": _ablationcam,
    "saliency": _saliency,
    "smoothgrad": _smoothgrad,
    "fullgrad": _fullgrad,
}

METHODS = (*BY_GRADIENT, *_OTHERS)
"""Every method; `cam` needs a layer that is pooled into `fc`."""

ON_INPUT = ("saliency", "smoothgrad", "fullgrad")
"""Those that are of no layer, and never rectified."""


def truth(name, subject, model, x, score, **options):
    """(N, h, w) float64, signed: the map of every picture."""
    if name in BY_GRADIENT:
        return BY_GRADIENT[name](*pair(subject, model, x, score))
    return _OTHERS[name](subject, model, x, score, **options).detach()


def rectified(name, maps):
    """As it is shown."""
    return maps if name in ON_INPUT else maps.clamp(min=0)


def strongest(model, x):
    """(N,) each picture's class of the largest logit of either sign: a share of a score near 0 is mostly rounding."""
    with torch.no_grad():
        return model(x).abs().argmax(1)


def close(found, expected, share=1e-5):
    """Whether two maps differ nowhere by more than a share of the largest value, which is not 0."""
    found, expected = found.double(), expected.double()
    largest = float(expected.abs().max())
    assert largest > 0
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) <= share * largest
