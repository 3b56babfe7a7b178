"""`--device` and `--precision`: from a word to what torch understands."""

from __future__ import annotations

import re

import torch

from hookscope.errors import UsageError, near_misses

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DEVICES = ("auto", "cpu", "cuda", "mps")


def resolve_device(name: str) -> torch.device:
    """The device meant by `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.

    Raises:
        UsageError: the word is unknown, or this machine has no such device.
    """
    if name == "auto":
        return torch.device(_best())
    kind = name.partition(":")[0]
    if kind not in _DEVICES or not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UsageError(
            f"unknown device {name!r}", near_misses(name, _DEVICES) or f"one of {', '.join(_DEVICES)}"
        )
    device = torch.device(name)
    if not _available(device):
        raise UsageError(f"the device {name!r} is not available here", "--device auto takes what there is")
    return device


def resolve_precision(name: str) -> torch.dtype:
    """The dtype meant by `fp32`, `bf16` or `fp16`.

    Raises:
        UsageError: the word is unknown.
    """
    if name not in PRECISIONS:
        raise UsageError(
            f"unknown precision {name!r}", near_misses(name, PRECISIONS) or f"one of {', '.join(PRECISIONS)}"
        )
    return PRECISIONS[name]


def _best() -> str:
    return next((kind for kind in ("cuda", "mps") if _available(torch.device(kind))), "cpu")


def _available(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu" or torch.backends.mps.is_available()
