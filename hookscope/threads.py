"""Whose forward pass it is: the thread's that listens, another's, or one that autograd makes again.

Owns no lock and waits for nobody; whose turn it is to inspect a model is for `turns`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hookscope.errors import UsageError


class OwnThread:
    """The thread in which this was made, and whether that one or another ran the model."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._heard = False
        self._overheard = False

    def hears(self) -> bool:
        """Whether a call that is made now is one of the own thread's passes."""
        if threading.get_ident() == self._ident:
            self._heard = True
            return True
        # Autograd's own threads make the calls of a checkpointed layer again; of whose pass cannot be told.
        if recomputing() and _is_autograds():
            return True
        self._overheard = True
        return False

    def refuse_others(self) -> None:
        """Raises a `UsageError` in another thread."""
        if threading.get_ident() != self._ident:
            raise UsageError(
                f"a runner was made by one thread and used by another, {threading.current_thread().name!r}",
                "make it in the thread that uses it",
            )

    def refuse_silence(self) -> None:
        """Raises a `UsageError` where the model was run, but never by the own thread."""
        if self._overheard and not self._heard:
            raise UsageError(
                "only other threads ran the model, and hooks hear the thread that attached them",
                "attach in each thread that runs it",
            )

    @contextmanager
    def refusing_company(self) -> Iterator[None]:
        """A block that raises a `UsageError` where another thread ran the model meanwhile."""
        self._overheard = False
        yield
        if self._overheard:
            raise UsageError(
                "another thread ran the model while it was in train mode, and took of its random numbers",
                "run it when the other is done, or let one of them have a copy",
            )


def recomputing() -> bool:
    """Whether autograd is at work in this thread: a forward call is then one made again for the backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def open_calls(module: nn.Module) -> int:
    """How many calls of the module are under way in this thread, one that is beginning included."""
    count, frame = 0, sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        count += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
    return max(1, count)


def _is_autograds() -> bool:
    """Whether Python did not start this thread, as those of the autograd engine."""
    known = (one for one in threading.enumerate() if one.ident == threading.get_ident())
    return all(isinstance(one, threading._DummyThread) for one in known)
