"""torchvision's models by name: its builders, its weights entries, its download cache.

Nothing is downloaded that was not asked for, and what was is read with `weights_only=True` before anybody
else may.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import torch
from torch import nn
from torchvision import models
from torchvision.ops import FrozenBatchNorm2d

from hookscope.errors import ModelError, UsageError, near_misses
from hookscope.models.checkpoint import Peeled, peel, read_state_dict
from hookscope.models.download import download
from hookscope.models.loaded import Progress, Request, Source
from hookscope.models.preprocess import Preprocess
from hookscope.models.weights import fill, is_file
from hookscope.wording import one_line

# The auxiliary head of a checkpoint: the start of its names, and the argument that builds it.
_AUXILIARY = {"aux_classifier.": "aux_loss", "aux1.": "aux_logits", "AuxLogits.": "aux_logits"}
# Weights that were ported with an epsilon of zero in their frozen batch norms.
_ZERO_EPSILON = (
    "fasterrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
)
_FROZEN = (
    *_ZERO_EPSILON,
    "fcos_resnet50_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
)
_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")


def names() -> list[str]:
    """Every torchvision name, of any family, sorted."""
    return cast(list[str], models.list_models())


def load(name: str, request: Request) -> Source:
    """A torchvision model with official weights, with a file's, or random.

    Raises:
        UsageError: no such name, weights or argument.
        ModelError: the weights cannot be had, or do not fit.
    """
    if name not in names():
        raise UsageError(
            f"unknown model {name!r}", near_misses(name, names()) or "`hookscope models` lists the names"
        )
    for argument in ("weights", "pretrained", "progress"):
        if argument in request.arguments:
            raise UsageError(f"{argument!r} is no argument of {name!r} here", "choose weights with --weights")
    if request.weights.lower() == "none":
        return _random(name, request)
    entry = _entry(name, request.weights)
    if entry is not None:
        return _official(name, entry, request)
    return from_file(name, Path(request.weights).expanduser(), request)


def from_file(name: str, path: Path, request: Request) -> Source:
    """A torchvision model with the weights of a checkpoint; what is known of the file's entry is used."""
    raw = read_state_dict(path)
    entry = _entry_of_file(name, path)
    module, arguments = _shaped_for(name, raw, _structure(name, entry) | request.arguments, request.arguments)

    def rebuild(classes: int) -> nn.Module:
        return _trained_structure(name, arguments | {"num_classes": classes})

    free = "num_classes" not in request.arguments
    filled = fill(module, raw, rebuild if free else None, _classes(name), f"the weights {path.name!r}")
    if name in _ZERO_EPSILON and entry.name == "COCO_V1" and path.name == _file_name(entry):
        _zero_epsilon(filled.module)
    classes = filled.classes or arguments.get("num_classes", _classes(name))
    source = _source(name, entry, filled.module, path.name, classes)
    return replace(source, warnings=(*filled.warnings, _told(entry)))


def _random(name: str, request: Request) -> Source:
    entry = _first(name)
    module = _build(name, _structure(name, entry) | request.arguments)
    classes = request.arguments.get("num_classes", _classes(name))
    source = _source(name, entry, module, "none (random)", classes)
    return replace(source, random_weights=True, warnings=(_told(entry),))


def _official(name: str, entry: Any, request: Request) -> Source:
    # torchvision reads the file without weights_only; what passes here can hold nothing but tensors.
    read_state_dict(_fetched(name, entry, request.progress))
    arguments: dict[str, object] = {"weights": entry, "progress": False}
    if "quantize" in _parameters(name):
        arguments["quantize"] = "unquantized" in entry.meta
    module = _build(name, arguments | request.arguments)
    source = _source(name, entry, module, entry.name, request.arguments.get("num_classes", _classes(name)))
    return replace(source, warnings=_headless(entry))


def _source(name: str, entry: Any, module: nn.Module, weights: str, classes: object) -> Source:
    return Source(
        module,
        name,
        weights,
        channels_last=True,
        preprocess=_preprocess(entry),
        categories=_categories(entry, classes),
    )


def _headless(entry: Any) -> tuple[str, ...]:
    if entry.name != "IMAGENET1K_FEATURES":
        return ()
    return (f"the weights {entry.name} are trained in the convolutions only: the classifier means nothing",)


def _fetched(name: str, entry: Any, progress: Progress | None) -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / _file_name(entry)
    if path.is_file():
        return path
    try:
        if progress is None:
            download(entry.url, path)
        else:
            download(entry.url, path, partial(progress, f"downloading {path.name} (MiB)"))
    except (
        OSError,
        ValueError,
        HTTPException,
    ) as error:  # a URLError is an OSError; a wrong hash a ValueError
        raise _not_downloaded(name, entry, path, error) from error
    return path


def _not_downloaded(name: str, entry: Any, path: Path, error: Exception) -> ModelError:
    cached = [other.name for other in _entries(name) if (path.parent / _file_name(other)).is_file()]
    ways = ["--weights none for random ones", "--weights PATH for a file of yours"]
    if cached:
        ways.insert(0, f"--weights {cached[0]}, which is in the cache")
    return ModelError(
        f"the weights {entry.name} of {name!r} cannot be downloaded: {path.name} ({one_line(error)})",
        f"put the file at {path}, or give {', or '.join(ways)}",
    )


