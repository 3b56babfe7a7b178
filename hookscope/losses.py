"""The losses that gradients are taken of: names on the command line, any callable in the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hookscope.errors import UsageError, near_misses

# The registry below is what `--help` shows, so torch is imported inside the functions.
if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.runner import Objective

LossFunction = Callable[[Any, Any], "Tensor"]


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the class scores, in float32 at least; of a single score, the binary one."""
    import torch
    import torch.nn.functional as F

    from hookscope.cam.outputs import logits_of, raw_scores
    from hookscope.cam.targets import check_classes, check_pictures

    _check_are_classes(targets)
    check_pictures(logits_of(output), len(targets))
    check_classes(targets, logits_of(output).shape[1])
    scores = raw_scores(output)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if scores.dim() == 1 or scores.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(scores.reshape(-1), targets.to(scores))
    return F.cross_entropy(scores, targets.to(scores.device))


def score(output: Any, targets: Tensor) -> Tensor:
    """Mean score (logit) of the target class."""
    from hookscope.cam.outputs import logits_of
    from hookscope.cam.targets import check_classes, check_pictures

    _check_are_classes(targets)
    logits = logits_of(output)
    check_pictures(logits, len(targets))
    check_classes(targets, logits.shape[1])
    return logits.gather(1, targets.to(logits.device)[:, None]).mean()


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "score": score}
"""Losses by name; each is `(output, targets) -> scalar`, a mean over the pictures."""


def loss_function(loss: str | LossFunction) -> LossFunction:
    """The loss of that name, or the callable itself.

    Raises:
        UsageError: there is no such loss.
    """
    if not isinstance(loss, str):
        return loss
    if loss not in LOSSES:
        hint = near_misses(loss, LOSSES) or f"{', '.join(LOSSES)}, or file.py:callable"
        raise UsageError(f"unknown loss {loss!r}", hint)
    return LOSSES[loss]


def loss_objective(loss: LossFunction, targets: Any, name: str = "loss") -> Objective:
    """The loss as an objective; without `targets`, of the model's own predictions.

    Raises:
        UsageError: (when differentiated) the loss raised, or is not one number.
    """
    from hookscope.runner import Objective

    def scalar(output: Any) -> Tensor:
        wanted = own_targets(loss, output) if targets is None else targets
        try:
            value = loss(output, wanted)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the loss raised {type(error).__name__}: {error}", "--debug shows where"
            ) from error
        import torch

        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(
                f"the loss gave {_described(value)}, not one number", "return a mean over the pictures"
            )
        return value.reshape(())

    return Objective(name, scalar)


def own_targets(loss: LossFunction, output: Any) -> Any:
    """The model's predictions; for a loss of the user's, `None` where the model makes none."""
    try:
        return predictions(output)
    except UsageError:
        if loss in LOSSES.values():
            raise
        return None


def predictions(output: Any) -> Tensor:
    """(N,) the best class of every picture."""
    from hookscope.cam.outputs import logits_of

    return logits_of(output).detach().argmax(dim=1)


def _check_are_classes(targets: Any) -> None:
    import torch

    whole = isinstance(targets, torch.Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    if not whole:
        what = f", {targets.dtype}" if isinstance(targets, torch.Tensor) else ""
        raise UsageError(
            f"the targets are {_described(targets)}{what}, not one class a picture",
            "an (N,) integer tensor, or a loss that takes them: --loss file.py:callable",
        )


def _described(value: object) -> str:
    import torch

    return (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    )
