"""Figures against those of a baseline: what drifted, what is no longer the same layer, and what an update keeps.

Pure: figures in, what was seen out. Reading and writing baselines is for `gradbaseline`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hookscope.checks.gradfigures import Figure, Figures, GradBaseline, layer_place, parameter_place
from hookscope.checks.rules import Place, Seen, Settings

# Figures are decimal: 1.01 is within a hundredth of 1, whatever their binary neighbours say.
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Tolerance:
    """How far a figure may be from that of a baseline whose total norm is `total`."""

    settings: Settings
    total: float

    def relative(self, metric: str, place: Place) -> float:
        """The relative tolerance of one of `DRIFT_METRICS`."""
        return self.settings.number(f"drift-{metric}", place)

    def absolute(self, metric: str, place: Place) -> float:
        """The difference that never counts; of a norm, what is noise beside the total does not either."""
        given = self.settings.number(f"drift-{metric}-abs", place)
        if metric == "loss" or not math.isfinite(self.total):
            return given
        return max(given, self.settings.number("drift-noise", place) * self.total)

    def allowed(self, metric: str, place: Place, old: float) -> float:
        """How far a figure may be from `old`."""
        return max(self.relative(metric, place) * abs(old), self.absolute(metric, place))

    def same(self, metric: str, place: Place, old: float | None, new: float | None) -> bool:
        """Whether the new figure is within the tolerance; one that is not finite is the same as its like alone."""
        if old is None or new is None:
            return old is new
        if not (math.isfinite(old) and math.isfinite(new)):
            return str(old) == str(new)
        return abs(new - old) <= self.allowed(metric, place, old) * _SLACK


@dataclass(frozen=True)
class Compared:
    """Figures of a run and of a baseline. `places`: what is known of a layer or parameter beyond its name."""

    new: Figures
    old: Figures
    places: Mapping[str, Place] = field(default_factory=dict)

    def pairs(self) -> Iterator[tuple[str, Place, Figure | None, Figure | None]]:
        """(metric, place, new, old): parameters first, in the run's order, then those of the baseline alone."""
        for metric, new, old, place in (
            ("parameter", self.new.parameters, self.old.parameters, parameter_place),
            ("output", self.new.layers, self.old.layers, layer_place),
        ):
            for name in dict.fromkeys((*new, *sorted(old))):
                yield metric, self.places.get(name) or place(name), new.get(name), old.get(name)


def drifted(compared: Compared, settings: Settings) -> Iterator[Seen]:
    """What the rule `drift` sees at the model, and at each parameter and layer that is in both."""
    allowed = Tolerance(settings, compared.old.total)
    yield _model(compared.new, compared.old, allowed)
    for metric, place, new, old in compared.pairs():
        if new is not None and old is not None:
            yield _drift(metric, place, new, old, allowed)


def changed(compared: Compared, settings: Settings) -> Iterator[Seen]:
    """What the rule `layers-changed` sees at each parameter and layer that is in either; those removed come last."""
    removed = []
    for metric, place, new, old in compared.pairs():
        kind = "parameter" if metric == "parameter" else "layer"
        if new is None:
            removed.append(
                Seen(place, message=f"{place.name}: this {kind} of the baseline is not there any more")
            )
        elif old is None:
            yield Seen(place, message=f"{place.name}: this {kind} is not in the baseline")
        else:
            yield Seen(place, message=_difference(place, new, old))
    yield from removed


def updated(
    old: GradBaseline | None,
    new: GradBaseline,
    settings: Settings,
    places: Iterable[Place] = (),
) -> GradBaseline:
    """The new baseline, but the old figure wherever the new one is within its tolerance, so that few lines change.

    Args:
        old: what is to be replaced; measured otherwise than the new one, nothing of it is kept.
        new: of this run.
        settings: for the tolerances.
        places: what is known of the run's layers and parameters, for globs of classes and aliases.
    """
    if old is None or old.measured != new.measured:
        return new
    compared = Compared(new.figures, old.figures, {place.name: place for place in places})
    allowed = Tolerance(settings, old.figures.total)
    kept: dict[str, dict[str, Figure]] = {"parameter": {}, "output": {}}
    for metric, place, now, then in compared.pairs():
        if now is not None:
            kept[metric][place.name] = _kept_figure(allowed, metric, place, now, then)
    figures = Figures(
        loss=_kept(allowed, "loss", new.figures.loss, old.figures.loss),
        total=_kept(allowed, "total", new.figures.total, old.figures.total),
        parameters=kept["parameter"],
        layers=kept["output"],
    )
    return replace(new, figures=figures)


def _model(new: Figures, old: Figures, allowed: Tolerance) -> Seen:
    """The loss and the total: the one that is further off."""
    seen = (
        _compared("loss", "the loss", Place(), new.loss, old.loss, allowed),
        _compared("total", "the total norm", Place(), new.total, old.total, allowed),
    )
    return max(seen, key=lambda one: (bool(one.message), one.value / one.limit if one.limit else 0.0))


def _drift(metric: str, place: Place, new: Figure, old: Figure, allowed: Tolerance) -> Seen:
    if new.norm is None or old.norm is None:
        return Seen(
            place, skipped=f"{'the baseline' if new.norm is not None else 'this run'} has no figure of it"
        )
    if new.shape != old.shape:
        return Seen(place, skipped="its shape is another than in the baseline")
    words = "the norm of the gradient" if metric == "parameter" else "the norm of the gradient at its output"
    return _compared(metric, f"{place.name}: {words}", place, new.norm, old.norm, allowed)


def _compared(metric: str, words: str, place: Place, new: float, old: float, allowed: Tolerance) -> Seen:
    """Two figures: the value and limit are relative to the old one, absolute where that is zero."""
    within = allowed.same(metric, place, old, new)
    if not (math.isfinite(new) and math.isfinite(old)):
        return Seen(place, message="" if within else f"{words} is {new:g}, the baseline's {old:g}")
    difference, limit = abs(new - old), allowed.allowed(metric, place, old)
    unit = ""
    if old:
        relative = allowed.relative(metric, place)
        difference, limit, unit = difference / abs(old), max(relative, limit / abs(old)), " %"
    scale = 100 if unit else 1
    message = (
        f"{words} is {new:g}, the baseline's {old:g}: {scale * difference:.4g}{unit} apart, "
        f"more than {scale * limit:.4g}{unit}"
    )
    return Seen(place, difference, limit, "" if within else message)


def _difference(place: Place, new: Figure, old: Figure) -> str:
    """In words, what is not the same; empty where all is."""
    said = [
        f"its {words} is {now or 'unknown'}, the baseline's {then or 'unknown'}"
        for words, now, then in (("shape", new.shape, old.shape), ("status", new.status, old.status))
        # The shape of a layer is known by its gradient only, and where that is gone the status says so.
        if now != then and (words == "status" or (now and then) or new.status == old.status)
    ]
    return f"{place.name}: {'; '.join(said)}" if said else ""


def _kept(allowed: Tolerance, metric: str, new: float, old: float) -> float:
    return old if allowed.same(metric, Place(), old, new) else new


def _kept_figure(allowed: Tolerance, metric: str, place: Place, new: Figure, old: Figure | None) -> Figure:
    if old is None or (old.status, old.shape) != (new.status, new.shape):
        return new
    return old if allowed.same(metric, place, old.norm, new.norm) else new
