"""The boxes of a detector: which one of a picture is meant, and why there is none.

Reads one picture's answer, a mapping with `boxes`, `labels` and `scores`; it knows no target and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import UsageError


@dataclass(frozen=True)
class Box:
    """One detection: `corners` (left, top, right, bottom) in pixels of the input; `missing`: why there is none."""

    corners: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    label: int | None = None
    score: float = 0.0
    missing: str = ""


def chosen_box(
    answer: Mapping[str, Tensor], index: int | None, rank: int, min_score: float, what: str = ""
) -> Box:
    """The `rank`-th best box, 1 is the best, of the class (`None`: of any) of those with `min_score` or more.

    `what`: the class in words.
    """
    check_answer(answer)
    scores, labels = answer["scores"].detach(), answer["labels"]
    # One that is nowhere cannot be drawn.
    fitting = (scores >= min_score) & answer["boxes"].detach().isfinite().all(dim=1)
    if index is not None:
        fitting = fitting & (labels == index)
    order = fitting.nonzero().flatten()
    # Stable, so that equal scores give the same box on every machine.
    order = order[torch.sort(scores[order].float(), descending=True, stable=True).indices]
    if rank > len(order):
        of_class = scores if index is None else scores[labels == index]
        return Box(label=index, missing=_no_box(what, of_class, rank, min_score))
    at = int(order[rank - 1])
    left, top, right, bottom = answer["boxes"][at].detach().float().tolist()
    return Box((left, top, right, bottom), int(labels[at]), float(scores[at]))


def check_answer(answer: Mapping[str, Any]) -> None:
    """Nothing, where it is one picture's detections.

    Raises:
        UsageError: boxes, labels and scores are not (n, 4), (n,) and (n,) tensors.
    """
    parts = [answer.get(name) for name in ("boxes", "labels", "scores")]
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    count = shapes[2][0] if isinstance(shapes[2], tuple) and len(shapes[2]) == 1 else -1
    if shapes != [(count, 4), (count,), (count,)]:
        raise UsageError(
            f"the model's detections have boxes, labels and scores of {shapes[0]}, {shapes[1]} and {shapes[2]}",
            "(n, 4), (n,) and (n,) tensors for each picture",
        )


def _no_box(what: str, scores: Tensor, rank: int, min_score: float) -> str:
    number = "" if rank == 1 else f" {rank}"
    of = f" of {what}" if what else ""
    best = f", the best has {float(scores.max()):.2g}" if rank == 1 and len(scores) else ""
    return f"no box{number}{of} scores {min_score:g} or more{best}"
