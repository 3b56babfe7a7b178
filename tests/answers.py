"""Small nets whose maps are known by hand, one for each kind of answer: scores, maps of scores, detections, tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

# Red, green and blue, seen by classes 1, 2 and 3.
COLOURS = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])


@dataclass
class Output:
    """As libraries of transformers return it."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()


def _cells(size):
    """A convolution whose channels are the mean red, green and blue of cells of that size."""
    conv = nn.Conv2d(3, 3, size, size, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(3)[:, :, None, None].expand_as(conv.weight) / size**2)
    return conv


class Scores(nn.Module):
    """Class k is the mean of colour k, class 0 nothing: a map is the colour's own cells. `kind`: what is returned."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.conv, self.fc, self.kind = _cells(4), nn.Linear(3, 4, bias=False), kind
        with torch.no_grad():
            self.fc.weight.copy_(COLOURS)

    def forward(self, x):
        features = self.conv(x)
        pooled = features.mean((2, 3))
        scores = self.fc(pooled)
        return {
            "plain": scores,
            "one": scores[:, 1:2] - 0.5,
            "flat": scores[:, 1] - 0.5,
            "dict": {"scores": scores, "features": features},
            "several": {"scores": scores, "twice": scores * 2, "features": features},
            "usual": {"logits": scores, "aux": scores * 2, "features": features},
            "tuple": (scores, -scores),
            "nested": {"heads": [scores, {"other": -scores}]},
            "object": Output(logits=scores, hidden_states=(features, pooled)),
            "embedding": {"last_hidden_state": features.flatten(2).mT, "pooler_output": pooled},
            "tokens": features.flatten(2).mT,
        }[self.kind]


class Segmenter(nn.Module):
    """Class k of a pixel is its cell's colour k, class 0 always 0.1."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.conv, self.head, self.kind = _cells(4), nn.Conv2d(3, 4, 1), kind
        with torch.no_grad():
            self.head.weight.copy_(COLOURS[:, :, None, None])
            self.head.bias.copy_(torch.tensor([0.1, 0, 0, 0]))

    def forward(self, x):
        scores = self.head(self.conv(x))
        if self.kind == "one":
            return scores[:, 1:2] - 0.5
        if self.kind == "dict":
            scores = F.interpolate(scores, scale_factor=4)
            return OrderedDict(out=scores, aux=scores * 2)
        return scores


class Detector(nn.Module):
    """A box round every cell of 8 pixels, of its strongest colour, scored by it; those above 0.3."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = _cells(8), nn.Conv2d(3, 3, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(3)[:, :, None, None])

    def forward(self, x):
        return [self._found(scores) for scores in self.head(self.backbone(x))]

    def _found(self, scores):
        best, labels = scores.max(dim=0)
        rows, columns = (best > 0.3).nonzero().unbind(1)
        corners = torch.stack([columns, rows, columns + 1, rows + 1], dim=1)
        return {
            "boxes": corners.float() * 8,
            "labels": labels[rows, columns] + 1,
            "scores": best[rows, columns],
        }


class Padding(Detector):
    """As torchvision's: the picture is resized and padded to a multiple of 32 before anything is seen of it."""

    def __init__(self):
        super().__init__()
        self.transform = GeneralizedRCNNTransform(40, 64, [0.0] * 3, [1.0] * 3)

    def forward(self, x):
        images, _ = self.transform([*x])
        found = [self._found(scores) for scores in self.head(self.backbone(images.tensors))]
        sizes = [tuple(one.shape[1:]) for one in x]
        return self.transform.postprocess(found, images.image_sizes, sizes)


class Transformer(nn.Module):
    """A small vision transformer.

    `prefix`: tokens before the patches, a class token first. `pool`: the class token, or the mean of the patches.
    `patches`: by a convolution, or cut out and put through a linear layer.
    """

    def __init__(self, prefix=1, pool="token", patches="conv", width=12, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.pool, self.prefix = patches, pool, prefix
        self.embed = nn.Conv2d(3, width, 8, 8) if patches == "conv" else nn.Linear(3 * 64, width)
        self.extra = nn.Parameter(torch.randn(1, prefix, width))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 2, 24, 0.0, batch_first=True) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        convolved = self.patches == "conv"
        tokens = self.embed(x).flatten(2).mT if convolved else self.embed(F.unfold(x, 8, stride=8).mT)
        tokens = self.blocks(torch.cat([self.extra.expand(len(x), -1, -1), tokens], dim=1))
        tokens = self.norm(tokens)
        return self.head(tokens[:, 0] if self.pool == "token" else tokens[:, self.prefix :].mean(1))


def colours(height=32, width=48, **patches):
    """(1, 3, height, width) black, with patches: `red=(left, top, right, bottom)`."""
    x = torch.zeros(1, 3, height, width)
    for name, (left, top, right, bottom) in patches.items():
        x[0, ("red", "green", "blue").index(name), top:bottom, left:right] = 1.0
    return x
