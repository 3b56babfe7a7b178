"""What begins to go wrong at a step: limits, spikes and drift looked at in the figures of one step after the other.

It keeps what was so at the step before, as an event tells of a beginning. It measures nothing and tells nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hookscope.checks.graddrift import Tolerance
from hookscope.checks.gradfigures import GradBaseline
from hookscope.checks.rules import Place, Settings
from hookscope.errors import ExitCode, HookscopeError
from hookscope.layers import Site, Status
from hookscope.monitor.records import ActivationFigures, Event, Kind, StepRecord
from hookscope.monitor.running import NORMAL
from hookscope.monitor.watched import Watched
from hookscope.wording import counted, listed

RULE_OF = {
    Kind.NON_FINITE: "nonfinite",
    Kind.EXPLODED: "exploding",
    Kind.VANISHED: "vanishing",
    Kind.MAX_NORM: "max-norm",
    Kind.DRIFT: "drift",
}
"""The gate's rule whose severity and limit an event goes by; a spike has its own limit."""

# A series that hardly moves has a MAD near 0, and every rounding would be a spike.
_LEAST_DEVIATION = 0.01
_MOST_OTHERS = 20


class GradientEvent(HookscopeError):
    """An event of a monitor that was told to raise; `event` is it."""

    exit_code = ExitCode.CHECK_FAILED

    def __init__(self, event: Event) -> None:
        super().__init__(
            f"step {event.step}: {event.message}", "on_event=None records events without stopping"
        )
        self.event = event


class GradientWarning(UserWarning):
    """An event of a monitor that was told to warn."""


@dataclass(frozen=True)
class _Found:
    """One place where something is so."""

    name: str
    layer: str
    value: float
    limit: float
    words: str
    severity: str


