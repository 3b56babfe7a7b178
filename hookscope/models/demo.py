"""The bundled model: MobileNetV2 with ImageNet weights in half precision, which needs no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hookscope.errors import UsageError
from hookscope.models import zoo
from hookscope.models.loaded import Request, Source
from hookscope.models.weights import is_file

NAME = "demo"
ASSETS = Path(__file__).parent.parent / "assets"
WEIGHTS_FILE = ASSETS / "mobilenet_v2-fp16.safetensors"
PHOTO_FILE = ASSETS / "photos" / "cat.png"

_MODEL = "mobilenet_v2"
_ENTRY = "IMAGENET1K_V1"


def photos() -> tuple[Path, ...]:
    """The bundled photos, the cat first."""
    return tuple(sorted(PHOTO_FILE.parent.glob("*.png")))


def load(request: Request) -> Source:
    """The bundled model; with `none` or a file for weights it is a plain MobileNetV2.

    Raises:
        UsageError: weights are named that are not the bundled ones.
    """
    if request.weights not in ("default", _ENTRY):
        if request.weights.lower() != "none" and not is_file(request.weights):
            raise UsageError(
                f"{NAME!r} has no weights {request.weights!r}",
                f"it has {_ENTRY}; {_MODEL} takes all that torchvision offers",
            )
        return replace(zoo.load(_MODEL, request), name=NAME)
    source = zoo.from_file(_MODEL, WEIGHTS_FILE, request)
    return replace(source, name=NAME, weights=f"{_ENTRY} (bundled, half precision)", warnings=())
