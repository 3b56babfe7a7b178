"""A batch's maps as the checks see them: what they are of, what made them, and the columns that say which each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.artifacts import Heat, Table
from hookscope.cam.explain import Explainer
from hookscope.cam.plan import Made
from hookscope.tasks import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.runner import Runner

_COLUMNS = ("image", "layer", "call", "output", "method", "target", "label")


@dataclass(frozen=True)
class BatchMaps:
    """The maps of one batch, `heats` as shown and `made` as computed, in one order; and all that they came from.

    `x`: (N, C, H, W). `images`: the pictures' paths.
    """

    heats: Sequence[Heat]
    made: Sequence[Made]
    explainer: Explainer
    runner: Runner
    x: Tensor
    subject: Subject
    images: Sequence[str]


@dataclass(frozen=True)
class Row:
    """What one map came to: the columns that say which it is, and its figures by name."""

    map: tuple[object, ...]
    figures: Mapping[str, float]


def row_of(heat: Heat, images: Sequence[str], figures: Mapping[str, float]) -> Row:
    """The figures of a map under the columns that say which it is."""
    target, site = heat.target, heat.site
    what = "" if target is None else target.index if target.index is not None else target.name
    label = "" if target is None else target.label
    place = (images[heat.image], site.layer, site.call, site.output, heat.method, what, label)
    return Row(place, figures)


def table_of(
    kind: str, title: str, names: Sequence[str], rows: Sequence[Row], scores: Mapping[str, float]
) -> Table:
    """A table with a row for each map: which it is, then the figures of these names."""
    cells = tuple((*row.map, *(row.figures[name] for name in names)) for row in rows)
    return Table(kind=kind, title=title, columns=(*_COLUMNS, *names), rows=cells, scores=dict(scores))
