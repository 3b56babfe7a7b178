"""Sizes of many tensors at once, left on their devices until they are read; no hooks, no names, no judgement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookscope.magnitudes import Magnitude, magnitude

# Entries whose float32 squares are summed together; the sums are finished in float64.
_BLOCK = 65536
# Below this, squares may have left float32's range unseen.
_SAFE_NORM = 1e-15


@dataclass
class Sizes:
    """Norms of a list of tensors: `parts` are (positions in the list, (orders, positions) float64 on a device).

    `orders`: L2 first. `counts`: entries, `None` where there was no tensor. `non_finite`: by position, where counted.
    """

    orders: tuple[float, ...]
    counts: list[int | None]
    parts: list[tuple[list[int], Tensor]] = field(default_factory=list)
    non_finite: dict[int, int] = field(default_factory=dict)


def orders_for(norm: float) -> tuple[float, ...]:
    """The norms to be measured: L2 always, which the RMS is of."""
    return (2.0,) if norm == 2 else (2.0, norm)


def sizes(tensors: Sequence[Tensor | None], orders: tuple[float, ...]) -> Sizes:
    """The sizes of plain tensors of any shape, layout, float dtype and device."""
    found = Sizes(orders, [None if one is None else one.numel() for one in tensors])
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for at, tensor in enumerate(tensors):
        if tensor is not None and tensor.layout != torch.strided:
            tensor = tensor.coalesce().values()  # an embedding's sparse gradient
        if tensor is not None and not tensor.is_meta:
            groups.setdefault((tensor.device, tensor.dtype), []).append((at, tensor.detach()))
    for (device, _), members in groups.items():
        places, parts = [at for at, _ in members], [flat(tensor) for _, tensor in members]
        norms = torch.stack([_norms(parts, order) for order in orders])
        if device.type == "cpu":
            _refine(found, norms, members)
        found.parts.append((places, norms))
    return found


def read(tensors: Iterable[Tensor]) -> list[list[float]]:
    """The values of every tensor, flattened: one transfer, and so one synchronisation, for each device."""
    tensors = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(at)
    values: list[list[float]] = [[] for _ in tensors]
    for places in by_device.values():
        whole = torch.cat([tensors[at].reshape(-1).to(wide(tensors[at])) for at in places]).tolist()
        for at in places:
            values[at], whole = whole[: tensors[at].numel()], whole[tensors[at].numel() :]
    return values


def magnitudes(found: Sizes, values: Sequence[Sequence[float]]) -> list[Magnitude | None]:
    """The sizes as numbers; `values`: what `read` made of the tensors in `parts`, in their order."""
    made: list[Magnitude | None] = [None] * len(found.counts)
    for (places, _), row in zip(found.parts, values, strict=True):
        for column, at in enumerate(places):
            norms = {order: row[line * len(places) + column] for line, order in enumerate(found.orders)}
            count = found.counts[at]
            if count is not None:
                made[at] = _one(norms, count, found.non_finite.get(at))
    return made


def moments(tensor: Tensor) -> tuple[Tensor, int, int]:
    """(sum, L2 norm, largest absolute entry) as (3,) on the tensor's device; entries; non-finite ones, -1 unknown."""
    entries = flat(tensor)
    if not entries.numel():
        return torch.zeros(3, dtype=wide(tensor), device=tensor.device), 0, 0
    half = entries.dtype.itemsize < 4
    total = entries.sum(dtype=torch.float32) if half else entries.sum()
    low, high = entries.aminmax()
    norm, non_finite = _norms([entries], 2.0)[0], -1
    if tensor.device.type == "cpu":
        value = float(norm)
        non_finite = 0
        if not (math.isfinite(value) and value > _SAFE_NORM):
            exact = magnitude(entries, largest=False)
            norm, non_finite = torch.tensor(exact.norm, dtype=torch.float64), exact.non_finite
    kind = wide(tensor)
    return (
        torch.stack([total.to(kind), norm.to(kind), torch.maximum(low.abs(), high.abs()).to(kind)]),
        entries.numel(),
        non_finite,
    )


def flat(tensor: Tensor) -> Tensor:
    """The entries in any order: a view where the memory is dense, whatever the order of its axes."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1)


def wide(tensor: Tensor) -> torch.dtype:
    """The widest float type of the tensor's device."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _norms(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norm of each, (n,) in the widest type."""
    if tensors[0].device.type != "cpu":
        # Reduced in the wide type, no square can leave the range.
        return torch.stack(torch._foreach_norm(list(tensors), order, dtype=wide(tensors[0])))
    narrow = tensors[0].dtype.itemsize < 4
    blocks = [block for tensor in tensors for block in torch.split(tensor, _BLOCK)]
    kind = torch.float32 if narrow else None
    if order == math.inf:
        # Ten times as fast as the norm of that order.
        found = [torch.maximum(low.abs(), high.abs()) for low, high in map(_range, blocks)]
    else:
        found = list(torch._foreach_norm(blocks, order, dtype=kind))
    return _joined(torch.stack(found).double(), tensors, order)


def _range(block: Tensor) -> tuple[Tensor, Tensor]:
    if not block.numel():
        return block.new_zeros(()), block.new_zeros(())
    block = block.abs() if block.is_complex() else block
    low, high = block.aminmax()
    return low, high


def _joined(blocks: Tensor, tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norms of whole tensors, of those of their blocks; an empty tensor is one block."""
    each = [max(1, -(-tensor.numel() // _BLOCK)) for tensor in tensors]
    if len(blocks) == len(tensors):
        return blocks
    owner = torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each))
    whole = torch.zeros(len(each), dtype=blocks.dtype)
    if order == math.inf:
        return whole.scatter_reduce_(0, owner, blocks, "amax")
    return whole.index_add_(0, owner, blocks**order) ** (1 / order)


def _refine(found: Sizes, norms: Tensor, members: Sequence[tuple[int, Tensor]]) -> None:
    """Norms that float32 could not hold, made again; and how many entries are not finite."""
    odd = ~(norms[0].isfinite() & (norms[0] > _SAFE_NORM))
    for column in odd.nonzero().flatten().tolist():
        at, tensor = members[column]
        if not bool(norms[0, column]) and not bool(tensor.any()):
            continue  # exactly zero, as of a dead layer: that is right, and soon said
        exact = magnitude(tensor, largest=math.inf in found.orders, l1=1.0 in found.orders)
        found.non_finite[at] = exact.non_finite
        norms[:, column] = torch.tensor([exact.of(order) for order in found.orders], dtype=norms.dtype)


def _one(norms: dict[float, float], count: int, non_finite: int | None) -> Magnitude:
    if non_finite is None:
        non_finite = 0 if math.isfinite(norms[2.0]) else -1
    return Magnitude(norms[2.0], norms.get(math.inf), non_finite, count, norms.get(1.0))
