"""The user's own batches: any iterable of (input, target), checked one by one.

Knows what a batch looks like and nothing of models or files; what the user's code raises is told with the batch's
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookscope.errors import HookscopeError, NothingMeasured, UsageError
from hookscope.nested import rebuilt, tensors_in
from hookscope.passes import pictures_in
from hookscope.wording import one_line

_WANTED = "give batches of (input, target)"


@dataclass(frozen=True)
class DataBatch:
    """One batch: what the model takes, as for `passes.called`, and what the loss takes.

    `number` counts from 0; `pictures`: how many samples it holds. `targets` is `None` where there are none.
    """

    number: int
    x: Any
    targets: Any
    pictures: int


def checked(
    source: Any, name: str = "batches", *, limit: int | None = None, paired: bool = True
) -> Iterator[DataBatch]:
    """Batches of any iterable of (input, target).

    Args:
        source: the iterable.
        name: what messages call it.
        limit: of how many batches to take.
        paired: a batch must have targets; otherwise a pair's second is left aside, and all else is an input alone.

    Raises:
        UsageError: it is none, one of its batches is no pair or empty, or it raised.
        NothingMeasured: there was not one batch.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit!r} batches are none", "1 or more")
    number = -1
    for number, batch in enumerate(_told(source, name, limit)):
        yield _checked_batch(batch, name, number, paired=paired)
    if number < 0:
        raise NothingMeasured(f"the data {name!r} gave no batch", _WANTED)


def placed(batch: DataBatch, device: torch.device, dtype: torch.dtype | None = None) -> DataBatch:
    """The batch on a device; with `dtype`, the model's floating-point input is of that type."""

    def moved(value: Any, wanted: torch.dtype | None) -> Any:
        def one(tensor: Tensor) -> Tensor:
            return tensor.to(device, wanted if tensor.is_floating_point() else None)

        return rebuilt(value, {path: one(tensor) for path, tensor in tensors_in(value)})

    return DataBatch(batch.number, moved(batch.x, dtype), moved(batch.targets, None), batch.pictures)


def raised(error: BaseException) -> str:
    """`raised ValueError: its message`."""
    return f"raised {type(error).__name__}: {one_line(error)}"


def _told(source: Any, name: str, limit: int | None) -> Iterator[Any]:
    """What the source gives; whatever it raises names the batch."""
    if isinstance(source, Dataset) and not hasattr(source, "__iter__"):
        raise UsageError(
            f"the data {name!r} is a {type(source).__name__}, single samples and no batches",
            "wrap it: torch.utils.data.DataLoader(data, batch_size=...)",
        )
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes, Tensor)):
        raise UsageError(f"the data {name!r} is {_described(source)}, which gives no batches", _WANTED)
    asked = 0
    try:
        for batch in islice(source, limit):
            asked += 1
            yield batch
    except HookscopeError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the data {name!r} {raised(error)}, at batch {asked}", "--debug shows where"
        ) from error


def _checked_batch(batch: Any, name: str, number: int, *, paired: bool) -> DataBatch:
    where = f"batch {number} of the data {name!r}"
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair and not paired:
        batch = (batch, None)
    elif not is_pair:
        raise UsageError(f"{where} is {_described(batch)}, no pair of (input, target)", _WANTED)
    x, targets = batch
    pictures = pictures_in(x)
    if not pictures:
        raise UsageError(f"{where} holds no samples: its input is {_described(x)}", _WANTED)
    return DataBatch(number, x, targets, pictures)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
