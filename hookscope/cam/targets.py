"""Targets: which class scores to explain, and the scalars to differentiate for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookscope.artifacts import Target
from hookscope.errors import UsageError, near_misses
from hookscope.nested import tensors_in
from hookscope.runner import Objective
from hookscope.wording import folded

# More classes than this no model has, and one target is made for each of top:K.
_DIGITS = 6


@dataclass(frozen=True)
class TargetSpec:
    """One thing to explain for every picture: the `rank`-th best class (1 is the best), or a class."""

    name: str
    rank: int = 0
    index: int | None = None
    per_picture: tuple[int, ...] = ()

    def classes(self, logits: Tensor) -> Tensor:
        """The class of every picture, (N,) int64, from (N, K) logits.

        Raises:
            UsageError: there are fewer classes than the target needs, or not one target a picture.
        """
        pictures, total = logits.shape
        if self.per_picture:
            chosen = torch.tensor(self.per_picture, dtype=torch.long, device=logits.device)
            if len(chosen) != pictures:
                raise UsageError(f"{len(chosen)} targets for {pictures} pictures", "give one class a picture")
        elif self.index is not None:
            chosen = torch.full((pictures,), self.index, dtype=torch.long, device=logits.device)
        else:
            if self.rank > total:
                raise UsageError(
                    f"target {self.name!r}: the model has {total} classes", f"top:{total} at the most"
                )
            # Stable, so that equal scores give the lower class on every machine.
            order = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices
            return order[:, self.rank - 1]
        check_classes(chosen, total)
        return chosen


def parse_targets(texts: Iterable[str], categories: Sequence[str] | None) -> tuple[TargetSpec, ...]:
    """`top1`, `top:K` (the K best), a class id, or a label; doubles are dropped.

    Raises:
        UsageError: a label is unknown (near misses in the hint), or names several classes.
    """
    specs: dict[TargetSpec, None] = {}
    for text in texts:
        for spec in _parsed(text.strip(), categories):
            specs.setdefault(spec)
    return tuple(specs)


def raw_scores(output: Any) -> Tensor:
    """The class scores in a model's output as they are: its one floating tensor of shape (N, K) or (N,).

    Raises:
        UsageError: the output has no such tensor, or several.
    """
    tensors = list(tensors_in(output))
    found = [tensor for _, tensor in tensors if tensor.is_floating_point() and tensor.dim() in (1, 2)]
    if len(found) != 1:
        shapes = ", ".join(f"{path or 'output'} {tuple(tensor.shape)}" for path, tensor in tensors[:6])
        what = "no class scores (N, classes)" if not found else "several tensors that could be class scores"
        raise UsageError(
            f"the model returns {what}: {shapes or 'no tensor'}",
            "a classifier returns one: wrap the model, or give gradnorm --loss file.py:callable",
        )
    return found[0]


def logits_of(output: Any) -> Tensor:
    """(N, K) class scores; of a single score a picture, class 1 is the score and class 0 its negative.

    Raises:
        UsageError: the output has no class scores.
    """
    scores = raw_scores(output)
    if scores.dim() == 1 or scores.shape[1] == 1:
        positive = scores.reshape(-1, 1)
        return torch.cat((-positive, positive), dim=1)
    return scores


def probabilities_of(output: Any) -> Tensor:
    """(N, K) float64: the softmax of the scores; of a single score, its sigmoid for class 1."""
    scores = raw_scores(output).double()
    if scores.dim() == 1 or scores.shape[1] == 1:
        positive = scores.reshape(-1, 1)
        return torch.cat((torch.sigmoid(-positive), torch.sigmoid(positive)), dim=1)
    return scores.softmax(dim=1)


def score_sum(output: Any, classes: Tensor) -> Tensor:
    """The sum over the pictures of each one's class score."""
    logits = logits_of(output)
    return logits.gather(1, classes.to(logits.device)[:, None]).sum()


def score_objective(spec: TargetSpec, classes: Tensor) -> Objective:
    """The sum over the pictures of each one's class score: its gradient is every picture's own."""
    return Objective(spec.name, lambda output: score_sum(output, classes))


def described(
    spec: TargetSpec, classes: Tensor, output: Any, categories: Sequence[str] | None
) -> list[Target]:
    """What the target came to for every picture: class, label, score (logit) and probability."""
    logits, probabilities = logits_of(output), probabilities_of(output)
    return [
        Target(
            spec.name,
            index,
            label_of(index, categories),
            float(logits[row, index]),
            float(probabilities[row, index]),
        )
        for row, index in enumerate(classes.tolist())
    ]


def label_of(index: int, categories: Sequence[str] | None) -> str:
    """The class's name, or `""` where none is known."""
    return categories[index] if categories is not None and 0 <= index < len(categories) else ""


def check_pictures(logits: Tensor, pictures: int) -> None:
    """Nothing, where there is a row of scores for every picture.

    Raises:
        UsageError: there is not.
    """
    if logits.shape[0] != pictures:
        raise UsageError(
            f"the model returns {logits.shape[0]} rows of scores for {pictures} pictures", "one a picture"
        )


def check_classes(classes: Tensor, total: int) -> None:
    """Nothing, where every class is one of the model's.

    Raises:
        UsageError: one is out of range.
    """
    outside = classes[(classes < 0) | (classes >= total)].tolist()
    if outside:
        raise UsageError(
            f"class {outside[0]} is out of range: the model has {total} classes", f"0 to {total - 1}"
        )


def _parsed(text: str, categories: Sequence[str] | None) -> list[TargetSpec]:
    if text == "top1":
        return [TargetSpec("top1", rank=1)]
    if text.startswith("top:"):
        count = text.removeprefix("top:")
        if not count.isdecimal() or len(count) > _DIGITS or int(count) < 1:
            raise UsageError(f"target {text!r} is not top:K with K of 1 or more", "for instance top:5")
        return [TargetSpec(f"top{rank}", rank=rank) for rank in range(1, int(count) + 1)]
    if text.isdecimal() and len(text) > _DIGITS:
        raise UsageError(f"class {text} is out of range", "classes are counted from 0")
    if text.isdecimal():
        return [TargetSpec(str(int(text)), index=int(text))]
    index = class_index(text, categories)
    return [TargetSpec(str(index), index=index)]


def class_index(label: str, categories: Sequence[str] | None) -> int:
    """The class of that name, case and `_` aside.

    Raises:
        UsageError: no class, or more than one, has the name.
    """
    if categories is None:
        raise UsageError(
            f"target {label!r} is a name and the model's class names are unknown", "--labels FILE, or an id"
        )
    wanted = folded(label)
    found = [index for index, name in enumerate(categories) if folded(name) == wanted]
    if len(found) > 1:
        ids = ", ".join(map(str, found))
        raise UsageError(f"target {label!r} names {len(found)} classes: {ids}", "give the id")
    if not found:
        raise UsageError(
            f"no class is called {label!r}", near_misses(label, categories) or "top1, top:K, an id or a label"
        )
    return found[0]
