"""The hooks of a training loop: on parameters, on the end of a backward pass, on an optimiser's step.

Beside `hookscope.hooks`, which looks into layers, the only code that registers hooks. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookscope.errors import UsageError


def on_gradients(parameters: Iterable[Tensor], told: Callable[[Tensor], None]) -> ExitStack:
    """`told(parameter)` whenever a backward pass has added to its `.grad`; closing the stack ends it.

    Under data parallel `.grad` is then this process's own still.
    """
    stack = ExitStack()
    for parameter in parameters:
        # A lazy one has no gradient to hook yet, and a frozen one never gets any.
        if parameter.requires_grad and not is_lazy(parameter):
            handle = parameter.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
    return stack


def after_backward(call: Callable[[], None]) -> None:
    """`call()` at the end of the backward pass that runs now, when data parallel has averaged the gradients."""
    engine: Any = torch.autograd.Variable._execution_engine

    def again() -> None:
        # Data parallel queues its own end after the first gradient came: what is queued now comes after that.
        engine.queue_callback(call)

    engine.queue_callback(again)


def current_backward() -> int:
    """A number of the backward pass that runs now."""
    return int(torch._C._current_graph_task_id())


def on_steps(optimizer: Optimizer, before: Callable[[bool], None], after: Callable[[], None]) -> ExitStack:
    """`before(has_closure)` and `after()` around every step; closing the stack ends it.

    Raises:
        UsageError: the optimiser takes no hooks.
    """

    def told_before(_: Optimizer, args: Any, kwargs: Any) -> None:
        before(any(callable(value) for value in (*args, *kwargs.values())))

    def told_after(_: Optimizer, args: Any, kwargs: Any) -> None:
        after()

    if not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(
            f"the optimizer, of class {type(optimizer).__name__!r}, takes no step hooks",
            "give the torch.optim.Optimizer inside it",
        )
    stack = ExitStack()
    stack.callback(optimizer.register_step_pre_hook(told_before).remove)
    stack.callback(optimizer.register_step_post_hook(told_after).remove)
    return stack
