"""Which layers a map can be made of: those with a spatial output, and by default the last that matters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hookscope.cam.outputs import Answer, answer_of, dense_scores
from hookscope.cam.scores import asks_for_class
from hookscope.errors import NothingMeasured, UsageError
from hookscope.layers import ROOT, LayerInfo, OutputInfo, Selection, Site
from hookscope.layouts import is_spatial
from hookscope.probes.cam import GradientReachProbe
from hookscope.probes.featuremaps import Infos
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
    key: str | None = None,
) -> Site:
    """The last site, in execution order, at whose positions on the picture the scores' gradient is not zero.

    Of layers that return the very same tensor the outermost is taken, but for the model itself; of several calls of a
    layer the last. Where the answer has places of its own (a segmentation, detections) the last layers only repeat
    it: there it is the `deepest_layer` of those that every score depends on. So it is, of all, where there is nothing
    to differentiate. Decided by a few passes over `x`, (1, C, H, W). `key`: which tensor of the output counts.

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
        reached, asked = _reached(model, x, infos, objectives, key, spatial[-count:])
        if not asked.any:
            return deepest_layer(infos)
        if asked.has_places:
            for sites in _by_channels(infos, asked.classes_a_pixel):
                layers = tuple(dict.fromkeys(site.layer for site in sites))
                found, _ = _reached(model, x, infos, objectives, key, layers)
                if set(sites) & found:
                    return [site for site in sites if site in found][-1]
        if reached:
            return _last(site for site in infos if site in reached)
    raise NothingMeasured(
        "the score's gradient is zero at every spatial layer",
        "is the classifier's weight all zero, as in an untrained ViT? name a layer to write its blank map",
    )


def last_layer(infos: Mapping[Site, OutputInfo]) -> Site:
    """The last site, in execution order, with a spatial output; the model's own only where there is no other.

    Raises:
        UsageError: there is none.
    """
    sites = [site for site, info in infos.items() if is_spatial(info)]
    if not sites:
        raise UsageError(
            "no layer of this model has a spatial output", "`hookscope layers MODEL IMAGE` shows them"
        )
    return _last(sites)


def deepest_layer(infos: Mapping[Site, OutputInfo], classes: int = 0) -> Site:
    """The last site of the most channels that a layer returns alone: the end of the backbone.

    Those in a part that the model calls its `backbone`, where it has one. `classes`: so many channels are taken for
    class scores, not features, where there are others.

    Raises:
        UsageError: no layer has a spatial output.
    """
    return next((sites[-1] for sites in _by_channels(infos, classes)), None) or last_layer(infos)


def _by_channels(infos: Mapping[Site, OutputInfo], classes: int) -> Iterator[list[Site]]:
    """Sites of as many channels together, the most first, each in execution order; see `deepest_layer`."""
    channels = {
        site: info.shape[1]
        for site, info in infos.items()
        if is_spatial(info) and info.layout == "NCHW" and not site.output and site.layer != ROOT
    }
    channels = {site: count for site, count in channels.items() if _in_backbone(site)} or channels
    channels = {site: count for site, count in channels.items() if count != classes} or channels
    for most in sorted(set(channels.values()), reverse=True):
        yield [site for site, count in channels.items() if count == most]


def _reached(
    model: nn.Module,
    x: Tensor,
    infos: Mapping[Site, OutputInfo],
    objectives: Callable[[Any], Iterable[Objective]],
    key: str | None,
    layers: tuple[str, ...],
) -> tuple[set[Site], _Asked]:
    """Which sites of the layers the scores depend on, by one pass; the fewer layers, the less graph there is."""
    probe, asked = _Reach(frozenset(layers), infos.get), _Asked(objectives, key)
    with running(model, [probe], Selection(layers)) as runner:
        runner.forward(x, asked)
    return probe.reached(every=asked.has_places), asked


class _Reach(GradientReachProbe):
    """Also tells the scores apart."""

    def __init__(self, layers: frozenset[str], infos: Infos) -> None:
        super().__init__(layers, infos)
        self._by_score: dict[str, set[Site]] = {}

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        self.depended_on = self._by_score.setdefault(objective, set())
        super().on_gradient(site, tensor, objective)

    def reached(self, *, every: bool) -> set[Site]:
        """The sites that any score depends on; those that every score does, where there are such."""
        found = list(self._by_score.values())
        common = set.intersection(*found) if found and every else set()
        return common or set().union(*found)


class _Asked:
    """The objectives, and what was learnt of them when they were asked for.

    `any`: there were some. `has_places`: the answer has places of its own. `classes_a_pixel`: of a segmentation.
    """

    def __init__(self, objectives: Callable[[Any], Iterable[Objective]], key: str | None) -> None:
        self.any = False
        self.has_places = False
        self.classes_a_pixel = 0
        self._objectives = objectives
        self._key = key

    def __call__(self, output: Any) -> list[Objective]:
        found = list(self._objectives(output))
        self.any = bool(found)
        if any(asks_for_class(objective.name) for objective in found):
            answer = answer_of(output, self._key)
            self.has_places = answer in (Answer.BOXES, Answer.DENSE)
            self.classes_a_pixel = dense_scores(output, self._key).shape[1] if answer is Answer.DENSE else 0
        return found


def _in_backbone(site: Site) -> bool:
    return "backbone" in site.layer.split(".")


def _last(sites: Iterable[Site]) -> Site:
    """The last that is not the model itself, whose output is what comes of the layers."""
    order = list(sites)
    return next((site for site in reversed(order) if site.layer != ROOT), order[-1])


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
