"""The gradient report of any batches: a forward and a backward pass for each, one after the other.

The pictures' way through a run is `run`'s; this one is for what is already batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from hookscope.errors import NothingMeasured
from hookscope.gradreport import GradReport, grad_report
from hookscope.layers import Selection, Site, Status, all_names
from hookscope.losses import LossFunction, loss_objective
from hookscope.passes import Pass
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.runner import Runner, running
from hookscope.userdata import DataBatch, placed

_BETTER = (Status.OK, Status.NO_TENSOR, Status.NOT_CALLED)


def gradients_of(
    model: nn.Module,
    batches: Iterable[DataBatch],
    selection: Selection,
    *,
    loss: LossFunction,
    norm: float = 2.0,
    train_seed: int | None = None,
    dtype: torch.dtype | None = None,
    told: Callable[[DataBatch, Pass], None] = lambda batch, done: None,
) -> GradReport:
    """Gradient norms of the mean loss over all batches, and of each batch alone.

    Args:
        model: left as it was found, `.grad` included; what making the batches draws at random is put back too.
        batches: moved to the model's device as they come, one at a time.
        selection: layers whose activations' gradients are measured.
        loss: of the model's output and a batch's targets; where these are `None`, of its own predictions.
        norm: 1, 2 or infinity.
        train_seed: runs the model in train mode, with what is random from this seed.
        dtype: of the model's floating-point input, where it must be another than the batches' own.
        told: of each batch, when it is done.

    Raises:
        UsageError: a batch, or an output that the loss cannot be taken of.
        ModelError: the model raised.
        NothingMeasured: there was not one batch.
    """
    probe = GradNormProbe(layers=frozenset(selection.names), norm=norm)
    seen = Outcomes(selection)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    everything = Selection(tuple(all_names(model)))
    with running(model, [probe], everything, train_seed=train_seed) as runner:
        for batch in batches:
            here = placed(batch, device, dtype)
            done = _pass(runner, here, loss)
            probe.finish_batch(done.sites, done.values["loss"])
            seen.add(runner, done)
            told(here, done)
    if not probe.batches:
        raise NothingMeasured("there was no batch", "give batches of (input, target)")
    train = train_seed is not None
    return grad_report(probe, model, seen.statuses, seen.called, seen.unobservable, train_mode=train)


def _pass(runner: Runner, batch: DataBatch, loss: LossFunction) -> Pass:
    objective = loss_objective(loss, batch.targets, "loss")
    return runner.forward(batch.x, lambda output: [objective])


class Outcomes:
    """What became of the layers, over all batches."""

    def __init__(self, selection: Selection) -> None:
        self.statuses: dict[str, Status] = dict.fromkeys(selection.names, Status.NOT_CALLED)
        self.called: frozenset[str] = frozenset()
        self.unobservable: frozenset[Site] = frozenset()

    def add(self, runner: Runner, done: Pass) -> None:
        """One more batch; a layer that was called in any was called."""
        for name, status in self.statuses.items():
            self.statuses[name] = min(status, runner.attachment.status(name), key=_BETTER.index)
        self.called |= frozenset(runner.attachment.calls)
        self.unobservable |= done.unobservable
