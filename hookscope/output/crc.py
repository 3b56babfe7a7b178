"""CRC-32C of bytes, as TensorBoard's files carry it: whole blocks at once by numpy. It must not open files."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits reversed
_BLOCK = 512
_SEED = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8

Words = NDArray[np.uint32]


def masked(data: bytes) -> int:
    """The masked checksum of record files: turned right by 15 bits, a constant added, so that it is none of itself."""
    value = crc32c(data)
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, Appendix B.4: that of `b"123456789"` is 0xE3069283."""
    whole = len(data) // _BLOCK * _BLOCK
    state = _SEED
    if whole:
        blocks = np.frombuffer(data, np.uint8, whole).reshape(-1, _BLOCK)
        for part in _each(blocks):
            state = _moved(state) ^ part
    table = _byte_table()[0]
    for byte in data[whole:]:
        state = table[(state ^ byte) & 0xFF] ^ state >> 8
    return state ^ _SEED


def _each(blocks: NDArray[np.uint8]) -> list[int]:
    """The remainder that each block leaves when it begins with none: all blocks advance by a byte together."""
    table = _byte_table()[1]
    state = np.zeros(len(blocks), np.uint32)
    for column in np.ascontiguousarray(blocks.T):
        state = table[(state ^ column) & 0xFF] ^ (state >> np.uint32(8))
    return [int(part) for part in state]


def _moved(state: int) -> int:
    """The remainder behind a block of zeros: a linear map, taken byte by byte."""
    first, second, third, fourth = _block_table()
    return first[state & 0xFF] ^ second[state >> 8 & 0xFF] ^ third[state >> 16 & 0xFF] ^ fourth[state >> 24]


@cache
def _byte_table() -> tuple[list[int], Words]:
    """What one byte leaves, for each of the 256: as whole numbers for Python, and as an array."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> np.uint32(1) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return table.tolist(), table


@cache
def _block_table() -> list[list[int]]:
    """Where a block of zeros takes each value of each of the four bytes of a remainder."""
    table = _byte_table()[1]
    state = (np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]).ravel()
    for _ in range(_BLOCK):
        state = table[state & 0xFF] ^ (state >> np.uint32(8))
    return [row.tolist() for row in state.reshape(4, 256)]
