"""What is in a picture file: any kind Pillow reads becomes an upright, opaque 8-bit RGB picture.

All that Pillow may throw or warn of ends here, as one `ImageError` in one line. It never resizes, and it
decodes in full: drafts and thumbnails would change the numbers. Safe to call from several threads at once.
"""

from __future__ import annotations

import logging
import re
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from hookscope.errors import ImageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Pillow logs some damage as an error, which Python prints to stderr where no program has set logging up.
logging.getLogger("PIL").addHandler(logging.NullHandler())

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What sets a picture upright, by EXIF orientation (Exif 2.32, tag 0x0112)."""

_NOT_PICTURES = frozenset(
    {".bufr", ".grib", ".h5", ".hdf", ".iim", ".mpg", ".mpeg", ".eps", ".ps", ".emf", ".wmf"}
)
"""Registered with Pillow, but only recognised by it, or drawn by another program: no search takes them."""

_MAX_REASON = 120


def decode(file: Path, path: str) -> Image.Image:
    """The picture in `file` as RGB, uint8, upright; the first frame of many. `path` is its name in errors.

    EXIF orientation is applied. Transparency is composited on white. 16-bit grey, integer and float pictures
    are scaled from their own finite visible range to 0..255 (a constant one is black, NaN is black). Pictures
    of more than twice `PIL.Image.MAX_IMAGE_PIXELS` (179 million unless changed) are refused.

    Raises:
        ImageError: the file is missing, broken, cut short, too large, or no picture; one line says which.
    """
    try:
        with _silence:
            return _read(file)
    except Exception as error:  # its parsers throw what they trip over, from struct.error to RecursionError
        raise ImageError(f"cannot read picture {path!r}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why something could not be read, in a few words and one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not a picture, or of a kind Pillow does not know"
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    words = "".join(mark if mark.isprintable() else " " for mark in str(error))
    words = " ".join(words.split())
    return words[:_MAX_REASON] or type(error).__name__


@cache
def readable_extensions() -> frozenset[str]:
    """Extensions of the kinds of pictures Pillow can decode by itself, lower case, with the dot."""
    kinds = Image.registered_extensions()
    return frozenset(extension for extension, kind in kinds.items() if kind in Image.OPEN) - _NOT_PICTURES


class _Silence:
    """Pillow's warnings are ignored while any thread is inside; other warnings and filters stay."""

    # `warnings.catch_warnings` is no help, as its own documentation says: it swaps the whole list of filters,
    # and threads that leave in another order than they came leave the wrong list behind.
    _RULE = ("ignore", None, Warning, re.compile(r"PIL(\.|$)"), 0)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            # Opening a file while another thread loads plugins may miss a plugin; so load all of them first.
            Image.init()
            self._inside += 1
            if self._RULE not in warnings.filters:
                _filters().insert(0, self._RULE)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            while not self._inside and self._RULE in warnings.filters:
                _filters().remove(self._RULE)


_silence = _Silence()


def _filters() -> list[Any]:
    return cast("list[Any]", warnings.filters)


def _read(file: Path) -> Image.Image:
    _refuse_unreadable(file)
    with Image.open(file) as image:
        key_scale = _key_scale(image)
        image.load()
        turn = _TURNS.get(_orientation(image))
        picture = _to_rgb(image, key_scale)
    # What is left in `info` (EXIF, profiles, a colour key) describes the file; savers would write it again.
    picture.info = {}
    return picture if turn is None else picture.transpose(turn)


def _refuse_unreadable(file: Path) -> None:
    size = file.stat().st_size
    if file.is_dir():
        raise ValueError("it is a directory")
    if not file.is_file():  # opening a pipe would wait for ever
        raise ValueError("not a regular file")
    if not size:
        raise ValueError("the file is empty")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where the tag is missing or the EXIF block is damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # as many kinds as decode() meets; the pixels are good whatever the block says
        return 1


def _to_rgb(image: Image.Image, key_scale: float) -> Image.Image:
    """A new picture, also where nothing is to be converted."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _ranged(image)
    if image.has_transparency_data:
        return _on_white(image, key_scale)
    return image.convert("RGB")


def _on_white(image: Image.Image, key_scale: float) -> Image.Image:
    _rescale_key(image, key_scale)
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _key_scale(image: ImageFile.ImageFile) -> float:
    """What a colour key in the file must be multiplied by to be in 0..255, as Pillow delivers the pixels."""
    # Pillow scales the pixels of a PNG, not its tRNS key; the depth is known only until the pixels are read.
    depth = str(image.tile[0][3]) if image.tile else ""
    return {"L;2": 85.0, "L;4": 17.0, "RGB;16B": 1 / 256}.get(depth, 1.0)


def _rescale_key(image: Image.Image, scale: float) -> None:
    key: Any = image.info.get("transparency")
    if scale != 1.0 and isinstance(key, int):
        image.info["transparency"] = int(key * scale)
    elif scale != 1.0 and isinstance(key, tuple):
        image.info["transparency"] = tuple(int(value * scale) for value in key)


def _ranged(image: Image.Image) -> Image.Image:
    """A grey picture of integers or floats, its own range spread over 0..255, a transparent value white."""
    values = np.asarray(image).astype(np.float64)
    key: Any = image.info.get("transparency")
    shown = values != key if isinstance(key, int) else np.ones(values.shape, bool)
    grey = np.where(shown, _spread(values, shown), np.uint8(255))
    return Image.fromarray(grey).convert("RGB")


def _spread(values: NDArray[np.float64], shown: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """(h, w) uint8: the finite range of the `shown` values over 0..255; infinities at the ends, NaN at 0."""
    finite = values[shown & np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    width = high - low if high > low else 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.nan_to_num((values - low) * (255.0 / width), nan=0.0, posinf=255.0, neginf=0.0)
    grey: NDArray[np.uint8] = np.rint(scaled.clip(0.0, 255.0)).astype(np.uint8)
    return grey
