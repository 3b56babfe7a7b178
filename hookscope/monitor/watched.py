"""Which parameters of a model are watched: their names, and the layers that own them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from hookscope.checks.rules import Place
from hookscope.errors import UsageError
from hookscope.layers import ROOT, Selection, modules_by_name, select
from hookscope.probes.finiteness import layer_of


@dataclass(frozen=True)
class Watched:
    """One parameter under its first name; `aliases`: the others of a tied one. `layer`: that owns the first."""

    name: str
    aliases: tuple[str, ...]
    layer: str
    place: Place
    parameter: nn.Parameter


def chosen_layers(model: nn.Module, layers: str | Iterable[str], exclude: str | Iterable[str]) -> Selection:
    """The layers that the globs choose; the model itself where it has no layer inside and all are wanted.

    Raises:
        UsageError: a pattern matches no layer.
    """
    if layers == "**" and not exclude and next(model.children(), None) is None:
        return Selection((ROOT,), {"**": (ROOT,)})
    return select(model, layers, exclude)


def watched_in(model: nn.Module, selection: Selection) -> tuple[Watched, ...]:
    """The parameters that the chosen layers own, in model order; with `**` the model's own ones too.

    Raises:
        UsageError: they own none.
    """
    types = {name: type(module).__name__ for name, module in modules_by_name(model).items()}
    layers = set(selection.names)
    if "**" in selection.patterns and ROOT not in selection.excluded:
        layers.add(ROOT)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = tuple(
        _watched(parameter, first, tuple(others), types)
        for parameter, (first, *others) in names.items()
        if any(_owner(name, model, types) in layers for name in (first, *others))
    )
    if not found:
        raise UsageError(
            f"the layers {', '.join(map(repr, selection.patterns))} own no parameter",
            "choose layers that are trained, such as 'type:Conv2d'",
        )
    return found


def by_layer(watched: Iterable[Watched]) -> Mapping[str, list[int]]:
    """Positions of the parameters that each layer owns."""
    layers: dict[str, list[int]] = {}
    for at, one in enumerate(watched):
        layers.setdefault(one.layer, []).append(at)
    return layers


def _watched(
    parameter: nn.Parameter, name: str, aliases: tuple[str, ...], types: Mapping[str, str]
) -> Watched:
    layer = layer_of(name)
    return Watched(name, aliases, layer, Place(name, layer, types.get(layer, ""), aliases), parameter)


def _owner(name: str, model: nn.Module, types: Mapping[str, str]) -> str:
    """The layer of a parameter's name, under the layer's first name: a shared one has several."""
    layer = layer_of(name)
    if layer in types:
        return layer
    module = model.get_submodule(layer)
    return next((first for first, one in modules_by_name(model).items() if one is module), layer)
