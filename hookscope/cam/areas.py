"""The pixels of a segmentation: how many each class has, which of them a score is taken over, and why there are none.

Works on the map of winning classes, (N, h, w); it knows no target and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookscope.cam.geometry import Point

BACKGROUND = "background"


def class_areas(winners: Tensor, classes: int) -> Tensor:
    """(N, K) float64: how many pixels of (N, h, w) are of each class."""
    # Counted picture by picture: one-hot would take K times the map.
    return torch.stack([torch.bincount(row.flatten(), minlength=classes) for row in winners]).double()


def background_last(areas: Tensor, categories: Sequence[str]) -> Tensor:
    """The areas with those of a class called background below all others: nobody asks why there is nothing."""
    names = [name.strip("_").casefold() for name in categories[: areas.shape[1]]]
    behind = [index for index, name in enumerate(names) if name == BACKGROUND]
    areas = areas.clone()
    areas[:, behind] -= areas.sum(dim=1, keepdim=True) + 1
    return areas


def at_point(point: Point, shares: Sequence[Point | None], winners: Tensor) -> tuple[Tensor, list[str]]:
    """(N, h, w) 1 at the point, and for every picture why there is none.

    Args:
        point: as it was asked for, for the words.
        shares: where it lies on each picture, as shares of width and height; `None` outside.
        winners: (N, h, w), for the size.
    """
    weights, missing = torch.zeros_like(winners), [""] * len(winners)
    height, width = winners.shape[1:]
    for row, share in enumerate(shares):
        if share is None:
            missing[row] = f"the model does not see the point {point[0]:g},{point[1]:g}"
        else:
            x, y = min(int(share[0] * width), width - 1), min(int(share[1] * height), height - 1)
            weights[row, y, x] = 1
    return weights, missing


def no_pixel(index: int, rank: int, winners: Tensor, names: Sequence[str]) -> str:
    """Why no pixel of (h, w) is of the class, `""` where one is.

    Args:
        index: the class.
        rank: it is the so-and-so largest; 0: it was asked for itself.
        winners: (h, w).
        names: (K,) what the classes are called.
    """
    if (winners == index).any():
        return ""
    present = torch.bincount(winners.flatten()).nonzero().flatten().tolist()
    if not rank:
        return f"no pixel is {names[index]}"
    if len(present) == 1:
        return f"every pixel is {names[present[0]]}"
    return f"only {len(present)} classes have pixels"
