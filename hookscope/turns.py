"""Whose turn it is: threads that inspect models with common parts do it one after another, all others at once.

Also what belongs to the whole process and is changed meanwhile. Knows nothing of hooks, and changes no model.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.thread import _WorkItem
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import UsageError

_LOOK_S = 0.2
_KEPT = 16


@dataclass(eq=False)
class _Turn:
    """A thread's wish to inspect a model; `alone`: while nobody else inspects any. `model` keeps the `parts` alive.

    `answers`: the conditions of the futures that it works for. Once it is the thread's turn: `number`, in order, and
    `training`: whether some of the model was found in train mode.
    """

    thread: threading.Thread
    model: nn.Module | None
    parts: frozenset[int]
    alone: bool = False
    answers: tuple[threading.Condition, ...] = ()
    number: int = 0
    training: bool = False

    @property
    def changes_modes(self) -> bool:
        """Whether the model is not in the mode that it was found in: eval mode, or train mode where it is alone."""
        return self.training or self.alone

    def excludes(self, other: _Turn) -> bool:
        """Whether both cannot be had at once."""
        if self.thread is other.thread:
            return False
        return self.alone or other.alone or not self.parts.isdisjoint(other.parts)


class Turns:
    """The turns that are being had, and those that are waited for, in their order; `count`: how many were had."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()
        self._had: list[_Turn] = []
        self._waiting: list[_Turn] = []
        self._past: deque[_Turn] = deque(maxlen=_KEPT)

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
        turn = _Turn(threading.current_thread(), model, _parts(model), alone, tuple(_answers()))
        try:
            self._wait(turn, model)
            yield
        finally:
            with self._changed:
                self._had = [one for one in self._had if one is not turn]
                turn.model = None
                self._past.append(turn)
                self._changed.notify_all()

    def disturbs(self, model: nn.Module, since: int, *, gradients: bool) -> bool:
        """Whether a pass of the model was not its own: another thread changed its mode, or its gradients.

        Args:
            model: what was run.
            since: the `count` when it began.
            gradients: whether these matter.
        """
        if self.count == since and not self._had:
            return False
        me = threading.current_thread()
        turns = [*self._had, *(turn for turn in list(self._past) if turn.number > since)]
        others = [turn for turn in turns if turn.thread is not me and (gradients or turn.changes_modes)]
        return bool(others) and any(turn.excludes(_Turn(me, model, _parts(model))) for turn in others)

    def _wait(self, turn: _Turn, model: nn.Module) -> None:
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._before(turn):
                    self._refuse_forever(turn.thread)
                    self._changed.wait(_LOOK_S)
                self.count += 1
                turn.number, turn.training = self.count, any(part.training for part in model.modules())
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
        awaited = _blocked_by(thread)
        if isinstance(awaited, threading.Thread):
            return [awaited]
        return [turn.thread for turn in self._waiting if awaited in turn.answers]


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


def _answers() -> Iterator[threading.Condition]:
    """What is told when the work that this thread does for others, in a pool, is done."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _WorkItem.run.__code__:
            yield frame.f_locals["self"].future._condition
        frame = frame.f_back


def _blocked_by(thread: threading.Thread) -> Any:
    """The thread that this one joins, or the condition that it waits for, just now; `None` where that is not known."""
    # Its innermost call alone: to follow another thread's stack while it runs is not safe.
    frame = sys._current_frames().get(thread.ident or 0)
    return frame.f_locals.get("self") if frame is not None and frame.f_code in _BLOCKING else None


_BLOCKING = [
    function.__code__
    for function in (
        threading.Condition.wait,
        threading.Thread.join,
        # Before Python 3.13, what waits inside `join`.
        getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join),
    )
]
