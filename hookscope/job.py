"""What a run needs and what it ends in. Plain data, and what of it needs no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from hookscope.artifacts import Table
from hookscope.checks.findings import Finding, failing
from hookscope.errors import ExitCode, HookscopeError
from hookscope.images import Found, decode
from hookscope.models import LoadedModel
from hookscope.output.board import Board
from hookscope.output.directory import OutputDir
from hookscope.output.manifest import Manifest
from hookscope.output.writers import PictureOptions
from hookscope.records import model_record, versions
from hookscope.tasks import Gate, Subject, Task
from hookscope.userdata import DataBatch

Data = Callable[[], Iterator[DataBatch]]
"""Makes the user's batches, from the first on."""


@dataclass(frozen=True)
class Drawing:
    """How a task's pictures are drawn, whether the originals are needed, and whether all of a run share one range."""

    picture: PictureOptions = field(default_factory=PictureOptions)
    overlay: bool = False
    range_over_run: bool = False


@dataclass(frozen=True)
class Job:
    """Everything a run needs, resolved: a loaded model, found pictures, tasks, and where the files go.

    `drawing`: how each task's pictures are drawn, by the task's name. `options`: for the manifest. `data`: batches of
    the user's own, instead of pictures. `batches`: no more than that many are run. `board`: shows the same
    in TensorBoard.
    """

    command: str
    loaded: LoadedModel
    found: Found
    tasks: Sequence[Task]
    out: OutputDir
    drawing: Mapping[str, Drawing]
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Data | None = None
    batches: int | None = None
    board: Board | None = None
    batch_size: int = 8
    workers: int | None = None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    tell: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Report:
    """How a run ended: the manifest as it was written, the exit code, and what there is to tell.

    `lines`: for a person. `gates`: for a CI service, with the tables of `summaries`. `errors`: what could not be done,
    though the rest was; the manifest's warnings say it too.
    """

    manifest: Manifest
    exit_code: ExitCode
    lines: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    summaries: tuple[Table, ...] = ()
    errors: tuple[HookscopeError, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return tuple(cast("Sequence[Finding]", self.manifest.findings))

    @property
    def failing(self) -> tuple[Finding, ...]:
        """The findings that fail the run."""
        passing = {one for gate in self.gates for one in gate.findings} - {
            one for gate in self.gates for one in failing(gate.findings, gate.fail_on)
        }
        return tuple(one for one in self.findings if one not in passing)


def subject_of(job: Job) -> Subject:
    """The model under inspection, before anything is known of its layers."""
    loaded = job.loaded

    def picture(path: str) -> Tensor:
        return loaded.batch([loaded.preprocess.tensor(decode(Path(path), path))])

    return Subject(
        model=loaded.module,
        categories=loaded.categories,
        record=model_record(loaded),
        note="RANDOM WEIGHTS" if loaded.random_weights else "",
        pictures=len(job.found.refs),
        tell=job.tell,
        progress=job.progress,
        picture=picture,
    )


def manifest_of(job: Job, **found: Any) -> Manifest:
    """The manifest of a job with what was found."""
    return Manifest(
        command=job.command,
        versions=versions(),
        model=model_record(job.loaded),
        options=job.options,
        **{"warnings": job.loaded.warnings, **found},
    )
