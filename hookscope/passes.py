"""What a pass through a model is: an objective to differentiate, what came of it, and the calls themselves.

Owns which parameters take part and how a failure of the model is told; registers no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookscope.errors import HookscopeError, ModelError
from hookscope.hooks import Attachment, came_from_probe
from hookscope.layers import Site
from hookscope.nested import rebuilt, tensors_in
from hookscope.wording import one_line


@dataclass(frozen=True)
class Objective:
    """A named scalar to differentiate: `scalar(output)` is a 0-dimensional tensor of the model's output."""

    name: str
    scalar: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Pass:
    """One forward pass: what the model returned (without a graph), and the sites no gradient came to.

    `stopped`: it was left once all that was asked for had been returned; then there is no `output`.

    `unreached[objective]` are the sites of the probes that follow it which the score does not depend on;
    `unobservable` those whose gradient cannot be seen: their output is a view of their input, written later.
    """

    output: Any
    sites: tuple[Site, ...]
    unreached: dict[str, frozenset[Site]]
    unobservable: frozenset[Site]
    values: dict[str, float]
    stopped: bool = False


class NoGradient(ModelError):
    """The backward pass raised."""


def called(model: nn.Module, x: Any) -> Any:
    """What the model returns for `x`: a tuple is its arguments, a mapping those by name, all else the one.

    Raises:
        ModelError: the model raised; its own message is passed on.
    """
    args = x if type(x) is tuple else (x,)
    try:
        if isinstance(x, Mapping):
            return model(**x)
        return model(*args)
    except (HookscopeError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if came_from_probe(error):
            raise
        raise ModelError(
            f"the model raised {type(error).__name__} on an input of shape {_shapes(x)}: {one_line(error)}",
            "is the size right? --resize and --crop set it; --debug shows where",
        ) from error


def differentiated(
    attachment: Attachment, name: str, scalar: Tensor, *, keep_graph: bool = False
) -> frozenset[Site]:
    """The sites that the gradient of an objective reached, after one backward pass.

    Raises:
        NoGradient: the backward pass raised.
    """
    try:
        return attachment.differentiate(name, scalar, keep_graph=keep_graph)
    except (HookscopeError, MemoryError):
        raise
    except RuntimeError as error:
        if came_from_probe(error):
            raise
        raise NoGradient(
            f"no gradient can be taken of the model: {one_line(error)}",
            "does it write in place to what its own backward needs, or use reentrant checkpointing?",
        ) from error


def entering(x: Any, *, reaching: bool) -> Any:
    """The input with every tensor copied; where the gradient must reach it, a part of the graph."""

    def made(tensor: Tensor) -> Tensor:
        # A copy, because the model may write into what it is given, and x may have to be run again.
        copied = tensor.detach().clone()
        # Not a leaf itself: autograd refuses to write into one.
        return copied.requires_grad_().clone() if reaching and copied.is_floating_point() else copied

    return rebuilt(x, {path: made(tensor) for path, tensor in tensors_in(x)})


def pictures_in(x: Any) -> int:
    """How many pictures, or samples, a batch holds: the first axis of its first tensor, or the length of a list."""
    while isinstance(x, (tuple, Mapping)) and x:
        x = next(iter(x.values() if isinstance(x, Mapping) else x))
    if isinstance(x, Tensor):
        return x.shape[0] if x.dim() else 0
    return len(x) if isinstance(x, Sized) else 0


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


def _shapes(x: Any) -> str:
    return ", ".join(str(tuple(tensor.shape)) for _, tensor in tensors_in(x)) or "no tensor"
