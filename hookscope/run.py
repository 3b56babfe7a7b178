"""The story of a run: model, pictures, layers, probes, passes, artefacts.

Knows the order of things and nothing of their insides. Prints nothing: what a person is to be told is in the
`Report`, and `Job.progress` is called as pictures are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import Any, cast

from torch import Tensor

from hookscope.background import Background, writing_threads
from hookscope.cam.choice import site_infos
from hookscope.errors import ExitCode, NothingMeasured, UsageError, worst
from hookscope.filing import Filing
from hookscope.job import Data, Job, Report, manifest_of, subject_of
from hookscope.layers import ROOT, LayerInfo, Selection, Site, modules_by_name
from hookscope.loading import Batch, batches, default_workers
from hookscope.records import failure_record, layer_records, top_records
from hookscope.runner import Objective, Pass, Runner, list_layers, running
from hookscope.tasks import Conclusion, DataTask, Subject, Task

# A model that takes pictures at their own size may see a new one every time.
_SIZES_KNOWN = 16


def execute(job: Job) -> Report:
    """Run the job to its end; files are written as they are made, the manifest last.

    Raises:
        HookscopeError: the run cannot go on; what was already written stays, with its journal.
    """
    _selections(job)
    return _Run(job).execute() if job.data is None else _Run(job).execute_data(job.data)


def plan(job: Job) -> Report:
    """What `execute` would do, without running the model or writing anything (`--dry-run`)."""
    selections = _selections(job)
    chosen = {name for selection in selections for name in selection.names}
    modules = modules_by_name(job.loaded.module)
    layers = [{"layer": name, "type": type(modules[name]).__name__} for name in modules if name in chosen]
    images: list[dict[str, Any]] = [
        {"path": ref.path, "status": "pending", "error": None, "top": []} for ref in job.found.refs
    ]
    patterns: dict[str, Sequence[str]] = {}
    for selection in selections:
        patterns |= selection.resolved
    manifest = manifest_of(
        job, patterns=patterns, images=[*images, *map(failure_record, job.found.failures)], layers=layers
    )
    code = ExitCode.IMAGES if job.found.failures else ExitCode.OK
    return Report(manifest, code)


def _selections(job: Job) -> list[Selection]:
    """What the patterns choose, before anything is run; a task that needs a run first has none yet."""
    subject = subject_of(job)
    return list(filter(None, (task.select(subject) for task in job.tasks)))


class _Run:
    """One execution of a job: what has been learnt and written so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.subject = subject_of(job)
        self.filing = Filing(job, self.subject.note)
        self.selection = Selection(())
        self.patterns: dict[str, Sequence[str]] = {}
        self.images: dict[int, dict[str, Any]] = {}
        self.tasks = list(job.tasks)
        self._recorded: list[LayerInfo] = []
        self._begun = False
        self._looked = False
        self._block = -1
        self.warnings: list[str] = list(job.loaded.warnings)
        self.codes = [ExitCode.IMAGES] if job.found.failures else [ExitCode.OK]
        self._known: dict[tuple[int, ...], list[LayerInfo]] = {}

    def execute(self) -> Report:
        with Background(writing_threads()) as writers:
            for shape, group in groupby(self._batches(), key=_shape):
                if shape is None:
                    self._pass_over(group, writers)
                else:
                    self._measure_group(group, writers)
            self._close(writers)
            self.filing.draw(writers)
        self._begin()
        return self._finish([self._concluded(task) for task in self.tasks if self._looked])

    def execute_data(self, data: Data) -> Report:
        """The same for batches of the user's own, which are no pictures."""
        self.subject.layers = list_layers(self.subject.model)
        for task in cast("list[DataTask]", self.tasks):
            selection = task.measure(
                self.subject,
                data(),
                self.job.loaded.dtype,
                lambda done: self.job.progress("batches", done, self.job.batches or done),
            )
            self.patterns |= selection.resolved
            chosen = set(selection.names)
            self._recorded = [layer for layer in self.subject.layers if layer.name in chosen]
        self._begin()
        return self._finish([self._concluded(task) for task in self.tasks])

    def _begin(self) -> None:
        """Make the directory ours. Not before there is something to write: until then an earlier run's is kept."""
        if not self._begun:
            self._begun = True
            self.job.out.begin()

    def _batches(self) -> Iterator[Batch]:
        job = self.job
        found = batches(
            job.found.refs,
            job.loaded.preprocess,
            size=job.batch_size,
            workers=default_workers() if job.workers is None else job.workers,
            keep_pictures=any(draws.overlay for draws in job.drawing.values()),
        )
        return islice(found, job.batches)

    def _measure_group(self, group: Iterator[Batch], writers: Background) -> None:
        """Measure batches of one picture size, so that one look at the layers serves them all."""
        first = next(group)
        self._look(replace(first, items=first.items[:1]))
        probes = [probe for task in self.tasks for probe in task.probes()]
        seed = next((task.train_seed for task in self.tasks if task.train_seed is not None), None)
        with running(self.subject.model, probes, self.selection, train_seed=seed) as runner:
            for batch in chain([first], group):
                self._measure(runner, batch, writers)

    def _pass_over(self, group: Iterator[Batch], writers: Background) -> None:
        """Blocks of which no picture can be read."""
        for batch in group:
            self._reach(batch.block, writers)
            self._record_failures(batch)

    def _reach(self, block: int, writers: Background) -> None:
        """The pictures of a block are next: what was the portion before it is done."""
        if block == self._block:
            return
        portion = self._portion
        if self._block >= 0 and block // portion != self._block // portion:
            self._close(writers)
        self._block = block

    def _close(self, writers: Background) -> None:
        """The portion of the latest block is done."""
        if self._block < 0 or not self._looked:
            return
        for task in self.tasks:
            for shard in task.close(self._block // self._portion):
                self.filing.shard(task, shard, writers)

    @property
    def _portion(self) -> int:
        """How many blocks belong together: at most one task of a run wants more than one."""
        return max((task.portion for task in self.tasks), default=1)

    def _until(self) -> frozenset[Site] | None:
        """The sites after which nobody needs the rest of a pass; `None`: somebody needs it all."""
        wanted = [task.until() for task in self.tasks]
        if any(sites is None for sites in wanted):
            return None
        return frozenset[Site]().union(*(sites for sites in wanted if sites is not None))

    def _look(self, single: Batch) -> None:
        """Learn the layers' outputs for this size of picture and, at the first, choose the layers."""
        x = self._entering(single)
        shape = tuple(x.shape)
        if shape not in self._known:
            self._known = {**self._known, shape: list_layers(self.subject.model, x)}
            for oldest in list(self._known)[:-_SIZES_KNOWN]:
                del self._known[oldest]
        self.subject.layers = self._known[shape]
        self.subject.outputs = site_infos(self.subject.layers)
        if self._looked:
            return
        self._looked = True
        _check_categories(self.subject)
        chosen = self._chosen(x, single)
        names = {name for selection in chosen for name in selection.names}
        for selection in chosen:
            self.patterns |= selection.resolved
        wanted = [task.select(self.subject) for task in self.tasks]
        recorded = names | {name for selection in wanted if selection for name in selection.names}
        self._recorded = [layer for layer in self.subject.layers if layer.name in recorded]
        self.selection = Selection(tuple(layer.name for layer in self._recorded if layer.name in names))

    def _chosen(self, x: Tensor, single: Batch) -> list[Selection]:
        """What each task attaches to; one that can measure nothing drops out, unless it is the only one."""
        chosen = {}
        for task in self.tasks:
            try:
                chosen[task.name] = task.choose(self.subject, x, single)
            except NothingMeasured as error:
                if len(self.tasks) == 1:
                    raise
                self.codes.append(error.exit_code)
                self.warnings.append(f"{task.name}: {error}")
        self.tasks = [task for task in self.tasks if task.name in chosen]
        return list(chosen.values())

    def _measure(self, runner: Runner, batch: Batch, writers: Background) -> None:
        self._reach(batch.block, writers)
        self._record_failures(batch)

        def objectives(output: Any) -> list[Objective]:
            return [objective for task in self.tasks for objective in task.objectives(output, batch)]

        needs_graph = any(probe.needs.gradients for probe in runner.probes)
        x = self._entering(batch)
        for task in self.tasks:
            task.expect([item.ref.index for item in batch.items])
        until = None if needs_graph else self._until()
        done = runner.forward(x, objectives if needs_graph else None, until=until)
        if not needs_graph and not done.stopped:
            objectives(done.output)
        self._record_pictures(batch, done)
        self._begin()
        for task in self.tasks:
            for artefact in task.collect(done, batch, runner, x):
                self.filing.take(task, artefact, batch.items[artefact.image], writers)
        writers.settle()
        self.job.progress("pictures", len(self.images), len(self.job.found.refs))

    def _entering(self, batch: Batch) -> Tensor:
        return self.job.loaded.batch([item.tensor for item in batch.items])

    def _record_failures(self, batch: Batch) -> None:
        for ref, failure in batch.failures:
            self.images[ref.index] = failure_record(failure)
            self.codes.append(ExitCode.IMAGES)

    def _record_pictures(self, batch: Batch, done: Pass) -> None:
        count, subject = len(batch.items), self.subject
        tops: list[Any] = [[] for _ in batch.items]
        if not done.stopped:
            tops = [*top_records(done.output, count, subject.categories, subject.logits)]
        for item, top in zip(batch.items, tops, strict=True):
            self.images[item.ref.index] = {"path": item.ref.path, "status": "ok", "error": None, "top": top}

    def _concluded(self, task: Task) -> Conclusion:
        try:
            conclusion = task.conclude()
        except NothingMeasured as error:
            conclusion = Conclusion(errors=(error,))
        self.codes += [error.exit_code for error in conclusion.errors]
        self.filing.conclude(task, conclusion)
        return conclusion

    def _finish(self, conclusions: Sequence[Conclusion]) -> Report:
        gates = tuple(conclusion.gate for conclusion in conclusions if conclusion.gate is not None)
        findings = [finding for conclusion in conclusions for finding in conclusion.findings]
        if findings or any(gate.failed for gate in gates):
            self.codes.append(ExitCode.CHECK_FAILED)
        findings += [finding for gate in gates for finding in gate.findings]
        errors = tuple(error for conclusion in conclusions for error in conclusion.errors)
        manifest = manifest_of(
            self.job,
            patterns=self.patterns,
            images=[
                *(self.images[index] for index in sorted(self.images)),
                *map(failure_record, self.job.found.failures),
            ],
            layers=self._layer_records(conclusions),
            findings=findings,
            warnings=[
                *self.warnings,
                *(said for conclusion in conclusions for said in conclusion.warnings),
                *map(str, errors),
            ],
        )
        self.job.out.finish(manifest)
        lines = tuple(line for conclusion in conclusions for line in conclusion.lines)
        summaries = tuple(page for conclusion in conclusions for page in conclusion.summary)
        return Report(
            replace(manifest, artifacts=self.job.out.records),
            worst(self.codes),
            lines,
            gates,
            summaries,
            errors,
        )

    def _layer_records(self, conclusions: Sequence[Conclusion]) -> list[dict[str, Any]]:
        said = {
            site: status
            for conclusion in conclusions
            for site, status in conclusion.statuses.items()
            if status != "ok"
        }
        return [
            record | {"status": said.get(site, record["status"])}
            for layer in self._recorded
            for site, record in layer_records(layer)
        ]


def _check_categories(subject: Subject) -> None:
    """Raises a `UsageError` where there is not one name for each class of a classifier."""
    output = subject.outputs.get(Site(ROOT))
    if subject.categories is None or output is None or len(output.shape) != 2:
        return
    classes = max(output.shape[1], 2)
    if len(subject.categories) != classes:
        raise UsageError(
            f"{len(subject.categories)} class names for a model of {classes} classes",
            "--labels FILE, one name a class",
        )


def _shape(batch: Batch) -> tuple[int, ...] | None:
    return tuple(batch.items[0].tensor.shape) if batch.items else None
