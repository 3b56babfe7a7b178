"""How large a tensor is: norms that neither overflow nor lose digits, at the speed of reading it once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 65536
# Below this, squares may have left float32's range unseen.
_SAFE_NORM = 1e-15


@dataclass(frozen=True)
class Magnitude:
    """Size of one tensor: L2 norm, largest absolute entry, entries that are not finite, and how many there are.

    `norm` and `largest` are `nan` or `inf` where an entry is; `largest` is `None` where it was not asked for.
    """

    norm: float
    largest: float | None
    non_finite: int
    count: int

    @property
    def rms(self) -> float:
        """Root mean square: norm / sqrt(count); 0 for an empty tensor."""
        return self.norm / math.sqrt(self.count) if self.count else 0.0


def magnitude(tensor: Tensor, *, largest: bool = True) -> Magnitude:
    """L2 norm and non-finite entries of a tensor of any shape, layout and float dtype; `largest` is optional work.

    Blocks of 65,536 entries are summed in float32 and finished in float64: relative error below 1e-6. Entries
    whose squares leave float32's range are measured in float64, relative to the largest.
    """
    flat = _flat(tensor)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    top = _largest(flat) if largest else None
    norm = _blocked_norm(flat) if flat.numel() else 0.0
    if math.isfinite(norm) and norm > _SAFE_NORM:
        return Magnitude(norm, top, 0, flat.numel())
    non_finite = flat.numel() - int(torch.isfinite(flat).sum())
    if not non_finite:
        norm = _scaled_norm(flat)
    return Magnitude(norm, top, non_finite, flat.numel())


def joined(one: Magnitude | None, other: Magnitude) -> Magnitude:
    """The magnitude of two tensors laid end to end; the largest entry is not kept."""
    if one is None:
        return other
    return Magnitude(
        math.hypot(one.norm, other.norm), None, one.non_finite + other.non_finite, one.count + other.count
    )


def scaled(size: Magnitude, factor: float) -> Magnitude:
    """The magnitude of the tensor times a positive factor."""
    largest = None if size.largest is None else size.largest * factor
    return Magnitude(size.norm * factor, largest, size.non_finite, size.count)


def _flat(tensor: Tensor) -> Tensor:
    """The entries in any order: a view where the memory is dense, whatever the order of its axes."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1)


def _blocked_norm(flat: Tensor) -> float:
    blocks = torch._foreach_norm(torch.split(flat, _BLOCK))
    return float(torch.linalg.vector_norm(torch.stack(blocks).double()))


def _scaled_norm(flat: Tensor) -> float:
    """The norm of entries whose squares leave the range of their type."""
    exact = flat.double()
    top = float(exact.abs().max()) if flat.numel() else 0.0
    return top * float(torch.linalg.vector_norm(exact / top)) if top else 0.0


def _largest(flat: Tensor) -> float:
    if not flat.numel():
        return 0.0
    low, high = (float(value) for value in flat.aminmax())
    return math.nan if math.isnan(low) or math.isnan(high) else max(abs(low), abs(high))
