"""Letters as pixels: a font that is always there, widths, line wrapping, and text as a grey mask.

It must not know where the text goes or in which colour.
"""

from __future__ import annotations

import unicodedata
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

AnyFont = ImageFont.FreeTypeFont | ImageFont.ImageFont

_PLAIN = str.maketrans({"×": "x", "·": "-", "…": "~"})


def mask(text: str, size_px: int) -> NDArray[np.uint8]:
    """One line of text: (line height, width) uint8, 0 paper to 255 ink."""
    picture = Image.new("L", (max(width(text, size_px), 1), line_height(size_px)), 0)
    ImageDraw.Draw(picture).text((0, 0), _drawable(text), fill=255, font=font(size_px))
    return np.asarray(picture)


def width(text: str, size_px: int) -> int:
    """Width of one line in pixels."""
    return int(np.ceil(font(size_px).getlength(_drawable(text))))


@cache
def line_height(size_px: int) -> int:
    """Height of a line in pixels, from the top of the highest letter to the foot of the lowest."""
    face = font(size_px)
    if isinstance(face, ImageFont.FreeTypeFont):
        return sum(face.getmetrics())
    return int(face.getbbox("Ag")[3])


def wrap(text: str, size_px: int, width_px: int) -> list[str]:
    """The text in lines of at most `width_px`: broken at spaces, inside a word only where it is too long."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if width(joined, size_px) <= width_px:
            lines[-1] = joined
            continue
        pieces = _broken(word, size_px, width_px)
        lines[-1:] = [lines[-1], *pieces] if lines[-1] else pieces
    return lines


@cache
def font(size_px: int) -> AnyFont:
    """DejaVu Sans as matplotlib ships it, else Pillow's own font, else its bitmap font of one size."""
    path = _dejavu()
    if not features.check("freetype2"):
        return ImageFont.load_default()
    if path is None:
        return ImageFont.load_default(size_px)
    # The basic layout engine is always there; Raqm, where installed, would place letters differently.
    return ImageFont.truetype(path, size_px, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1)
def _dejavu() -> str | None:
    spec = find_spec("matplotlib")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return str(path) if path.is_file() else None


@lru_cache(maxsize=4096)
def _drawable(text: str) -> str:
    """The text without control characters and, for the lesser fonts, without letters they lack."""
    text = "".join(" " if unicodedata.category(letter).startswith("C") else letter for letter in text)
    if _dejavu() is not None and features.check("freetype2"):
        return text
    plain = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return plain.encode("ascii", "replace").decode("ascii")


def _broken(word: str, size_px: int, width_px: int) -> list[str]:
    pieces = [""]
    for letter in word:
        if pieces[-1] and width(pieces[-1] + letter, size_px) > width_px:
            pieces.append("")
        pieces[-1] += letter
    return pieces
