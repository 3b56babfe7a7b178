"""Names of layers: globs over `named_modules()`, sites, statuses and what is known of a layer.

Knows names and shapes only; it never runs a model and never registers a hook.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from hookscope.errors import UsageError, near_misses

if TYPE_CHECKING:
    from torch import nn

ROOT = "."
"""The pattern and the printed name of the model itself, whose dotted path is empty."""


@dataclass(frozen=True, order=True)
class Site:
    """Which call of which layer, and which tensor of a nested output.

    `output` is `""` for a plain tensor, else a path such as `"0"` or `"out"`.
    `str(site)` is `layer`, `layer@1`, `layer:out` or `layer@1:out`.
    """

    layer: str
    call: int = 0
    output: str = ""

    def __str__(self) -> str:
        call = f"@{self.call}" if self.call else ""
        output = f":{self.output}" if self.output else ""
        return f"{self.layer}{call}{output}"


class Status(StrEnum):
    """What became of a layer in a run."""

    OK = "ok"
    NOT_CALLED = "not-called"
    NO_TENSOR = "no-tensor"
    NO_GRAD_PATH = "no-grad-path"
    ZERO_GRADIENT = "zero-gradient"
    NON_FINITE = "non-finite"
    BYPASSED = "bypassed"


@dataclass(frozen=True)
class OutputInfo:
    """One tensor that a layer returned: its site, shape (batch first), dtype and layout.

    `layout` is `NCHW`, `NHWC`, `NTC`, `NPTC`, `NC`, `NCL`, `NCDHW`, or `""` where none is known.
    `grid` is `(height, width, prefix)` where the values lie on the picture, prefix tokens first; else `None`.
    `order` is the position in the order in which calls ended; `same_as` the site just before it that returned
    the very same tensor.
    """

    site: Site
    shape: tuple[int, ...]
    dtype: str
    layout: str
    grid: tuple[int, int, int] | None = None
    same_as: Site | None = None
    order: int = 0


@dataclass(frozen=True)
class LayerInfo:
    """One module: every name it has, its class, its own parameters and, after a run, what it returned."""

    name: str
    type: str
    parameters: int
    aliases: tuple[str, ...] = ()
    calls: int | None = None
    outputs: tuple[OutputInfo, ...] = ()
    status: Status | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the first tensor of the first call, batch first; `None` where there is none."""
        return self.outputs[0].shape if self.outputs else None

    @property
    def layout(self) -> str:
        """Layout of the first tensor of the first call; `""` where there is none."""
        return self.outputs[0].layout if self.outputs else ""


@dataclass(frozen=True)
class Selection:
    """Which layers the patterns chose: names in model order, and what each pattern resolved to.

    `excluded` is what each of the patterns to leave out resolved to.
    """

    names: tuple[str, ...]
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def resolved(self) -> dict[str, tuple[str, ...]]:
        """What every pattern resolved to."""
        return {**self.patterns, **self.excluded}


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every module's first name with the other names it has, in `named_modules()` order; the root is `.`."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name or ROOT)
    return {first: tuple(others) for first, *others in names.values()}


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module once, under its first name."""
    return {name or ROOT: module for name, module in model.named_modules()}


def select(model: nn.Module, include: str | Iterable[str], exclude: str | Iterable[str] = ()) -> Selection:
    """Layers that any of `include` matches and none of `exclude` does, in model order.

    Patterns are matched segment by segment: `*`, `?`, `[...]` stay inside a segment, `**` spans any number
    of segments, none included. `.` is the root, which no other pattern matches; `type:GLOB` chooses by class
    name. A shared module matches under any of its names and is given once, under the first.

    Raises:
        UsageError: a pattern matches nothing; the nearest names are in the hint.
    """
    include, exclude = _listed(include), _listed(exclude)
    names = all_names(model)
    modules = modules_by_name(model)
    types = {name: type(module).__name__ for name, module in modules.items()}
    resolved: dict[str, tuple[str, ...]] = {}
    for pattern in (*include, *exclude):
        found = tuple(
            first
            for first, others in names.items()
            if any(matches(pattern, name, types[first]) for name in (first, *others))
        )
        if not found:
            raise _no_match(pattern, names, types)
        resolved[pattern] = found
    chosen = {name for pattern in include for name in resolved[pattern]}
    dropped = {name for pattern in exclude for name in resolved[pattern]}
    kept = tuple(name for name in names if name in chosen and name not in dropped)
    if not kept:
        raise UsageError(
            f"no layer is left: {_quoted(exclude)} excludes all that {_quoted(include)} chose",
            "narrow --exclude",
        )
    return Selection(
        kept,
        {pattern: resolved[pattern] for pattern in include},
        {pattern: resolved[pattern] for pattern in exclude},
    )


def matches(pattern: str, name: str, type_name: str = "") -> bool:
    """Whether a glob matches a dotted name (or, for `type:GLOB`, a class name). Case counts."""
    if pattern.startswith("type:"):
        return fnmatch.fnmatchcase(type_name, pattern.removeprefix("type:"))
    if ROOT in (pattern, name):
        return pattern == name
    return _match_segments(tuple(pattern.split(".")), tuple(name.split(".")))


def _match_segments(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    # One row of the usual table: reach[j] says whether the pattern so far matches the first j segments.
    reach = [True] + [False] * len(name)
    for part in pattern:
        if part == "**":
            seen = False
            reach = [seen := seen or here for here in reach]
        else:
            test = _segment(part).fullmatch
            reach = [False] + [
                here and test(segment) is not None for here, segment in zip(reach, name, strict=False)
            ]
    return reach[-1]


@lru_cache(maxsize=4096)
def _segment(part: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(part))


def _no_match(pattern: str, names: Mapping[str, Sequence[str]], types: Mapping[str, str]) -> UsageError:
    if pattern.startswith("type:"):
        known: Iterable[str] = [f"type:{name}" for name in sorted(set(types.values()))]
    else:
        known = [name for first, others in names.items() for name in (first, *others)]
    hint = near_misses(pattern, known) or "`hookscope layers MODEL` lists the names"
    return UsageError(f"no layer matches {pattern!r}", hint)


def _listed(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _quoted(patterns: Iterable[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns)
