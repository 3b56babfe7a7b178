"""What is measured of the maps themselves: are they faithful, are they the weights' doing, have they changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from hookscope.artifacts import Heat, Pair
from hookscope.checks.baseline import Baseline
from hookscope.checks.maps import MapComparison, WorstPair, check_limits
from hookscope.errors import HookscopeError, UsageError
from hookscope.records import versions
from hookscope.tasks import Conclusion, Subject
from hookscope.tasks.cammaps import BatchMaps
from hookscope.tasks.camsanity import STAGES, Sanity
from hookscope.tasks.camscores import Faithful


@dataclass(frozen=True)
class CheckOptions:
    """The flags that measure maps. `baseline`: an earlier run's output directory or its manifest."""

    score: bool = False
    score_steps: int = 16
    sanity: bool = False
    sanity_max: float | None = None
    baseline: str | None = None
    min_iou: float | None = None
    min_corr: float | None = None
    seed: int = 0
    batch: int = 16


class CamChecks:
    """Measures the maps of every batch; `conclude` has the tables and what did not pass.

    Raises:
        UsageError: a limit without its check, out of range, or a baseline that is none.
    """

    def __init__(self, options: CheckOptions) -> None:
        _check_options(options)
        self._faithful = Faithful(options.score_steps, options.seed, options.batch) if options.score else None
        self._sanity = Sanity(options.seed, options.sanity_max) if options.sanity else None
        self._baseline = Baseline.read(options.baseline) if options.baseline is not None else None
        self._comparison: MapComparison | None = None
        if self._baseline is not None:
            self._comparison = MapComparison(
                self._baseline, min_iou=options.min_iou, min_corr=options.min_corr
            )

    @property
    def scored(self) -> bool:
        """Whether the scores that the maps explain are asked for again."""
        return self._faithful is not None

    def passes(self) -> Iterator[str]:
        """In words, which forward passes the checks make."""
        if self._faithful is not None:
            yield f"score: {self._faithful.passes:,} forward passes a map"
        if self._sanity is not None:
            yield f"sanity: every map up to {STAGES} times more, of random weights"

    def checked(self, maps: BatchMaps) -> list[Heat]:
        """The maps with their figures, once all that is asked for has been measured."""
        heats = list(maps.heats) if self._faithful is None else self._faithful.scored(maps)
        if self._sanity is not None:
            self._sanity.compare(replace(maps, heats=heats))
        if self._comparison is not None:
            for heat in heats:
                self._comparison.add(maps.images[heat.image], heat)
        return heats

    def conclude(self, subject: Subject) -> Conclusion:
        """Tables, findings, warnings and lines for people."""
        said = Conclusion()
        if self._faithful is not None:
            said = said.and_also(Conclusion(tables=(self._faithful.table(),)))
        if self._sanity is not None:
            said = said.and_also(self._sanity.conclude())
        return said.and_also(self._compared(subject))

    def _compared(self, subject: Subject) -> Conclusion:
        """What the comparison with the baseline came to; that nothing could be compared is an error among the rest."""
        if self._comparison is None or self._baseline is None:
            return Conclusion()
        differences = self._baseline.differences(subject.record, versions())
        try:
            found = self._comparison.conclude()
        except HookscopeError as error:
            return Conclusion(warnings=differences, errors=(error,))
        return Conclusion(
            tables=(found.table,),
            findings=found.findings,
            warnings=(*differences, *found.warnings),
            lines=found.lines,
            pairs=tuple((worst.image, _pair(worst)) for worst in found.worst),
        )


def _check_options(options: CheckOptions) -> None:
    check_limits(options.min_iou, options.min_corr)
    if options.baseline is None and not (options.min_iou is None and options.min_corr is None):
        raise UsageError(
            "--min-iou and --min-corr compare with a baseline", "--baseline DIR of an earlier run"
        )
    limit = options.sanity_max
    if limit is not None and not options.sanity:
        raise UsageError("--sanity-max is a limit of --sanity", "give both")
    if limit is not None and not -1 <= limit <= 1:
        raise UsageError(f"--sanity-max {limit!r} is out of range", "-1 to 1, a rank correlation")


def _pair(worst: WorstPair) -> Pair:
    heat = worst.heat
    return Pair(
        image=heat.image,
        site=heat.site,
        method=heat.method,
        target=heat.target,
        before=worst.earlier,
        now=heat.values,
        scores=asdict(worst.likeness),
        signed=heat.signed,
        covers=heat.covers,
    )
