"""What a gradient-norm run found: sums of the probe under the names, weights and statuses of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.layers import ROOT, Site, Status, modules_by_name
from hookscope.magnitudes import Magnitude, Spread, joined, magnitude, norm_of_norms
from hookscope.probes.finiteness import FirstNonFinite, blamed, layer_of
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
    inside it, which `subtree_grad` counts too; a tied parameter belongs to the layer of its first name; a layer
    called twice has one set of parameters, which every call's row repeats. `weight_norm`, `ratio`: of the own
    parameters that got a gradient. Norms that are one number are in the report's norm; so are the spreads, which are
    of each batch's own gradient.
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
    *,
    train_mode: bool = False,
) -> GradReport:
    """The report of a probe that has seen its last batch.

    Args:
        probe: what was summed.
        model: the model it was summed on, for names, classes and weights.
        statuses: every layer that was to be measured, in model order, with what became of it.
        called: every layer of the model that was called, measured or not.
        unobservable: sites whose gradient no hook can see: their status is `undefined`.
        train_mode: how the model ran, for the record.
    """
    parameters = tuple(_param_row(probe, *named, called) for named in _parameters(model))
    total = _together(parameters)
    return GradReport(
        loss=probe.mean_loss(),
        total_norm=0.0 if total is None else total.of(probe.norm),
        pictures=probe.pictures,
        batches=probe.batches,
        parameters=parameters,
        layers=_Rows(probe, model, parameters, unobservable).of(statuses),
        norm=probe.norm,
        total=total,
        total_spread=probe.total_spread(),
        loss_spread=probe.loss_spread(),
        first_forward=blamed(probe.finiteness.forward, model),
        first_backward=probe.finiteness.backward,
        train_mode=train_mode,
    )


def _param_row(
    probe: GradNormProbe, name: str, aliases: tuple[str, ...], parameter: Tensor, called: frozenset[str]
) -> ParamGrad:
    # A lazy layer that was never called has a parameter without a shape.
    shaped = not is_lazy(parameter)
    weight = (
        _weight(parameter.detach(), probe.norm) if shaped else Magnitude(math.nan, math.nan, 0, 0, math.nan)
    )
    gradient = probe.param_gradient(name)
    norm = _in(gradient, probe.norm)
    layer = layer_of(name)
    return ParamGrad(
        name=name,
        layer=layer,
        shape=tuple(parameter.shape) if shaped else (),
        aliases=aliases,
        weight_norm=weight.of(probe.norm),
        gradient=gradient,
        ratio=_ratio(norm, weight.of(probe.norm)),
        status=_param_status(parameter, gradient, was_called=layer in called),
        grad_norm=norm,
        weight_non_finite=weight.non_finite,
        spread=probe.param_spread(name),
    )


class _Rows:
    """The rows of layers, from what is known of their parameters and what the probe saw of their activations."""

    def __init__(
        self,
        probe: GradNormProbe,
        model: nn.Module,
        parameters: Sequence[ParamGrad],
        unobservable: frozenset[Site],
    ) -> None:
        self._probe = probe
        self._types = {name: type(module).__name__ for name, module in modules_by_name(model).items()}
        self._unobservable = unobservable
        self._own: dict[str, list[ParamGrad]] = {}
        self._below: dict[str, list[ParamGrad]] = {}
        for row in parameters:
            if row.gradient is not None:
                self._own.setdefault(row.layer, []).append(row)
                for layer in _around(row.layer):
                    self._below.setdefault(layer, []).append(row)

    def of(self, statuses: Mapping[str, Status]) -> tuple[LayerGrad, ...]:
        """Called layers by depth, then the others."""
        seen = {site.layer for site in self._probe.sites}
        return (
            *(self._called(site, depth) for depth, site in enumerate(self._probe.sites)),
            *(self._silent(name, status) for name, status in statuses.items() if name not in seen),
        )

    def _called(self, site: Site, depth: int) -> LayerGrad:
        probe = self._probe
        output, received = probe.output_gradient(site), probe.input_gradient(site)
        status = UNDEFINED if site in self._unobservable else _gradient_status(output)
        return replace(
            self._row(site, status),
            depth=depth,
            output_grad=output,
            output_grad_norm=_in(output, probe.norm),
            input_grad=received,
            input_grad_total=_in(received, probe.norm),
            output_spread=probe.output_spread(site),
            input_spread=probe.input_spread(site),
        )

    def _silent(self, name: str, status: Status) -> LayerGrad:
        bypassed = status is Status.NOT_CALLED and name in self._own
        return self._row(Site(name), str(Status.BYPASSED if bypassed else status))

    def _row(self, site: Site, status: str) -> LayerGrad:
        """What is known of the layer's parameters."""
        norm = self._probe.norm
        rows = self._own.get(site.layer, ())
        own, below = _together(rows), _together(self._below.get(site.layer, ()))
        weight = norm_of_norms([row.weight_norm for row in rows], norm) if rows else None
        return LayerGrad(
            site=site,
            type=self._types[site.layer],
            depth=None,
            output_grad=None,
            input_grad_total=None,
            parameter_grad_norm=_in(own, norm),
            status=status,
            parameter_grad=own,
            subtree_grad=below,
            subtree_grad_norm=_in(below, norm),
            weight_norm=weight,
            ratio=_ratio(_in(own, norm), weight),
            parameter_spread=self._probe.layer_spread(site.layer),
        )


def _around(layer: str) -> Iterator[str]:
    """The layer and all that it lies in, the root last."""
    while layer and layer != ROOT:
        yield layer
        layer = layer.rpartition(".")[0]
    yield ROOT


def _together(rows: Iterable[ParamGrad]) -> Magnitude | None:
    """The size of all these gradients laid end to end; `None` where there are none."""
    whole: Magnitude | None = None
    for row in rows:
        whole = whole if row.gradient is None else joined(whole, row.gradient)
    return whole


def _weight(parameter: Tensor, norm: float) -> Magnitude:
    return magnitude(parameter, largest=norm == math.inf, l1=norm == 1)


def _in(size: Magnitude | None, norm: float) -> float | None:
    return None if size is None else size.of(norm)


def _ratio(gradient: float | None, weight: float | None) -> float | None:
    return gradient / weight if gradient is not None and weight is not None and weight > 0 else None


def _parameters(model: nn.Module) -> list[tuple[str, tuple[str, ...], nn.Parameter]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [(first, tuple(others), parameter) for parameter, (first, *others) in names.items()]


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
