"""Putting an inspected model back as it was found, whatever happens in between; threads take turns with it."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from hookscope.errors import ModelError
from hookscope.turns import TURNS, Shared
from hookscope.wording import counted


@contextmanager
def preserved(model: nn.Module, *, alone: bool = False) -> Iterator[None]:
    """A block after which the model is as it was: also when the block raises or is interrupted.

    Every module's `training`, every parameter's `requires_grad`, the buffers and the random state are put back;
    `.grad` is set aside (not copied) and returned. For inspection, not for training loops.

    Other threads wait before their own blocks of models that share modules, parameters or buffers with this one. The
    random state is the process's: what is found by the first thread is put back when the last has left.

    Args:
        model: any module.
        alone: no other thread may have a block at all, as where the random state counts.

    Raises:
        ModelError: the model wrote to its own parameters, of which no copies are kept.
        UsageError: a thread that waits for this one is inspecting the model.
    """
    with TURNS.taken(model, alone=alone), _random_state_kept(), _kept(model):
        yield


def sow(seed: int) -> None:
    """The random state of torch, numpy and python, from a seed; for use inside `preserved`."""
    numpy = sys.modules.get("numpy")
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    # Not torch.manual_seed: on a GPU that is not in use yet, what that leaves behind could not be taken back.
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def sown(seed: int | None) -> Iterator[None]:
    """A random state from a seed inside, what it was before afterwards; nothing without a seed."""
    if seed is None:
        yield
        return
    with _random_state():
        sow(seed)
        yield


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    buffers = _snapshot_buffers(model)
    owners = [(module, dict(module._parameters)) for module in model.modules()]
    versions = _versions(model)
    try:
        for parameter, _, _ in flags:
            parameter.grad = None
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad, gradient in flags:
            # By assignment: requires_grad_() refuses a lazy module's parameter that has no shape yet.
            parameter.requires_grad = requires_grad
            parameter.grad = gradient
        for module, parameters in owners:
            if module._parameters.keys() != parameters.keys() or any(
                module._parameters[name] is not kept for name, kept in parameters.items()
            ):
                module._parameters.clear()
                module._parameters.update(parameters)
        _restore_buffers(buffers)
    written = sum(parameter._version != version for parameter, version in versions)
    if written:
        raise ModelError(
            f"the model wrote to {counted(written, 'parameter')} of its own while it ran, which stay as it left them",
            "weights are too large to be kept twice; let forward leave them alone in eval mode",
        )


class _Inside(threading.local):
    random = False


_INSIDE = _Inside()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    # A block within a block of the same thread puts back what it found itself.
    if _INSIDE.random:
        with _random_state():
            yield
        return
    with _RANDOM.held():
        _INSIDE.random = True
        try:
            yield
        finally:
            _INSIDE.random = False


@contextmanager
def _random_state() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    devices = range(torch.cuda.device_count()) if _cuda_in_use() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)


_RANDOM = Shared(_random_state)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _snapshot_buffers(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    copies: dict[int, Tensor] = {}
    snapshot = []
    for module in model.modules():
        if not module._buffers:
            continue
        for buffer in module._buffers.values():
            if _has_values(buffer) and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
        originals = dict(module._buffers)
        snapshot.append(
            (module, originals, {n: copies[id(b)] for n, b in originals.items() if id(b) in copies})
        )
    return snapshot


def _versions(model: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """What counts the writes to each parameter; one without a shape yet is made, not changed, by the first pass."""
    parameters = (parameter for parameter in model.parameters() if not is_lazy(parameter))
    return [(parameter, parameter._version) for parameter in parameters if not parameter.is_inference()]


def _has_values(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return buffer is not None and not isinstance(buffer, UninitializedBuffer)


def _restore_buffers(snapshot: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    with torch.no_grad():
        for module, originals, copies in snapshot:
            module._buffers.clear()
            module._buffers.update(originals)
            for name, copied in copies.items():
                _put_back(originals[name], copied)


def _put_back(buffer: Tensor, copied: Tensor) -> None:
    # Only where it changed: a write would invalidate a graph of the caller's that saved the buffer.
    if buffer.shape != copied.shape:
        buffer.data = copied
    elif not _same_values(buffer, copied):
        buffer.copy_(copied)


def _same_values(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    # Not a number is not equal to itself, but it is the same.
    if not one.is_floating_point():
        return False
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
