"""Which layers a map can be made of: those with a spatial output, and by default the last that matters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hookscope.cam.outputs import is_detections
from hookscope.errors import NothingMeasured, UsageError
from hookscope.layers import LayerInfo, OutputInfo, Selection, Site
from hookscope.layouts import is_spatial
from hookscope.probes.cam import GradientReachProbe
from hookscope.runner import Objective, running

_FIRST_LOOK = 24


def site_infos(layers: Iterable[LayerInfo]) -> dict[Site, OutputInfo]:
    """What is known of every site, in the order in which the calls ended."""
    outputs = (output for layer in layers for output in layer.outputs)
    return {output.site: output for output in sorted(outputs, key=lambda output: output.order)}


def spatial_layers(infos: Mapping[Site, OutputInfo]) -> tuple[str, ...]:
    """Layers with an output of more than one position on the picture, in execution order."""
    return tuple(dict.fromkeys(site.layer for site, info in infos.items() if is_spatial(info)))


def spatial_selection(selection: Selection, infos: Mapping[Site, OutputInfo]) -> Selection:
    """The selection without layers that have no place on the picture.

    Raises:
        UsageError: a pattern chose nothing but such layers; the nearest that can serve are in the hint.
    """
    spatial = spatial_layers(infos)
    for pattern, names in selection.patterns.items():
        if not set(names) & set(spatial):
            raise _not_spatial(pattern, names, infos, spatial)
    kept = tuple(name for name in selection.names if name in set(spatial))
    if not kept:
        raise _not_spatial(", ".join(selection.names), selection.names, infos, spatial)
    return replace(selection, names=kept)


def default_layer(
    model: nn.Module,
    x: Tensor,
    infos: Mapping[Site, OutputInfo],
    objectives: Callable[[Any], Iterable[Objective]],
) -> Site:
    """The last site, in execution order, at whose positions on the picture the scores' gradient is not zero.

    Of layers that return the very same tensor the outermost is taken; of several calls of a layer the last. Of a
    detector, whose boxes come from several resolutions, and where there is nothing to differentiate, it is the
    `deepest_layer`. Decided by one pass over `x`, (1, C, H, W).

    Raises:
        UsageError: no layer has a spatial output.
        NothingMeasured: the gradient is zero at all of them.
    """
    spatial = spatial_layers(infos)
    if not spatial:
        raise UsageError(
            "no layer of this model has a spatial output", "`hookscope layers MODEL IMAGE` shows them"
        )
    for count in dict.fromkeys((min(_FIRST_LOOK, len(spatial)), len(spatial))):
        candidates = spatial[-count:]
        probe, asked = GradientReachProbe(frozenset(candidates), infos.get), _Asked(objectives)
        with running(model, [probe], Selection(candidates)) as runner:
            runner.forward(x, asked)
        if asked.of_boxes or not asked.any:
            return deepest_layer(infos)
        reached = [site for site in infos if site in probe.depended_on]
        if reached:
            return reached[-1]
    raise NothingMeasured(
        "the score's gradient is zero at every spatial layer",
        "is the classifier's weight all zero, as in an untrained ViT? name a layer to write its blank map",
    )


def last_layer(infos: Mapping[Site, OutputInfo]) -> Site:
    """The last site, in execution order, with a spatial output.

    Raises:
        UsageError: there is none.
    """
    sites = [site for site, info in infos.items() if is_spatial(info)]
    if not sites:
        raise UsageError(
            "no layer of this model has a spatial output", "`hookscope layers MODEL IMAGE` shows them"
        )
    return sites[-1]


def deepest_layer(infos: Mapping[Site, OutputInfo]) -> Site:
    """The last site of the most channels that a layer returns alone: the end of the backbone.

    Raises:
        UsageError: no layer has a spatial output.
    """
    channels = {
        site: info.shape[1]
        for site, info in infos.items()
        if is_spatial(info) and info.layout == "NCHW" and not site.output
    }
    most = max(channels.values(), default=0)
    return next((site for site in reversed(channels) if channels[site] == most), None) or last_layer(infos)


class _Asked:
    """The objectives, and what was learnt of them when they were asked for."""

    def __init__(self, objectives: Callable[[Any], Iterable[Objective]]) -> None:
        self.any = False
        self.of_boxes = False
        self._objectives = objectives

    def __call__(self, output: Any) -> list[Objective]:
        found = list(self._objectives(output))
        self.any, self.of_boxes = bool(found), is_detections(output)
        return found


def _not_spatial(
    pattern: str, names: Sequence[str], infos: Mapping[Site, OutputInfo], spatial: Sequence[str]
) -> UsageError:
    order = {site.layer: position for position, site in enumerate(infos)}
    called = [name for name in names if name in order]
    if not called:
        what = "is never called" if len(names) == 1 else "chose layers that are never called"
    else:
        site, info = next((s, i) for s, i in infos.items() if s.layer == called[0])
        what = f"has no spatial output: {site} returns {info.shape}"
    here = order[called[0]] if called else len(order)
    nearest = sorted(spatial, key=lambda name: abs(order[name] - here))[:3]
    hint = f"near it: {', '.join(map(repr, nearest))}" if nearest else "no layer of this model has one"
    return UsageError(f"layer {pattern!r} {what}", hint)
