"""Cutting the graph: nothing before the first chosen layer joins it.

A tensor is made the start of the graph where it lies, so that everybody who holds it goes on with it: no copy, no
stand-in. Owns the rules of where that tells the whole truth; where it would not, it says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Cut:
    """Where the graph starts during one forward pass.

    Usually at a layer's output. Not where a gradient could pass it by: an output of several tensors, which may be
    made of one another, or one that was read before the layer returned it. Such a layer `failed`, and the graph
    must start at its inputs (`at_inputs`), or, where `whole` is set, at the model's.
    """

    def __init__(self) -> None:
        self.at_inputs: set[str] = set()
        self.failed: set[str] = set()
        self.whole = False
        self.reads = Reads()
        self._started: list[weakref.ref[Tensor]] = []

    def begin(self) -> None:
        """A forward pass is about to start."""
        self.failed.clear()
        self.whole = False
        self.reads.clear()

    def start_at_output(self, layer: str, tensor: Tensor, *, alone: bool, aliased: bool) -> None:
        """Start the graph at what a layer returned, or record that it cannot.

        Args:
            layer: its name.
            tensor: one of the tensors of its output.
            alone: whether it is the only one.
            aliased: whether it shares memory with an input.
        """
        if layer in self.at_inputs:
            self.whole = True  # its output does not come from its inputs
        elif alone and not self.reads.saw(tensor) and self._start(tensor):
            return
        elif aliased and self.reads.saw(tensor):
            self.whole = True  # somebody who read the input has a share in the gradient
        else:
            self.failed.add(layer)

    def start_at_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Start the graph at what a layer is about to receive."""
        for tensor in tensors:
            if tensor.is_floating_point() and not tensor.requires_grad:
                self._start(tensor)

    def undo(self) -> None:
        """Take the marks off what may outlive the pass, such as a buffer."""
        with torch.no_grad():
            for reference in self._started:
                tensor = reference()
                if tensor is not None:
                    tensor.detach_()
        self._started.clear()

    def _start(self, tensor: Tensor) -> bool:
        # A view takes part in the graph through its base.
        origin = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if isinstance(origin, nn.Parameter) or origin.is_inference() or origin.requires_grad:
            return False
        source = torch.zeros((), dtype=origin.dtype, device=origin.device).expand(origin.shape)
        with torch.enable_grad():
            _Start.apply(source.requires_grad_(), origin)
        self._started.append(weakref.ref(origin))
        return tensor.requires_grad


class _Start(torch.autograd.Function):
    """Makes `value`, the very object, a result of `source`; writes nothing."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Reads(TorchFunctionMode):
    """Which tensors were read, by a function of torch that did not return the very tensor, at their present version.

    What scripted functions, `torch.func` and other threads read passes by unseen.

    `paused` while probes look: what they read is not the model's doing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # `b[:] = y` gives nothing, and has read y.
        if not self.paused and (isinstance(result, (Tensor, tuple, list)) or func is Tensor.__setitem__):
            for tensor in _among((*args, *(kwargs or {}).values())):
                if tensor is not result and not isinstance(tensor, nn.Parameter):
                    self._seen[id(tensor)] = weakref.ref(tensor), version_of(tensor)
        return result

    def saw(self, tensor: Tensor) -> bool:
        """Whether the tensor was read since it was last written to."""
        reference, version = self._seen.get(id(tensor), (None, -1))
        # An identity may have been given to another tensor since.
        return reference is not None and reference() is tensor and version == version_of(tensor)

    def clear(self) -> None:
        """Forget all reads."""
        self._seen.clear()


def _among(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (item for item in value if isinstance(item, Tensor))


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; 0 where that is not counted, as in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
