"""Questions: from what is asked of every picture, and the model's answer to a batch, to the scores to explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookscope.artifacts import Target
from hookscope.cam.areas import BACKGROUND, at_point, background_last, class_areas, no_pixel
from hookscope.cam.boxes import Box, chosen_box
from hookscope.cam.outputs import (
    Answer,
    answer_of,
    dense_scores,
    described,
    embedding_of,
    is_one_channel,
    logits_of,
    probabilities_of,
)
from hookscope.cam.scores import (
    NORM_NAME,
    SIMILAR_NAME,
    BoxScore,
    ClassScore,
    DenseScore,
    NormScore,
    Score,
    SimilarityScore,
    picked,
)
from hookscope.cam.targets import DATASET, TargetSpec, check_pictures, label_of
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

    def __post_init__(self) -> None:
        if any(spec.norm for spec in self.contrast):
            raise UsageError("--contrast 'norm' is no class", "an id, a label or top:K")
        if self.contrast and all(spec.norm for spec in self.specs):
            raise UsageError("--contrast needs a class to tell from others", "--target CLASS")


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
        if question.point is not None and kind is not Answer.DENSE:
            raise UsageError(f"--point is of a segmentation, and the model returns {kind}", "leave it out")
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
        against, missing = _against(question, spec, classes, logits, asked)
        bare = ClassScore(name=spec.name, key=question.key, classes=classes, against=against)
        values = bare.values(output, torch.arange(len(classes))).tolist()
        sure = picked(probabilities, classes, torch.arange(len(classes))).tolist()
        targets = _targets(question, spec, classes, against, values, sure)
        made.append(replace(bare, targets=_missing(targets, missing)))
    return made


def _of_pixels(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    scores = dense_scores(output, question.key)
    check_pictures(scores, len(asked.positions))
    if not scores[0].numel():
        raise UsageError(
            f"the model's map of class scores is empty: {tuple(scores.shape)}", "is the picture large enough?"
        )
    winners = scores.argmax(dim=1)
    one_channel = is_one_channel(output, question.key)
    ranked = _ranked(question, scores, winners, asked, one_channel=one_channel)
    made: list[Score] = []
    for spec in specs:
        classes = spec.classes(ranked, _given(spec, asked))
        weights, absent = _pixels(question, spec, winners, classes, asked)
        against, alone = _against(question, spec, classes, ranked, asked)
        bare = DenseScore(name=spec.name, key=question.key, classes=classes, against=against, weights=weights)
        everyone = torch.arange(len(classes))
        values, sure = bare.values(output, everyone).tolist(), bare.confidence(output, everyone).tolist()
        targets = _targets(question, spec, classes, against, values, sure)
        made.append(replace(bare, targets=_missing(_missing(targets, alone), absent)))
    return made


def _ranked(
    question: Question, scores: Tensor, winners: Tensor, asked: Asked, *, one_channel: bool
) -> Tensor:
    """(N, K) what makes one class better than another: the score at the point, else how many pixels it has."""
    if question.point is not None:
        weights, _ = at_point(question.point, asked.points, winners)
        return (scores.detach() * weights[:, None]).sum(dim=(2, 3))
    names = question.categories or (BACKGROUND,) * one_channel
    return background_last(class_areas(winners, scores.shape[1]), names)


def _pixels(
    question: Question, spec: TargetSpec, winners: Tensor, classes: Tensor, asked: Asked
) -> tuple[Tensor, list[str]]:
    """(N, h, w) which pixels count, and for every picture why there are none."""
    if question.point is not None:
        return at_point(question.point, asked.points, winners)
    highest = int(max(winners.max(), classes.max()))
    names = [_named(index, question) for index in range(highest + 1)]
    absent = [
        no_pixel(index, spec.rank, row, names) for index, row in zip(classes.tolist(), winners, strict=True)
    ]
    if question.pixels == "mask":
        return (winners == classes[:, None, None]).long(), absent
    # Any class has a score at every pixel, but the best of those that are seen must be seen.
    return torch.ones_like(winners), absent if spec.rank else [""] * len(absent)


def _named(index: int, question: Question) -> str:
    return label_of(index, question.categories) or f"class {index}"


def _of_boxes(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    if len(output) != len(asked.positions):
        raise UsageError(
            f"the model returns {len(output)} detections for {len(asked.positions)} pictures", "one a picture"
        )
    return [_box_score(question, spec, output, asked) for spec in specs]


def _box_score(question: Question, spec: TargetSpec, output: Any, asked: Asked) -> BoxScore:
    given = _given(spec, asked) or [spec.index] * len(output)
    name = f"box{spec.rank}" if spec.rank else spec.name
    found = [
        chosen_box(
            answer,
            index,
            max(spec.rank, 1),
            question.min_score,
            "" if index is None else _named(index, question),
        )
        for answer, index in zip(output, given, strict=True)
    ]
    return BoxScore(
        name=name,
        targets=[_box_target(question, name, box) for box in found],
        boxes=torch.tensor([box.corners for box in found]),
        labels=torch.tensor([-1 if box.label is None else box.label for box in found]),
    )


def _box_target(question: Question, name: str, box: Box) -> Target:
    label = "" if box.label is None else label_of(box.label, question.categories)
    if box.missing:
        return Target(name, box.label, label, missing=box.missing)
    return Target(name, box.label, label, box.score, box.score, box=box.corners)


def _norm(question: Question, embedding: Tensor) -> NormScore:
    bare = NormScore(name=NORM_NAME, key=question.key)
    values = NormScore.of(embedding).tolist()
    return replace(bare, targets=[Target(NORM_NAME, label=NORM_NAME, score=value) for value in values])


def _similarity(question: Question, embedding: Tensor) -> SimilarityScore:
    assert question.like is not None
    other, name = question.like
    if other.shape != embedding.shape[1:]:
        raise UsageError(
            f"--similar-to {name}: an embedding of {other.numel()} numbers, the pictures' have {embedding.shape[1]}",
            "does its size depend on the picture's? --resize makes them alike",
        )
    label = f"similar to {name}"
    bare = SimilarityScore(name=f"{SIMILAR_NAME}{name}", key=question.key, other=other)
    values = bare.of(embedding).tolist()
    return replace(bare, targets=[Target(bare.name, label=label, score=value) for value in values])


def _no_class(question: Question, specs: Sequence[TargetSpec], output: Any, asked: Asked) -> list[Score]:
    raise UsageError(
        f"the model returns no class scores: {described(output)}",
        "--target norm, or --similar-to PICTURE, explain an embedding",
    )


_MAKERS: dict[Answer, Callable[[Question, Sequence[TargetSpec], Any, Asked], list[Score]]] = {
    Answer.CLASSES: _of_classes,
    Answer.DENSE: _of_pixels,
    Answer.BOXES: _of_boxes,
    Answer.EMBEDDING: _no_class,
}


def _given(spec: TargetSpec, asked: Asked) -> Sequence[int | None]:
    """The classes that a list, or the data set, says of these pictures.

    Raises:
        UsageError: there is no data set.
    """
    if spec.from_dataset:
        if not asked.labels or None in asked.labels:
            raise UsageError(
                f"target {DATASET!r} without a data set", "--dataset DIR, a folder for each class"
            )
        return asked.labels
    if spec.per_picture:
        if max(asked.positions, default=0) >= len(spec.per_picture):
            return spec.per_picture
        return [spec.per_picture[position] for position in asked.positions]
    return ()


def _against(
    question: Question, spec: TargetSpec, classes: Tensor, ranked: Tensor, asked: Asked
) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """For each picture the classes its target is told from, never the target itself, and why there are none.

    Raises:
        UsageError: the target is told from itself alone, whatever the picture.
    """
    if not question.contrast:
        return ((),) * len(classes), [""] * len(classes)
    if spec.index is not None and {spec.index} == {other.index for other in question.contrast}:
        raise UsageError(
            f"--contrast names no class but the target {spec.index} itself", "name another class"
        )
    columns = [other.classes(ranked, _given(other, asked)).tolist() for other in question.contrast]
    found = [
        tuple(dict.fromkeys(other for other in others if other != own))
        for own, others in zip(classes.tolist(), zip(*columns, strict=True), strict=True)
    ]
    alone = [
        "" if others else f"--contrast names nothing but {_named(own, question)} itself"
        for own, others in zip(classes.tolist(), found, strict=True)
    ]
    return tuple(found), alone


def _missing(targets: Sequence[Target], reasons: Sequence[str]) -> list[Target]:
    """The targets with why a picture has none; a reason that is there already is kept unless there is another."""
    return [
        replace(target, missing=why or target.missing) for target, why in zip(targets, reasons, strict=True)
    ]


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
