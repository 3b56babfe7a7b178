"""`--weights`: whether the word is a file, and a file's tensors into a module that somebody built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from hookscope.errors import ModelError
from hookscope.models.checkpoint import SUFFIXES, Peeled, check, class_count, peel
from hookscope.wording import one_line


@dataclass(frozen=True, eq=False)
class Filled:
    """A module with a file's weights in it, the number of classes if it changed, and what to tell people."""

    module: nn.Module
    classes: int | None
    warnings: tuple[str, ...]


def is_file(weights: str) -> bool:
    """Whether the word means a checkpoint: it has a path separator or a known suffix, or is a file."""
    separators = tuple(filter(None, (os.sep, os.altsep)))
    return (
        any(separator in weights for separator in separators)
        or weights.lower().endswith(SUFFIXES)
        or (weights not in ("default", "none") and Path(weights).is_file())
    )


def fill(
    module: nn.Module,
    raw: object,
    rebuild: Callable[[int], nn.Module] | None = None,
    classes: int | None = None,
    origin: str = "the weights",
) -> Filled:
    """`module` with the file's tensors; built anew where only the number of classes differs.

    Args:
        raw: what the file held.
        rebuild: makes the model with another number of classes; `None` where that cannot be.
        classes: how many the module has, where known.
        origin: what an error calls the weights.

    Raises:
        ModelError: the file does not fit.
    """
    expected = module.state_dict()
    peeled = peel(raw, expected)
    count = class_count(peeled, expected, classes) if rebuild else None
    notes = _notes(peeled)
    if count is not None and rebuild is not None:
        module = rebuild(count)
        notes = (*notes, f"the model was rebuilt with the checkpoint's {count} classes")
    _put(module, peeled, origin)
    return Filled(module, count, notes)


def _put(module: nn.Module, peeled: Peeled, origin: str) -> None:
    state = check(peeled, module.state_dict(), origin)
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a sparse or meta tensor, a hook of the module's own
        raise ModelError(f"{origin} cannot be copied into the model: {one_line(error)}") from error


def _notes(peeled: Peeled) -> tuple[str, ...]:
    if not peeled.others:
        return ()
    others = ", ".join(repr(name) for name in peeled.others)
    return (f"the weights are those under {peeled.nesting!r}; {others} in the same file would fit as well",)
