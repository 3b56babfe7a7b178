"""Where the classes of a model's layers are written, so that a finding can point at a line of the user's code.

Files are read, never imported. A layer of a library is of no use to the reader of a change: it stands for the nearest
layer around it whose class is the user's own.
"""

from __future__ import annotations

import ast
import inspect
import os
import site
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from hookscope.checks.findings import Source
from hookscope.layers import ROOT, modules_by_name
from hookscope.output.journal import is_inside

if TYPE_CHECKING:
    from torch import nn

_LIBRARIES = {"torch", "torchvision", "timm", "hookscope"}
_INSTALLED = {"site-packages", "dist-packages"}


def sources_of(model: nn.Module, cwd: Path) -> dict[str, Source]:
    """By layer name, where its class is written, or that of the nearest layer around it which is the user's own.

    A layer with nothing of the user's around it is left out. `cwd` is what files are relative to.
    """
    known: dict[type, Source | None] = {}
    found: dict[str, Source] = {}
    for name, module in modules_by_name(model).items():
        cls = type(module)
        if cls not in known:
            known[cls] = source_of(module, cwd)
        own = known[cls] or found.get(_around(name))
        if own is not None:
            found[name] = own
    return found


def source_of(module: nn.Module, cwd: Path) -> Source | None:
    """Where the module's class is written; `None` where it is a library's, or made without a file.

    Of a class that torch made from the user's (parametrised, sharded), it is the user's.
    """
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] not in _LIBRARIES and (found := _written(cls)) is not None:
            return Source(_relative(found.file, cwd), found.line)
    return None


def nearest(layer: str, sources: Mapping[str, Source], fallback: Source | None = None) -> Source | None:
    """What to point at for a layer, a parameter, or `""`, the whole model: never a file outside the working directory.

    The layer's own source, that of the nearest layer around it, or the fallback.
    """
    for name in _outwards(layer):
        if name in sources and is_inside(sources[name].file):
            return sources[name]
    return fallback if fallback is not None and is_inside(fallback.file) else None


def _outwards(layer: str) -> Iterator[str]:
    name = layer or ROOT
    while name != ROOT:
        yield name
        name = _around(name)
    yield ROOT


def _around(name: str) -> str:
    return name.rpartition(".")[0] or ROOT


def _relative(file: str, cwd: Path) -> str:
    """With forward slashes; links are followed on both sides, since code scanning shows no linked file."""
    path, root = Path(file), Path(os.path.realpath(cwd))
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def _written(cls: type) -> Source | None:
    """The class in a file of the user's, by its real path."""
    # Not inspect.getsourcefile(cls): it goes by the name of the class's module, which a file loaded by path may share
    # with another, or which is forgotten by now. The code of its methods knows where it comes from.
    codes = [code for code in _codes(cls) if os.path.isfile(code.co_filename)]
    module = sys.modules.get(cls.__module__)
    named = codes[0].co_filename if codes else getattr(module, "__file__", None)
    if not isinstance(named, str) or _is_installed(file := os.path.realpath(named)):
        return None
    line = _line(cls.__qualname__, file, codes[0].co_firstlineno if codes else None)
    return Source(file, line) if line is not None else None


def _codes(cls: type) -> Iterator[CodeType]:
    """Of the functions that were written in the class's body."""
    for value in vars(cls).values():
        function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
        if isinstance(function, FunctionType) and _is_in(function, cls):
            yield function.__code__


def _is_in(function: FunctionType, cls: type) -> bool:
    return function.__module__ == cls.__module__ and function.__qualname__.startswith(f"{cls.__qualname__}.")


def _line(qualname: str, file: str, inside: int | None) -> int | None:
    """The line of the class statement; of several with this name the one around the line `inside`, else the last."""
    try:
        with tokenize.open(file) as stream:  # as Python itself decodes it
            tree = ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return inside
    found = [node for name, node in _classes(tree, "") if name == qualname]
    around = [
        node for node in found if inside is not None and node.lineno <= inside <= (node.end_lineno or inside)
    ]
    last = (around or found)[-1:]
    return last[0].lineno if last else inside


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class statement below a node, with the qualified name that Python gives it."""
    for child in ast.iter_child_nodes(node):
        below = prefix
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child
            below = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            below = f"{prefix}{child.name}.<locals>."
        yield from _classes(child, below)


def _is_installed(file: str) -> bool:
    """Whether it belongs to Python or to an installed package, in an environment inside the project too."""
    path = Path(file)
    return bool(_INSTALLED & set(path.parts)) or any(path.is_relative_to(place) for place in _places())


@cache
def _places() -> frozenset[str]:
    named = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return frozenset(os.path.realpath(place) for place in (*named, site.getusersitepackages()) if place)
