"""From a picture to the tensor a model expects, and back to where that tensor lies in the picture.

Gives the very numbers of torchvision's own transforms for pictures. It reads no file and knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hookscope.errors import ImageError, ModelError, UsageError
from hookscope.images import View

Size = int | tuple[int, int]

PLAIN_SOURCE = "values 0..1 at the picture's size"

_TENSORS = "from Python any tensor will do: hookscope.feature_maps(model, x, layers)"

_MAX_PIXELS = 2**28  # a picture of 1 x 60000 would be enlarged to gigabytes
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "nearest-exact": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
_FIT = ("ImageClassification", "SemanticSegmentation")
_UNFIT = {
    "VideoClassification": "takes video clips",
    "OpticalFlow": "takes pairs of pictures",
}


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a model's input.

    `resize`: the shorter edge in pixels, or (height, width); `crop`: the middle square, or (height, width);
    `None` leaves the picture as it is. `mean`, `std`: per channel, of values 0..1; empty for none.
    `channels`: 3, or 1 for grey. `source`: where this comes from, in words. `refusal`: why pictures cannot
    be given at all, else empty. Pillow always applies `antialias`; it is kept for the record.
    """

    resize: Size | None
    crop: Size | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    antialias: bool = True
    channels: int = 3
    source: str = ""
    refusal: str = ""

    @classmethod
    def from_weights(cls, weights: Any) -> Preprocess:
        """What a torchvision weights entry does to a picture.

        Raises:
            UsageError: the model takes video clips or pairs of pictures.
            ModelError: the transforms are of a kind that is not known.
        """
        preset = weights.transforms()
        source = f"{type(weights).__name__}.{weights.name}"
        kind = type(preset).__name__
        if kind in _UNFIT:
            raise UsageError(
                f"a model with the weights {source!r} {_UNFIT[kind]}, not single pictures",
                _TENSORS,
            )
        if kind == "ObjectDetection":
            return cls(None, None, (), (), source=source)
        if kind not in _FIT:
            raise ModelError(f"hookscope does not know the transforms {kind!r} of {source!r}", _TENSORS)
        return cls(
            resize=_edge(getattr(preset, "resize_size", None)),
            crop=_edge(getattr(preset, "crop_size", None)),
            mean=tuple(preset.mean),
            std=tuple(preset.std),
            interpolation=preset.interpolation.value,
            antialias=bool(preset.antialias),
            source=source,
        )

    @classmethod
    def plain(cls, channels: int = 3) -> Preprocess:
        """Values 0..1 at the picture's own size."""
        return cls(None, None, (), (), channels=channels, source=PLAIN_SOURCE)

    @classmethod
    def none(cls, refusal: str) -> Preprocess:
        """For a model that takes no pictures: asking for a tensor raises `refusal` as a UsageError."""
        return cls(None, None, (), (), source="none", refusal=refusal)

    def with_overrides(
        self,
        resize: Size | None = None,
        crop: Size | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Preprocess:
        """The same with what is given replaced; 0 switches `resize` or `crop` off, `()` the normalisation.

        Raises:
            UsageError: a size below zero, a deviation that is not above zero, or a number of values that does
                not fit the channels.
        """
        given = {"resize": resize, "crop": crop, "mean": mean, "std": std}
        changed = [f"--{name}" for name, value in given.items() if value is not None]
        if not changed:
            return self
        return replace(
            self,
            resize=self.resize if resize is None else _checked_size("--resize", resize),
            crop=self.crop if crop is None else _checked_size("--crop", crop),
            mean=self.mean if mean is None else self._per_channel("--mean", mean),
            std=self.std if std is None else _positive(self._per_channel("--std", std)),
            source=f"{self.source}, changed by {' '.join(changed)}",
        )

    def tensor(self, image: Image.Image) -> Tensor:
        """The model's input: (C, H, W) float32, bit for bit what torchvision's transforms give.

        Raises:
            ModelError: the model takes neither 3 channels nor 1.
            UsageError: the model takes no single pictures.
            ImageError: the picture would have to be enlarged beyond 2**28 pixels.
        """
        self._require_pictures()
        mode = "RGB" if self.channels == 3 else "L"
        image = image if image.mode == mode else image.convert(mode)
        width, height = self._resized(image.width, image.height)
        if (width, height) != image.size:
            image = image.resize((width, height), _RESAMPLING[self.interpolation])
        box = self._crop_box(width, height)
        if box != (0, 0, width, height):
            image = image.crop(box)  # outside the picture Pillow fills with zeros, as torchvision pads
        return self._normalised(_to_tensor(image))

    def view(self, width: int, height: int) -> View:
        """Where the input made of a picture of this size in pixels lies in that picture."""
        self._require_pictures()
        resized_width, resized_height = self._resized(width, height)
        left, top, right, bottom = self._crop_box(resized_width, resized_height)
        x, y = width / resized_width, height / resized_height
        return View((width, height), (left * x, top * y, right * x, bottom * y), (right - left, bottom - top))

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the input: of the crop, else of the resized picture were it square."""
        return _pair(self.crop) or _pair(self.resize)

    def _require_pictures(self) -> None:
        if self.refusal:
            raise UsageError(self.refusal, _TENSORS)
        if self.channels not in (1, 3):
            raise ModelError(
                f"the model takes pictures of {self.channels} channels; ours have 3, or 1 in grey",
                _TENSORS,
            )

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if self.resize is None:
            return width, height
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        longer = int(self.resize * max(width, height) / min(width, height))
        if self.resize * longer > _MAX_PIXELS:
            raise ImageError(
                f"a picture of {width}x{height} pixels would be enlarged to {self.resize}x{longer}"
            )
        return (self.resize, longer) if width <= height else (longer, self.resize)

    def _crop_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        crop = _pair(self.crop)
        if crop is None:
            return 0, 0, width, height
        left, top = _offset(width, crop[1]), _offset(height, crop[0])
        return left, top, left + crop[1], top + crop[0]

    def _normalised(self, values: Tensor) -> Tensor:
        if self.mean:
            values = values.sub_(_column(self.mean))
        return values.div_(_column(self.std)) if self.std else values

    def _per_channel(self, flag: str, values: Sequence[float]) -> tuple[float, ...]:
        numbers = tuple(float(value) for value in values)
        if len(numbers) == 1:
            return numbers * self.channels
        if len(numbers) not in (0, self.channels):
            raise UsageError(
                f"{flag} has {len(numbers)} values {numbers!r} but the model takes {self.channels} channels",
                f"give 1 or {self.channels}",
            )
        return numbers


def _edge(size: Sequence[int] | None) -> Size | None:
    if size is None:
        return None
    return size[0] if len(size) == 1 else (size[0], size[1])


def _pair(size: Size | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _offset(length: int, crop: int) -> int:
    # torchvision pads by the floored half where the crop is larger, but rounds half to even where smaller.
    return -((crop - length) // 2) if crop > length else round((length - crop) / 2.0)


def _to_tensor(image: Image.Image) -> Tensor:
    pixels = np.array(image, copy=True)
    pixels = pixels.reshape(image.height, image.width, -1)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)


def _column(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def _checked_size(flag: str, size: Size) -> Size | None:
    edges = _pair(size) or ()
    if any(edge < 0 for edge in edges) or (isinstance(size, tuple) and 0 in edges):
        raise UsageError(f"{flag} is {size!r}", "give pixels above 0, or 0 to switch it off")
    return size or None


def _positive(values: tuple[float, ...]) -> tuple[float, ...]:
    if not all(0 < value < float("inf") for value in values):
        raise UsageError(f"--std is {values!r}", "every deviation must be above 0")
    return values