class Judge:
    """Told of one record after the other, it gives the events of each.

    Args:
        watched: the parameters, in the order of the arrays it is told.
        settings: of the gradient gate.
        spike: how many deviations above the rolling median are a spike; infinity: none is.
        baseline: figures that parameters are compared with.
        types: classes of layers, for globs.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        settings: Settings,
        spike: float,
        baseline: GradBaseline | None,
        types: Mapping[str, str],
    ) -> None:
        self._watched = tuple(watched)
        self._types = types
        self._settings = settings
        self._spike = spike
        self._baseline = baseline
        self._limits = {kind: self._each(kind) for kind in (Kind.EXPLODED, Kind.VANISHED)}
        self._so: set[tuple[Kind, bool]] = set()
        self.order: dict[str, int] = {one.name: -at for at, one in enumerate(watched)}

    def events(
        self,
        record: StepRecord,
        norms: NDArray[np.float64],
        centre: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    ) -> tuple[Event, ...]:
        """The events of a step.

        Args:
            record: its figures.
            norms: of the total and each parameter, `nan` where there is none.
            centre: rolling median and MAD of the same before this step; `None` during warm-up.
        """
        found = {
            (Kind.NON_FINITE, False): self._non_finite(record),
            (Kind.EXPLODED, False): self._beyond(record, Kind.EXPLODED),
            (Kind.VANISHED, False): self._beyond(record, Kind.VANISHED),
            (Kind.MAX_NORM, False): self._total(record),
            (Kind.DRIFT, False): self._drift(record),
            (Kind.SPIKE, False): self._spikes(norms, centre),
            (Kind.NON_FINITE, True): self._sites(record, Kind.NON_FINITE, _site_broken),
            (Kind.EXPLODED, True): self._sites(
                record, Kind.EXPLODED, lambda figures, limit: figures.rms > limit
            ),
            (Kind.VANISHED, True): self._sites(
                record, Kind.VANISHED, lambda figures, limit: 0 < figures.rms < limit
            ),
        }
        made = []
        so = set()
        for (kind, local), places in found.items():
            listed_places = list(places)
            if not listed_places:
                continue
            so.add((kind, local))
            if (kind, local) not in self._so:
                made.append(self._event(kind, record, listed_places, local))
        self._so = so
        return tuple(made)

    def _each(self, kind: Kind) -> NDArray[np.float64]:
        """The limit at each parameter; one that never holds where the rule is off."""
        off = math.inf if kind is Kind.EXPLODED else 0.0
        return np.array([self._limit(kind, one.place, off) for one in self._watched])

    def _limit(self, kind: Kind, place: Place, off: float) -> float:
        rule = RULE_OF[kind]
        return off if self._settings.severity(rule, place) == "off" else self._settings.number(rule, place)

    def _found(self, at: int, kind: Kind, value: float, limit: float, words: str) -> _Found:
        one = self._watched[at]
        severity = self._settings.severity(RULE_OF[kind], one.place) if kind in RULE_OF else "warn"
        return _Found(one.name, one.layer, value, limit, words, severity)

    def _non_finite(self, record: StepRecord) -> Iterator[_Found]:
        for at, one in enumerate(self._watched):
            figures = record.parameters[one.name]
            on = self._settings.severity("nonfinite", one.place) != "off"
            if on and figures.status == Status.NON_FINITE:
                broken = _broken(figures.non_finite, figures.count)
                words = f"{broken} of the gradient of {one.name} are not finite"
                yield self._found(at, Kind.NON_FINITE, float(figures.non_finite), 0.0, words)

    def _beyond(self, record: StepRecord, kind: Kind) -> Iterator[_Found]:
        rows = record.parameters
        rms = np.array([_rms(rows[one.name].rms, rows[one.name].status) for one in self._watched])
        limits = self._limits[kind]
        bad = rms > limits if kind is Kind.EXPLODED else rms < limits
        for at in np.flatnonzero(bad):
            words = (
                f"the RMS of the gradient of {self._watched[at].name} is {rms[at]:.6g}, "
                f"{'above' if kind is Kind.EXPLODED else 'below'} {limits[at]:g}"
            )
            yield self._found(int(at), kind, float(rms[at]), float(limits[at]), words)

    def _total(self, record: StepRecord) -> Iterator[_Found]:
        limit = self._settings.limit("max-norm", Place())
        severity = self._settings.severity("max-norm", Place())
        if limit is None or record.total_norm is None or severity == "off" or record.total_norm <= limit:
            return
        words = f"the total gradient norm is {record.total_norm:.6g}, not within {limit:g}"
        yield _Found("", "", record.total_norm, limit, words, severity)

    def _drift(self, record: StepRecord) -> Iterator[_Found]:
        if self._baseline is None:
            return
        figures = self._baseline.figures
        allowed = Tolerance(self._settings, figures.total)
        for at, one in enumerate(self._watched):
            old, new = figures.parameters.get(one.name), record.parameters[one.name]
            if old is None or self._settings.severity("drift", one.place) == "off":
                continue
            if (
                old.norm is not None
                and new.norm is not None
                and not allowed.same("parameter", one.place, old.norm, new.norm)
            ):
                words = f"the norm of the gradient of {one.name} is {new.norm:g}, the baseline's {old.norm:g}"
                yield self._found(
                    at,
                    Kind.DRIFT,
                    abs(new.norm - old.norm),
                    allowed.allowed("parameter", one.place, old.norm),
                    words,
                )

    def _spikes(
        self, norms: NDArray[np.float64], centre: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    ) -> Iterator[_Found]:
        if centre is None or not math.isfinite(self._spike):
            return
        median, mad = centre
        limits = median + self._spike * np.maximum(NORMAL * mad, _LEAST_DEVIATION * median)
        bad = np.flatnonzero(np.isfinite(norms) & (norms > limits) & (median > 0))
        # The total first; then the one that is furthest beyond its own limit.
        for at in sorted(bad.tolist(), key=lambda one: (one != 0, -norms[one] / limits[one])):
            name = "the total" if at == 0 else f"the norm of {self._watched[at - 1].name}"
            words = (
                f"{name} is {norms[at]:.6g}, the rolling median {median[at]:.6g} and {limits[at]:.6g} a spike"
            )
            if at == 0:
                yield _Found("", "", float(norms[0]), float(limits[0]), words, "warn")
            else:
                yield self._found(at - 1, Kind.SPIKE, float(norms[at]), float(limits[at]), words)

    def _sites(
        self, record: StepRecord, kind: Kind, bad: Callable[[ActivationFigures, float], bool]
    ) -> Iterator[_Found]:
        rule = RULE_OF[kind]
        for site, figures in record.activations.items():
            place = Place(str(site), site.layer, self._types.get(site.layer, ""))
            severity = self._settings.severity(rule, place)
            limit = self._settings.limit(rule, place) if kind is not Kind.NON_FINITE else 0.0
            if severity == "off" or limit is None or not bad(figures, limit):
                continue
            value, words = _said(site, figures, limit, kind)
            yield _Found(str(site), site.layer, value, limit, words, severity)

    def _event(self, kind: Kind, record: StepRecord, places: Sequence[_Found], local: bool) -> Event:
        # Of activations the record itself is in the order of backward.
        if not local and kind is not Kind.SPIKE:
            places = sorted(places, key=lambda one: self.order.get(one.name, 0))
        first = places[0]
        others = tuple(dict.fromkeys(one.name for one in places[1:]))
        more = f" (and at {counted(len(others), 'more place')}: {listed(others, 3)})" if others else ""
        event = Event(
            kind=kind,
            step=record.step,
            name=first.name,
            layer=first.layer,
            value=first.value,
            limit=first.limit,
            message=first.words + more,
            severity=first.severity,
            others=others[:_MOST_OTHERS],
            local=local,
        )
        return _detailed(event, record)


def _detailed(event: Event, record: StepRecord) -> Event:
    own = record.layers.get(event.layer)
    at = event.name if event.local else event.layer
    figures = _figures(record.activations, at)
    event = replace(
        event, parameter_norm=own.norm if own is not None else record.total_norm if not event.layer else None
    )
    if figures is None:
        return event
    return replace(event, mean=figures.mean, deviation=figures.deviation, maximum=figures.maximum)


def _figures(activations: Mapping[Site, ActivationFigures], name: str) -> ActivationFigures | None:
    return next((figures for site, figures in activations.items() if name in (str(site), site.layer)), None)


def _site_broken(figures: ActivationFigures, limit: float) -> bool:
    return figures.status == Status.NON_FINITE


def _rms(rms: float | None, status: str) -> float:
    """The RMS of a gradient that is finite and above zero; else `nan`, which is beyond no limit."""
    return math.nan if rms is None or status != Status.OK else rms


def _broken(count: int, of: int) -> str:
    return f"{count} of {counted(of, 'value')}" if count >= 0 else "some values"


def _said(site: Site, figures: ActivationFigures, limit: float, kind: Kind) -> tuple[float, str]:
    """The value that was compared, and the event in words."""
    at = f"of the gradient at the output of {site}"
    if kind is Kind.NON_FINITE:
        broken = _broken(figures.non_finite, figures.count)
        return float(figures.non_finite), f"{broken} {at} are not finite"
    way = "above" if kind is Kind.EXPLODED else "below"
    return figures.rms, f"the RMS {at} is {figures.rms:.6g}, {way} {limit:g}"
