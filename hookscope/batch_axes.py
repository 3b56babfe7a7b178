"""Where the pictures of a batch lie in a tensor: found by comparing one picture with two copies of it.

Compares and repeats tensors; knows no model and no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookscope.nested import rebuilt, tensors_in

_TOLERANCE = 1e-5
_TOLERANCE_HALF = 2e-2  # two units in the last place of bfloat16


class NoAxis(Exception):
    """Two copies of a picture do not give twice what one gives, along any axis."""


@dataclass(frozen=True)
class Axis:
    """Where the pictures lie.

    `index`: the axis (`None`: the tensor is the same for any batch); `rows`: its size for one picture; `tiled`:
    whether all rows of a picture follow one another, as windows do, or each row of all pictures.
    """

    index: int | None
    rows: int = 1
    tiled: bool = True

    def repeated(self, tensor: Tensor, copies: int, *, real: bool = True) -> Tensor:
        """The tensor of one picture as it is for `copies` of it; if not `real`, a view where there can be one."""
        if self.index is None:
            return tensor.clone()
        if self.rows != 1:
            return (
                torch.cat([tensor] * copies, self.index)
                if self.tiled
                else tensor.repeat_interleave(copies, self.index)
            )
        view = tensor.expand([copies if axis == self.index else -1 for axis in range(tensor.dim())])
        return view.clone() if real else view

    def first(self, tensor: Tensor) -> Tensor:
        """What a tensor of two copies of a picture holds for the first, a copy."""
        if self.index is None:
            return tensor.clone()
        step = 1 if self.tiled else 2
        rows = torch.arange(0, self.rows * step, step, device=tensor.device)
        return tensor.index_select(self.index, rows)


Axes = Mapping[str, Axis]


def axis_of(one: Tensor, two: Tensor) -> Axis:
    """The axis of a tensor's value for one picture and its value for two copies of it.

    Raises:
        NoAxis: there is none.
    """
    if one.shape == two.shape:
        return Axis(None)
    grown = [axis for axis in range(min(one.dim(), two.dim())) if one.shape[axis] != two.shape[axis]]
    if one.dim() != two.dim() or len(grown) != 1 or two.shape[grown[0]] != 2 * one.shape[grown[0]]:
        raise NoAxis(f"shape {tuple(one.shape)} becomes {tuple(two.shape)} for two pictures")
    index, rows = grown[0], one.shape[grown[0]]
    if rows == 1:
        return Axis(index)
    ways = (Axis(index, rows, tiled) for tiled in (True, False))
    return min(ways, key=lambda axis: difference(axis.repeated(one, 2), two))


def axes_of(one: Any, two: Any) -> Axes:
    """The axes of all tensors of a nested value, by path.

    Raises:
        NoAxis: there is none, or the values are not built alike.
    """
    first, second = dict(tensors_in(one)), dict(tensors_in(two))
    if first.keys() != second.keys():
        raise NoAxis(f"{len(first)} tensors become {len(second)} for two pictures")
    return {path: axis_of(tensor, second[path]) for path, tensor in first.items()}


def repeated(value: Any, axes: Axes, copies: int, *, real: bool = True) -> Any:
    """A nested value of one picture as it would be for `copies` of it."""
    tensors = dict(tensors_in(value))
    return rebuilt(
        value, {path: axis.repeated(tensors[path], copies, real=real) for path, axis in axes.items()}
    )


def first(value: Any, axes: Axes) -> Any:
    """What a nested value of two copies of a picture holds for the first, a copy."""
    tensors = dict(tensors_in(value))
    return rebuilt(value, {path: axis.first(tensors[path]) for path, axis in axes.items()})


def difference(one: Any, other: Any) -> float:
    """The largest difference of two nested values, as a share of the largest of each tensor; 0 where equal.

    Infinite where they are not built alike.
    """
    first, second = dict(tensors_in(one)), dict(tensors_in(other))
    if first.keys() != second.keys() or any(first[path].shape != second[path].shape for path in first):
        return float("inf")
    return max((_difference(first[path], second[path]) for path in first), default=0.0)


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal but for rounding; in half precision that is coarse."""
    return difference(one, other) <= (_TOLERANCE_HALF if is_half(one) else _TOLERANCE)


def is_half(value: Any) -> bool:
    """Whether any tensor of a nested value is in half precision."""
    return any(tensor.dtype in (torch.float16, torch.bfloat16) for _, tensor in tensors_in(value))


def _difference(one: Tensor, other: Tensor) -> float:
    # What is equal, infinities and not-a-numbers among it, differs by nothing.
    equal = (one == other) | ((one != one) & (other != other))
    if equal.all():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - other.to(wide))[~equal].abs().max()
    largest = torch.cat([one.flatten(), other.flatten()]).to(wide).abs().nan_to_num(0.0, 0.0).max()
    share = float(apart / largest)
    return share if share == share else float("inf")
