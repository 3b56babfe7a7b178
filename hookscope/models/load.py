"""The story of loading: which kind of MODEL it is, its weights, device and layout, its pictures and names.

Each kind is a function in a module of its own; a new one is a line in `_source`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from hookscope.errors import HookscopeError, ModelError, UsageError, near_misses
from hookscope.models.device import resolve_device, resolve_precision
from hookscope.models.labels import read_labels
from hookscope.models.loaded import (
    DEFAULT_EDGE_PX,
    LoadedModel,
    Progress,
    Request,
    Source,
    first_channels,
    parameter_count,
)
from hookscope.models.preprocess import PLAIN_SOURCE, Preprocess, Size
from hookscope.models.user import given, is_user_spec, own_copy
from hookscope.models.user import load as load_user
from hookscope.wording import one_line

_RANDOM = "the weights are RANDOM: the shapes are real, but no value means anything"
_PLAIN = (
    f"the model's own preprocessing is unknown: it gets {PLAIN_SOURCE}; "
    "--resize, --crop, --mean and --std say otherwise"
)


def load_model(
    spec: str | nn.Module,
    *,
    weights: str | Path = "default",
    device: str = "cpu",
    model_args: Mapping[str, object] | None = None,
    labels: str | Path | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> LoadedModel:
    """A model in eval mode with all that is known of it.

    Args:
        spec: a torchvision name, `demo`, `package.module:callable`, `file.py:callable`, `timm/NAME`, a
            `.pt2` file, or a module. A module that somebody else holds is copied where it would have to be
            changed.
        weights: `default`, `none`, the name of official ones, or a checkpoint's path.
        device: `auto`, `cpu`, `cuda` or `mps`.
        model_args: for the function or class that makes the model.
        labels: a file of class names.
        resize: instead of the model's own, as are `crop`, `mean` and `std`; 0 or `()` for none.
        precision: `fp32` leaves the model as it is, `bf16` and `fp16` convert it.
        progress: called as torchvision's weights are downloaded: what, MiB so far, MiB in all.

    Raises:
        UsageError: something named does not exist.
        ModelError: the model or its weights cannot be loaded.
    """
    place, dtype = resolve_device(device), resolve_precision(precision)
    names = None if labels is None else read_labels(Path(labels))
    source = _source(spec, Request(str(weights), dict(model_args or {}), progress))
    channels_last = source.channels_last and place.type in ("cpu", "cuda") and not _has_volumes(source.module)
    module = _placed(source, place, dtype, channels_last)
    base = source.preprocess or Preprocess.plain(first_channels(module))
    preprocess = base.with_overrides(resize, crop, mean, std)
    plain = preprocess.source == PLAIN_SOURCE
    return LoadedModel(
        module=module,
        preprocess=preprocess,
        categories=names or source.categories,
        name=source.name,
        weights=source.weights,
        random_weights=source.random_weights,
        parameters=parameter_count(module),
        channels_last=channels_last,
        input_size=_input_size(preprocess, source),
        warnings=(
            *([_RANDOM] if source.random_weights else []),
            *source.warnings,
            *([_PLAIN] if plain else []),
        ),
    )


def list_models(pattern: str = "*") -> list[str]:
    """Names that MODEL may be and that a glob matches: `demo` and torchvision's.

    Raises:
        UsageError: none matches.
    """
    from hookscope.models import demo, zoo

    known = [demo.NAME, *zoo.names()]
    found = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise UsageError(f"no model matches {pattern!r}", near_misses(pattern, known) or "try '*net*'")
    return found


def _source(spec: str | nn.Module, request: Request) -> Source:
    if isinstance(spec, nn.Module):
        return given(spec, request)
    if spec.endswith(".pt2"):
        from hookscope.models import exported

        return exported.load(spec, request)
    if is_user_spec(spec):
        return load_user(spec, request)
    if spec.startswith("timm/"):
        from hookscope.models import timm_models

        return timm_models.load(spec, request)
    return _named(spec, request)


def _named(spec: str, request: Request) -> Source:
    # torchvision takes a second to import, which a user's own model need not pay.
    from hookscope.models import demo, zoo
    from hookscope.models.checkpoint_file import SUFFIXES

    if spec == demo.NAME:
        return demo.load(request)
    if spec.lower().endswith(SUFFIXES):
        raise UsageError(
            f"the model {spec!r} is a checkpoint, which holds weights but no model",
            f"name the model and give the file as its weights: MODEL --weights {spec}",
        )
    return zoo.load(spec, request)


def _placed(source: Source, device: torch.device, dtype: torch.dtype, channels_last: bool) -> nn.Module:
    """The module in eval mode where it is wanted; a copy where it is not ours and would change."""
    module = source.module
    convert = dtype is not torch.float32
    if not source.ours and _would_change(module, device, dtype if convert else None):
        module = own_copy(module)
    try:
        if convert or not _lies_on(module, device):
            module = module.to(device, dtype if convert else None)
        if channels_last:
            module = module.to(memory_format=torch.channels_last)
        return module.eval() if any(part.training for part in module.modules()) else module
    except HookscopeError:
        raise
    except Exception as error:  # too little memory, or a module that overrides these
        raise ModelError(
            f"the model cannot be moved to {str(device)!r}: {one_line(error)}",
            "try --device cpu --precision fp32",
        ) from error


def _would_change(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> bool:
    values = (*module.parameters(), *module.buffers())
    return (
        any(part.training for part in module.modules())
        or not _lies_on(module, device)
        or any(value.is_floating_point() and dtype not in (None, value.dtype) for value in values)
    )


def _lies_on(module: nn.Module, device: torch.device) -> bool:
    values = (*module.parameters(), *module.buffers())
    return all(
        value.device.type == device.type and device.index in (None, value.device.index) for value in values
    )


def _has_volumes(module: nn.Module) -> bool:
    return any(parameter.dim() == 5 for parameter in module.parameters())


def _input_size(preprocess: Preprocess, source: Source) -> tuple[int, int, int]:
    if preprocess.size is None and source.input_size is not None:
        return source.input_size
    height, width = preprocess.size or (DEFAULT_EDGE_PX, DEFAULT_EDGE_PX)
    return preprocess.channels, height, width
