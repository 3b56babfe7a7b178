"""Recording what modules return up to a call, and returning it again instead of computing it.

Works by giving modules a `forward` of their own for a while; their `__dict__`s are left exactly as they were. Knows
the order of calls, not what is done with it; registers no hook and starts no pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

from hookscope.edits import storages
from hookscope.nested import rebuilt, tensors_in

Forward = Callable[..., Any]

PICTURE = -1
"""The model's input among the numbers of steps."""


class Kind(Enum):
    """What became of a call when the target's began: it had ended, it was still open, it is the target's."""

    ENDED = "ended"
    OPEN = "open"
    TARGET = "target"


@dataclass(frozen=True)
class Step:
    """One call, none of whose callers had ended when the target's began.

    `output`: a copy of what it returned, as it was then. `memory`: where the tensors of the output lay.
    `shares`: whether some of it is the memory of an input.
    """

    module: nn.Module
    kind: Kind
    output: Any = None
    memory: frozenset[int] = frozenset()
    shares: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the output by path."""
        return dict(tensors_in(self.output))


@dataclass(frozen=True)
class Recording:
    """One pass over one picture, or a batch of it: `value` is what the site held, `output` what the model returned.

    `memory`: where the input lay.
    """

    x: Tensor
    memory: int
    steps: tuple[Step, ...]
    value: Tensor
    output: Any

    @property
    def order(self) -> tuple[Any, ...]:
        """The calls and what they returned, but for the values: alike for all pictures that one plan serves."""
        return tuple(
            (
                id(step.module),
                step.kind,
                step.shares,
                tuple((path, t.shape) for path, t in step.tensors.items()),
            )
            for step in self.steps
        )

    @property
    def handed_on(self) -> frozenset[int]:
        """The steps whose memory the target hands on, where it does: an in-place op, an identity, a view."""
        target = self.steps[-1]
        if not target.shares:
            return frozenset()
        steps = [number for number, step in enumerate(self.steps) if step.memory & target.memory]
        return frozenset([*steps, PICTURE] if self.memory in target.memory else steps)

    def writes(self) -> int:
        """How often what was recorded was written to."""
        recorded = (tensor for step in self.steps for tensor in step.tensors.values())
        return sum(tensor._version for tensor in (self.x, *recorded))


class Diverged(Exception):
    """The calls came in another order than recorded."""

    def __str__(self) -> str:
        return "the order in which it calls its layers depends on the values"


@dataclass
class Recorder:
    """The `steps` of one pass, the target's call the last of them; none after a pass that never came to it.

    Args:
        target: the module of the target's call.
        is_now: whether the call of it that begins is the one meant.
    """

    target: nn.Module
    is_now: Callable[[], bool]
    steps: list[Step] = field(default_factory=list)
    reached: bool = False
    # An address tells memory apart only as long as nobody frees it.
    _alive: list[Any] = field(default_factory=list)

    def forward_of(self, module: nn.Module, forward: Forward) -> Forward:
        """The module's `forward`, recorded."""

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.reached:
                return forward(*args, **kwargs)
            self.reached = module is self.target and self.is_now()
            kind = Kind.TARGET if self.reached else Kind.ENDED
            begun = len(self.steps)
            self._add(Step(module, Kind.OPEN), None)
            output = forward(*args, **kwargs)
            if kind is Kind.TARGET or not self.reached:
                del self.steps[begun:], self._alive[begun:]
                self._add(_step(module, kind, (args, kwargs), output), output)
            if kind is Kind.TARGET:
                self._alive.clear()
            return output

        return recorded

    def _add(self, step: Step, output: Any) -> None:
        self.steps.append(step)
        self._alive.append(output)


@dataclass
class Player:
    """Hands out recorded outputs in the recorded order, and lets all that comes after the target's call compute.

    Args:
        steps: as recorded.
        output: what the n-th of them returns instead of computing; `None`: it computes.
        now: the number of the target's call that is running.
    """

    steps: Sequence[Step]
    output: Callable[[int], Any]
    now: Callable[[], int]
    call: int | None = None
    _next: int = 0
    _computing: bool = False

    @property
    def reached(self) -> bool:
        """Whether the target's call began."""
        return self._next == len(self.steps)

    def forward_of(self, module: nn.Module, forward: Forward) -> Forward:
        """The module's `forward`, or what it returned when it was recorded."""

        @functools.wraps(forward)
        def played(*args: Any, **kwargs: Any) -> Any:
            if self.reached or self._computing:
                return forward(*args, **kwargs)
            index, step = self._next, self.steps[self._next]
            if step.module is not module:
                raise Diverged
            self._next += 1
            if self.reached:
                self.call = self.now()
            output = self.output(index)
            if output is not None:
                return output
            self._computing = step.kind is not Kind.OPEN
            try:
                return forward(*args, **kwargs)
            finally:
                self._computing = False

        return played


@contextmanager
def forwards_replaced(
    modules: Iterable[nn.Module], replacement: Callable[[nn.Module, Forward], Forward]
) -> Iterator[None]:
    """Every module's `forward` gives way to `replacement(module, forward)` until the block ends, in this thread."""
    with ExitStack() as stack:
        for module in {id(module): module for module in modules}.values():
            new = _in_this_thread(replacement(module, module.forward), module.forward)
            stack.callback(_put_back, module, dict(module.__dict__))
            module.__dict__["forward"] = new
        yield


def kept_aside(modules: Iterable[nn.Module]) -> dict[tuple[int, str], list[Tensor]]:
    """The tensors that modules and those inside them keep as attributes or buffers, by owner and name."""
    held: dict[tuple[int, str], list[Tensor]] = {}
    for inner in {id(inner): inner for module in modules for inner in module.modules()}.values():
        for name, value in vars(inner).items():
            if name != "_parameters":
                held[id(inner), name] = [tensor for _, tensor in tensors_in(value)]
    return held


def copied(value: Any) -> Any:
    """A nested value with a copy, without a graph, of each of its tensors."""
    return rebuilt(value, {path: tensor.detach().clone() for path, tensor in tensors_in(value)})


def _in_this_thread(forward: Forward, elsewhere: Forward) -> Forward:
    thread = threading.get_ident()

    @functools.wraps(elsewhere)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (forward if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return chosen


def _put_back(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    if "forward" in attributes:
        module.__dict__["forward"] = attributes["forward"]
    else:
        module.__dict__.pop("forward", None)


def _step(module: nn.Module, kind: Kind, inputs: Any, output: Any) -> Step:
    memory = storages(output)
    return Step(module, kind, copied(output), memory, bool(memory & storages(inputs)))
