"""When backward passes end, and in which order they reach parameters. It reads no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch import Tensor

from hookscope.monitor.hooks import after_backward, current_backward, on_gradients
from hookscope.monitor.watched import Watched


class Arrivals:
    """Calls `ended` at the end of every backward pass that reaches a watched parameter while it is `listening`.

    `order`: names of parameters, in the order in which the first such pass reached them; empty before.
    """

    def __init__(self, watched: Iterable[Watched], ended: Callable[[], None]) -> None:
        self.listening = False
        self.order: dict[str, int] = {}
        self._watched = tuple(watched)
        self._ended = ended
        self._backward = -1
        self._arrived: list[int] = []

    def hooked(self) -> ExitStack:
        """Hooks are in place until the stack closes."""
        return on_gradients((one.parameter for one in self._watched), self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        # Called by autograd for every parameter: it must do next to nothing.
        if not self.listening:
            return
        # By number, not by a flag: a pass that raises never ends.
        if (number := current_backward()) != self._backward:
            self._backward = number
            self._arrived.clear()
            after_backward(self._at_end)
        if not self.order:
            self._arrived.append(id(parameter))

    def _at_end(self) -> None:
        self._backward = -1
        if not self.order:
            known = {id(one.parameter): one.name for one in self._watched}
            self.order.update({known[one]: at for at, one in enumerate(dict.fromkeys(self._arrived))})
            self._arrived.clear()
        if self.listening:
            self._ended()
