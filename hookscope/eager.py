"""Running models so that hooks see all of it: no fused path, nothing compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hookscope.turns import Shared


@contextmanager
def eager() -> Iterator[None]:
    """Attention's fused fast path off, and whatever is compiled run eagerly: both would pass hooks by.

    Both are switches of the whole process, put back when the last thread has left: meanwhile compiled code of other
    threads runs eagerly too.
    """
    with ExitStack() as stack:
        # A model does not tell that it is called by compiled code. What nobody has imported has compiled nothing.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_UNCOMPILED.held())
        stack.enter_context(_UNFUSED.held())
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _unfused() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


_UNCOMPILED, _UNFUSED = Shared(_uncompiled), Shared(_unfused)
