"""All that is known of a training so far: statistics of every series, the latest records, what a report needs.

Told of one measured step after the other. It decides neither when to measure nor what is bad.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.checks.gradfigures import GradBaseline
from hookscope.checks.rules import Settings
from hookscope.layers import Site
from hookscope.monitor.activations import Moments, merged
from hookscope.monitor.parallel import gathered, ranks_in
from hookscope.monitor.records import Event, ParamFigures, StepRecord
from hookscope.monitor.report import Last, MonitorReport, ParamSummary, grad_report, spread_of
from hookscope.monitor.running import Running
from hookscope.monitor.stepping import Done
from hookscope.monitor.watched import Watched

Series = NDArray[np.float64]


class Tally:
    """Statistics over measured steps.

    Args:
        watched: the parameters.
        history: how many of the latest records are kept.
        window, warmup: of the rolling median, in measured steps.
    """

    def __init__(self, watched: Sequence[Watched], history: int, window: int, warmup: int) -> None:
        self.measured = self.skipped = 0
        self.events: list[Event] = []
        self.records: deque[StepRecord] = deque(maxlen=history)
        self.last: Last | None = None
        self._watched = tuple(watched)
        self._warmup = warmup
        self._norms = Running(1 + len(watched), window)
        self._ratios, self._updates = Running(len(watched), window), Running(len(watched), window)
        self._moments: dict[Site, Moments] = {}

    def centre(self) -> tuple[Series, Series] | None:
        """Rolling median and MAD of the total norm and each parameter's; `nan` of those still warming up."""
        if self._norms.counts.max(initial=0) < self._warmup:
            return None
        median, mad = self._norms.centre()
        return np.where(self._norms.counts < self._warmup, np.nan, median), mad

    def add(self, done: Done, norms: Series, last: Last) -> None:
        """One more measured step; `norms`: of its record, as `norms_of` gives them; `last`: the same for a report."""
        rows = [done.record.parameters[one.name] for one in self._watched]
        missing = np.array([done.record.total_norm is None, *(row.norm is None for row in rows)])
        self._norms.add(norms, missing)
        self._ratios.add(*_column([row.ratio for row in rows]))
        self._updates.add(*_column([row.update_ratio for row in rows]))
        for site, found in done.activations.items():
            held = self._moments.get(site)
            self._moments[site] = found if held is None else merged((held, found))
        self.measured += 1
        self.skipped += done.record.skipped
        self.records.append(done.record)
        self.last = last

    def report(
        self,
        steps: int,
        types: Mapping[str, str],
        settings: Settings,
        baseline: GradBaseline | None,
        group: Any,
    ) -> MonitorReport:
        """The report; a collective where `group` is given."""
        of_last = self.last.activations if self.last is not None else {}
        known = gathered((self._moments, of_last), group)
        whole = _pooled([moments for moments, _ in known])
        last = self._with(_pooled([moments for _, moments in known]))
        parameters = {one.name: self._summary(at) for at, one in enumerate(self._watched)}
        total = self._norms.summary(0)
        spreads = {name: spread for name, one in parameters.items() if (spread := spread_of(one.norm))}
        return MonitorReport(
            steps=steps,
            measured=self.measured,
            skipped=self.skipped,
            norm=last.record.norm if last is not None else math.nan,
            ranks=ranks_in(group),
            total=total,
            parameters=parameters,
            activations={site: one.figures() for site, one in whole.items()},
            events=tuple(self.events),
            last=self.last.record if self.last is not None else None,
            grad=None if last is None else grad_report(last, self._watched, types, spreads, spread_of(total)),
            settings=settings,
            baseline=baseline,
        )

    def _with(self, activations: Mapping[Site, Moments]) -> Last | None:
        if self.last is None:
            return None
        return replace(self.last, activations=activations)

    def _summary(self, at: int) -> ParamSummary:
        return ParamSummary(self._norms.summary(1 + at), self._ratios.summary(at), self._updates.summary(at))


def norms_of(record: StepRecord, watched: Sequence[Watched]) -> Series:
    """The norms of the total and of each parameter, `nan` where there is no gradient."""
    rows: list[ParamFigures] = [record.parameters[one.name] for one in watched]
    return np.array([_number(record.total_norm), *(_number(row.norm) for row in rows)])


def _pooled(found: Sequence[Mapping[Site, Moments]]) -> dict[Site, Moments]:
    """Of all processes together: each has its share of the mean loss, and so its gradient counts by that share."""
    sites = dict.fromkeys(site for one in found for site in one)
    return {site: merged(one[site].times(1 / len(found)) for one in found if site in one) for site in sites}


def _column(values: Sequence[float | None]) -> tuple[Series, NDArray[np.bool_]]:
    return np.array([_number(value) for value in values]), np.array([value is None for value in values])


def _number(value: float | None) -> float:
    return math.nan if value is None else value