def _entries(name: str) -> Any:
    return models.get_model_weights(name)


def _first(name: str) -> Any:
    return next(iter(_entries(name)))


def _entry(name: str, weights: str) -> Any | None:
    """The official entry that a word names; `None` where it is a file."""
    known = _entries(name).__members__
    word = weights.rpartition(".")[2].upper() if Path(weights).name == weights else ""
    if weights.lower() == "default" or word in known:
        return known[word]
    if is_file(weights):
        return None
    hint = near_misses(weights, known) or f"it has {', '.join(known)}; none and a path are possible too"
    raise UsageError(f"{name!r} has no weights {weights!r}", hint)


def _entry_of_file(name: str, path: Path) -> Any:
    """The entry whose official file has this name, else the first."""
    entries = list(_entries(name))
    return next((entry for entry in entries if _file_name(entry) == path.name), entries[0])


def _file_name(entry: Any) -> str:
    return Path(urlparse(entry.url).path).name


def _structure(name: str, entry: Any) -> dict[str, object]:
    """Arguments that torchvision derives from an entry and that a file of such weights needs as well."""
    known = _parameters(name)
    arguments: dict[str, object] = {}
    if "weights_backbone" in known:
        arguments["weights_backbone"] = None
    if "transform_input" in known:
        arguments |= {"init_weights": False, "transform_input": True}
    if name.startswith("vit_"):
        arguments["image_size"] = entry.meta["min_size"][0]
    return arguments


def _shaped_for(
    name: str, raw: object, arguments: dict[str, object], given: Mapping[str, object]
) -> tuple[nn.Module, dict[str, object]]:
    """The model with the auxiliary heads that the checkpoint has, and the arguments that made it."""
    module = _trained_structure(name, arguments)
    auxiliary = _auxiliary(module, peel(raw, module.state_dict()), given)
    if not auxiliary:
        return module, arguments
    return _trained_structure(name, arguments | auxiliary), arguments | auxiliary


def _auxiliary(module: nn.Module, peeled: Peeled, given: Mapping[str, object]) -> dict[str, object]:
    """Builds the auxiliary heads that the checkpoint has, and no others, unless the user said which."""
    ours = module.state_dict()
    for start, argument in _AUXILIARY.items():
        has, wanted = (any(key.startswith(start) for key in state) for state in (ours, peeled.state))
        if has != wanted and argument not in given:
            return {argument: wanted}
    return {}


def _trained_structure(name: str, arguments: Mapping[str, object]) -> nn.Module:
    module = _build(name, arguments)
    if name in _FROZEN:
        _freeze_norms(module)
    return module


def _freeze_norms(module: nn.Module) -> None:
    """Puts frozen batch norms for the plain ones of the backbone, as a trained detector has."""
    for part in list(cast(nn.Module, module.backbone).modules()):
        for name, child in part.named_children():
            if type(child) is nn.BatchNorm2d:
                setattr(part, name, FrozenBatchNorm2d(child.num_features, child.eps))


def _zero_epsilon(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FrozenBatchNorm2d):
            part.eps = 0.0


def _build(name: str, arguments: Mapping[str, object]) -> nn.Module:
    builder = models.get_model_builder(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cast(nn.Module, builder(**arguments))
    except (RuntimeError, OSError, MemoryError) as error:
        raise ModelError(f"{name!r} cannot be built: {one_line(error)}") from error
    except Exception as error:  # an argument of the wrong kind may lead to any
        raise _bad_arguments(name, error) from error


def _bad_arguments(name: str, error: Exception) -> UsageError:
    unknown = _UNKNOWN_ARGUMENT.search(str(error))
    if unknown is None:
        own = "official weights come with their own: --weights none, or a file, allows others"
        hint = own if "expected value" in str(error) else "see --model-arg"
        return UsageError(f"{name!r} cannot be built with these arguments: {one_line(error)}", hint)
    hint = (
        near_misses(unknown.group(1), _parameters(name)) or f"it takes {', '.join(sorted(_parameters(name)))}"
    )
    return UsageError(f"{name!r} takes no argument {unknown.group(1)!r}", hint)


def _parameters(name: str) -> set[str]:
    """Arguments a builder takes, its class's own included."""
    signature = inspect.signature(models.get_model_builder(name))
    takers: list[Callable[..., Any]] = [models.get_model_builder(name)]
    if isinstance(signature.return_annotation, type):
        classes = inspect.getmro(signature.return_annotation)
        takers += classes[: classes.index(nn.Module)]
    found = {parameter for taker in takers for parameter in inspect.signature(taker).parameters}
    return found - {"args", "kwargs", "progress", "weights"}


def _classes(name: str) -> int | None:
    return len(_first(name).meta.get("categories") or ()) or None


def _categories(entry: Any, classes: object) -> tuple[str, ...] | None:
    known = entry.meta.get("categories") or ()
    return tuple(known) if known and len(known) == classes else None


def _preprocess(entry: Any) -> Preprocess:
    try:
        return Preprocess.from_weights(entry)
    except UsageError as error:
        return Preprocess.none(error.message)


def _told(entry: Any) -> str:
    return f"preprocessing is that of {type(entry).__name__}.{entry.name}"
