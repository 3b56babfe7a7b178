"""Hooks: the only code that registers them.

`attached()` lets probes see values and gradients as they pass; its companion `preserved()` puts an inspected model
back as it was found. Nothing here decides what a value means, and nothing here reads, prints or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hookscope.attachment import Attachment as Attachment
from hookscope.eager import eager
from hookscope.edits import Edit as Edit
from hookscope.layers import Selection, modules_by_name, select
from hookscope.preserve import preserved as preserved
from hookscope.probe import Needs as Needs
from hookscope.probe import Probe as Probe
from hookscope.watching import Deliver
from hookscope.wrappers import unwrapped


@contextmanager
def attached(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection = "**",
    edits: Sequence[Edit] = (),
) -> Iterator[Attachment]:
    """A model whose chosen layers tell `probes` what passes by, until the block ends.

    Call the model inside the block as often as needed: every call of the model starts afresh at call 0. Only the
    thread that attaches is heard, and edited; others use the model, or attach to it, as if it were theirs. A loss's
    own `backward()` reports its gradients under the objective `loss`; `Attachment.differentiate` names another.
    Values are never changed but by `edits`: hooks only look, and where a gradient must be followed the model goes on
    with a tensor of the same storage. What happens between modules (`F.relu`, a residual sum) is not seen.

    Args:
        model: any module; hooks that others registered are left alone. Of a compiled or data-parallel one, the model
            inside: names are its own, either may be called, and what is compiled runs eagerly until the block ends.
        probes: who is told. Each is told of the layers it `hears`.
        layers: globs, as for `hookscope.layers.select`.
        edits: changes of what layers return, made before the probes are told; of any layers, not only of `layers`.

    Raises:
        UsageError: a pattern matches no layer, or an edit names none; only other threads ran the model.
        ModelError: a part of the model is TorchScript.
    """
    with listening(model, probes, layers, edits) as attachment:
        yield attachment
    attachment.thread.refuse_silence()


@contextmanager
def listening(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection,
    edits: Sequence[Edit],
) -> Iterator[Attachment]:
    """As `attached`, for who sees to it that the model is run in this thread."""
    model, _ = unwrapped(model)
    chosen = (layers if isinstance(layers, Selection) else select(model, layers)).names
    attachment = Attachment(model, probes, edits, _hooked)
    modules = modules_by_name(model)
    with ExitStack() as stack:
        stack.enter_context(eager())
        stack.callback(attachment.forget)
        begins, ends = _root_hooks(attachment)
        stack.callback(model.register_forward_pre_hook(begins, prepend=True, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(ends, always_call=True).remove)
        for name in attachment.editing.layers:
            _hook(stack, modules[name], *_edit_hooks(attachment, name))
        for name in chosen:
            _hook(stack, modules[name], *_module_hooks(attachment, name))
        yield attachment


def came_from_probe(error: BaseException) -> bool:
    """Whether the exception was raised by a probe that was told something, not by the model."""
    return getattr(error, "_from_probe", False)


def _hooked(tensor: Tensor, deliver: Deliver) -> Any:
    return tensor.register_hook(deliver)  # type: ignore[no-untyped-call]


def _hook(stack: ExitStack, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)


# A call of another thread may find a hook of ours half registered or half removed, and then gives it no `kwargs`.
def _root_hooks(attachment: Attachment) -> tuple[Callable[..., None], Callable[..., None]]:
    def begins(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        attachment.begins(module, args, kwargs)

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        attachment.ends(output)

    return begins, ends


def _module_hooks(attachment: Attachment, name: str) -> tuple[Callable[..., None], Callable[..., Any]]:
    def before(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        attachment.before(name, args, kwargs)

    def after(module: nn.Module, args: Any, *rest: Any) -> Any:
        return attachment.after(name, args, *rest)

    return before, after


def _edit_hooks(attachment: Attachment, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def before(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        replaced = attachment.edit_before(name, module, args)
        return None if replaced is None else (replaced, kwargs)

    def after(module: nn.Module, args: Any, *rest: Any) -> Any:
        *kwargs, output = rest
        return attachment.edit_after(name, (args, *kwargs), output)

    return before, after
