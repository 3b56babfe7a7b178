"""What a gradient-norm run found: sums of the probe under the names, weights and statuses of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.layers import ROOT, Site, Status, modules_by_name
from hookscope.magnitudes import Magnitude, Spread, magnitude
from hookscope.probes.finiteness import FirstNonFinite
from hookscope.probes.gradnorm import GradNormProbe

UNDEFINED = "undefined"
"""Status of a layer whose gradient is there and cannot be seen."""

FROZEN = "frozen"
"""Status of a parameter that does not require a gradient; its others are those of `layers.Status`."""


@dataclass(frozen=True)
class ParamGrad:
    """The gradient of one parameter: after backward, before clipping, unscaled, of the mean loss over all pictures.

    `gradient` is `None` where there is none, which is not the same as zero; `status` says why. `weight_norm`,
    `grad_norm` and their `ratio` are in the report's norm; `ratio` is `None` where it is not defined (weights all
    zero, or no gradient). `aliases` are the other names of a tied parameter, which is counted once.
    `weight_non_finite`: entries of the parameter itself that are not finite. `spread`: the norms of each batch's own
    gradient, whose mean is not the norm of the mean gradient.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    weight_norm: float
    gradient: Magnitude | None
    ratio: float | None
    status: str
    grad_norm: float | None = None
    weight_non_finite: int = 0
    spread: Spread | None = None


@dataclass(frozen=True)
class LayerGrad:
    """The gradients at one call of a layer: of its output, the total at all that it received, and its parameters'.

    The input's gradient counts every use of the input, not only the one through this layer; `None` where the input
    needs no gradient, as the picture itself. `depth` is the position in the order in which calls ended, `None` for
    a layer that was never called. `parameter_grad`: of the layer's own parameters, without those of the layers
    inside it, which `subtree_grad` counts too; a tied parameter belongs to the layer of its first name. `ratio`: own
    parameters' gradient to their weights. The `..._norm`, `input_grad_total`, `ratio` and spreads are in the report's
    norm; the spreads are the norms of each batch's own gradient. A layer called twice has one set of parameters,
    which every call's row repeats.
    """

    site: Site
    type: str
    depth: int | None
    output_grad: Magnitude | None
    input_grad_total: float | None
    parameter_grad_norm: float | None
    status: str
    output_grad_norm: float | None = None
    input_grad: Magnitude | None = None
    parameter_grad: Magnitude | None = None
    subtree_grad: Magnitude | None = None
    subtree_grad_norm: float | None = None
    weight_norm: float | None = None
    ratio: float | None = None
    output_spread: Spread | None = None
    input_spread: Spread | None = None
    parameter_spread: Spread | None = None


@dataclass(frozen=True)
class GradReport:
    """Gradient norms of the mean loss over `pictures`: after backward, before clipping, unscaled.

    `norm`: 1, 2 or infinity, the norm that single figures are in. `total_norm` is over all parameters that got a
    gradient, tied ones once; `total` the same in every norm. Both are of the mean gradient over all pictures;
    `total_spread` and `loss_spread` are of each batch alone. `layers` are in execution order, those never called
    last. `first_forward` and `first_backward`: the first layer at which a value, or a gradient, was not finite.
    """

    loss: float
    total_norm: float
    pictures: int
    batches: int
    parameters: tuple[ParamGrad, ...]
    layers: tuple[LayerGrad, ...]
    norm: float = 2.0
    total: Magnitude | None = None
    total_spread: Spread | None = None
    loss_spread: Spread | None = None
    first_forward: FirstNonFinite | None = None
    first_backward: FirstNonFinite | None = None
    train_mode: bool = False

    @property
    def by_depth(self) -> tuple[LayerGrad, ...]:
        """The layers that were called, in the order in which their calls ended."""
        return tuple(row for row in self.layers if row.depth is not None)

    @property
    def first_non_finite(self) -> FirstNonFinite | None:
        """Where it began: going forward if it did there, for what is then not finite going back follows from it."""
        return self.first_forward or self.first_backward


