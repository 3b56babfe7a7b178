"""A report of distributions as tables and in a few lines. Numbers in, numbers and words out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hookscope.artifacts import Table
from hookscope.checks.rules import Settings
from hookscope.statsreport import StatsReport, StatsRow
from hookscope.tasks.statsdocument import IDLE, MEASURED, QUANTILES, Idle, concentration, document, idle_units
from hookscope.wording import counted, listed, ranges

_QUANTILE_COLUMNS = tuple(f"q{100 * share:g}" for share in QUANTILES)
_COLUMNS = (
    "layer", "call", "output", "side", "type", "kind", "depth", "shape", "layout", "status", "same_as", "count",
    "non_finite", "zero_share", "mean", "std", "min", "max", *_QUANTILE_COLUMNS, "sampled", "rank_error", "channels",
    "dead", "constant", "saturated", "participation_ratio", "entropy_rank", "gini", "top_1", "top_10",
    "effective_rank", "stable_rank", "mean_abs_correlation",
)  # fmt: skip
_PEOPLES_COLUMNS = (
    "depth", "place", "type", "channels", "mean", "std", "min", "max", "zero_share", "participation_ratio", "dead",
    "non_finite", "status",
)  # fmt: skip


def table(report: StatsReport, settings: Settings, note: str = "") -> Table:
    """Every place as a row, for CSV; `data` is the JSON."""
    rows = tuple(tuple(row.get(column) for column in _COLUMNS) for row in _rows(report, settings))
    return Table("stats", "Activations", _COLUMNS, rows, data=document(report, settings, note))


def summary(report: StatsReport, settings: Settings, note: str = "") -> tuple[Table, ...]:
    """The same for people: totals, units that do nothing, and every tensor once by depth."""
    notes = (*([f"the model has {note}"] if note else []), f"measured: {MEASURED}", *_first_lines(report))
    once = [row for row in _rows(report, settings) if row.get("same_as") is None]
    cells = tuple(tuple(row.get(column) for column in _PEOPLES_COLUMNS) for row in once)
    found = idle_units(report, settings)
    idle = tuple(_idle(report, found))
    return (
        Table("stats", "Activations over data", ("what", "value"), tuple(_totals(report, found)), notes),
        *(
            [Table("stats", "Units that do nothing", ("place", "what", "units", "of", "which"), idle)]
            if idle
            else []
        ),
        Table("stats", "Tensors by depth", _PEOPLES_COLUMNS, cells),
    )


def lines(report: StatsReport, settings: Settings) -> tuple[str, ...]:
    """What the shell is told."""
    tensors = sum(row.same_as is None and row.distribution is not None for row in report.rows)
    silent = sum(row.distribution is None for row in report.rows)
    return (
        f"{counted(tensors, 'tensor')} at {counted(len(report.rows) - silent, 'place')}, over {_over(report)}",
        f"units: {_units(idle_units(report, settings))}",
        *([f"{counted(silent, 'layer')} without a tensor"] if silent else []),
        *_first_lines(report),
    )


def _over(report: StatsReport) -> str:
    batches = f" in {report.batches} batches" if report.batches > 1 else ""
    return f"{counted(report.pictures, 'picture')}{batches}"


def _first_lines(report: StatsReport) -> Iterator[str]:
    found = report.first_non_finite
    if found is not None:
        named = f" ({listed(found.parameters)})" if found.parameters else ""
        yield (
            f"first values that are not finite: {found.site}, batch {found.batch}, "
            f"{found.non_finite} of {found.count}: {found.why}{named}"
        )


def _units(found: Sequence[Idle]) -> str:
    """How many do nothing, in words; why that is not known, where it is nowhere."""
    sums = _sums(found)
    missing = next(filter(None, (idle.missing for idle in found)), "")
    if not sums and missing:
        return f"{missing}, so none is called {', '.join(IDLE[:-1])} or {IDLE[-1]}"
    said = ", ".join(f"{sums.get(name, 0)} {name}" for name in IDLE)
    return f"{said} (somewhere {missing})" if missing else said


def _sums(found: Sequence[Idle]) -> Mapping[str, int]:
    """By what they are; without what is known of no layer."""
    sums: dict[str, int] = {}
    for idle in found:
        for name, channels in idle.units.items():
            sums[name] = sums.get(name, 0) + len(channels)
    return sums


def _totals(report: StatsReport, found: Sequence[Idle]) -> Iterator[tuple[str, Any]]:
    yield "pictures", report.pictures
    yield "batches", report.batches
    yield "tensors", sum(row.same_as is None and row.distribution is not None for row in report.rows)
    yield "threshold", report.threshold
    sums = _sums(found)
    if sums or not any(idle.missing for idle in found):
        for name in IDLE:
            yield f"{name} units", sums.get(name, 0)
    missing = next(filter(None, (idle.missing for idle in found)), "")
    if missing:
        yield "dead, constant or saturated units", missing


def _idle(report: StatsReport, found: Sequence[Idle]) -> Iterator[tuple[Any, ...]]:
    for row, idle in zip(report.rows, found, strict=True):
        for name, channels in idle.units.items():
            if channels:
                yield row.place, name, len(channels), _number(row), ranges(channels)


def _number(row: StatsRow) -> int | None:
    found = row.distribution
    return found.channels.channels if found is not None and found.channels is not None else None


def _rows(report: StatsReport, settings: Settings) -> Iterator[dict[str, Any]]:
    for row, found in zip(report.rows, idle_units(report, settings), strict=True):
        yield {
            "layer": row.site.layer,
            "place": row.place,
            "call": row.site.call,
            "output": row.site.output,
            "side": row.side,
            "type": row.type,
            "kind": row.kind,
            "depth": row.depth,
            "shape": row.shape,
            "layout": row.layout,
            "status": row.status,
            "channels": _number(row),
            **_figures(row, found.units),
        }


def _figures(row: StatsRow, found: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    own = row.distribution
    if own is None:
        return {}
    if row.same_as is not None:
        site, side = row.same_as
        return {"same_as": f"{site}<" if side == "input" else str(site)}
    return {
        "count": own.count,
        "non_finite": own.non_finite,
        "zero_share": own.zeros / own.count if own.count else None,
        "mean": own.mean,
        "std": own.std,
        "min": own.minimum,
        "max": own.maximum,
        **_sample(row),
        **{name: len(channels) for name, channels in found.items()},
        **concentration(own.channels),
        **_spectrum(row),
    }


def _sample(row: StatsRow) -> dict[str, Any]:
    found = row.distribution.histogram if row.distribution is not None else None
    if found is None:
        return {}
    quantiles = {f"q{100 * share:g}": found.quantile(share) for share in QUANTILES}
    return quantiles | {"sampled": found.sampled, "rank_error": found.rank_error}


def _spectrum(row: StatsRow) -> dict[str, Any]:
    found = row.spectrum
    if found is None:
        return {}
    return {
        "effective_rank": found.effective_rank,
        "stable_rank": found.stable_rank,
        "mean_abs_correlation": found.mean_abs_correlation,
    }
