"""A sample of a tensor's values, for a histogram: drawn at places that no batch size, order or process changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.streaming import Histogram, binned

_MOST_FLOAT32 = float(np.finfo(np.float32).max)


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
        rows = len(tensor) if tensor.dim() else 1
        pictures = len(numbers) if numbers and rows % len(numbers) == 0 else 1
        entries = tensor.numel() // pictures
        complete = entries <= self._most
        if complete:
            return Histogram(_counted(tensor), complete)
        where = self._positions(entries, name, _named(numbers, pictures))
        return Histogram(_counted(_taken(tensor, where)), complete)

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


def _taken(tensor: Tensor, where: NDArray[np.int64]) -> Tensor:
    """The entries at places in each picture, (pictures, n), in the order of the axes, however they lie in memory."""
    pictures = len(where)
    if tensor.is_contiguous():
        return tensor.view(pictures, -1).gather(1, torch.from_numpy(where).to(tensor.device))
    rest = (where + np.arange(pictures)[:, None] * (tensor.numel() // pictures)).ravel()
    places = np.zeros_like(rest)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        rest, before = rest // size, rest
        places += (before - rest * size) * stride
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,))
    return memory.gather(0, torch.from_numpy(places).to(tensor.device))


def _counted(tensor: Tensor) -> NDArray[np.int64]:
    found = tensor.flatten().cpu()
    values = (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    kept = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if kept.dtype != np.float32:
        kept = np.clip(kept.astype(np.float64), -_MOST_FLOAT32, _MOST_FLOAT32).astype(np.float32)
    return binned(kept)
