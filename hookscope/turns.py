"""Whose turn it is: threads that inspect models with common parts do it one after another, all others at once.

Also what belongs to the whole process and is changed meanwhile. Knows nothing of hooks, and changes no model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import UsageError

_LOOK_S = 0.2


@dataclass(eq=False)
class _Turn:
    """A thread's wish to inspect a model; `alone`: while nobody else inspects any. `model` keeps the `parts` alive.

    `training`: whether some of it was found in train mode, once it is the thread's turn.
    """

    thread: threading.Thread
    model: nn.Module
    parts: frozenset[int]
    alone: bool = False
    training: bool = False

    def excludes(self, other: _Turn) -> bool:
        """Whether both cannot be had at once."""
        if self.thread is other.thread:
            return False
        return self.alone or other.alone or not self.parts.isdisjoint(other.parts)


class Turns:
    """The turns that are being had, and those that are waited for, in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._had: list[_Turn] = []
        self._waiting: list[_Turn] = []

    @contextmanager
    def taken(self, model: nn.Module, *, alone: bool = False) -> Iterator[None]:
        """A block in which no other thread has a turn with a model that shares modules or memory with this one.

        Waits for it. One thread may have any number of turns.

        Args:
            model: what is inspected.
            alone: no other thread has a turn at all.

        Raises:
            UsageError: waiting would never end.
        """
        turn = _Turn(threading.current_thread(), model, _parts(model), alone)
        try:
            self._wait(turn)
            yield
        finally:
            with self._changed:
                self._had = [one for one in self._had if one is not turn]
                self._changed.notify_all()

    def disturbs(self, model: nn.Module, *, gradients: bool) -> bool:
        """Whether a pass of the model made now is not its own: another thread has changed its mode, or its gradients.

        `gradients`: whether these matter.
        """
        me = threading.current_thread()
        others = [turn for turn in self._had if turn.thread is not me and (gradients or turn.training)]
        return bool(others) and any(turn.excludes(_Turn(me, model, _parts(model))) for turn in others)

    def _wait(self, turn: _Turn) -> None:
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._before(turn):
                    self._refuse_forever(turn.thread)
                    self._changed.wait(_LOOK_S)
                turn.training = any(module.training for module in turn.model.modules())
                self._had.append(turn)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _before(self, turn: _Turn) -> list[_Turn]:
        """The turns that must end, or come, before this one."""
        had = [one for one in self._had if one.excludes(turn)]
        if any(one.thread is turn.thread for one in self._had):
            return had  # nobody who waits for this thread may hold it up
        return had + [one for one in self._waiting[: self._waiting.index(turn)] if one.excludes(turn)]

    def _refuse_forever(self, thread: threading.Thread) -> None:
        seen: list[threading.Thread] = []
        ahead = self._awaited(thread)
        while ahead:
            other = ahead.pop()
            if other is thread or not other.is_alive():
                what = "waits for this one" if other is thread else "has ended without leaving it"
                raise UsageError(
                    f"the model is under inspection by another thread, which {what}: it would never be free",
                    "inspect it in one thread, or a copy of it",
                )
            if other not in seen:
                seen.append(other)
                ahead += self._awaited(other)

    def _awaited(self, thread: threading.Thread) -> list[threading.Thread]:
        """The threads that this one waits for, as far as can be told."""
        turns = [turn for turn in self._waiting if turn.thread is thread]
        if turns:
            return [other.thread for turn in turns for other in self._before(turn)]
        return _joined_by(thread)


class Shared:
    """A change of something that belongs to the whole process, in force while any thread is in its block.

    Who comes first makes it, and who leaves last puts back what was found then.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = change
        self._lock = threading.RLock()
        self._inside = 0
        self._change: AbstractContextManager[object] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which the change is in force."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._change is None:
                change = self._make()
                change.__enter__()
                self._change = change
            self._inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._change is not None:
                change, self._change = self._change, None
                change.__exit__(None, None, None)


TURNS = Turns()


def _parts(model: nn.Module) -> frozenset[int]:
    """What an inspection changes and puts back: modules, parameters and buffers, and where the latter lie."""
    modules = list(model.modules())
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)]
    return frozenset(id(part) for part in (*modules, *tensors)) | _memory(tensors)


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    found = set()
    for tensor in tensors:
        try:
            found.add(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            continue  # it lies nowhere, as a sparse one
    return found


def _joined_by(thread: threading.Thread) -> list[threading.Thread]:
    """The thread, if any, whose end or whose answer this one waits for just now."""
    stacks = sys._current_frames()
    for awaited in _held(stacks, thread, _WAITS):
        if isinstance(awaited, threading.Thread):
            return [awaited]
        return [
            one
            for one in threading.enumerate()
            if any(work.future is awaited for work in _held(stacks, one, _WORKS))
        ]
    return []


_WAITS = (threading.Thread.join.__code__, Future.result.__code__, Future.exception.__code__)
_WORKS = (_WorkItem.run.__code__,)


def _held(stacks: dict[int, Any], thread: threading.Thread, calls: Sequence[CodeType]) -> Iterator[Any]:
    """The objects whose method a thread is in, the innermost call first."""
    frame = stacks.get(thread.ident or 0)
    while frame is not None:
        if frame.f_code in calls and "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back
