"""One tensor reduced to what is kept of it, by channel, in about the time that reading it a few times takes.

The kernels are chosen for a CPU, where `var_mean` and `vector_norm` along an axis take ten times as long: plain sums
and extremes, every temporary in one buffer that stays in the cache. Sums are float32 within a block, about a shift,
and float64 beyond it. What is not finite is counted and left out. Knows no layer, and keeps nothing between two
tensors but the buffer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hookscope.streaming import Partial

_BLOCK = 1 << 20
"""Entries of a block: 4 MiB of float32."""
_ROWS = 4096
# Below this a tensor is reduced in float64 at once: quicker than to be clever.
_SMALL = 1 << 15
_SHIFT_FROM = 64
# Of a block: squares that float32 cannot hold, below 1e-38, are a millionth of this at most.
_LEAST_SQUARES = 1e-26

Bounds = tuple[float, float]


def is_measurable(tensor: Tensor) -> bool:
    """Whether the values are real numbers that lie in memory, one after the other."""
    return not (
        tensor.is_complex() or tensor.is_quantized or tensor.is_sparse or tensor.device.type == "meta"
    )


class Reducer:
    """Reduces tensors, one after the other; holds a buffer of two blocks."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def reduce(self, tensor: Tensor, axis: int | None, bounds: Bounds | None = None) -> Partial:
        """What the tensor has, by the channels along `axis`; all as one channel where that is `None`.

        Args:
            tensor: of any real dtype, strides and device; not written to.
            axis: of the channels.
            bounds: entries not above the first or not below the second are counted as saturated.
        """
        view = _as_planes(tensor, axis)
        channels = view.shape[1]
        if not tensor.numel():
            return _nothing(channels, bounds)
        tally = _Tally(channels, bounds, view)
        for block in _blocks(view):
            self._add(tally, block)
        return tally.partial()

    def _add(self, tally: _Tally, block: Tensor) -> None:
        wide = _accumulating(block)
        work = self._buffer(block.device, wide, block.numel())[: block.numel()].view(block.shape)
        if block.dtype != wide:
            block = block.to(wide)
        centred = torch.sub(block, tally.shift, out=work)
        sums = self._sums(centred)
        squares = self._sums(centred.mul_(centred))
        least, most = _extremes(block)
        if not _in_range(sums, squares, least, most):
            self._add_widely(tally, block)
            return
        count = block.numel() // block.shape[1]
        alive = self._sums(torch.gt(block, self.threshold, out=work))
        tally.add(count, sums, squares, least, most, alive)
        tally.zeros += self._zeros(block, work, least, most, alive, count)
        if tally.bounds is not None:
            low, high = tally.bounds
            tally.saturate(
                self._sums(torch.le(block, low, out=work)), self._sums(torch.ge(block, high, out=work))
            )

    def _zeros(
        self, block: Tensor, work: Tensor, least: Tensor, most: Tensor, alive: Tensor, count: int
    ) -> int:
        """How many entries are 0; known already where a sign or the count above 0 says it."""
        lowest, highest = float(least.min()), float(most.max())
        if lowest > 0 or highest < 0:
            return 0
        if lowest == 0 and self.threshold == 0:
            return block.numel() - int(alive.double().sum())
        return int(self._sums(torch.eq(block, 0, out=work)).double().sum())

    def _add_widely(self, tally: _Tally, block: Tensor) -> None:
        """The slow way, in float64, for a block with something that is not finite or whose squares are not float32."""
        finite = block.isfinite()
        axes = (0, 2)
        values = block.double()
        kept = torch.where(finite, values - tally.shift, 0.0)
        found = (
            kept.sum(axes),
            kept.square().sum(axes),
            torch.where(finite, values, math.inf).amin(axes),
            torch.where(finite, values, -math.inf).amax(axes),
            (finite & (values > self.threshold)).sum(axes),
        )
        tally.add(finite.sum(axes), *found)
        tally.zeros += int((values == 0).sum())
        tally.non_finite += int((~finite).sum())
        if tally.bounds is not None:
            low, high = tally.bounds
            tally.saturate((finite & (values <= low)).sum(axes), (finite & (values >= high)).sum(axes))

    def _sums(self, planes: Tensor) -> Tensor:
        """(C,) of (N, C, P), over the other two."""
        if planes.shape[2] > 1:
            return planes.sum((0, 2))
        return planes[:, :, 0].sum(0)

    def _buffer(self, device: torch.device, dtype: torch.dtype, entries: int) -> Tensor:
        held = self._buffers.get((device, dtype))
        if held is None or held.numel() < entries:
            held = self._buffers[device, dtype] = torch.empty(
                max(entries, _BLOCK), dtype=dtype, device=device
            )
        return held


