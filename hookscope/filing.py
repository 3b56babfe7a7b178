"""Where a run's artefacts go: the folder of their picture, now or when all of the run is known.

Knows pictures, tasks and the output directory; it measures nothing and draws nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hookscope.artifacts import Heat, Shard, Sheet, Table
from hookscope.background import Background
from hookscope.checks.formats.pages import findings_table
from hookscope.images import ImageRef
from hookscope.job import Job
from hookscope.loading import Item, batches, default_workers
from hookscope.output.directory import replace_file
from hookscope.output.ranged import Ranged
from hookscope.output.shards import prepared_shard
from hookscope.output.writers import (
    Artefact,
    Place,
    Writing,
    prepared,
    write_document,
    write_summary,
    write_table,
)
from hookscope.tasks import Conclusion, Task


class Filing:
    """Hands the artefacts of a job to the writers.

    Args:
        job: what is run.
        note: what every reader must know of the model.
    """

    def __init__(self, job: Job, note: str) -> None:
        self._job = job
        self._note = note
        self._several = len(job.tasks) > 1
        self._ranged = {
            name: Ranged(job.out, drawing.picture)
            for name, drawing in job.drawing.items()
            if drawing.range_over_run
        }

    def take(self, task: Task, artefact: Artefact, item: Item, writers: Background) -> None:
        """Have an artefact of one picture written; of one whose colours reach over the run, its values alone."""
        ranged, place = self._ranged.get(task.name), self._place(task.name, item.ref, item)
        if ranged is not None and isinstance(artefact, Sheet):
            ranged.sheet(item.ref.index)
        elif ranged is not None and isinstance(artefact, Heat):
            writing = ranged.values(artefact, place, item.ref.index)
            writers.submit(self._shown(writing, task.name, item.ref))
        else:
            writing = prepared(self._job.out, artefact, place, self._job.drawing[task.name].picture)
            writers.submit(self._shown(writing, task.name, item.ref))

    def shard(self, task: Task, shard: Shard, writers: Background) -> None:
        """Have the features of a portion of the run written."""
        folder = f"{task.name}/" if self._several else ""
        writers.submit(prepared_shard(self._job.out, shard, folder))

    def draw(self, writers: Background) -> None:
        """Draw what has waited for the run's range; the pictures are read once more."""
        writers.drain()
        wanted = frozenset[int]().union(*(ranged.pictures for ranged in self._ranged.values()))
        refs = [ref for ref in self._job.found.refs if ref.index in wanted]
        for done, item in enumerate(self._read(refs), start=1):
            for name, ranged in self._ranged.items():
                for writing in ranged.drawn(self._place(name, item.ref, item), item.ref.index):
                    writers.submit(self._shown(writing, name, item.ref, values=False))
            writers.settle()
            self._job.progress("drawing", done, len(refs))

    def conclude(self, task: Task, conclusion: Conclusion) -> None:
        """Write the tables, pages and pairs that a task ends in."""
        out, prefix = self._job.out, f"{task.name}/" if self._several else ""
        if self._job.board is not None:
            self._job.board.conclusion(task.name, conclusion.tables, conclusion.summary, conclusion.documents)
        for table in conclusion.tables:
            write_table(out, table, name=f"{prefix}{table.kind}", formats=("csv", "json"))
        if conclusion.summary:
            write_summary(
                out, (*_verdict(task, conclusion), *conclusion.summary), name=f"{prefix}{task.name}"
            )
        for name, data in conclusion.documents.items():
            part = "plot" if name.endswith(".png") else "report"
            write_document(out, f"{prefix}{name}", data, kind=task.name, part=part)
        for file, data in conclusion.updates.items():
            replace_file(file, data)
        pairs = dict.fromkeys(path for path, _ in conclusion.pairs)
        refs = [ref for ref in self._job.found.refs if ref.path in pairs]
        for item in self._read(refs):
            for path, pair in conclusion.pairs:
                if path == item.ref.path:
                    place = self._place(task.name, item.ref, item)
                    writing = prepared(out, pair, place, self._job.drawing[task.name].picture)
                    self._shown(writing, task.name, item.ref)()

    def _shown(
        self, writing: Writing, task: str, ref: ImageRef, *, values: bool = True
    ) -> Callable[[], object]:
        """The writing, and the same for the board where there is one."""
        board = self._job.board
        return writing if board is None else board.shown(writing, task, ref.index, ref.path, values=values)

    def _place(self, task: str, ref: ImageRef, item: Item) -> Place:
        folder = f"{task}/{ref.key}" if self._several else ref.key
        return Place(folder, ref.path, item.picture, item.view, self._note)

    def _read(self, refs: list[ImageRef]) -> Iterator[Item]:
        job = self._job
        workers = default_workers() if job.workers is None else job.workers
        found = batches(refs, job.loaded.preprocess, size=job.batch_size, workers=workers, keep_pictures=True)
        return (item for batch in found for item in batch.items)


def _verdict(task: Task, conclusion: Conclusion) -> list[Table]:
    """What a gate found, for the page of the task's tables."""
    found = conclusion.gate.findings if conclusion.gate is not None else ()
    return [findings_table(found, task.name)] if found else []
