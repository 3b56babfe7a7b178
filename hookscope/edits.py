"""Changes of values in flight: what an `Edit` is, and how it is made so that everybody goes on with it.

Registers nothing: `hooks` calls `Editing` before and after the layers that are edited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import UsageError, near_misses
from hookscope.layers import Site, modules_by_name
from hookscope.nested import rebuilt, tensors_in


@dataclass(frozen=True)
class Edit:
    """A change of what a layer returns.

    `change(site, tensor)` gives the new values, of the tensor's shape; the tensor itself means unchanged. It is
    the model's own live tensor and must not be written to; where it is part of a graph, the change becomes part of
    it too. `layer` is a first name as in `modules_by_name`; `call` which of its calls (`None`: every one), `output`
    the path of the tensor in a nested output (`None`: every floating tensor). `gives_away`: nobody else holds the new
    values, so that the model may go on with that very tensor.
    """

    layer: str
    change: Callable[[Site, Tensor], Tensor]
    call: int | None = None
    output: str | None = None
    gives_away: bool = False

    def concerns(self, site: Site, tensor: Tensor) -> bool:
        """Whether the edit is meant for this tensor."""
        if site.layer != self.layer or self.call not in (None, site.call):
            return False
        return tensor.is_floating_point() if self.output is None else self.output == site.output


@dataclass(frozen=True)
class _Entered:
    """A call under way: its number, and the tensor for which the layer got a stand-in, then of which version."""

    call: int
    stood_for: Tensor | None = None
    stand_in: Tensor | None = None
    version: int = 0


class Editing:
    """The edits of one `attached()` block. `calls`: how often each edited layer was called in this pass.

    Where a layer's output shares memory with one of its inputs (an in-place op, an identity), the caller may
    ignore what is returned and go on with the input: the new values are then written into that memory, unless it
    cannot be written to or is the model's own. The model's input is no exception: give it a copy.

    With a graph such a write could take from autograd what it saved: there a module with `inplace` set works on a
    stand-in, whose new values are then written where the module would have written, and all others return a changed
    copy.

    Args:
        model: the model whose layers are edited.
        edits: in the order in which they apply.
        looking: the context in which a change looks at a tensor.

    Raises:
        UsageError: an edit names a layer that the model does not have.
    """

    def __init__(
        self, model: nn.Module, edits: Sequence[Edit], looking: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.calls: dict[str, int] = {}
        self._looking = looking
        self._open: dict[str, list[_Entered]] = {}
        self._edits: dict[str, list[Edit]] = {}
        modules = modules_by_name(model) if edits else {}
        for edit in edits:
            if edit.layer not in modules:
                raise UsageError(f"no layer is named {edit.layer!r}", near_misses(edit.layer, modules))
            self._edits.setdefault(edit.layer, []).append(edit)
        self._model = model

    @cached_property
    def _owned(self) -> frozenset[int]:
        # Dear to find out, and seldom asked for.
        return owned_memory(self._model)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the edited layers."""
        return tuple(self._edits)

    def begin(self) -> None:
        """A forward pass is about to start."""
        self.calls.clear()
        self._open.clear()

    def enter(self, layer: str, module: nn.Module, args: Any, *, again: bool = False) -> Any:
        """A call of the layer begins; returns the arguments it gets instead of `args`, or `None` for these.

        `again`: it is one that checkpointing repeats in the backward pass.
        """
        call = self.calls.get(layer, 0)
        if again:
            # Which of several calls is repeated is not known; only edits of every call hold then.
            call = 0 if call == 1 else -1
        else:
            self.calls[layer] = call + 1
        stood_for = args[0] if _needs_stand_in(module, args) else None
        if stood_for is None:
            self._open.setdefault(layer, []).append(_Entered(call))
            return None
        with self._looking():
            stand_in = stood_for.clone()
        self._open.setdefault(layer, []).append(_Entered(call, stood_for, stand_in, stand_in._version))
        return (stand_in, *args[1:])

    def leave(self, layer: str, inputs: Any, output: Any) -> Any:
        """What the model goes on with instead of `output`, or `None` where nothing is replaced."""
        opened = self._open.get(layer)
        entered = opened.pop() if opened else _Entered(0)
        if entered.stood_for is not None and output is entered.stand_in:
            return self._handed_on(layer, entered, entered.stood_for)
        shared = storages(inputs)
        replaced: dict[str, Tensor] = {}
        for path, tensor in tensors_in(output):
            new = self._changed(Site(layer, entered.call, path), tensor)
            if new is not tensor and not (storage(tensor) in shared and self._written(tensor, new)):
                given = self._is_given_away(layer) and _lies_like(new, tensor)
                replaced[path] = new if given else _own(new, tensor)
        return rebuilt(output, replaced) if replaced else None

    def _handed_on(self, layer: str, entered: _Entered, stood_for: Tensor) -> Tensor:
        """An in-place layer returned its stand-in: what it is to return, written where it would have written."""
        tensor: Any = entered.stand_in
        new = self._changed(Site(layer, entered.call), tensor)
        if tensor._version == entered.version:  # it did not write: a dropout in eval mode
            return stood_for if new is tensor else _own(new, tensor)
        return stood_for.copy_(new)

    def _changed(self, site: Site, tensor: Tensor) -> Tensor:
        value = tensor
        for edit in self._edits[site.layer]:
            if edit.concerns(site, value):
                with self._looking():
                    value = _checked(site, value, edit.change(site, value))
        return value

    def _is_given_away(self, layer: str) -> bool:
        return all(edit.gives_away for edit in self._edits[layer])

    def _written(self, tensor: Tensor, new: Tensor) -> bool:
        if storage(tensor) in self._owned or not _is_writable(tensor):
            return False
        if torch.is_grad_enabled() and (tensor.requires_grad or new.requires_grad):
            return False
        tensor.copy_(new)
        return True