class _Tally:
    """Sums of blocks of one tensor."""

    def __init__(self, channels: int, bounds: Bounds | None, view: Tensor) -> None:
        self.bounds = bounds
        self.shift = _shift(view)  # (C, 1)
        self.zeros = self.non_finite = 0
        self._sums = torch.zeros(3, channels, dtype=torch.float64, device=view.device)
        self._counts = torch.zeros(3, channels, dtype=torch.int64, device=view.device)
        self._least = torch.full((channels,), math.inf, dtype=torch.float64, device=view.device)
        self._most = torch.full((channels,), -math.inf, dtype=torch.float64, device=view.device)

    def add(
        self, count: int | Tensor, sums: Tensor, squares: Tensor, least: Tensor, most: Tensor, alive: Tensor
    ) -> None:
        """One more block."""
        self._sums[0] += sums
        self._sums[1] += squares
        self._counts[0] += count
        self._counts[1] += alive.long()
        self._least = torch.minimum(self._least, least.double())
        self._most = torch.maximum(self._most, most.double())

    def saturate(self, low: Tensor, high: Tensor) -> None:
        """Counts at the two bounds."""
        self._counts[2] += low.long() + high.long()

    def partial(self) -> Partial:
        """All of it."""
        count, alive, saturated = self._counts.cpu().numpy()
        sums, squares = self._sums[0].cpu().numpy(), self._sums[1].cpu().numpy()
        many = np.maximum(count, 1)
        step = sums / many
        return Partial(
            count=count,
            mean=self.shift[:, 0].double().cpu().numpy() + step,
            scatter=np.maximum(squares - sums * step, 0.0),
            minimum=self._least.cpu().numpy(),
            maximum=self._most.cpu().numpy(),
            alive=alive,
            zeros=self.zeros,
            non_finite=self.non_finite,
            saturated=saturated if self.bounds is not None else None,
        )


def _as_planes(tensor: Tensor, axis: int | None) -> Tensor:
    """(N, C, P): a view where one will do; P is 1 where the channels lie next to each other."""
    if axis is None or tensor.dim() < 2:
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        return tensor.permute(by_stride).reshape(1, 1, -1)
    axis %= tensor.dim()
    last = tensor.movedim(axis, -1)
    if axis == tensor.dim() - 1 or last.is_contiguous():
        return last.reshape(-1, last.shape[-1], 1)
    return tensor.flatten(2) if axis == 1 else last.reshape(-1, last.shape[-1], 1)


def _blocks(view: Tensor) -> list[Tensor]:
    """Parts of (N, C, P) of about a block's entries, whole planes where they fit."""
    _, channels, positions = view.shape
    if positions == 1:
        return list(torch.split(view, max(1, min(_ROWS, _BLOCK // channels))))
    together = max(1, _BLOCK // (channels * positions))
    width = max(1, _BLOCK // channels)
    parts = torch.split(view, together)
    return [
        part for whole in parts for part in (torch.split(whole, width, 2) if positions > width else (whole,))
    ]


def _in_range(sums: Tensor, squares: Tensor, least: Tensor, most: Tensor) -> bool:
    """Whether all was finite, and no channel that varies has squares too small to be told from 0."""
    lost = ((squares < _LEAST_SQUARES) & (least < most)).any()
    return bool((sums.sum() + squares.sum()).isfinite() & ~lost)


def _accumulating(block: Tensor) -> torch.dtype:
    if block.numel() <= _SMALL or block.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return torch.float64 if block.device.type != "mps" else torch.float32
    return torch.float32


def _shift(view: Tensor) -> Tensor:
    """(C, 1): about each channel's mean, from a few entries of the first picture; of float32's precision."""
    count, channels, positions = view.shape
    if not view.numel():
        return torch.zeros(channels, 1, device=view.device)
    some = view[:: max(1, count // _SHIFT_FROM), :, 0] if positions == 1 else _some_positions(view)
    return some.float().mean(0).nan_to_num(0.0, 0.0, 0.0).unsqueeze(1)


def _some_positions(view: Tensor) -> Tensor:
    return view[0, :, :: max(1, view.shape[2] // _SHIFT_FROM)].T


def _extremes(planes: Tensor) -> tuple[Tensor, Tensor]:
    if planes.shape[2] > 1:
        return planes.amin((0, 2)), planes.amax((0, 2))
    return planes[:, :, 0].amin(0), planes[:, :, 0].amax(0)


def _nothing(channels: int, bounds: Bounds | None) -> Partial:
    none, nan = np.zeros(channels, dtype=np.int64), np.full(channels, 0.0)
    most = np.full(channels, np.inf)
    return Partial(none, nan, nan, most, -most, none, 0, 0, none if bounds is not None else None)
