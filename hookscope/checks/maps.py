"""The maps of this run against those of an earlier one, as they are made, and what that means for a gate.

Keeps figures of every map and the values of the worst few, no more. Two maps are the same when their pictures
are (`pictures`) and their keys are (`mapkeys`). Whoever looks at fewer pictures than the baseline has is not
told of the rest; but of a picture that is looked at, every map of the baseline is expected.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hookscope.artifacts import Heat, MapStatus, Table
from hookscope.checks import verdicts
from hookscope.checks.baseline import Baseline, Listed
from hookscope.checks.findings import Finding
from hookscope.checks.mapkeys import MapKey, explained, key_in, key_of, label_in
from hookscope.checks.pictures import Pairing
from hookscope.checks.verdicts import Limits, Row, Rule
from hookscope.errors import NothingMeasured, UsageError
from hookscope.likeness import Likeness, likeness
from hookscope.wording import listed

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class WorstPair:
    """Two maps that are little alike: this run's, and the earlier values, (h, w) float32 at their own resolution."""

    image: str
    heat: Heat
    earlier: Floats
    likeness: Likeness


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    `findings`: only under a gate; without one, `warnings` say which maps could not be compared. `worst`: the pairs
    that differ most, least overlap first, then least rank correlation. `lines`: for people.
    """

    table: Table
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    worst: tuple[WorstPair, ...]
    lines: tuple[str, ...]


def check_limits(min_iou: float | None, min_corr: float | None) -> None:
    """Nothing, where both limits are such that a map can be on either side of them.

    Raises:
        UsageError: one is not.
    """
    for flag, limit, low in (("--min-iou", min_iou, 0), ("--min-corr", min_corr, -1)):
        if limit is not None and not low <= limit <= 1:
            raise UsageError(f"{flag} {limit!r} is out of range", f"{low} to 1, where 1 is the same map")


class MapComparison:
    """Compares with a baseline: `add` for every map of this run, then `conclude`.

    Args:
        baseline: the earlier run.
        min_iou, min_corr: below which overlap or rank correlation a map is a finding; with either, so is every
            map that could not be compared.
        worst: of how many of the worst maps the values are kept.
        kind: of the maps, in the baseline's records.

    Raises:
        UsageError: a limit is out of range, or the baseline holds no such maps.
    """

    def __init__(
        self,
        baseline: Baseline,
        *,
        min_iou: float | None = None,
        min_corr: float | None = None,
        worst: int = 4,
        kind: str = "gradcam",
    ) -> None:
        check_limits(min_iou, min_corr)
        self._baseline = baseline
        self._limits = Limits(min_iou, min_corr)
        self._most = worst
        self._earlier: dict[str, dict[MapKey, list[Listed]]] = {}
        for record in baseline.records(kind, "raw"):
            image, key = key_in(record)
            self._earlier.setdefault(image, {}).setdefault(key, []).append(record)
        self._pictures = Pairing(self._earlier)
        self._times: Counter[tuple[str, MapKey]] = Counter()
        self._rows: list[Row] = []
        self._worst: list[WorstPair] = []

    def add(self, image: str, heat: Heat) -> Likeness | None:
        """How alike the map and the baseline's are; `None` where there are no two maps to compare.

        `image`: the picture's path, as the manifest has it.
        """
        key, label = key_of(heat), heat.target.label if heat.target else ""
        row = Row(image, key, label, _status(heat.values, heat.status))
        record = self._record(image, key)
        if record is not None:
            row = self._compared(replace(row, baseline_status=record.status or MapStatus.OK), heat, record)
        self._rows.append(row)
        return row.likeness

    def conclude(self) -> Comparison:
        """The comparison of all maps added.

        Raises:
            UsageError: not a single map is in the baseline, or can be read from it.
            NothingMeasured: this run made no map.
        """
        partners = self._pictures.settled()
        rows = [self._settled(row, partners) for row in self._rows]
        self._check_any(rows, partners)
        rows += self._not_made(rows, partners)
        found = verdicts.findings(rows, self._limits)
        moved = verdicts.moved(partners)
        return Comparison(
            table=verdicts.table(rows, self._baseline.path),
            findings=tuple(found) if self._limits.any else (),
            warnings=moved if self._limits.any else (*moved, *verdicts.warnings(found)),
            worst=tuple(pair for pair in self._worst if pair.image in partners),
            lines=verdicts.lines(rows, self._baseline.path),
        )

    def _record(self, image: str, key: MapKey) -> Listed | None:
        """The baseline's record of a map; of several with one key each in turn, as the run makes them."""
        at = self._times[image, key]
        self._times[image, key] += 1
        found = self._maps_of(self._pictures.partner(image)).get(key, [])
        return found[at] if at < len(found) else None

    def _maps_of(self, partner: str | None) -> Mapping[MapKey, list[Listed]]:
        return self._earlier.get(partner, {}) if partner is not None else {}

    def _compared(self, row: Row, heat: Heat, record: Listed) -> Row:
        """The row with its figures, or with the reason why there are none."""
        if row.status != row.baseline_status:
            return row.troubled(Rule.STATUS, f"was {row.baseline_status}, is {row.status}")
        if row.status != MapStatus.OK:
            return replace(row, equal=True)
        try:
            earlier = self._baseline.raw_map(record)
        except UsageError as error:
            return row.troubled(Rule.UNREADABLE, error.message)
        return self._measured(row, heat, earlier)

    def _measured(self, row: Row, heat: Heat, earlier: Floats) -> Row:
        if not np.isfinite(earlier).all():
            row = replace(row, baseline_status=MapStatus.NON_FINITE)
            return row.troubled(Rule.STATUS, f"was {row.baseline_status}, is {row.status}")
        found, equal = likeness(heat.values, earlier), np.array_equal(heat.values, earlier)
        if not equal:
            self._keep(WorstPair(row.image, heat, earlier, found))
        return replace(row, likeness=found, equal=equal)

    def _keep(self, pair: WorstPair) -> None:
        """The pair stays if it is among the worst, with values of its own: a view would hold the whole batch."""
        if len(self._worst) < self._most or (self._worst and _unlike(pair) < _unlike(self._worst[-1])):
            own = replace(pair, heat=replace(pair.heat, values=pair.heat.values.copy()))
            insort(self._worst, own, key=_unlike)
            del self._worst[self._most :]

    def _settled(self, row: Row, partners: Mapping[str, str]) -> Row:
        """The row as it is now that all pictures are known: one whose picture is another's has nothing to it."""
        if row.image not in partners:
            row = Row(row.image, row.key, row.label, row.status)
        if row.baseline_status:
            return row
        return row.troubled(Rule.NOT_IN_BASELINE, self._why_absent(row, partners))

    def _why_absent(self, row: Row, partners: Mapping[str, str]) -> str:
        if row.image not in partners:
            return self._pictures.why(row.image)
        maps, key = self._maps_of(partners[row.image]), row.key
        there = {other: records for other, records in maps.items() if other.place == key.place}
        if there:
            # A class that this run did not come to is what the prediction was.
            gone = {other: records for other, records in there.items() if not self._times[row.image, other]}
            names = [explained(other, label_in(records[0])) for other, records in (gone or there).items()]
            return f"the baseline explains {listed(names)} there"
        if any(other.site == key.site for other in maps):
            return "the baseline has no map of this layer by this method"
        return "the baseline has no map of this layer"

    def _not_made(self, rows: Sequence[Row], partners: Mapping[str, str]) -> Iterator[Row]:
        """Rows of the baseline's maps that this run has not; no trouble where another row names them already."""
        told = {(row.image, row.key.place) for row in rows if _is_absent(row)}
        for image, partner in partners.items():
            for key, records in self._maps_of(partner).items():
                for record in records[self._times[image, key] :]:
                    row = Row(image, key, label_in(record), baseline_status=record.status or MapStatus.OK)
                    known = (image, key.place) in told
                    yield row if known else row.troubled(Rule.NOT_IN_RUN, "this run made no such map")

    def _check_any(self, rows: Sequence[Row], partners: Mapping[str, str]) -> None:
        """Raises where nothing at all could be compared."""
        if not rows:
            raise NothingMeasured(f"no map was made to compare with the baseline {self._baseline.path!r}")
        matched = [row for row in rows if row.baseline_status]
        unread = [row.trouble for row in matched if row.trouble and row.trouble.rule is Rule.UNREADABLE]
        if len(matched) > len(unread):
            return
        reason, hint = (
            self._why_none(rows, partners),
            "give the pictures, layers, methods and targets that it has",
        )
        if unread:
            reason, hint = unread[0].words, "make the baseline again"
        raise UsageError(f"nothing to compare with the baseline {self._baseline.path!r}: {reason}", hint)

    def _why_none(self, rows: Sequence[Row], partners: Mapping[str, str]) -> str:
        if not partners:
            pictures = list(dict.fromkeys(row.image for row in rows))
            return f"its pictures are {listed(list(self._earlier))}, here they are {listed(pictures)}"
        there = [key for partner in partners.values() for key in self._maps_of(partner)]
        return _first_difference(there, [row.key for row in rows if row.image in partners])


def _first_difference(there: Sequence[MapKey], here: Sequence[MapKey]) -> str:
    """In which respect no key of the one is like any of the other."""
    for words, said in (
        ("layers", lambda key: str(key.site)),
        ("methods", lambda key: key.method),
        ("targets", lambda key: explained(key, "")),
    ):
        old, new = list(dict.fromkeys(map(said, there))), list(dict.fromkeys(map(said, here)))
        if not set(old) & set(new):
            return f"its {words} are {listed(old)}, here they are {listed(new)}"
    return "no map has the same layer, method and target"


def _status(values: Floats, status: str) -> str:
    """The map's status, which is not `ok` where a value is not finite, whatever is said."""
    return str(status) if status != MapStatus.OK or np.isfinite(values).all() else str(MapStatus.NON_FINITE)


def _unlike(pair: WorstPair) -> tuple[float, float]:
    return verdicts.unlikeness(pair.likeness)


def _is_absent(row: Row) -> bool:
    return row.trouble is not None and row.trouble.rule is Rule.NOT_IN_BASELINE
