"""Records and events as lines of a file: JSONL with all figures, CSV with a row for each figure's place.

Owns the form of the lines; `output` writes them. A file that is there is continued, never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from hookscope.artifacts import Table
from hookscope.monitor.records import ActivationFigures, Event, ParamFigures, StepRecord
from hookscope.output.lines import LineFile
from hookscope.output.manifest import to_json_line
from hookscope.output.tables import to_csv

SCHEMA = 1

COLUMNS = (
    "step", "place", "name", "norm", "weight_norm", "ratio", "update_ratio", "mean", "deviation", "maximum", "rms",
    "count", "non_finite", "status", "message",
)  # fmt: skip
"""Of the CSV. `place`: `total`, `parameter`, `layer`, `activation`, or `event`, whose value is the norm."""


class JsonlSink:
    """Writes one JSON object a line; every line is on disk when its call returns.

    `{"line": "start", "schema": 1}` at every opening; `{"line": "step", ...}` with the fields of a `StepRecord`, sites
    as text; `{"line": "event", ...}` with those of an `Event`. Numbers that are not finite are strings.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = LineFile(path)
        self._say({"line": "start", "schema": SCHEMA})

    def record(self, record: StepRecord) -> None:
        self._say({"line": "step"} | _fields(record))

    def event(self, event: Event) -> None:
        self._say({"line": "event"} | _fields(event))

    def close(self) -> None:
        """Nothing is held."""

    def _say(self, line: dict[str, Any]) -> None:
        self._file.add(to_json_line(line))


class CsvSink:
    """Writes rows under `COLUMNS`, for spreadsheets: one for the total, each parameter, layer and site of each step.

    What was not measured is empty; numbers that are not finite are `nan` and `inf`. `parameters`: with a row for each
    parameter besides those for layers.

    Raises:
        OutputError: the file cannot be written, or holds something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, parameters: bool = True) -> None:
        self._file = LineFile(path, to_csv(Table("", "", COLUMNS, ())))
        self._parameters = parameters

    def record(self, record: StepRecord) -> None:
        self._file.add(_rows(self._of_record(record)))

    def event(self, event: Event) -> None:
        row = {
            "step": event.step,
            "place": "event",
            "name": event.name,
            "norm": event.value,
            "mean": event.mean,
            "deviation": event.deviation,
            "maximum": event.maximum,
            "status": str(event.kind),
            "message": event.message,
        }
        self._file.add(_rows([row]))

    def close(self) -> None:
        """Nothing is held."""

    def _of_record(self, record: StepRecord) -> Iterator[dict[str, Any]]:
        status = "skipped" if record.skipped else "ok"
        yield {"step": record.step, "place": "total", "norm": record.total_norm, "status": status}
        places: list[tuple[str, Any]] = [("layer", record.layers), ("activation", record.activations)]
        if self._parameters:
            places.insert(0, ("parameter", record.parameters))
        for place, found in places:
            for name, figures in found.items():
                yield {"step": record.step, "place": place, "name": str(name)} | _fields(figures)


def _fields(made: StepRecord | Event | ParamFigures | ActivationFigures) -> dict[str, Any]:
    return {item.name: getattr(made, item.name) for item in fields(made)}


def _rows(rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> str:
    cells = tuple(tuple(row.get(column) for column in COLUMNS) for row in rows)
    return to_csv(Table("", "", COLUMNS, cells)).partition("\n")[2]