def owned_memory(model: nn.Module) -> frozenset[int]:
    """Where the model's parameters, buffers and other tensors it keeps lie: not to be written to."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided and not is_lazy(tensor))
    return frozenset(storage(tensor) for tensor in dense) - {0}


def storage(tensor: Tensor) -> int:
    """Where a tensor's memory begins; of one without memory, as inside `torch.func`, a number of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return -id(tensor)


def storages(value: Any) -> frozenset[int]:
    """The memory of all tensors in a nested value."""
    return frozenset(storage(tensor) for _, tensor in tensors_in(value))


def _checked(site: Site, tensor: Tensor, new: Any) -> Tensor:
    if not isinstance(new, Tensor) or new.shape != tensor.shape:
        what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else f"{type(new).__name__}"
        raise UsageError(
            f"the change at {site} made {what} of one of shape {tuple(tensor.shape)}",
            "a change must keep the shape",
        )
    return new if new is tensor else new.to(tensor)


def _own(new: Tensor, like: Tensor) -> Tensor:
    # Never the change's own tensor, which somebody may hold and the model may write to.
    return torch.empty_like(like, requires_grad=False).copy_(new)


def _needs_stand_in(module: nn.Module, args: Any) -> bool:
    if not torch.is_grad_enabled() or getattr(module, "inplace", False) is not True:
        return False
    given = args[0] if args else None
    return isinstance(given, Tensor) and given.requires_grad and not given.is_leaf


def _lies_like(new: Tensor, tensor: Tensor) -> bool:
    """Whether the model's own kernels would be taken for it: same type, same order of axes in memory."""
    # An expanded axis has a stride of 0, which says nothing of the order.
    alike = all(own in (0, other) for own, other in zip(tensor.stride(), new.stride(), strict=True))
    return new.dtype == tensor.dtype and alike and _is_writable(new)


def _is_writable(tensor: Tensor) -> bool:
    expanded = any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not expanded and (not tensor.is_inference() or torch.is_inference_mode_enabled())
