"""The distributions of what passes through a model, over any batches: which layers, which axis is whose, the report.

Knows a model's classes, which the probe does not; reduces and judges nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.errors import NothingMeasured
from hookscope.gradpasses import Outcomes
from hookscope.layers import LayerInfo, OutputInfo, Selection, Site, Status, modules_by_name
from hookscope.layouts import received_layout
from hookscope.nested import tensors_in
from hookscope.passes import Pass
from hookscope.probes.finiteness import blamed
from hookscope.probes.kept import Kept, Place
from hookscope.probes.stats import StatsProbe, Wanted
from hookscope.reductions import Bounds
from hookscope.runner import list_layers, running
from hookscope.statsreport import OUTPUT, ChannelStats, Distribution, StatsReport, StatsRow
from hookscope.userdata import DataBatch, placed

# Where the function is flat for what may be trained: sigmoid beyond an argument of 5, tanh beyond 0.97.
_SIGMOID = 1 / (1 + math.exp(5))
_TANH = 0.97
# Of sizes of pictures times places, of which the layouts are remembered.
_MOST_SHAPES = 1 << 14
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
_KINDS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.ReLU, "relu"),
    (nn.ReLU6, "relu6"),
    (nn.Hardtanh, "hardtanh"),
    (nn.Sigmoid, "sigmoid"),
    (nn.Tanh, "tanh"),
    (nn.Hardsigmoid, "hardsigmoid"),
    *((norm, "norm") for norm in _NORMS),
)
_FIXED: Mapping[str, Bounds] = {
    "relu6": (-math.inf, 6.0),
    "sigmoid": (_SIGMOID, 1 - _SIGMOID),
    "tanh": (-_TANH, _TANH),
    "hardsigmoid": (0.0, 1.0),
}


def kind_of(module: nn.Module) -> str:
    """What a layer does to values, as in `StatsRow.kind`; subclasses count as their parent."""
    return next((name for parent, name in _KINDS if isinstance(module, parent)), "")


def bounds_of(module: nn.Module) -> Bounds | None:
    """Between what the function of a layer is not flat; `None` where it has no such bounds, or no upper one.

    ReLU6 counts at its ceiling alone: at its floor a unit is off, which is another matter.
    """
    kind = kind_of(module)
    if isinstance(module, nn.Hardtanh) and kind == "hardtanh":
        return float(module.min_val), float(module.max_val)
    return _FIXED.get(kind)


def stats_probe(
    model: nn.Module,
    layers: Sequence[LayerInfo],
    selection: Selection,
    input_shape: tuple[int, ...],
    wanted: Wanted,
) -> StatsProbe:
    """A probe for the chosen layers.

    Args:
        model: the model it will be attached to.
        layers: all of them after a pass, as of `list_layers`.
        selection: those chosen.
        input_shape: of the pass, (N, C, H, W).
        wanted: what is kept of each place.
    """
    modules = modules_by_name(model)
    outputs = {info.site: info for layer in layers for info in layer.outputs}
    bounds = {name: found for name in selection.names if (found := bounds_of(modules[name])) is not None}
    return StatsProbe(_Layouts(modules, outputs, input_shape), bounds, wanted, frozenset(selection.names))


def stats_report(probe: StatsProbe, model: nn.Module, statuses: Mapping[str, Status]) -> StatsReport:
    """The report of a probe that has seen its last batch.

    Args:
        probe: what was kept.
        model: the model it was kept of, for names and classes.
        statuses: every chosen layer, in model order, with what became of it.
    """
    return StatsReport(
        pictures=probe.pictures,
        batches=probe.batches,
        rows=tuple(_Rows(probe, model).of(statuses)),
        threshold=probe.wanted.threshold,
        seed=probe.wanted.seed,
        first_non_finite=blamed(probe.first_non_finite, model),
    )


def stats_of(
    model: nn.Module,
    batches: Iterable[DataBatch],
    selection: Selection,
    *,
    wanted: Wanted | None = None,
    dtype: torch.dtype | None = None,
    told: Callable[[DataBatch, Pass], None] = lambda batch, done: None,
) -> StatsReport:
    """Distributions over all batches of what the chosen layers received and returned.

    Args:
        model: run in eval mode, left as it was found.
        batches: moved to the model's device as they come, one at a time; their targets are not looked at.
        selection: the layers.
        wanted: what is kept of each place.
        dtype: of the model's floating-point input, where it must be another than the batches' own.
        told: of each batch, when it is done.

    Raises:
        UsageError: a batch that is none.
        ModelError: the model raised.
        NothingMeasured: there was not one batch.
    """
    probe, statuses = stats_passes(model, batches, selection, wanted=wanted, dtype=dtype, told=told)
    return stats_report(probe, model, statuses)


def stats_passes(
    model: nn.Module,
    batches: Iterable[DataBatch],
    selection: Selection,
    *,
    wanted: Wanted | None = None,
    dtype: torch.dtype | None = None,
    told: Callable[[DataBatch, Pass], None] = lambda batch, done: None,
    mine: Callable[[int], bool] = lambda number: True,
) -> tuple[StatsProbe, Mapping[str, Status]]:
    """As `stats_of`, what a report is made of: the probe, and what became of every chosen layer.

    Args:
        model, batches, selection, wanted, dtype, told: as of `stats_of`.
        mine: whether this process runs the batch of that number; all processes go through all of them.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    source = iter(batches)
    first = next(source, None)
    if first is None:
        raise NothingMeasured("there was no batch", "give batches of pictures")
    x = placed(first, device, dtype).x
    x = x[:1] if isinstance(x, Tensor) else x
    probe = stats_probe(model, list_layers(model, x), selection, _shape_of(x), wanted or Wanted())
    outcomes, before = Outcomes(selection), 0
    with running(model, [probe], selection) as runner:
        for batch in chain([first], source):
            if mine(batch.number):
                probe.expect(range(before, before + batch.pictures))
                done = runner.forward(placed(batch, device, dtype).x)
                probe.finish_batch()
                outcomes.add(runner, done)
                told(batch, done)
            before += batch.pictures
    return probe, outcomes.statuses


