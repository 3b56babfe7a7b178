"""Wrappers around a model under which hooks would see nothing, or other modules than those named."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hookscope.errors import ModelError


def unwrapped(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model inside data-parallel and compiled wrappers, and a sentence for each that was taken off.

    Raises:
        ModelError: a part is TorchScript, on which hooks do not work.
    """
    notes: list[str] = []
    while (inner := _inner(module)) is not None:
        notes.append(
            f"the {type(module).__name__} around the model was taken off: hooks need the model itself"
        )
        module = inner
    _refuse_scripted(module)
    if any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules()):
        notes.append("the model was compiled in place: it is run eagerly, since compiled code calls no hooks")
    return module, tuple(notes)


def _inner(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return cast(nn.Module, module.module)
    # By name: importing torch._dynamo to compare the class takes seconds.
    if type(module).__name__ == "OptimizedModule":
        return cast(nn.Module, module._orig_mod)
    return None


def _refuse_scripted(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            where = f"its part {name!r}" if name else "it"
            raise ModelError(
                f"{where} is TorchScript, on which hooks do not work",
                "load the Python model it was made from",
            )
