"""`--sanity`: the same maps of the model with its weights made random from the top down.

A map that stays what it was does not depend on what the model has learnt (Adebayo et al., Sanity Checks for Saliency
Maps, NeurIPS 2018).
"""

from __future__ import annotations

import math

from hookscope.artifacts import Heat, MapStatus
from hookscope.cam.plan import Made
from hookscope.checks.findings import Finding
from hookscope.errors import NothingMeasured
from hookscope.layers import modules_by_name
from hookscope.likeness import spearman
from hookscope.randomise import cascade, randomised
from hookscope.tasks import Conclusion, Subject
from hookscope.tasks.cammaps import BatchMaps, Row, row_of, table_of
from hookscope.wording import counted

STAGES = 4
"""In how many steps the weights become random."""

_COLUMNS = ("layers", "of", "spearman")
_NONE_COMPARED = "no map could be compared with that of random weights"


class Sanity:
    """Compares the maps of every batch with those of random weights.

    Args:
        seed: of the weights.
        most: the rank correlation above which a map of weights that are all random is a finding.
    """

    def __init__(self, seed: int, most: float | None) -> None:
        self._seed, self._most = seed, most
        self._rows: list[Row] = []
        self._last: list[tuple[str, str, float]] = []

    def compare(self, maps: BatchMaps) -> None:
        """Make the maps of a batch again, by ever more random weights."""
        names = _with_weights(maps.subject)
        stages = cascade(names, STAGES)
        for stage, chosen in enumerate(stages, start=1):
            with randomised(maps.runner.model, chosen, self._seed):
                again = {_same(one): one for one in maps.explainer.again(maps.runner, maps.x)}
            for heat, true in zip(maps.heats, maps.made, strict=True):
                alike = _correlation(true, again.get(_same(true)))
                figures = {"layers": len(chosen), "of": len(names), "spearman": alike}
                self._rows.append(row_of(heat, maps.images, figures))
                if stage == len(stages):
                    self._last.append((heat.site.layer, _named(heat, maps.images[heat.image]), alike))

    def conclude(self) -> Conclusion:
        """The table, what did not pass, and a line for people."""
        defined = [alike for _, _, alike in self._last if math.isfinite(alike)]
        title = "Rank correlation with the maps of the same model with random weights"
        greatest = {"max_spearman": max(defined)} if defined else {}
        table = table_of("sanity", title, _COLUMNS, self._rows, greatest)
        if not defined:
            return self._nothing(Conclusion(tables=(table,)))
        findings = (
            _finding(layer, what, alike, self._most)
            for layer, what, alike in self._last
            if self._most is not None and alike > self._most
        )
        line = f"with random weights, rank correlation at most {max(defined):.2f}"
        unknown = len(self._last) - len(defined)
        warnings = (f"{counted(unknown, 'map')} could not be compared with that of random weights",)
        return Conclusion(
            tables=(table,), findings=tuple(findings), lines=(line,), warnings=warnings if unknown else ()
        )

    def _nothing(self, said: Conclusion) -> Conclusion:
        """With a limit, that nothing could be held to it is an error; without one, a warning."""
        why = "all of them, or all of the random ones, are uniform or undefined"
        if not self._rows:
            why = "the model has no weights"
        if self._most is not None:
            return said.and_also(Conclusion(errors=(NothingMeasured(_NONE_COMPARED, why),)))
        return said.and_also(Conclusion(warnings=(f"{_NONE_COMPARED}: {why}",)))


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


def _named(heat: Heat, image: str) -> str:
    return f"{image}: {heat.site} {heat.method} {heat.target or ''}".rstrip()


def _finding(layer: str, what: str, alike: float, limit: float) -> Finding:
    message = f"{what}: the map of random weights is like the true one, rank correlation {alike:.3f} above {limit:g}"
    return Finding("sanity-max", "error", layer, alike, limit, message)
