"""What a command does with a run: which layers and objectives it wants, and what it makes of a batch.

A task turns flags into a probe and objectives, and what the probe kept into artefacts. The passes are the
runner's, the files are the writers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hookscope.checks.findings import Case, Finding, Source, failing
from hookscope.errors import HookscopeError
from hookscope.layers import LayerInfo, OutputInfo, Selection, Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hookscope.artifacts import Heat, Pair, Shard, Sheet, Table, Tiles
    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Objective, Pass, Runner
    from hookscope.userdata import DataBatch


@dataclass
class Subject:
    """The model under inspection and what is known of it: layers and outputs for the latest picture size.

    `record`: the model as the manifest has it. `note`: what every reader must know of it, such as that its weights are
    random. `pictures`: how many there are. `tell`: what a person should know before a long run. `progress`: of passes
    that are not a picture's own: which, how many are done, of how many. `picture`: any picture by its path,
    (1, C, H, W), as the model takes it. `logits`: which tensor of its output counts, `None`: found by itself.
    """

    model: nn.Module
    categories: tuple[str, ...] | None
    record: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    layers: Sequence[LayerInfo] = ()
    outputs: Mapping[Site, OutputInfo] = field(default_factory=dict)
    pictures: int = 0
    tell: Callable[[str], None] = lambda line: None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    picture: Callable[[str], Tensor] | None = None
    logits: str | None = None

    def info(self, site: Site) -> OutputInfo | None:
        """What is known of a site."""
        return self.outputs.get(site)


@dataclass(frozen=True)
class Gate:
    """What a gate looked at and found, for whoever tells it on: `fail_on` says which findings fail the run.

    `sources`: where layers' classes are written.
    """

    title: str
    findings: tuple[Finding, ...]
    cases: tuple[Case, ...] = ()
    fail_on: tuple[str, ...] = ("error",)
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the run fails."""
        return bool(failing(self.findings, self.fail_on))


@dataclass(frozen=True)
class Conclusion:
    """What a task has to say after the last batch.

    `summary`: its tables for people, on one page. `pairs`: maps beside those of an earlier run, with their pictures'
    paths. `findings` fail the run, and so do those of the `gate` that it says. `updates`: files to replace outside
    the output directory. `errors`: what could not be done, though the rest was; each with its exit code.
    """

    tables: tuple[Table, ...] = ()
    summary: tuple[Table, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)
    statuses: Mapping[Site, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    pairs: tuple[tuple[str, Pair], ...] = ()
    gate: Gate | None = None
    updates: Mapping[Path, bytes] = field(default_factory=dict)
    errors: tuple[HookscopeError, ...] = ()

    def and_also(self, other: Conclusion) -> Conclusion:
        """This one with the other's tables, findings, warnings, lines, pairs and errors after its own."""
        return replace(
            self,
            tables=(*self.tables, *other.tables),
            findings=(*self.findings, *other.findings),
            warnings=(*self.warnings, *other.warnings),
            lines=(*self.lines, *other.lines),
            pairs=(*self.pairs, *other.pairs),
            errors=(*self.errors, *other.errors),
        )


class Task(Protocol):
    """One command's part in a run. A class that names this one as its parent need not say what has a default here.

    Pictures are run in batches, batches make portions, and each portion is run by one process of the run.
    """

    name: str
    train_seed: int | None = None
    """Runs the model in train mode, with what is random from this seed."""

    portion: int = 1
    """How many batches belong together; known after `choose`."""

    sharing: str = "portion"
    """When what was seen is handed to the first process: `step` (after every batch, in the run's order), `portion` (by
    portion, in their order, when all is done) or `end` (once for each process: any order gives the same)."""

    def select(self, subject: Subject) -> Selection | None:
        """The layers that the patterns choose, before anything is run; `None`: decided by `choose`.

        Raises:
            UsageError: a pattern or a target names nothing.
        """

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        """The layers to attach to, after one look at what the first picture, `x` (1, C, H, W), gave."""

    def probes(self) -> Sequence[Probe]:
        """The probes, once the layers are chosen."""

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        """What to differentiate for this batch, given the model's output; asked for even where nothing is."""

    def expect(self, numbers: Sequence[int]) -> None:
        """The pictures of the pass that is next, by their place in the run."""
        return

    def until(self) -> frozenset[Site] | None:
        """The sites after which the pass may stop; `None`: it must run to its end."""
        return None

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Tiles | Heat | Sheet]:
        """Artefacts of one batch, `x` to the model; their `image` is the place in the batch."""

    def close(self, portion: int) -> Iterable[Shard]:
        """Artefacts of a portion whose last batch is done; `portion` counts from 0 over the whole run."""
        return ()

    def share(self) -> Any:
        """What was seen since the last call, for another process's `absorb`: plain, picklable; forgotten here."""
        return None

    def absorb(self, shared: Any) -> None:
        """Take in what another process, or an earlier run that was interrupted, has seen."""
        return

    def conclude(self) -> Conclusion:
        """What is left to say when all batches are done."""


class DataTask(Task, Protocol):
    """A task that can measure batches which are no pictures."""

    def measure(
        self, subject: Subject, batches: Iterable[DataBatch], dtype: torch.dtype, told: Callable[[int], None]
    ) -> Selection:
        """Measure all batches; returns the layers that were.

        `dtype`: of the model's input. `told`: hears how many batches are done.
        """