class _Layouts:
    """Which layout a tensor has, by what is known of the layers' outputs and of their classes."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        outputs: Mapping[Site, OutputInfo],
        input_shape: tuple[int, ...],
    ) -> None:
        self._modules, self._outputs, self._input_shape = modules, outputs, input_shape
        self._found = lru_cache(_MOST_SHAPES)(self._look)

    def __call__(self, site: Site, side: str, shape: tuple[int, ...]) -> str:
        return self._found(site, side, shape)

    def _look(self, site: Site, side: str, shape: tuple[int, ...]) -> str:
        known = self._outputs.get(site) if side == OUTPUT else None
        if known is not None and len(known.shape) == len(shape):
            return known.layout
        return received_layout(self._modules[site.layer], shape, self._outputs, self._input_shape)


class _Rows:
    """The rows of a report."""

    def __init__(self, probe: StatsProbe, model: nn.Module) -> None:
        self._probe = probe
        modules = modules_by_name(model)
        self._types = {name: type(module).__name__ for name, module in modules.items()}
        self._kinds = {name: kind_of(module) for name, module in modules.items()}
        self._depths: dict[tuple[str, int], int] = {}
        self._sites: dict[Site, int] = {}
        for depth, site in enumerate(probe.order()):
            self._sites[site] = depth
            self._depths.setdefault((site.layer, site.call), depth)
        self._first: dict[int, Place] = {}
        self._made: dict[int, Distribution] = {}

    def of(self, statuses: Mapping[str, Status]) -> Iterator[StatsRow]:
        """By depth, what a call received before what it returned; those that nothing passed at last."""
        places = {place: at for at, place in enumerate(self._probe.places())}
        end = len(self._sites)

        def order(place: Place) -> tuple[int, bool, int]:
            depth = self._depth(*place)
            return end if depth is None else depth, place[1] == OUTPUT, places[place]

        ordered = sorted(places, key=order)
        for site, side in ordered:
            yield self._row(site, side)
        seen = {site.layer for site, _ in ordered}
        for name, status in statuses.items():
            if name not in seen:
                yield StatsRow(Site(name), OUTPUT, self._types[name], str(status), kind=self._kinds[name])

    def _depth(self, site: Site, side: str) -> int | None:
        return self._sites.get(site) if side == OUTPUT else self._depths.get((site.layer, site.call))

    def _row(self, site: Site, side: str) -> StatsRow:
        plain = StatsRow(
            site,
            side,
            self._types[site.layer],
            self._probe.unmeasured.get((site, side), ""),
            depth=self._depth(site, side),
            kind=self._kinds[site.layer],
        )
        return plain if plain.status else self._measured(plain)

    def _measured(self, row: StatsRow) -> StatsRow:
        place = row.site, row.side
        kept = self._probe.kept(place)
        first = self._first.setdefault(id(kept), place)
        if first == place:
            self._made[id(kept)] = _distribution(kept)
        found = self._made[id(kept)]
        return replace(
            row,
            status=str(Status.NON_FINITE if found.non_finite else Status.OK),
            shape=(1, *kept.shape),
            layout=kept.layout,
            same_as=None if first == place else first,
            distribution=found,
            spectrum=kept.covariance.spectrum() if kept.covariance is not None and first == place else None,
        )


def _distribution(kept: Kept) -> Distribution:
    moments = kept.moments
    mean, deviation, _ = moments.whole()
    finite = int(moments.count.sum())
    return Distribution(
        count=finite + moments.non_finite,
        non_finite=moments.non_finite,
        zeros=moments.zeros,
        mean=mean,
        std=deviation,
        minimum=float(moments.minimum.min(initial=math.inf)) if finite else math.nan,
        maximum=float(moments.maximum.max(initial=-math.inf)) if finite else math.nan,
        histogram=kept.histogram,
        channels=_channels(kept, kept.axis) if kept.axis is not None else None,
    )


def _channels(kept: Kept, axis: int) -> ChannelStats:
    moments = kept.moments
    some = moments.count > 0
    return ChannelStats(
        axis=axis,
        count=moments.count,
        mean=moments.means(),
        std=moments.deviations(),
        maximum=np.where(some, moments.maximum, math.nan),
        minimum=np.where(some, moments.minimum, math.nan),
        energy=moments.energies(),
        alive=moments.alive,
        saturated=moments.saturated,
    )


def _shape_of(x: object) -> tuple[int, ...]:
    return next((tuple(tensor.shape) for _, tensor in tensors_in(x)), ())
