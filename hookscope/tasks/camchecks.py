"""What is measured of the maps themselves: how faithful they are, whether they are the weights' doing, what they were.

Each is a pass over a batch's maps and a table at the end; the gates among them give findings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from hookscope.artifacts import Heat, MapStatus, Pair, Table
from hookscope.cam.explain import Explainer
from hookscope.cam.plan import Made
from hookscope.cam.scores import Score
from hookscope.checks.baseline import Baseline
from hookscope.checks.findings import Finding
from hookscope.checks.maps import MapComparison, WorstPair, check_limits
from hookscope.errors import NothingMeasured, UsageError
from hookscope.faithfulness import faithfulness
from hookscope.layers import modules_by_name
from hookscope.likeness import spearman
from hookscope.randomise import cascade, randomised
from hookscope.records import versions
from hookscope.tasks import Conclusion, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.runner import Runner

SCORE_COLUMNS = ("deletion_auc", "insertion_auc", "average_drop", "increase_in_confidence")
_MAP_COLUMNS = ("image", "layer", "call", "output", "method", "target", "label")
_STAGES = 4
_NONE_COMPARED = "no map could be compared with that of random weights"


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


@dataclass(frozen=True)
class _Row:
    """What one map came to: the columns that say which it is, and its figures by name."""

    map: tuple[object, ...]
    figures: Mapping[str, float]


class CamChecks:
    """Measures the maps of every batch; `conclude` has the tables and what did not pass.

    Raises:
        UsageError: a limit without its check, out of range, or a baseline that is none.
    """

    def __init__(self, options: CheckOptions) -> None:
        _check_options(options)
        self._options = options
        self._scored: list[_Row] = []
        self._sanity: list[_Row] = []
        self._correlations: list[tuple[Heat, str, float]] = []
        self._baseline: Baseline | None = None
        self._comparison: MapComparison | None = None
        if options.baseline is not None:
            self._baseline = Baseline.read(options.baseline)
            self._comparison = MapComparison(
                self._baseline, min_iou=options.min_iou, min_corr=options.min_corr
            )

    @property
    def scored(self) -> bool:
        """Whether the scores that the maps explain are asked for again."""
        return self._options.score

    def passes(self) -> Iterator[str]:
        """In words, which forward passes the checks make."""
        if self._options.score:
            yield f"score: {2 * self._options.score_steps + 2:,} forward passes a map"
        if self._options.sanity:
            yield f"sanity: every map up to {_STAGES} times more, of random weights"

    def checked(
        self,
        heats: Sequence[Heat],
        made: Sequence[Made],
        explainer: Explainer,
        runner: Runner,
        x: Tensor,
        subject: Subject,
        images: Sequence[str],
    ) -> list[Heat]:
        """The maps with their figures, once all that is asked for has been measured; `made`: the same, in order."""
        heats = list(heats)
        if self._options.score:
            heats = [self._faithful(heat, explainer.scores, runner, x, images) for heat in heats]
        if self._options.sanity:
            self._randomise(list(zip(heats, made, strict=True)), explainer, runner, x, subject, images)
        if self._comparison is not None:
            for heat in heats:
                self._comparison.add(images[heat.image], heat)
        return heats

    def conclude(self, subject: Subject) -> Conclusion:
        """Tables, findings, warnings and lines for people.

        Raises:
            UsageError: the baseline has none of this run's maps.
            NothingMeasured: no map could be checked against random weights.
        """
        said = Conclusion()
        if self._options.score:
            said = _joined(said, Conclusion(tables=(self._score_table(),)))
        if self._options.sanity:
            said = _joined(said, self._sanity_conclusion())
        if self._comparison is not None and self._baseline is not None:
            found = self._comparison.conclude()
            said = _joined(
                said,
                Conclusion(
                    tables=(found.table,),
                    findings=found.findings,
                    warnings=(*self._baseline.differences(subject.record, versions()), *found.warnings),
                    lines=found.lines,
                    pairs=tuple((worst.image, _pair(worst)) for worst in found.worst),
                ),
            )
        return said

    def _faithful(
        self, heat: Heat, scores: Sequence[Score], runner: Runner, x: Tensor, images: Sequence[str]
    ) -> Heat:
        score = _score_of(heat, scores)
        if score is None or heat.status not in (MapStatus.OK, MapStatus.NEGATIVE_ONLY, MapStatus.BLANK):
            figures = dict.fromkeys(SCORE_COLUMNS, math.nan)
        else:
            figures = _figures(heat, score, runner, x, self._options)
        self._scored.append(_Row(_which(heat, images), figures))
        return replace(heat, scores={**heat.scores, **figures})

    def _randomise(
        self,
        maps: Sequence[tuple[Heat, Made]],
        explainer: Explainer,
        runner: Runner,
        x: Tensor,
        subject: Subject,
        images: Sequence[str],
    ) -> None:
        """The same maps of the model with more and more of its weights random, from the top down."""
        names = _with_weights(subject)
        stages = cascade(names, _STAGES)
        for stage, chosen in enumerate(stages, start=1):
            with randomised(runner.model, chosen, self._options.seed):
                again = {_same(one): one for one in explainer.again(runner, x)}
            for heat, true in maps:
                alike = _correlation(true, again.get(_same(true)))
                figures = {"layers": len(chosen), "of": len(names), "spearman": alike}
                self._sanity.append(_Row(_which(heat, images), figures))
                if stage == len(stages):
                    self._correlations.append((heat, images[heat.image], alike))

    def _score_table(self) -> Table:
        means = {name: _mean([row.figures[name] for row in self._scored]) for name in SCORE_COLUMNS}
        return Table(
            kind="scores",
            title="How faithful the maps are",
            columns=(*_MAP_COLUMNS, *SCORE_COLUMNS),
            rows=tuple((*row.map, *(row.figures[name] for name in SCORE_COLUMNS)) for row in self._scored),
            scores={name: value for name, value in means.items() if math.isfinite(value)},
        )

    def _sanity_conclusion(self) -> Conclusion:
        columns = ("layers", "of", "spearman")
        defined = [alike for _, _, alike in self._correlations if math.isfinite(alike)]
        limit = self._options.sanity_max
        if limit is not None and not defined:
            raise NothingMeasured(_NONE_COMPARED, self._why_none())
        table = Table(
            kind="sanity",
            title="Rank correlation with the maps of the same model with random weights",
            columns=(*_MAP_COLUMNS, *columns),
            rows=tuple((*row.map, *(row.figures[name] for name in columns)) for row in self._sanity),
            scores={"max_spearman": max(defined)} if defined else {},
        )
        findings = tuple(
            _insane(heat, image, alike, limit)
            for heat, image, alike in self._correlations
            if limit is not None and alike > limit
        )
        lines = (f"with random weights, rank correlation at most {max(defined):.2f}",) if defined else ()
        warnings = () if defined else (f"{_NONE_COMPARED}: {self._why_none()}",)
        return Conclusion(tables=(table,), findings=findings, lines=lines, warnings=warnings)

    def _why_none(self) -> str:
        if not self._sanity:
            return "the model has no weights"
        return "all of them, or all of the random ones, are uniform or undefined"


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


def _figures(heat: Heat, score: Score, runner: Runner, x: Tensor, options: CheckOptions) -> dict[str, float]:
    down, across = heat.covers
    values = torch.from_numpy(heat.values)
    height, width = values.shape
    # What lies on the padding is not on the picture.
    values = values[: max(1, round(down * height)), : max(1, round(across * width))]

    def confidence(pictures: Tensor) -> Tensor:
        return score.confidence(runner.outputs(pictures.to(x)), torch.full((len(pictures),), heat.image))

    found = faithfulness(
        x[heat.image : heat.image + 1],
        values,
        confidence,
        steps=options.score_steps,
        seed=options.seed,
        batch=options.batch,
    )
    return {name: float(getattr(found, name)) for name in SCORE_COLUMNS}


def _score_of(heat: Heat, scores: Sequence[Score]) -> Score | None:
    """The score that the map explains; of a map of no class, the first."""
    if heat.target is None:
        return next((score for score in scores if not score.targets[heat.image].missing), None)
    return next((score for score in scores if score.name == heat.target.name), None)


def _with_weights(subject: Subject) -> list[str]:
    """Layers with parameters of their own, in the order in which they end."""
    modules = modules_by_name(subject.model)
    called = dict.fromkeys(site.layer for site in subject.outputs)
    names = [name for name in called if modules[name]._parameters]
    return names + [name for name in modules if modules[name]._parameters and name not in called]


def _same(one: Made) -> tuple[object, ...]:
    return one.image, one.site, one.method, None if one.target is None else one.target.name


def _correlation(true: Made, random: Made | None) -> float:
    """Of the maps before their ReLU, which leaves many a map of random weights blank."""
    if random is None or true.status is MapStatus.UNDEFINED or random.status is MapStatus.UNDEFINED:
        return math.nan
    return spearman(true.before, random.before)


def _which(heat: Heat, images: Sequence[str]) -> tuple[object, ...]:
    target = heat.target
    what = "" if target is None else target.index if target.index is not None else target.name
    label = "" if target is None else target.label
    site = heat.site
    return images[heat.image], site.layer, site.call, site.output, heat.method, what, label


def _insane(heat: Heat, image: str, alike: float, limit: float) -> Finding:
    what = f"{image}: {heat.site} {heat.method} {heat.target or ''}".rstrip()
    message = f"{what}: the map of random weights is like the true one, rank correlation {alike:.3f} above {limit:g}"
    return Finding("sanity-max", "error", heat.site.layer, alike, limit, message)


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


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _joined(one: Conclusion, other: Conclusion) -> Conclusion:
    return Conclusion(
        tables=(*one.tables, *other.tables),
        findings=(*one.findings, *other.findings),
        warnings=(*one.warnings, *other.warnings),
        lines=(*one.lines, *other.lines),
        pairs=(*one.pairs, *other.pairs),
    )
