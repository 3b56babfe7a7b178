"""A run for TensorBoard: which tag and step each artefact has. `tensorboard` writes them; nothing is drawn anew.

A tag is the command, the layer and what was asked of it, so that the pictures of a run are the steps of one tag. What
is said of the whole run has step 0.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hookscope.artifacts import Heat, Sheet, Table, Tiles
from hookscope.layers import Site
from hookscope.output.tables import to_markdown
from hookscope.output.tensorboard import TensorBoard
from hookscope.output.writers import Artefact, Writing

PICTURE_PARTS = ("grid", "overlay", "heatmap", "sheet", "pair")
"""Of what an artefact becomes, what TensorBoard shows."""

COLUMNS = {
    "gradnorm": ("grad_norm", "grad_rms", "non_finite", "weight_norm", "grad_to_weight", "input_grad_total"),
    "stats": ("mean", "std", "min", "max", "zero_share", "non_finite", "participation_ratio"),
}
"""Which columns of a table become scalars, by the table's kind: one tag for each row, `KIND.COLUMN/PLACE`."""


class Board:
    """Shows a run's artefacts, in the order in which they were announced, whichever thread has one ready first.

    TensorBoard draws a tag's points in the order of the file: a line would run to and fro.

    Args:
        board: where they go; closed by `close`.
    """

    def __init__(self, board: TensorBoard) -> None:
        self._board = board
        self._pictures: dict[int, str] = {}
        self._lock = threading.Lock()
        self._announced = self._next = 0
        self._ready: dict[int, Callable[[], None]] = {}

    def shown(
        self, writing: Writing, task: str, picture: int, path: str, *, values: bool = True
    ) -> Callable[[], None]:
        """The writing, which shows what it has written too; announced now, to be called in any thread.

        Args:
            picture, path: its place in the run, which is the step, and what it is called.
            values: a histogram of the values and the scores, besides the pictures.
        """
        turn, self._announced = self._announced, self._announced + 1
        self._pictures[picture] = path

        def write_and_show() -> None:
            files: list[tuple[str, bytes]] = []
            replace(writing, shown=lambda part, data: files.append((part, data)))()
            self._take_turn(turn, lambda: self._show(writing.artefact, task, picture, files, values))

        return write_and_show

    def conclusion(
        self, task: str, tables: Sequence[Table], pages: Sequence[Table], documents: Mapping[str, bytes]
    ) -> None:
        """What is said of the whole run: tables as scalars and histograms, pages for people as text, plots."""
        for table in tables:
            self._board.scalars({f"{table.kind}/{name}": value for name, value in table.scores.items()})
            self._board.scalars(dict(_cells(table)))
            for place, counts, edges in _histograms(table):
                self._board.counted(f"{table.kind}.values/{place}", counts, edges)
        if pages:
            self._board.text(f"{task}/summary", "\n".join(map(to_markdown, pages)))
        for name, data in documents.items():
            if name.endswith(".png"):
                self._board.picture(f"{task}/{name.removesuffix('.png')}", data)

    def close(self) -> None:
        """The text `pictures` says which picture each step is; nothing more may come."""
        with self._lock:
            # After an error, what was waiting for what has not come.
            for _, show in sorted(self._ready.items()):
                show()
            self._ready.clear()
        if rows := tuple(sorted(self._pictures.items())):
            self._board.text("pictures", to_markdown(Table("pictures", "", ("step", "picture"), rows)))
        self._board.close()

    def _take_turn(self, turn: int, show: Callable[[], None]) -> None:
        with self._lock:
            self._ready[turn] = show
            while self._next in self._ready:
                self._ready.pop(self._next)()
                self._next += 1

    def _show(
        self, artefact: Artefact, task: str, picture: int, files: Sequence[tuple[str, bytes]], values: bool
    ) -> None:
        tag = tag_of(task, artefact)
        for part, data in files:
            if part in PICTURE_PARTS:
                self._board.picture(f"{tag}/{part}", data, picture)
        if values and isinstance(artefact, Tiles | Heat):
            self._board.histogram(f"{tag}/values", artefact.values, picture)
            self._board.scalars({f"{tag}/{name}": value for name, value in _scores(artefact)}, picture)


def tag_of(task: str, artefact: Artefact) -> str:
    """`gradcam/layer4/layercam/top1`: the target is as it was asked for, so that it is one tag for all pictures."""
    if isinstance(artefact, Sheet):
        return task
    if isinstance(artefact, Tiles):
        return f"{task}/{artefact.site}"
    parts = [task, str(artefact.site), artefact.method]
    if artefact.target is not None:
        against = "-".join(map(str, artefact.target.against))
        parts.append(artefact.target.name + (f" vs {against}" if against else ""))
    return "/".join(parts)


def _scores(artefact: Tiles | Heat) -> Iterator[tuple[str, float]]:
    if not isinstance(artefact, Heat):
        return
    yield from artefact.scores.items()
    if artefact.target is not None:
        if artefact.target.score is not None:
            yield "score", artefact.target.score
        if artefact.target.probability is not None:
            yield "probability", artefact.target.probability


def _cells(table: Table) -> Iterator[tuple[str, float]]:
    wanted = COLUMNS.get(table.kind, ())
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        if not cells.get("same_as"):
            for column in wanted:
                value = cells.get(column)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield f"{table.kind}.{column}/{_place(cells)}", value


def _place(cells: Mapping[str, Any]) -> str:
    """What a row is of; an input has `<` behind it."""
    name = cells.get("name", cells.get("layer")) or str(cells.get("kind") or ".")
    site = Site(str(name), int(cells.get("call") or 0), str(cells.get("output") or ""))
    return f"{site}<" if cells.get("side") == "input" else str(site)


def _histograms(table: Table) -> Iterator[tuple[str, Sequence[int], Sequence[float]]]:
    """Of a document with `edges` and places, those that have a histogram: counts and edges, closed at the ends."""
    inner = table.data.get("edges") or ()
    edges = [-math.inf, *inner, math.inf]
    for place in table.data.get("places", ()):
        found = place.get("histogram")
        if inner and found and found["counts"]:
            first = found["first_bin"]
            bounds = edges[first : first + len(found["counts"]) + 1]
            yield place["place"], found["counts"], _within(bounds, place["min"], place["max"])


def _within(bounds: Sequence[float], low: float, high: float) -> list[float]:
    """The edges, the outermost moved in to the extremes where these are known."""
    first = low if bounds[0] < low <= bounds[1] else bounds[0]
    last = high if bounds[-2] <= high < bounds[-1] else bounds[-1]
    return [first, *bounds[1:-1], last]
