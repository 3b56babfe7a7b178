"""What a pass through a model is: an objective to differentiate, what came of it, and the call itself.

Owns which parameters take part and how a failure of the model is told; no hooks, no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookscope.errors import HookscopeError, ModelError
from hookscope.hooks import came_from_probe
from hookscope.layers import Site
from hookscope.wording import one_line


@dataclass(frozen=True)
class Objective:
    """A named scalar to differentiate: `scalar(output)` is a 0-dimensional tensor of the model's output."""

    name: str
    scalar: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Pass:
    """One forward pass: what the model returned (without a graph), and the sites no gradient came to.

    `unreached[objective]` are the sites of the probes that follow it which the score does not depend on;
    `unobservable` those whose gradient cannot be seen: their output is a view of their input, written later.
    """

    output: Any
    sites: tuple[Site, ...]
    unreached: dict[str, frozenset[Site]]
    unobservable: frozenset[Site]
    values: dict[str, float]


def called(model: nn.Module, x: Tensor) -> Any:
    """What the model returns.

    Raises:
        ModelError: the model raised; its own message is passed on.
    """
    try:
        return model(x)
    except (HookscopeError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if came_from_probe(error):
            raise
        raise ModelError(
            f"the model raised {type(error).__name__} on an input of shape {tuple(x.shape)}: {one_line(error)}",
            "is the size right? --resize and --crop set it; --debug shows where",
        ) from error


@contextmanager
def requiring(model: nn.Module, wanted: Sequence[nn.Parameter]) -> Iterator[None]:
    """Only the wanted parameters take part in a graph."""
    kept = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in wanted}
    try:
        for parameter, _ in kept:
            parameter.requires_grad = id(parameter) in chosen
        yield
    finally:
        for parameter, flag in kept:
            parameter.requires_grad = flag