def grad_report(
    probe: GradNormProbe,
    model: nn.Module,
    statuses: Mapping[str, Status],
    called: frozenset[str],
    unobservable: frozenset[Site] = frozenset(),
) -> GradReport:
    """The report of a probe that has seen its last batch.

    Args:
        probe: what was summed.
        model: the model it was summed on, for names, classes and weights.
        statuses: every layer that was to be measured, in model order, with what became of it.
        called: every layer of the model that was called, measured or not.
        unobservable: sites whose gradient no hook can see: their status is `undefined`.
    """
    parameters = tuple(_param_row(probe, *named, called) for named in _parameters(model))
    got = [row.gradient.norm for row in parameters if row.gradient is not None]
    return GradReport(
        loss=probe.mean_loss(),
        total_norm=math.hypot(*got),
        pictures=probe.pictures,
        batches=probe.batches,
        parameters=parameters,
        layers=_layer_rows(probe, model, statuses, _norms_by_layer(parameters), unobservable),
    )


def _param_row(
    probe: GradNormProbe, name: str, aliases: tuple[str, ...], parameter: Tensor, called: frozenset[str]
) -> ParamGrad:
    layer = name.rpartition(".")[0] or ROOT
    # A lazy layer that was never called has a parameter without a shape.
    shaped = not is_lazy(parameter)
    weight = magnitude(parameter.detach(), largest=False).norm if shaped else math.nan
    gradient = probe.param_gradient(name)
    return ParamGrad(
        name=name,
        layer=layer,
        shape=tuple(parameter.shape) if shaped else (),
        aliases=aliases,
        weight_norm=weight,
        gradient=gradient,
        ratio=gradient.norm / weight if gradient is not None and weight > 0 else None,
        status=_param_status(parameter, gradient, was_called=layer in called),
    )


def _layer_rows(
    probe: GradNormProbe,
    model: nn.Module,
    statuses: Mapping[str, Status],
    own: Mapping[str, float],
    unobservable: frozenset[Site],
) -> tuple[LayerGrad, ...]:
    types = {name: type(module).__name__ for name, module in modules_by_name(model).items()}
    seen = {site.layer for site in probe.sites}
    rows = [_called_row(probe, site, depth, types[site.layer], own) for depth, site in enumerate(probe.sites)]
    rows = [replace(row, status=UNDEFINED) if row.site in unobservable else row for row in rows]
    for name, status in statuses.items():
        if name not in seen:
            bypassed = status is Status.NOT_CALLED and name in own
            said = Status.BYPASSED if bypassed else status
            rows.append(LayerGrad(Site(name), types[name], None, None, None, own.get(name), str(said)))
    return tuple(rows)


def _called_row(
    probe: GradNormProbe, site: Site, depth: int, kind: str, own: Mapping[str, float]
) -> LayerGrad:
    output, received = probe.output_gradient(site), probe.input_gradient(site)
    total = received.norm if received is not None else None
    return LayerGrad(site, kind, depth, output, total, own.get(site.layer), _gradient_status(output))


def _parameters(model: nn.Module) -> list[tuple[str, tuple[str, ...], nn.Parameter]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [(first, tuple(others), parameter) for parameter, (first, *others) in names.items()]


def _norms_by_layer(parameters: Sequence[ParamGrad]) -> dict[str, float]:
    norms: dict[str, float] = {}
    for row in parameters:
        if row.gradient is not None:
            norms[row.layer] = math.hypot(norms.get(row.layer, 0.0), row.gradient.norm)
    return norms


def _param_status(parameter: Tensor, gradient: Magnitude | None, *, was_called: bool) -> str:
    if not parameter.requires_grad:
        return FROZEN
    if gradient is None and not was_called:
        return str(Status.NOT_CALLED)
    return _gradient_status(gradient)


def _gradient_status(gradient: Magnitude | None) -> str:
    if gradient is None:
        return str(Status.NO_GRAD_PATH)
    if gradient.non_finite:
        return str(Status.NON_FINITE)
    return str(Status.ZERO_GRADIENT if gradient.norm == 0 else Status.OK)
