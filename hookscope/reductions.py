"""One tensor reduced to what is kept of it, by channel, in about the time that reading it a few times takes.

The kernels are chosen for a CPU, where `var_mean` and `vector_norm` along an axis take ten times as long: plain sums
and extremes, every temporary in one buffer that stays in the cache. Sums are float32 within a block, about a shift,
and float64 beyond it. What is not finite is counted and left out. Knows no layer, and keeps nothing between two
tensors but the buffer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.streaming import Histogram, Partial, binned

_BLOCK = 1 << 20
"""Entries of a block: 4 MiB of float32."""
_ROWS = 4096
# Below this a tensor is reduced in float64 at once: quicker than to be clever.
_SMALL = 1 << 15
_SHIFT_FROM = 64

Bounds = tuple[float, float]


def is_measurable(tensor: Tensor) -> bool:
    """Whether the values are real numbers that lie in memory, one after the other."""
    return not (
        tensor.is_complex() or tensor.is_quantized or tensor.is_sparse or tensor.device.type == "meta"
    )


class Sampler:
    """Draws values of tensors at places that only a seed, a name and the pictures' numbers decide.

    Each picture's part of the tensor is cut into `most` pieces of one size, and a value is drawn from each.
    """

    def __init__(self, seed: int = 0, most: int = 2048) -> None:
        self._seed = seed
        self._most = most

    def sample(self, tensor: Tensor, name: str, numbers: Sequence[int]) -> Histogram:
        """A histogram of finite values of the tensor.

        Args:
            tensor: of real numbers; its first axis is the pictures', or a whole multiple of them.
            name: of the place.
            numbers: of the pictures in the data set.
        """
        pictures = len(numbers) if numbers and tensor.dim() and tensor.shape[0] % len(numbers) == 0 else 1
        rows = _in_memory_order(tensor).reshape(pictures, -1)
        entries = rows.shape[1]
        if entries > self._most:
            where = torch.from_numpy(self._positions(entries, name, _named(numbers, pictures)))
            rows = rows.gather(1, where.to(rows.device))
        drawn = rows.detach().flatten().cpu()
        values = (drawn.double() if drawn.dtype == torch.bfloat16 else drawn).numpy()
        kept = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        with np.errstate(over="ignore"):
            return Histogram(binned(kept.astype(np.float32)), complete=entries <= self._most)

    def _positions(self, entries: int, name: str, numbers: Sequence[str]) -> NDArray[np.int64]:
        """(pictures, most), ascending in every row."""
        starts = [_hashed(self._seed, name, number) for number in numbers]
        piece = np.arange(self._most, dtype=np.uint64)
        drawn = _mixed(np.array(starts, dtype=np.uint64)[:, None] + piece * _GOLDEN)
        share = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.minimum((piece + share) * (entries / self._most), entries - 1).astype(np.int64)


def _named(numbers: Sequence[int], pictures: int) -> Sequence[str]:
    return [*map(str, numbers)] if len(numbers) == pictures else [",".join(map(str, numbers))]


def _hashed(*words: object) -> int:
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The pictures first, all else as it lies in memory, where a view will do."""
    last = tensor.movedim(1, -1) if tensor.dim() > 2 else tensor
    return last if last.is_contiguous() else tensor


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
        least, most = _extremes(block)
        if not bool((sums.sum() + least.sum() + most.sum()).isfinite()):
            self._add_finite(tally, block)
            return
        squares = self._sums(centred.mul_(centred))
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

    def _add_finite(self, tally: _Tally, block: Tensor) -> None:
        """The slow way, for a block with something that is not finite."""
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
        return tensor.reshape(1, 1, -1)
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
