"""Pictures and arrays as bytes, the same bytes for the same values. It must not open files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save

from hookscope.errors import UsageError, near_misses

FORMATS = ("png", "jpg", "webp")
"""What a picture may be written as; also the file's ending."""

_JPEG_QUALITY = 90
_PNG_LEVEL = 3


def picture(image: Image.Image, kind: str) -> bytes:
    """The picture encoded as one of `FORMATS`; WebP is lossless.

    Raises:
        UsageError: there is no such format.
    """
    if kind == "png":
        return _saved(image, "PNG", compress_level=_PNG_LEVEL)
    if kind == "jpg":
        return _saved(image.convert("RGB"), "JPEG", quality=_JPEG_QUALITY)
    if kind == "webp":
        return _saved(image.convert("RGB"), "WEBP", lossless=True, method=2)
    hint = near_misses(kind, FORMATS) or f"choose from {', '.join(FORMATS)}"
    raise UsageError(f"no picture format is called {kind!r}", hint)


def npy(values: NDArray[Any]) -> bytes:
    """The array in numpy's own format, for `numpy.load`."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(values), allow_pickle=False)
    return buffer.getvalue()


def safetensors(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """The named arrays as one safetensors file."""
    # Safetensors writes a strided array's memory as it lies, so every array must be contiguous.
    whole = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    encoded: bytes = save(whole, metadata=dict(metadata))
    return encoded


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
