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

    @classmethod
    def whole(cls, width: int, height: int) -> View:
        """The view of a model that is given the picture uncropped and at its own size, in pixels."""
        return cls((width, height), (0.0, 0.0, float(width), float(height)), (width, height))
