"""timm's models by name, where timm is installed. It is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hookscope.errors import ModelError, UsageError, near_misses
from hookscope.models.checkpoint_file import read_state_dict
from hookscope.models.loaded import Request, Source
from hookscope.models.preprocess import Preprocess
from hookscope.models.weights import fill, is_file
from hookscope.wording import one_line

PREFIX = "timm/"


def load(spec: str, request: Request) -> Source:
    """A timm model with its pretrained weights, with a file's, or random.

    Raises:
        UsageError: timm is not installed, or knows no such name or argument.
        ModelError: the weights cannot be had, or do not fit.
    """
    timm = _timm()
    name = spec.removeprefix(PREFIX)
    if not timm.is_model(name):
        hint = near_misses(name.partition(".")[0], timm.list_models())
        raise UsageError(
            f"timm has no model {name!r}", hint or "python -c 'import timm; print(timm.list_models())'"
        )
    if is_file(request.weights):
        return _from_file(timm, spec, name, request)
    if request.weights not in ("default", "none"):
        raise UsageError(
            f"{spec!r} has no weights {request.weights!r}", "timm names them in the model: timm/NAME.TAG"
        )
    pretrained = request.weights == "default"
    module = _create(timm, name, request.arguments, pretrained=pretrained)
    weights = _tag(module) if pretrained else "none (random)"
    return _source(timm, spec, module, weights, random_weights=not pretrained)


def _from_file(timm: Any, spec: str, name: str, request: Request) -> Source:
    path = Path(request.weights).expanduser()
    raw = read_state_dict(path)

    def rebuild(classes: int) -> nn.Module:
        return _create(timm, name, request.arguments | {"num_classes": classes})

    module = _create(timm, name, request.arguments)
    free = "num_classes" not in request.arguments
    filled = fill(module, raw, rebuild if free else None, origin=f"the weights {path.name!r}")
    return _source(timm, spec, filled.module, path.name, warnings=filled.warnings)


def _source(
    timm: Any,
    spec: str,
    module: nn.Module,
    weights: str,
    *,
    random_weights: bool = False,
    warnings: tuple[str, ...] = (),
) -> Source:
    return Source(
        module,
        spec,
        weights,
        random_weights=random_weights,
        channels_last=True,
        preprocess=_preprocess(timm.data.resolve_model_data_config(module)),
        categories=_categories(module),
        warnings=warnings,
    )


def _timm() -> ModuleType:
    try:
        import timm
        import timm.data
    except ImportError as error:
        raise UsageError("timm is not installed", "pip install 'hookscope[timm]'") from error
    found: ModuleType = timm
    return found


def _create(timm: Any, name: str, arguments: Mapping[str, object], *, pretrained: bool = False) -> nn.Module:
    try:
        module: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
    except TypeError as error:
        raise UsageError(f"timm cannot build {name!r}: {error}", "see --model-arg") from error
    except Exception as error:  # a hub that cannot be reached raises what its client likes
        raise ModelError(
            f"timm cannot build {name!r}: {type(error).__name__}: {one_line(error)}",
            "--weights none gives random ones, --weights PATH a file of yours",
        ) from error
    return module


def _preprocess(config: Mapping[str, Any]) -> Preprocess:
    channels, height, width = config["input_size"]
    fraction = config.get("crop_pct") or 1.0
    square = height == width and config.get("crop_mode") != "squash"
    return Preprocess(
        resize=int(height / fraction) if square else (int(height / fraction), int(width / fraction)),
        crop=height if height == width else (height, width),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        channels=channels,
        source="timm's own for this model",
    )


def _tag(module: nn.Module) -> str:
    return str(_config(module).get("tag") or "pretrained")


def _config(module: nn.Module) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(module, "pretrained_cfg", None) or {}
    return found


def _categories(module: nn.Module) -> tuple[str, ...] | None:
    """ImageNet's names where the weights' tag says that the model was made for them."""
    if getattr(module, "num_classes", None) != 1000 or "in1k" not in str(_config(module).get("tag")):
        return None
    from torchvision.models import ResNet18_Weights

    return tuple(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
