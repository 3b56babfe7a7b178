"""TensorBoard's event files: scalars, histograms, pictures and text under tags and steps.

The only code that writes them. No value makes it fail: what is not finite or beyond float32 is counted, and clipped
where it must be. It must not know what is written, and needs the extra `tensorboard` for the form of messages alone.
"""

from __future__ import annotations

import io
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from hookscope.errors import OutputError, UsageError
from hookscope.output.crc import masked

BINS = 64
LARGEST = float(np.finfo(np.float32).max)
"""What TensorBoard can hold: it keeps all numbers as float32."""

_STEPS = 2**63 - 1
_SHOWN = {"PNG", "JPEG", "GIF", "BMP"}  # TensorBoard serves no WebP
_COLOUR_SPACES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_NUMBERS = count()


def is_installed() -> bool:
    """Whether the extra is there."""
    return find_spec("tensorboard") is not None


def check_installed() -> None:
    """Nothing, where event files can be written.

    Raises:
        UsageError: the extra is missing; the hint is how it is installed.
    """
    if not is_installed():
        raise UsageError(
            "TensorBoard's package is not installed", "pip install 'hookscope[tensorboard]' installs it"
        )


class TensorBoard:
    """Writes one event file in a directory, from the first value on; may be used by several threads.

    Every record is on disk when its call returns. Several files in one directory are one run to TensorBoard.
    `non_finite`: values given so far that are `nan` or infinite. `clipped`: finite ones beyond float32, and edges.

    Args:
        directory: made where it is not there; nothing in it is replaced.

    Raises:
        UsageError: the extra is missing.
        OutputError: the directory is a file.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        check_installed()
        self.directory = Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise OutputError(f"{str(directory)!r} is not a directory", "name a directory for TensorBoard")
        self.non_finite = self.clipped = 0
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def scalar(self, tag: str, value: float, step: int = 0) -> None:
        """One number; `nan` and infinity stay what they are, which TensorBoard marks."""
        self.scalars({tag: value}, step)

    def scalars(self, values: Mapping[str, float], step: int = 0) -> None:
        """One number under each tag."""
        self._add([{"tag": tag, "simple_value": self._number(value)} for tag, value in values.items()], step)

    def histogram(self, tag: str, values: ArrayLike, step: int = 0) -> None:
        """The finite values in `BINS` equal bins, of any shape; where others are, their number as `TAG/non-finite`.

        None where no value is finite.
        """
        flat = _floats(values)
        finite = flat if _all_finite(flat) else flat[np.isfinite(flat)]
        self._tell_lost(tag, flat.size - finite.size, step)
        if not finite.size:
            return
        kept = np.clip(finite, -LARGEST, LARGEST) if finite.dtype == np.float64 else finite
        if kept is not finite:
            self._count(clipped=int(np.count_nonzero(kept != finite)))
        counts, edges = _binned(kept)
        sums = kept.sum(dtype=np.float64), np.einsum("i,i->", kept, kept, dtype=np.float64)
        self._add([{"tag": tag, "histo": _histogram(counts, edges, *sums)}], step)

    def counted(
        self, tag: str, counts: ArrayLike, edges: ArrayLike, step: int = 0, *, non_finite: int = 0
    ) -> None:
        """A histogram whose values are counted already.

        `counts`: (B,). `edges`: (B + 1,), ascending; infinite ones at the ends are clipped to their neighbour's size,
        doubled. Bins at the ends that are empty are left out. Sums are those of the bins' middles.
        """
        numbers, bounds = np.asarray(counts, np.float64), np.asarray(edges, np.float64)
        if numbers.ndim != 1 or bounds.shape != (numbers.size + 1,) or np.isnan(bounds).any():
            raise ValueError(f"{numbers.shape} counts do not lie between {bounds.shape} edges")
        self._tell_lost(tag, non_finite, step)
        full = np.flatnonzero(numbers)
        if not full.size:
            return
        first, last = int(full[0]), int(full[-1]) + 1
        numbers, bounds = numbers[first:last], self._bounded(bounds[first : last + 1])
        middles = bounds[:-1] / 2 + bounds[1:] / 2
        sums = (numbers * middles).sum(), (numbers * middles * middles).sum()
        self._add([{"tag": tag, "histo": _histogram(numbers, bounds, *sums)}], step)

    def picture(self, tag: str, data: bytes, step: int = 0) -> None:
        """An encoded picture; one that TensorBoard does not show, such as WebP, is encoded anew as PNG."""
        with Image.open(io.BytesIO(data)) as image:
            size, mode, shown = image.size, image.mode, image.format in _SHOWN
            if not shown:
                data = _as_png(image)
        space = _COLOUR_SPACES.get(mode, 3)
        field = {"width": size[0], "height": size[1], "colorspace": space, "encoded_image_string": data}
        self._add([{"tag": tag, "image": field}], step)

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        """Text that TensorBoard shows as Markdown."""
        encoded = markdown.encode("utf-8", "backslashreplace")
        tensor = {"dtype": 7, "tensor_shape": {}, "string_val": [encoded]}  # 7: DT_STRING
        plugin = {"plugin_data": {"plugin_name": "text"}}
        self._add([{"tag": tag, "tensor": tensor, "metadata": plugin}], step)

    def close(self) -> None:
        """The file is whole; nothing may be written after."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
                self._file = None

    def _number(self, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:  # a whole number that no float can hold
            number = 2 * LARGEST if value > 0 else -2 * LARGEST
        if not math.isfinite(number):
            self._count(non_finite=1)
            return number
        kept = min(max(number, -LARGEST), LARGEST)
        self._count(clipped=int(kept != number))
        return kept

    def _bounded(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """The edges, all finite."""
        inner = edges[np.isfinite(edges)]
        reach = 2 * float(np.abs(inner).max(initial=0.5))
        kept = np.clip(np.clip(edges, -reach, reach), -LARGEST, LARGEST)
        self._count(clipped=int(np.count_nonzero(kept != edges)))
        return kept

    def _tell_lost(self, tag: str, number: int, step: int) -> None:
        if number:
            self._count(non_finite=number)
            self._add([{"tag": f"{tag}/non-finite", "simple_value": float(number)}], step)

    def _count(self, *, non_finite: int = 0, clipped: int = 0) -> None:
        with self._lock:
            self.non_finite += non_finite
            self.clipped += clipped

    def _add(self, values: list[dict[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if values:
            named = [{**value, "tag": _plain(value["tag"])} for value in values]
            step = min(max(int(step), -_STEPS), _STEPS)
            event = Event(wall_time=time.time(), step=step, summary={"value": named})
            with self._lock:
                self._write(event.SerializeToString())

    def _write(self, record: bytes) -> None:
        if self._closed:
            raise RuntimeError("close() was called already")
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write(_framed(record))
            self._file.flush()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(
                f"cannot write {str(self.directory)!r}: {reason}", "name another directory for TensorBoard"
            ) from error

    def _opened(self) -> BinaryIO:
        from tensorboard.compat.proto.event_pb2 import Event

        self.directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # The form of the name is TensorBoard's own; files of one directory are read in the order of their names.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        file = open(self.directory / name, "xb")  # noqa: SIM115 (closed by close())
        file.write(_framed(Event(wall_time=now, file_version="brain.Event:2").SerializeToString()))
        return file


def _framed(record: bytes) -> bytes:
    """The record as it lies in a file: its length and the data, each followed by its checksum."""
    length = struct.pack("<Q", len(record))
    return b"".join((length, struct.pack("<I", masked(length)), record, struct.pack("<I", masked(record))))


def _floats(values: ArrayLike) -> NDArray[Any]:
    """The values in a row, float32 or float64; of complex ones the real parts."""
    flat = np.asarray(values).ravel()
    flat = flat.real if np.iscomplexobj(flat) else flat
    return flat if flat.dtype == np.float32 else flat.astype(np.float64)


def _all_finite(values: NDArray[Any]) -> bool:
    # One number tells nearly always: a sum of finite values may be infinite, and is looked at again.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum(dtype=np.float64)))


def _binned(values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How many finite values lie in each of `BINS` equal bins, and the bins' edges."""
    low, high = float(values.min()), float(values.max())
    largest = max(-low, high)
    if 1e-30 < largest < 1e30 and high - low > 1e-4 * largest:
        counts, edges = np.histogram(values, BINS, (low, high))
        return counts.astype(np.float64), edges.astype(np.float64)
    # np.histogram refuses bins that are narrower than two neighbouring numbers, overflows where their distance does,
    # and gives a single value a range that is none of its own.
    edges = np.linspace(low, high, BINS + 1)
    places = np.searchsorted(edges[1:-1], values, side="right")
    return np.bincount(places, minlength=BINS).astype(np.float64), edges


def _histogram(
    counts: NDArray[np.float64], edges: NDArray[np.float64], total: float, squares: float
) -> dict[str, Any]:
    return {
        "min": float(edges[0]),
        "max": float(edges[-1]),
        "num": float(counts.sum()),
        "sum": float(total),
        "sum_squares": float(squares),
        # Every bin by its upper edge; the first begins at `min`.
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }


def _as_png(image: Image.Image) -> bytes:
    kept = image if image.mode in _COLOUR_SPACES else image.convert("RGB")
    buffer = io.BytesIO()
    kept.save(buffer, "PNG")
    return buffer.getvalue()


def _plain(tag: str) -> str:
    """The tag as valid UTF-8 text, never empty: a lone surrogate of a file's name as its escape."""
    return tag.encode("utf-8", "backslashreplace").decode() or "."
