"""Scores: the numbers that maps explain, one for each picture, taken from whatever the model returned.

A score is fixed by one look at the model's answer to the pictures as they are (which class, which pixels, which box),
and can then be taken of any later output: of the same pass to differentiate it, or of changed pictures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from hookscope.artifacts import Target
from hookscope.cam.outputs import dense_probabilities, dense_scores, embedding_of, logits_of, probabilities_of
from hookscope.cam.targets import check_pictures
from hookscope.runner import Objective

GAMMA = 0.6
"""The weight of the contrasted classes: FinerCAM, Zhang et al., CVPR 2025."""

SAME_BOX = 0.5
"""The least intersection over union at which a box of a changed picture is taken for the explained one."""

NORM_NAME, SIMILAR_NAME = "norm", "similar-to "
"""What the scores of an embedding are called; of a similarity, the picture's name follows."""


@dataclass(frozen=True, kw_only=True)
class Score(ABC):
    """A number for each picture of a batch.

    `targets`: what it is of, for every picture; where `missing` is set, the picture has no such thing and its value
    counts for nothing. `key`: which tensor of the output it is taken of.
    """

    name: str
    targets: Sequence[Target] = ()
    key: str | None = None

    @abstractmethod
    def values(self, output: Any, pictures: Tensor) -> Tensor:
        """(M,) the scores in an output whose row m is (a changed copy of) the batch's picture `pictures[m]`."""

    def confidence(self, output: Any, pictures: Tensor) -> Tensor:
        """(M,) float64: the same as a probability, where there is one."""
        return self.values(output, pictures).double()

    def mirrored(self, width: int) -> Score:
        """The same score of the pictures, `width` pixels wide, turned left to right."""
        return self


def asks_for_class(name: str) -> bool:
    """Whether the score of that name is of a class or a box, not of the embedding as a whole."""
    return name != NORM_NAME and not name.startswith(SIMILAR_NAME)


def objective(score: Score) -> Objective | None:
    """The sum of the score over the pictures that have one: its gradient is every picture's own. `None`: none has."""
    there = [index for index, target in enumerate(score.targets) if not target.missing]
    if not there:
        return None
    pictures = torch.arange(len(score.targets))
    return Objective(score.name, lambda output: score.values(output, pictures)[there].sum())


@dataclass(frozen=True, kw_only=True)
class ClassScore(Score):
    """The class's logit, less `GAMMA` times the mean logit of the classes it is told from (FinerCAM).

    `classes`: (N,). `against`: for each picture the classes to subtract, maybe none.
    """

    classes: Tensor
    against: tuple[tuple[int, ...], ...]

    def values(self, output: Any, pictures: Tensor) -> Tensor:
        logits = logits_of(output, self.key)
        check_pictures(logits, len(pictures))
        return self._contrasted(logits, pictures)

    def confidence(self, output: Any, pictures: Tensor) -> Tensor:
        probabilities = probabilities_of(output, self.key)
        check_pictures(probabilities, len(pictures))
        return picked(probabilities, self.classes, pictures)

    def _contrasted(self, logits: Tensor, pictures: Tensor) -> Tensor:
        values = picked(logits, self.classes, pictures)
        if not any(self.against):
            return values
        others = [
            logits[row, list(self.against[picture])].mean() for row, picture in enumerate(pictures.tolist())
        ]
        return values - GAMMA * torch.stack(others)


@dataclass(frozen=True, kw_only=True)
class DenseScore(Score):
    """The sum of the class's score over chosen pixels (Seg-Grad-CAM: Vinogradova et al., AAAI 2020, eq. 3).

    `weights`: (N, h, w), 1 where a pixel counts.
    """

    classes: Tensor
    against: tuple[tuple[int, ...], ...]
    weights: Tensor

    def values(self, output: Any, pictures: Tensor) -> Tensor:
        scores = dense_scores(output, self.key)
        maps = torch.stack([self._contrasted(scores[row], at) for row, at in enumerate(pictures.tolist())])
        return (wide(maps) * self.weights[pictures].to(maps.device)).sum(dim=(1, 2))

    def confidence(self, output: Any, pictures: Tensor) -> Tensor:
        """The mean probability of the class over the pixels."""
        probabilities = dense_probabilities(output, self.key)
        rows = torch.arange(len(pictures))
        weights = self.weights[pictures].double().to(probabilities.device)
        inside = (probabilities[rows, self.classes[pictures].to(probabilities.device)] * weights).sum(
            dim=(1, 2)
        )
        return inside / weights.sum(dim=(1, 2)).clamp(min=1)

    def mirrored(self, width: int) -> Score:
        return replace(self, weights=self.weights.flip(2))

    def _contrasted(self, scores: Tensor, picture: int) -> Tensor:
        own = scores[int(self.classes[picture])]
        others = self.against[picture]
        return own - GAMMA * scores[list(others)].mean(dim=0) if others else own


@dataclass(frozen=True, kw_only=True)
class BoxScore(Score):
    """The detector's score of a box; in another output, of the box of that class that overlaps it most.

    `boxes`: (N, 4), `labels`: (N,), of the batch's pictures; what is missing has no area.
    """

    boxes: Tensor
    labels: Tensor

    def values(self, output: Any, pictures: Tensor) -> Tensor:
        return torch.stack(
            [self._one(found, at) for found, at in zip(output, pictures.tolist(), strict=True)]
        )

    def mirrored(self, width: int) -> Score:
        left, top, right, bottom = self.boxes.unbind(dim=1)
        return replace(self, boxes=torch.stack((width - right, top, width - left, bottom), dim=1))

    def _one(self, found: dict[str, Tensor], picture: int) -> Tensor:
        scores = found["scores"]
        same = (found["labels"] == self.labels[picture].to(scores.device)).nonzero().flatten()
        if self.targets[picture].missing or not len(same):
            return scores.new_zeros(())
        boxes, box = found["boxes"][same].detach().float(), self.boxes[picture].to(scores.device)
        # The very box, though it may have no area.
        overlap = _overlap(boxes, box).nan_to_num(0).where(~(boxes == box).all(dim=1), 1.0)
        best = int(overlap.argmax())
        return scores[same[best]] if overlap[best] >= SAME_BOX else scores.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class NormScore(Score):
    """The Euclidean norm of the picture's embedding."""

    def values(self, output: Any, pictures: Tensor) -> Tensor:
        return self.of(embedding_of(output, self.key))

    @staticmethod
    def of(embedding: Tensor) -> Tensor:
        """(N,) the norms of (N, D)."""
        norms: Tensor = torch.linalg.vector_norm(wide(embedding), dim=1)
        return norms


@dataclass(frozen=True, kw_only=True)
class SimilarityScore(Score):
    """The cosine of the picture's embedding and that of another picture, (D,)."""

    other: Tensor

    def values(self, output: Any, pictures: Tensor) -> Tensor:
        return self.of(embedding_of(output, self.key))

    def of(self, embedding: Tensor) -> Tensor:
        """(N,) the cosines of (N, D) with the other."""
        embedding = wide(embedding)
        return F.cosine_similarity(embedding, self.other.to(embedding)[None], dim=1)


def picked(rows: Tensor, classes: Tensor, pictures: Tensor) -> Tensor:
    """Of every row the entry of its picture's class."""
    return rows.gather(1, classes.to(rows.device)[pictures.to(rows.device), None])[:, 0]


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: the square of a half-precision number overflows soon."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _overlap(boxes: Tensor, box: Tensor) -> Tensor:
    """(B,) the intersection over union of each of (B, 4) with one."""
    found: Tensor = box_iou(boxes.float(), box[None].float())
    return found[:, 0]
