"""Exported programs (`.pt2`): read without running code, and unflattened so that hooks find modules."""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hookscope.errors import ModelError, UsageError, near_misses
from hookscope.models.loaded import Request, Source
from hookscope.models.preprocess import Preprocess
from hookscope.wording import one_line

SUFFIX = ".pt2"

_STRICT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_OBJECTS = ("custom_obj", "opaque_obj")


def load(spec: str, request: Request) -> Source:
    """The program as a tree of modules under the model's own names; their types are the interpreter's.

    Raises:
        UsageError: weights or arguments are given, or there is no such file.
        ModelError: the file is damaged, or needs code to be read.
    """
    if request.arguments or request.weights.lower() not in ("default", "none"):
        raise UsageError(f"the exported program {spec!r} carries its own weights and takes no arguments")
    path = Path(spec).expanduser()
    program = _program(path)
    module = torch.export.unflatten(program)
    shape = _input_shape(program)
    warnings_ = (
        () if shape is None or shape[0] is None else (f"the program takes batches of {shape[0]} only",)
    )
    return Source(
        module,
        spec,
        path.name,
        preprocess=Preprocess.plain(_number(shape, 1, 3)),
        input_size=(_number(shape, 1, 3), _number(shape, 2, 224), _number(shape, 3, 224)),
        warnings=warnings_,
    )


def _program(path: Path) -> Any:
    _check(path)
    try:
        with warnings.catch_warnings(), _weights_only():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:  # a damaged archive may raise anything
        raise ModelError(
            f"the exported program {str(path)!r} cannot be read ({type(error).__name__}: {one_line(error)})",
            "export it again with this version of torch",
        ) from error


def _check(path: Path) -> None:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        raise UsageError(f"there is no file {str(path)!r}", near_misses(path.name, siblings))
    if not zipfile.is_zipfile(path):
        raise ModelError(
            f"{str(path)!r} is no exported program, or a damaged one", "make it with torch.export.save"
        )
    with zipfile.ZipFile(path) as archive:
        names = [name.rpartition("/")[2] for name in archive.namelist()]
    if any(name.startswith(_OBJECTS) for name in names):
        raise ModelError(
            f"the exported program {str(path)!r} holds objects that need code to be read, which is never run",
            "export a model made of tensors alone",
        )


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    # torch.export.load falls back to full pickles; only the environment can forbid it.
    before = os.environ.get(_STRICT)
    os.environ[_STRICT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_STRICT]
        else:
            os.environ[_STRICT] = before


def _input_shape(program: Any) -> tuple[int | None, ...] | None:
    """Shape of the first input, `None` where an axis may vary."""
    names = program.graph_signature.user_inputs
    values = (node.meta.get("val") for node in program.graph.nodes if names and node.name == names[0])
    value = next(values, None)
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def _number(shape: tuple[int | None, ...] | None, axis: int, otherwise: int) -> int:
    size = shape[axis] if shape is not None and axis < len(shape) else None
    return otherwise if size is None else size
