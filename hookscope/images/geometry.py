"""Where the model's crop lies in the original picture. Numbers only: it never sees a picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """Where the model's input lies in the original picture.

    `original`: (width, height) in pixels, after EXIF orientation. `box`: (left, top, right, bottom) in
    original pixels, fractions allowed, outside the picture where the crop was padded. `size`: (width, height)
    of the input.
    """

    original: tuple[int, int]
    box: tuple[float, float, float, float]
    size: tuple[int, int]
