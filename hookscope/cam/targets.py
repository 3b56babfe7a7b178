"""Targets: which things to explain, as words of the command line or numbers of a program, and their classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hookscope.errors import UsageError, near_misses
from hookscope.wording import counted, folded

# More classes than this no model has, and one target is made for each of top:K.
_DIGITS = 6

NORM = "norm"
DATASET = "dataset"
EACH = "each:"


@dataclass(frozen=True)
class TargetSpec:
    """One thing to explain for every picture.

    The `rank`-th best class (1 is the best); a class (`index`); a class for each picture of the run
    (`per_picture`); the picture's class in the data set (`from_dataset`); or the output's norm (`norm`).
    """

    name: str
    rank: int = 0
    index: int | None = None
    per_picture: tuple[int, ...] = ()
    from_dataset: bool = False
    norm: bool = False

    def classes(self, logits: Tensor, given: Sequence[int | None] = ()) -> Tensor:
        """The class of every picture, (N,) int64, from (N, K) logits.

        Args:
            logits: (N, K), for the best classes.
            given: the classes of these pictures that `per_picture` or the data set says; `per_picture` itself
                where empty.

        Raises:
            UsageError: there are fewer classes than the target needs, or not one target a picture.
        """
        pictures, total = logits.shape
        if self.per_picture or self.from_dataset:
            # All of a list, so that a class that is out of range is not met halfway through the run.
            check_classes(torch.tensor(self.per_picture, dtype=torch.long), total)
            chosen = self._one_each(given or self.per_picture, pictures)
        elif self.index is not None:
            chosen = torch.full((pictures,), self.index, dtype=torch.long)
        else:
            if self.rank > total:
                raise UsageError(
                    f"target {self.name!r}: the model has {total} classes", f"top:{total} at the most"
                )
            # Stable, so that equal scores give the lower class on every machine.
            order = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices
            return order[:, self.rank - 1]
        check_classes(chosen, total)
        return chosen.to(logits.device)

    def _one_each(self, given: Sequence[int | None], pictures: int) -> Tensor:
        known = [index for index in given if index is not None]
        if self.from_dataset and len(known) < pictures:
            raise UsageError(
                f"target {DATASET!r} without a data set", "--dataset DIR, a folder for each class"
            )
        if len(known) != pictures:
            raise UsageError(f"{len(known)} targets for {pictures} pictures", "give one class a picture")
        return torch.tensor(known, dtype=torch.long)


def parse_targets(texts: Iterable[str], categories: Sequence[str] | None) -> tuple[TargetSpec, ...]:
    """The targets that the words mean; doubles are dropped.

    `top1`, `top:K` (the K best), a class id, a label, `each:A,B,...` (one for each picture, in their order,
    between commas or line ends), `dataset` (the class of the picture's folder) and `norm`.

    Raises:
        UsageError: a label is unknown (near misses in the hint), or names several classes.
    """
    specs: dict[TargetSpec, None] = {}
    for text in texts:
        for spec in _parsed(text, categories):
            specs.setdefault(spec)
    return _told_apart(specs)


def _told_apart(specs: Iterable[TargetSpec]) -> tuple[TargetSpec, ...]:
    """The same with names of their own: of several lists the second is `each2`."""
    seen: dict[str, int] = {}
    found = []
    for spec in specs:
        seen[spec.name] = number = seen.get(spec.name, 0) + 1
        found.append(spec if number == 1 else replace(spec, name=f"{spec.name}{number}"))
    return tuple(found)


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


def check_count(specs: Iterable[TargetSpec], pictures: int) -> None:
    """Nothing, where every list of one target a picture is as long as the run.

    Raises:
        UsageError: one is longer or shorter.
    """
    for spec in specs:
        if spec.per_picture and len(spec.per_picture) != pictures:
            raise UsageError(
                f"{counted(len(spec.per_picture), 'target')} for {counted(pictures, 'picture')}",
                "each: takes one class a picture, in their order",
            )


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
            f"no class is called {label!r}",
            near_misses(label, categories) or "top1, top:K, an id, a label, each:A,B, dataset or norm",
        )
    return found[0]


def _parsed(text: str, categories: Sequence[str] | None) -> list[TargetSpec]:
    # Before any blank is stripped: a line end says that lines, not commas, part the names.
    if text.lstrip().startswith(EACH):
        return [TargetSpec("each", per_picture=_each(text.strip(" "), categories))]
    text = text.strip()
    if text == "top1":
        return [TargetSpec("top1", rank=1)]
    if text.startswith("top:"):
        count = text.removeprefix("top:")
        if not count.isdecimal() or len(count) > _DIGITS or int(count) < 1:
            raise UsageError(f"target {text!r} is not top:K with K of 1 or more", "for instance top:5")
        return [TargetSpec(f"top{rank}", rank=rank) for rank in range(1, int(count) + 1)]
    if text == NORM:
        return [TargetSpec(NORM, norm=True)]
    if text == DATASET:
        return [TargetSpec(DATASET, from_dataset=True)]
    index = _index(text, categories)
    return [TargetSpec(str(index), index=index)]


def _each(text: str, categories: Sequence[str] | None) -> tuple[int, ...]:
    listed = text.removeprefix(EACH)
    parts = [part.strip() for part in listed.strip().split("\n" if "\n" in listed else ",")]
    if not all(parts):
        number = parts.index("") + 1
        raise UsageError(f"target {text.strip()!r}: entry {number} is empty", "one class a picture")
    return tuple(_index(part, categories) for part in parts)


def _index(text: str, categories: Sequence[str] | None) -> int:
    digits = text.removeprefix("-")
    if digits.isdecimal() and (len(text) > _DIGITS or digits != text):
        raise UsageError(f"class {text} is out of range", "classes are counted from 0")
    if not text:
        raise UsageError("an empty target", "top1, top:K, an id, a label, each:A,B, dataset or norm")
    return int(text) if text.isdecimal() else class_index(text, categories)
