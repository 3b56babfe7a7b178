"""Running a model so that hooks see all of it: no fused path, nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Attention's fused fast path off, and compiled sub-modules run eagerly: both would pass hooks by."""
    fast = torch.backends.mha.get_fastpath_enabled()
    compiled = any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    with ExitStack() as stack:
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        yield
