"""`--score`: how faithful every map is to the model, by deletion, insertion and masking."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hookscope.artifacts import Heat, MapStatus, Table
from hookscope.cam.scores import Score
from hookscope.faithfulness import faithfulness
from hookscope.tasks.cammaps import BatchMaps, Row, row_of, table_of

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = ("deletion_auc", "insertion_auc", "average_drop", "increase_in_confidence")

_MEASURED = (MapStatus.OK, MapStatus.NEGATIVE_ONLY, MapStatus.BLANK)


class Faithful:
    """Measures the maps of every batch.

    Args:
        steps: of deletion and insertion.
        seed: of the order in which pixels of one value go.
        batch: how many pictures run at once.
    """

    def __init__(self, steps: int, seed: int, batch: int) -> None:
        self._steps, self._seed, self._batch = steps, seed, batch
        self._rows: list[Row] = []

    @property
    def passes(self) -> int:
        """How many forward passes a map takes."""
        return 2 * self._steps + 2

    def scored(self, maps: BatchMaps) -> list[Heat]:
        """The maps with their figures; not a number where there is nothing to measure."""
        return [self._one(heat, maps) for heat in maps.heats]

    def table(self) -> Table:
        """Every map's figures; `scores` are their means."""
        means = {name: _mean([row.figures[name] for row in self._rows]) for name in COLUMNS}
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        return table_of("scores", "How faithful the maps are", COLUMNS, self._rows, finite)

    def _one(self, heat: Heat, maps: BatchMaps) -> Heat:
        score = _score_of(heat, maps.explainer.scores)
        figures = dict.fromkeys(COLUMNS, math.nan)
        if score is not None and heat.status in _MEASURED:
            figures = self._figures(heat, score, maps)
        self._rows.append(row_of(heat, maps.images, figures))
        return replace(heat, scores={**heat.scores, **figures})

    def _figures(self, heat: Heat, score: Score, maps: BatchMaps) -> dict[str, float]:
        x = maps.x[heat.image : heat.image + 1]

        def confidence(pictures: Tensor) -> Tensor:
            output = maps.runner.outputs(pictures.to(x))
            return score.confidence(output, torch.full((len(pictures),), heat.image))

        found = faithfulness(
            x, _on_picture(heat), confidence, steps=self._steps, seed=self._seed, batch=self._batch
        )
        return {name: float(getattr(found, name)) for name in COLUMNS}


def _on_picture(heat: Heat) -> Tensor:
    """The part of a map that lies on the picture, not on the padding that the model added."""
    (down, across), (height, width) = heat.covers, heat.values.shape
    values = torch.from_numpy(heat.values)
    return values[: max(1, round(down * height)), : max(1, round(across * width))]


def _score_of(heat: Heat, scores: Sequence[Score]) -> Score | None:
    """The score that the map explains; of a map of no class, the first."""
    if heat.target is None:
        return next((score for score in scores if not score.targets[heat.image].missing), None)
    return next((score for score in scores if score.name == heat.target.name), None)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan
