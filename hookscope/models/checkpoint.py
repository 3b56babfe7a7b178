"""State dicts: which tensors of what a file held are a model's, and whether they fit.

It works on names and shapes of given objects; it opens no file and builds no model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hookscope.errors import ModelError
from hookscope.models.checkpoint_file import SUFFIXES, read_state_dict

__all__ = ["SUFFIXES", "Peeled", "check", "class_count", "peel", "read_state_dict"]

WRAPPERS = (
    "state_dict",
    "model",
    "model_state_dict",
    "model_state",
    "net",
    "network",
    "module",
    "weights",
    "model_weights",
    "params",
    "ema",
    "model_ema",
    "ema_model",
    "state_dict_ema",
    "ema_state_dict",
    "params_ema",
)
"""Keys under which training scripts put the weights; on a tie the earlier wins, so plain before averaged."""

PREFIXES = ("module.", "model.", "_orig_mod.", "backbone.", "net.")
"""What wrappers put before names; each goes only where more names then match."""

_MAX_DEPTH = 6
_MAX_TRIES = 32  # names made up for it would else give 5**6 ways to strip them
_BOOKKEEPING = ("num_batches_tracked", "n_averaged", "total_ops", "total_params")
_SHOWN = 3

State = dict[str, Any]


@dataclass(frozen=True)
class Peeled:
    """The part of a file that matches a model best.

    `state`: under the model's names, with whatever did not match under its own. `nesting`: the keys it lay
    under, `""` for none. `prefixes`: what was stripped, in order. `others`: nestings that match as much.
    """

    state: State = field(repr=False)
    nesting: str = ""
    prefixes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def peel(raw: object, names: Collection[str]) -> Peeled:
    """The nesting and the stripping of prefixes under which most of `names` are found.

    Raises:
        ModelError: there is no mapping with text keys at all.
    """
    if not isinstance(raw, Mapping):
        raise ModelError(
            f"the weights file holds a {type(raw).__name__}, no state dict", "save model.state_dict() in it"
        )
    known = frozenset(names)
    candidates = [(nesting, *_stripped(state, known)) for nesting, state in _nestings(raw)]
    scores = [_matching(state, known) for _, state, _ in candidates]
    best = max(scores)
    nesting, state, prefixes = candidates[scores.index(best)]
    as_good = [other for (other, _, _), score in zip(candidates, scores, strict=True) if score == best > 0]
    return Peeled(state, nesting, prefixes, tuple(as_good[1:]))


def check(peeled: Peeled, expected: Mapping[str, Any], origin: str = "the weights") -> State:
    """The peeled tensors that the model expects, all of them; counters of batches may be missing.

    Raises:
        ModelError: one for all that does not fit.
    """
    found = _differences(peeled.state, expected)
    if found.any():
        raise _mismatch(origin, peeled, expected, found)
    return {name: peeled.state[name] for name in expected if name in peeled.state}


def class_count(peeled: Peeled, expected: Mapping[str, Any], classes: int | None = None) -> int | None:
    """The file's number of classes where that alone keeps it from fitting, else `None`.

    Every tensor that differs must do so in its first axis alone, and all by the same ratio: that of the
    file's number of classes to the model's. `classes`: the model's, where known; else its shortest axis
    that differs.
    """
    pairs = []
    for name, value in expected.items():
        if name in peeled.state and _differ(peeled.state[name], value, _shape):
            theirs, ours = _shape(peeled.state[name]), _shape(value)
            if not isinstance(theirs, tuple) or not theirs or not ours or theirs[1:] != ours[1:]:
                return None
            pairs.append((theirs[0], ours[0]))
    if not pairs:
        return None
    own = classes or min(ours for _, ours in pairs)
    counts = {divmod(theirs * own, ours) for theirs, ours in pairs}
    count, rest = next(iter(counts))
    return count if len(counts) == 1 and rest == 0 and count > 0 else None


def _nestings(raw: Mapping[Any, Any]) -> Iterator[tuple[str, State]]:
    """Every mapping reached through wrapper keys, the outermost first; one that holds itself is met once."""
    seen: set[int] = set()
    level: list[tuple[str, Mapping[Any, Any]]] = [("", raw)]
    for _ in range(_MAX_DEPTH):
        deeper = []
        for nesting, mapping in level:
            if id(mapping) in seen:
                continue
            seen.add(id(mapping))
            yield nesting, {key: value for key, value in mapping.items() if isinstance(key, str)}
            deeper += [
                (f"{nesting}.{key}" if nesting else key, mapping[key])
                for key in WRAPPERS
                if isinstance(mapping.get(key), Mapping)
            ]
        level = deeper


def _stripped(state: State, known: frozenset[str]) -> tuple[State, tuple[str, ...]]:
    """The state with the shortest run of prefixes removed that makes most names match."""
    best, best_score = state, _matching(state, known)
    best_prefixes: tuple[str, ...] = ()
    tried = {frozenset(state)}
    level: list[tuple[State, tuple[str, ...]]] = [(state, ())]
    for _ in range(_MAX_DEPTH):
        level = [
            (shorter, (*prefixes, prefix))
            for names, prefixes in level
            for prefix in PREFIXES
            if (shorter := _without(names, prefix, known)) is not names and not _met(shorter, tried)
        ][:_MAX_TRIES]
        for names, prefixes in level:
            if (score := _matching(names, known)) > best_score:
                best, best_prefixes, best_score = names, prefixes, score
    return best, best_prefixes


def _met(state: State, tried: set[frozenset[str]]) -> bool:
    key = frozenset(state)
    if key in tried:
        return True
    tried.add(key)
    return False


def _without(state: State, prefix: str, known: frozenset[str]) -> State:
    """The state without one prefix; a name that matches as it stands, or would collide, is kept."""
    short = {name: _strip(name, prefix) for name in state if name not in known}
    if all(name == new for name, new in short.items()):
        return state
    taken: State = {name: value for name, value in state.items() if name in known}
    for name, new in short.items():
        taken[name if new in taken or (new != name and new in state) else new] = state[name]
    return taken


def _strip(name: str, prefix: str) -> str:
    if prefix == "_orig_mod.":  # a compiled part puts it in the middle of the name
        return ".".join(part for part in name.split(".") if part != "_orig_mod")
    return name.removeprefix(prefix)


def _matching(state: Mapping[str, Any], known: frozenset[str]) -> int:
    return sum(name in known for name in state)


def _is_bookkeeping(name: str) -> bool:
    return name.rpartition(".")[2] in _BOOKKEEPING


def _differ(theirs: Any, ours: Any, what: Callable[[Any], object]) -> bool:
    """Whether two values differ in `what`; never where ours is no tensor, or not yet shaped."""
    if not isinstance(ours, Tensor) or is_lazy(ours):
        return False
    return what(theirs) != what(ours)


def _shape(value: Any) -> Any:
    """A tensor's sizes; of anything else the name of its class, which equals no sizes."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_quantized:
        return "quantised"
    if value.is_complex():
        return "complex"
    if value.is_floating_point():
        return "real"
    return "truth" if value.dtype is torch.bool else "integer"


