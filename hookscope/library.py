"""The library twins of the commands: a model and a tensor in, plain results out. Nothing is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.artifacts import MapStatus
from hookscope.cam.choice import spatial_selection
from hookscope.cam.methods import method
from hookscope.cam.targets import TargetSpec, logits_of, score_objective
from hookscope.errors import UsageError
from hookscope.gradreport import GradReport, grad_report
from hookscope.hooks import Needs, Probe
from hookscope.layers import Selection, Site, all_names, modules_by_name, select
from hookscope.layouts import Layouts
from hookscope.losses import loss_function, loss_objective
from hookscope.probes.cam import CamProbe
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.probes.shapes import ShapeProbe
from hookscope.runner import Objective, running
from hookscope.wrappers import unwrapped


@dataclass(frozen=True)
class CamMap:
    """A class-activation map of one picture.

    `raw`: (h, w) float32, >= 0, at the layer's own resolution and in the score's own scale; not a number where the
    gradient cannot be seen (status `undefined`). `target`: the class. `output`: which tensor of a nested output.
    """

    image: int
    layer: str
    call: int
    method: str
    target: int
    raw: Tensor
    status: MapStatus
    output: str = ""


class _Keep(Probe):
    needs = Needs(outputs=True)

    def __init__(self) -> None:
        self.kept: dict[Site, Tensor] = {}

    def begin(self, pictures: int) -> None:
        self.kept.clear()

    def on_output(self, site: Site, tensor: Tensor) -> None:
        self.kept[site] = tensor.clone()


def feature_maps(model: nn.Module, x: Tensor, layers: str | Iterable[str]) -> dict[Site, Tensor]:
    """What the chosen layers returned for `x`, every value as it was when the layer returned it.

    Args:
        model: any module; run in eval mode, left as it was found.
        x: a batch, on the model's device.
        layers: globs, as for `hookscope.layers.select`.

    Returns:
        A copy of every tensor by `Site(layer, call, output)`, in the order in which the calls ended, in the
        model's own shape, layout and dtype.

    Raises:
        UsageError: a pattern matches no layer.
        ModelError: the model raised on `x`.
    """
    probe = _Keep()
    with running(model, [probe], layers) as runner:
        runner.forward(x)
    return probe.kept


def gradcam(
    model: nn.Module,
    x: Tensor,
    *,
    layers: str | Iterable[str],
    targets: Sequence[int] | Tensor | None = None,
    methods: str | Iterable[str] = ("gradcam",),
) -> list[CamMap]:
    """Class-activation maps of every picture, target, layer and method, from one forward pass.

    Args:
        model: a classifier; run in eval mode, left as it was found. Frozen parameters and `no_grad` do not matter.
        x: (N, C, H, W), on the model's device.
        layers: globs; each must match a layer with a spatial output.
        targets: classes, each explained for every picture; or an (N,) integer tensor, one a picture; or
            nothing: each picture's best class.
        methods: names in `hookscope.cam.methods.METHODS`.

    Returns:
        Maps ordered by picture, then target, layer and method.

    Raises:
        UsageError: a pattern, method or class that cannot be served.
        ModelError: the model raised on `x`.
    """
    model, _ = unwrapped(model)
    layouts = Layouts(modules_by_name(model), tuple(x.shape))
    selection = select(model, layers)
    specs = _target_specs(targets)
    names = frozenset(spec.name for spec in specs)
    probe = CamProbe(
        frozenset(selection.names),
        layouts.get,
        [method(name) for name in ((methods,) if isinstance(methods, str) else methods)],
        names,
    )
    classes: dict[str, Tensor] = {}

    def objectives(output: Any) -> list[Objective]:
        spatial_selection(selection, layouts.outputs)
        logits = logits_of(output)
        classes.update({spec.name: spec.classes(logits) for spec in specs})
        return [score_objective(spec, classes[spec.name]) for spec in specs]

    # The layouts are learnt in the same pass: one more forward, even of one picture, would cost more than that.
    everything = Selection(tuple(all_names(model)))
    with running(model, [ShapeProbe(layouts), probe], everything) as runner:
        done = runner.forward(x, objectives)
    probe.fill(done.unreached, done.unobservable)
    return [
        CamMap(
            image=found.image,
            layer=found.site.layer,
            call=found.site.call,
            method=found.method,
            target=int(classes[found.objective][found.image]),
            raw=torch.from_numpy(found.values),
            status=found.status,
            output=found.site.output,
        )
        for found in probe.artifacts()
    ]


def gradnorm(
    model: nn.Module,
    x: Tensor,
    targets: Tensor | None = None,
    *,
    layers: str | Iterable[str] = "**",
    loss: str | Callable[[Any, Any], Tensor] = "cross_entropy",
) -> GradReport:
    """Gradient norms of every parameter, and of the outputs and inputs of the chosen layers.

    Args:
        model: any module; run in eval mode, left as it was found, `.grad` included.
        x: (N, C, H, W), on the model's device.
        targets: (N,) classes; nothing: the model's own predictions.
        layers: globs of the layers whose activations' gradients are measured.
        loss: `cross_entropy`, `score`, or `(output, targets) -> scalar`, a mean over the pictures.

    Raises:
        UsageError: an unknown loss, or an output that the loss cannot be taken of.
        ModelError: the model raised on `x`.
    """
    model, _ = unwrapped(model)
    selection = select(model, layers)
    probe = GradNormProbe(layers=frozenset(selection.names))
    objective = loss_objective(loss_function(loss), targets)
    everything = Selection(tuple(all_names(model)))
    with running(model, [probe], everything) as runner:
        done = runner.forward(x, lambda output: [objective])
        probe.finish_batch(done.sites, done.values[objective.name])
        statuses = {name: runner.attachment.status(name) for name in selection.names}
        called = frozenset(runner.attachment.calls)
    return grad_report(probe, model, statuses, called, done.unobservable)


def _target_specs(targets: Sequence[int] | Tensor | None) -> tuple[TargetSpec, ...]:
    if targets is None:
        return (TargetSpec("top1", rank=1),)
    if isinstance(targets, Tensor):
        if targets.dim() != 1 or targets.is_floating_point():
            what = f"{tuple(targets.shape)} {targets.dtype}"
            raise UsageError(
                f"targets of shape and type {what}", "an (N,) integer tensor, or a list of classes"
            )
        return (TargetSpec("target", per_picture=tuple(targets.tolist())),)
    return tuple(dict.fromkeys(TargetSpec(str(int(index)), index=int(index)) for index in targets))
