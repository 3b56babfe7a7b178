"""Questions: from what is asked of every picture, and the model's answer to a batch, to the scores to explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hookscope.artifacts import Target
from hookscope.cam.outputs import (
    Answer,
    answer_of,
    dense_scores,
    described,
    embedding_of,
    logits_of,
    probabilities_of,
)
from hookscope.cam.scores import (
    BoxScore,
    ClassScore,
    DenseScore,
    NormScore,
    Score,
    SimilarityScore,
    picked,
)
from hookscope.cam.targets import TargetSpec, check_pictures, label_of
from hookscope.errors import UsageError


@dataclass(frozen=True)
class Question:
    """What is asked of every picture.

    `key`: which tensor of the output counts. `contrast`: classes to tell the target from. `pixels`, `point`: of a
    segmentation; the point is (x, y) in the original picture's pixels. `min_score`: of a detection. `like`: (D,) an
    embedding and the name of its picture.
    """

    specs: tuple[TargetSpec, ...]
    key: str | None = None
    contrast: tuple[TargetSpec, ...] = ()
    pixels: str = "mask"
    point: tuple[float, float] | None = None
    min_score: float = 0.5
    like: tuple[Tensor, str] | None = None
    categories: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Asked:
    """What is known of the pictures of one batch beside their pixels.

    `size`: (height, width) of the model's input. `positions`: their places in the run. `labels`: their classes in
    the data set. `points`: where `Question.point` lies on each one's input, (x, y) as shares of its width and
    height; `None` outside it.
    """

    size: tuple[int, int]
    positions: Sequence[int]
    labels: Sequence[int | None] = ()
    points: Sequence[tuple[float, float] | None] = ()


def scores_for(question: Question, output: Any, asked: Asked) -> list[Score]:
    """The scores that the question comes to, given the model's answer to a batch.

    Raises:
        UsageError: the model's output cannot answer it.
    """
    scores: list[Score] = []
    wanted = [spec for spec in question.specs if not spec.norm]
    if wanted:
        kind = answer_of(output, question.key)
        if question.contrast and kind not in (Answer.CLASSES, Answer.DENSE):
            raise UsageError(f"--contrast needs class scores, and the model returns {kind}", "leave it out")
        scores += _MAKERS[kind](question, wanted, output, asked)
    embedding = (
        embedding_of(output, question.key) if question.like or len(wanted) < len(question.specs) else None
    )
    if embedding is not None:
        check_pictures(embedding, len(asked.positions))
        if len(wanted) < len(question.specs):
            scores.append(_norm(question, embedding))
        if question.like is not None:
            scores.append(_similarity(question, embedding))
    return scores


def _of_classes(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    logits, probabilities = logits_of(output, question.key), probabilities_of(output, question.key)
    check_pictures(logits, len(asked.positions))
    made: list[Score] = []
    for spec in specs:
        classes = spec.classes(logits, _given(spec, asked))
        against = _against(question, classes, logits)
        bare = ClassScore(name=spec.name, key=question.key, classes=classes, against=against)
        values = bare.values(output, torch.arange(len(classes))).tolist()
        sure = picked(probabilities, classes, torch.arange(len(classes))).tolist()
        made.append(replace(bare, targets=_targets(question, spec, classes, against, values, sure)))
    return made


def _of_pixels(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    scores = dense_scores(output, question.key)
    check_pictures(scores, len(asked.positions))
    winners = scores.argmax(dim=1)
    areas = F.one_hot(winners, scores.shape[1]).sum(dim=(1, 2)).double()
    areas = _background_last(areas, question.categories)
    made: list[Score] = []
    for spec in specs:
        classes = spec.classes(areas, _given(spec, asked))
        weights, missing = _pixels(question, winners, classes, asked)
        against = _against(question, classes, areas)
        bare = DenseScore(name=spec.name, key=question.key, classes=classes, against=against, weights=weights)
        everyone = torch.arange(len(classes))
        values, sure = bare.values(output, everyone).tolist(), bare.confidence(output, everyone).tolist()
        targets = _targets(question, spec, classes, against, values, sure)
        told = [replace(target, missing=why) for target, why in zip(targets, missing, strict=True)]
        made.append(replace(bare, targets=told))
    return made


def _background_last(areas: Tensor, categories: Sequence[str] | None) -> Tensor:
    """The areas with those of a class called background below all others: nobody asks why there is nothing."""
    names = (
        [] if categories is None else [name.strip("_").casefold() for name in categories[: areas.shape[1]]]
    )
    behind = [index for index, name in enumerate(names) if name == "background"]
    areas = areas.clone()
    areas[:, behind] -= areas.sum(dim=1, keepdim=True) + 1
    return areas


def _pixels(question: Question, winners: Tensor, classes: Tensor, asked: Asked) -> tuple[Tensor, list[str]]:
    """(N, h, w) which pixels count, and for every picture why there are none."""
    if question.point is not None:
        return _at_point(question.point, winners, asked)
    if question.pixels == "all":
        return torch.ones_like(winners), [""] * len(winners)
    own = (winners == classes[:, None, None]).long()
    names = [label_of(index, question.categories) or f"class {index}" for index in classes.tolist()]
    none = [f"no pixel is {name}" if not mask.any() else "" for name, mask in zip(names, own, strict=True)]
    return own, none


def _at_point(point: tuple[float, float], winners: Tensor, asked: Asked) -> tuple[Tensor, list[str]]:
    weights, missing = torch.zeros_like(winners), [""] * len(winners)
    height, width = winners.shape[1:]
    for row, share in enumerate(asked.points):
        if share is None:
            missing[row] = f"the model does not see the point {point[0]:g},{point[1]:g}"
        else:
            x, y = min(int(share[0] * width), width - 1), min(int(share[1] * height), height - 1)
            weights[row, y, x] = 1
    return weights, missing


def _of_boxes(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    return [_box_score(question, spec, output, asked) for spec in specs]


def _box_score(question: Question, spec: TargetSpec, output: Any, asked: Asked) -> BoxScore:
    given = _given(spec, asked)
    found = [
        _box(question, spec, answer, given[row] if given else spec.index) for row, answer in enumerate(output)
    ]
    boxes = torch.stack([box for box, _, _ in found])
    labels = torch.tensor([label for _, label, _ in found])
    return BoxScore(
        name=found[0][2].name, targets=[target for _, _, target in found], boxes=boxes, labels=labels
    )


def _box(
    question: Question, spec: TargetSpec, answer: dict[str, Tensor], index: int | None
) -> tuple[Tensor, int, Target]:
    """The box meant in one picture, its class, and the target it makes."""
    name = f"box{spec.rank}" if spec.rank else spec.name
    scores, labels = answer["scores"].detach(), answer["labels"]
    fitting = scores >= question.min_score
    if index is not None:
        fitting &= labels == index
    order = fitting.nonzero().flatten()
    order = order[torch.sort(scores[order].float(), descending=True, stable=True).indices]
    place = max(spec.rank, 1) - 1
    if place >= len(order):
        label = "" if index is None else label_of(index, question.categories)
        missing = Target(name, index, label, missing=_no_box(question, index, label, scores, place))
        return torch.zeros(4), -1 if index is None else index, missing
    at = int(order[place])
    box, label_index, score = answer["boxes"][at].detach().float().cpu(), int(labels[at]), float(scores[at])
    left, top, right, bottom = box.tolist()
    label = label_of(label_index, question.categories)
    return box, label_index, Target(name, label_index, label, score, score, box=(left, top, right, bottom))


def _no_box(question: Question, index: int | None, label: str, scores: Tensor, place: int) -> str:
    what = f" of {label or f'class {index}'}" if index is not None else ""
    best = f", the best has {float(scores.max()):.2g}" if place == 0 and not what and len(scores) else ""
    return (
        f"no {'box' if place == 0 else f'box {place + 1}'}{what} scores {question.min_score:g} or more{best}"
    )


def _norm(question: Question, embedding: Tensor) -> NormScore:
    bare = NormScore(name="norm", key=question.key)
    values = NormScore.of(embedding).tolist()
    return replace(bare, targets=[Target("norm", label="norm", score=value) for value in values])


def _similarity(question: Question, embedding: Tensor) -> SimilarityScore:
    assert question.like is not None
    other, name = question.like
    if other.shape != embedding.shape[1:]:
        raise UsageError(
            f"--similar-to {name}: an embedding of {other.numel()} numbers, the pictures' have {embedding.shape[1]}",
            "does its size depend on the picture's? --resize makes them alike",
        )
    label = f"similar to {name}"
    bare = SimilarityScore(name=f"similar-to {name}", key=question.key, other=other)
    values = bare.of(embedding).tolist()
    return replace(bare, targets=[Target(bare.name, label=label, score=value) for value in values])


def _no_class(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    raise UsageError(
        f"the model returns no class scores (N, classes): {described(output)}",
        "--target norm, or --similar-to PICTURE, explains an embedding",
    )


_MAKERS: dict[Answer, Callable[[Question, Sequence[TargetSpec], Any, Asked], list[Score]]] = {
    Answer.CLASSES: _of_classes,
    Answer.DENSE: _of_pixels,
    Answer.BOXES: _of_boxes,
    Answer.EMBEDDING: _no_class,
}


def _given(spec: TargetSpec, asked: Asked) -> Sequence[int | None]:
    """The classes that a list, or the data set, says of these pictures."""
    if spec.from_dataset:
        return asked.labels or [None] * len(asked.positions)
    if spec.per_picture:
        if max(asked.positions, default=0) >= len(spec.per_picture):
            return spec.per_picture
        return [spec.per_picture[position] for position in asked.positions]
    return ()


def _against(question: Question, classes: Tensor, logits: Tensor) -> tuple[tuple[int, ...], ...]:
    """For each picture the classes its target is told from: never the target itself."""
    if not question.contrast:
        return ((),) * len(classes)
    columns = [spec.classes(logits).tolist() for spec in question.contrast]
    found = [
        tuple(dict.fromkeys(other for other in others if other != own))
        for own, others in zip(classes.tolist(), zip(*columns, strict=True), strict=True)
    ]
    if not all(found):
        own = int(classes[[bool(others) for others in found].index(False)])
        raise UsageError(f"--contrast names no class but the target {own} itself", "name another class")
    return tuple(found)


def _targets(
    question: Question,
    spec: TargetSpec,
    classes: Tensor,
    against: Sequence[tuple[int, ...]],
    values: Sequence[float],
    probabilities: Sequence[float],
) -> list[Target]:
    rows = zip(classes.tolist(), against, values, probabilities, strict=True)
    return [
        Target(spec.name, index, label_of(index, question.categories), value, sure, against=others)
        for index, others, value, sure in rows
    ]