@dataclass(frozen=True)
class _Differences:
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    rekinded: list[str]

    def any(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.rekinded)


def _differences(state: State, expected: Mapping[str, Any]) -> _Differences:
    common = [name for name in expected if name in state]
    reshaped = [name for name in common if _differ(state[name], expected[name], _shape)]
    same_shape = [name for name in common if name not in reshaped and not _is_bookkeeping(name)]
    foreign = [name for name, value in state.items() if name not in expected and isinstance(value, Tensor)]
    return _Differences(
        missing=[name for name in expected if name not in state and not _is_bookkeeping(name)],
        unexpected=[name for name in foreign if not _is_bookkeeping(name)],
        reshaped=reshaped,
        rekinded=[name for name in same_shape if _differ(state[name], expected[name], _kind)],
    )


def _mismatch(origin: str, peeled: Peeled, expected: Mapping[str, Any], found: _Differences) -> ModelError:
    state = peeled.state

    def sizes(name: str) -> str:
        return f"{name} {_size(state[name])} for {_size(expected[name])}"

    def kinds(name: str) -> str:
        return f"{name} {_kind(state[name])} for {_kind(expected[name])}"

    parts = [
        _part("missing", found.missing, lambda name: f"{name} {_size(expected[name])}"),
        _part("unexpected", found.unexpected, lambda name: f"{name} {_size(state[name])}"),
        _part("of another shape", found.reshaped, sizes),
        _part("of another kind", found.rekinded, kinds),
    ]
    place = f" under {peeled.nesting!r}" if peeled.nesting else ""
    needed = sum(not _is_bookkeeping(name) for name in expected)
    fitting = needed - len(found.missing) - len(found.reshaped) - len(found.rekinded)
    return ModelError(
        f"{origin}{place} do not fit the model, {fitting} of {needed} tensors do: "
        + "; ".join(part for part in parts if part),
        _advice(peeled, fitting),
    )


def _advice(peeled: Peeled, fitting: int) -> str:
    if fitting == 0:
        keys = ", ".join(repr(key) for key in list(peeled.state)[:_SHOWN])
        return f"the file begins with {keys or 'nothing'}; is it a checkpoint of another model?"
    return "choose the model the file was made with, or shape it with --model-arg"


def _part(title: str, names: list[str], describe: Callable[[str], str]) -> str:
    if not names:
        return ""
    shown: Iterable[str] = map(describe, names[:_SHOWN])
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} {title} ({', '.join(shown)}{more})"


def _size(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "(not yet shaped)" if is_lazy(value) else "(" + ", ".join(map(str, value.shape)) + ")"
