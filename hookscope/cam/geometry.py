"""Where things lie: a point of the original picture on the model's input, and the padding that a detector adds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.images.geometry import View

Point = tuple[float, float]


def parse_point(text: str) -> Point:
    """`X,Y`, pixels of the original picture from its top left.

    Raises:
        UsageError: it is anything else.
    """
    x, _, y = text.partition(",")
    try:
        point = float(x), float(y)
    except ValueError:
        point = (-1.0, -1.0)
    if not all(0 <= number < 2**31 for number in point):
        raise UsageError(
            f"--point {text!r} is no pixel", "X,Y from the top left of the picture, such as 120,80"
        )
    return point


def on_input(point: Point, view: View) -> Point | None:
    """The middle of that pixel as shares of the input's width and height; `None` where the model does not see it."""
    left, top, right, bottom = view.box
    width, height = view.original
    x, y = (point[0] + 0.5 - left) / (right - left), (point[1] + 0.5 - top) / (bottom - top)
    inside = point[0] < width and point[1] < height and 0 <= x < 1 and 0 <= y < 1
    return (x, y) if inside else None


def covered(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Which shares of height and width of the model's own padded picture are the picture: (1, 1) for most.

    torchvision's detectors resize a picture and pad it below and to the right.
    """
    for module in model.modules():
        if type(module).__name__ == "GeneralizedRCNNTransform":
            with torch.no_grad():
                # Not through its call: nobody's hook is to hear of this.
                images, _ = module.forward([x[0].detach()])
            (height, width), padded = images.image_sizes[0], images.tensors.shape[-2:]
            return height / padded[0], width / padded[1]
    return 1.0, 1.0


def mirrored_back(maps: Tensor, across: float) -> Tensor:
    """Maps (N, h, w) of mirrored pictures, turned back: only that share of the width, from the left, is the picture.

    Exact where the picture ends between two columns; else each column is read between two, and what lies on the
    padding is 0.
    """
    width = maps.shape[2]
    centres = torch.arange(width, dtype=torch.float64) + 0.5
    places = (across * width - centres - 0.5).clamp(0, width - 1)
    low, share = places.floor().long(), places.frac().to(maps.dtype)
    high = (low + 1).clamp(max=width - 1)
    turned = maps[..., low] * (1 - share) + maps[..., high] * share
    return torch.where(centres < across * width, turned, torch.zeros((), dtype=maps.dtype))
