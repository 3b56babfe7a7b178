"""How far a model's score bears a map out: deletion, insertion, average drop and increase in confidence.

Makes changed pictures and asks for their confidence; it knows no model, layer or method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, pad

_ALIKE = 2**20


@dataclass(frozen=True)
class Faithfulness:
    """Four figures of one map of one picture; nan where a figure is undefined.

    `deletion_auc`: the mean confidence while the pixels go, hottest first; a faithful map's is low.
    `insertion_auc`: while they come back; high. `average_drop`: the share of the confidence lost when only what the
    map shows is seen, 0 to 1. `increase_in_confidence`: 1 where it rose, else 0.
    """

    deletion_auc: float
    insertion_auc: float
    average_drop: float
    increase_in_confidence: float


def faithfulness(
    x: Tensor,
    heat: Tensor,
    confidence: Callable[[Tensor], Tensor],
    *,
    steps: int = 16,
    seed: int = 0,
    batch: int = 16,
) -> Faithfulness:
    """The four figures of a map; all nan, without asking, where it has no value above 0 or one that is not finite.

    Deletion and insertion: Petsiuk et al., RISE: Randomized Input Sampling for Explanation of Black-box Models, BMVC
    2018. Pixels go, and come back, in the order of the upsampled map's values in `steps` equal shares; the area is
    the trapezoid rule's over shares 0 to 1, both ends included. A pixel that goes becomes 0, the mean colour; before
    it comes it is that of the blurred picture. Equal values are ordered at random: a rectified map is 0 over much of
    a picture, and in the order of their index those pixels would be a scan from the top left that biases the area.

    Average drop, max(0, Y - O) / Y, and increase in confidence, O > Y, where Y is the confidence of the picture and
    O that of the picture times the map: Chattopadhay et al., Grad-CAM++, WACV 2018. The drop is nan where Y <= 0.

    Args:
        x: (1, C, H, W), the model's input, whose 0 is the mean colour.
        heat: (h, w), the map; below 0 it is ordered, but shows nothing.
        confidence: (M, C, H, W) to (M,), the class's probability, M <= `batch`; asked for 2 `steps` + 2 pictures.
        steps: how many shares.
        seed: of the order of equal values; the global random state is not touched.
        batch: how many pictures exist at once.
    """
    if not (heat.isfinite().all() and (heat > 0).any()):
        return Faithfulness(math.nan, math.nan, math.nan, math.nan)
    shown = _upsampled(heat, x)
    counts = [round(step * shown.numel() / steps) for step in range(steps + 1)]
    pictures = _pictures(x, shown, _ranks(shown, seed), counts)
    asked = _asked(pictures, 2 * steps + 2, confidence, batch, like=x)
    shares = torch.tensor(counts, dtype=torch.float64) / shown.numel()
    # All pixels back is the picture itself, as is none gone.
    deletion, insertion = asked[: steps + 1], torch.cat([asked[steps + 1 : -1], asked[:1]])
    whole, seen = float(asked[0]), float(asked[-1])
    return Faithfulness(
        deletion_auc=float(torch.trapezoid(deletion, shares)),
        insertion_auc=float(torch.trapezoid(insertion, shares)),
        average_drop=_drop(whole, seen),
        increase_in_confidence=math.nan if math.isnan(whole + seen) else float(seen > whole),
    )


def _pictures(x: Tensor, shown: Tensor, ranks: Tensor, counts: list[int]) -> Iterator[Tensor]:
    """(C, H, W) each: those of the deletion, those of the insertion but its last, and what the map shows."""
    picture = x[0]
    for count in counts:
        yield picture.where(ranks >= count, 0.0)
    blurred = _blurred(x)[0]
    for count in counts[:-1]:
        yield picture.where(ranks < count, blurred)
    yield picture * shown.clamp(min=0).to(x)


def _asked(
    pictures: Iterator[Tensor], count: int, confidence: Callable[[Tensor], Tensor], batch: int, like: Tensor
) -> Tensor:
    """(M,) float64 on the CPU: the confidence of every picture."""
    found = []
    with torch.no_grad():
        for start in range(0, count, batch):
            some = like.new_empty(min(batch, count - start), *like.shape[1:])
            for place in some:
                place.copy_(next(pictures))
            found.append(confidence(some).detach().cpu().double())
    return torch.cat(found)


def _upsampled(heat: Tensor, x: Tensor) -> Tensor:
    """(H, W) float32 on the input's device, with a maximum of 1."""
    size = (x.shape[2], x.shape[3])
    large = interpolate(
        heat[None, None].to(x.device).float(), size=size, mode="bilinear", align_corners=False
    )[0, 0]
    return large / large.amax()


def _ranks(shown: Tensor, seed: int) -> Tensor:
    """(H, W) int64: each pixel's place, hottest first. Values less than a millionth apart are equal.

    What upsampling rounds would otherwise order the pixels of an even part of the map.
    """
    values = (shown.cpu().flatten() * _ALIKE).round()
    shuffled = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed))
    order = shuffled[values[shuffled].argsort(descending=True, stable=True)]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.numel())
    return ranks.view(shown.shape).to(shown.device)


def _blurred(x: Tensor) -> Tensor:
    """The picture under a Gaussian of RISE's size: 11 pixels and a deviation of 5 at 224, in proportion elsewhere.

    Edges are continued, not filled with 0: an even picture stays even.
    """
    radius = max(1, round(5 * min(x.shape[2:]) / 224))
    distance = torch.arange(-radius, radius + 1, device=x.device, dtype=torch.float32)
    kernel = (-0.5 * (distance / radius) ** 2).exp()
    kernel = (kernel / kernel.sum()).to(x.dtype).expand(x.shape[1], 1, 1, -1)
    padded = pad(x, (radius,) * 4, mode="replicate")
    rows = conv2d(padded, kernel, groups=x.shape[1])
    return conv2d(rows, kernel.mT, groups=x.shape[1])


def _drop(whole: float, seen: float) -> float:
    """max() would hide a nan."""
    if not whole > 0 or math.isnan(seen):
        return math.nan
    return max(0.0, whole - seen) / whole
