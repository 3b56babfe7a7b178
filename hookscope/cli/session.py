"""From flags to a run: what every command that looks at pictures shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hookscope.cli import talk
from hookscope.cli.collecting import uncollected
from hookscope.cli.flags import (
    LayerFlags,
    ModelFlags,
    OutputFlags,
    PictureFlags,
    PreprocessFlags,
    RunFlags,
    TalkFlags,
)
from hookscope.cli.showing import board_in
from hookscope.cli.telling import tell
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from hookscope.images import Found
    from hookscope.job import Data, Drawing, Job, Report
    from hookscope.models import LoadedModel
    from hookscope.tasks import Task


_MOST_PX = 2**15


class ProbeFlags(Protocol):
    """A command's own flags: they know what task they mean and how its pictures are drawn.

    `baseline`: an earlier run's output that is compared with, or replaced. `data`: batches instead of pictures, at
    most `batches` of them.
    """

    @property
    def baseline(self) -> str | None: ...

    @property
    def data(self) -> str | None: ...

    @property
    def batches(self) -> int | None: ...

    def task(self, shared: Shared) -> Task:
        """The task."""

    def drawing(self) -> Drawing:
        """How its pictures are drawn."""


@dataclass(frozen=True)
class Shared:
    """The flags that commands share, as parsed."""

    layers: LayerFlags
    model: ModelFlags
    preprocess: PreprocessFlags
    pictures: PictureFlags
    run: RunFlags
    output: OutputFlags
    talk: TalkFlags


def inspect(
    command: str, spec: str, images: Sequence[str] | None, shared: Shared, probes: dict[str, ProbeFlags]
) -> int:
    """Run the probes on the pictures and say how it went; returns the exit code."""
    with talk.only_results_on_stdout(), talk.ProgressBar(quiet=shared.talk.quiet) as bar:
        with uncollected():
            job = _job(command, spec, images, shared, probes, bar)
        bar.update("pictures", 0, len(job.found.refs))
        report = _report(job, dry_run=shared.talk.dry_run)
    tell(report, job, shared.talk)
    return int(report.exit_code)


def load(
    spec: str, shared_model: ModelFlags, preprocess: PreprocessFlags, seed: int, bar: talk.ProgressBar
) -> LoadedModel:
    """The model that the flags describe; random weights come from the seed."""
    import torch

    from hookscope.models import load_model, parse_model_arg

    torch.manual_seed(seed)
    return load_model(
        spec,
        weights=shared_model.weights,
        device=shared_model.device,
        model_args=dict(map(parse_model_arg, shared_model.model_arg)),
        labels=shared_model.labels,
        precision=shared_model.precision,
        resize=_size("--resize", preprocess.resize),
        crop=_size("--crop", preprocess.crop),
        mean=_numbers("--mean", preprocess.mean),
        std=_numbers("--std", preprocess.std),
        progress=bar.update,
    )


def _finder(spec: str, images: Sequence[str], flags: PictureFlags) -> Any:
    """How to find the pictures once the model's classes are known; what needs no model is checked at once."""
    if images and flags.dataset is not None:
        raise UsageError("both pictures and --dataset are given", "give one of them")
    if not images and flags.dataset is None and spec != "demo":
        raise UsageError("no pictures are given", "name files, directories or quoted globs, or --dataset DIR")

    def found(loaded: LoadedModel) -> Found:
        from hookscope.images import find, find_dataset
        from hookscope.models.demo import photos

        if flags.dataset is not None:
            return find_dataset(flags.dataset, loaded.categories, flags.limit)
        return find(images or [str(photo) for photo in photos()], flags.limit)

    return found


def _job(
    command: str,
    spec: str,
    images: Sequence[str] | None,
    shared: Shared,
    probes: dict[str, ProbeFlags],
    bar: talk.ProgressBar,
) -> Job:
    from hookscope.job import Job
    from hookscope.output.directory import OutputDir

    out = shared.output.out
    if out == "":
        raise UsageError("--out '' names no directory", "an unset variable? . is the current directory")
    place = Path(out) if out is not None else Path("hookscope-out") / command
    for flags in probes.values():
        _check_apart(flags.baseline, place)
    tasks = [flags.task(shared) for flags in probes.values()]
    _check_together(tasks)
    data, most = _data(probes, images or (), shared.pictures, dry_run=shared.talk.dry_run)
    found_of = _finder(spec, images or (), shared.pictures) if data is None else _no_pictures
    directory = OutputDir(
        place, command=command, overwrite=shared.output.overwrite, default_place=out is None
    )
    directory.check()
    board = board_in(shared.output.tensorboard, place)
    loaded = load(spec, shared.model, shared.preprocess, shared.run.seed, bar)
    if data is not None:
        loaded = _without_pictures(loaded)
    return Job(
        command=command,
        loaded=loaded,
        found=found_of(loaded),
        tasks=tasks,
        out=directory,
        drawing={name: flags.drawing() for name, flags in probes.items()},
        options=_resolved(spec, images, shared, probes),
        data=data,
        batches=most,
        board=board,
        batch_size=shared.run.batch_size,
        workers=shared.run.workers,
        progress=bar.update,
        tell=(lambda line: None) if shared.talk.quiet else partial(talk.complain, "note"),
    )


def _check_together(tasks: Sequence[Task]) -> None:
    """Raises a `UsageError` where one task wants another mode than the rest: there is one forward pass."""
    if len(tasks) > 1 and any(task.train_seed is not None for task in tasks):
        raise UsageError("--train-mode is for gradnorm alone", "run it by itself")


def _check_apart(baseline: str | None, out: Path) -> None:
    """Raises a `UsageError` where the run would write over what it compares with."""
    if baseline is None:
        return
    path, root = Path(baseline).resolve(), out.resolve()
    if path == root or root in path.parents:
        raise UsageError(
            f"the baseline {baseline!r} is where this run writes", "choose another directory with -o"
        )


def _data(
    probes: dict[str, ProbeFlags], images: Sequence[str], flags: PictureFlags, *, dry_run: bool
) -> tuple[Data | None, int | None]:
    """The user's own batches, where a probe asks for them, and how many batches there are to be at most."""
    from hookscope.models.data import batches_of, check_data

    limits = [probe.batches for probe in probes.values() if probe.batches is not None]
    most = min(limits, default=None)
    specs = [probe.data for probe in probes.values() if probe.data is not None]
    if not specs:
        return None, most
    if len(probes) > 1:
        raise UsageError("--data is for one command alone", "run it by itself")
    if images or flags.dataset is not None:
        raise UsageError("both pictures and --data are given", "give one of them")
    if dry_run:
        check_data(specs[0])
    return (lambda: batches_of(specs[0], limit=most)), most


def _without_pictures(loaded: LoadedModel) -> LoadedModel:
    """The model without its warnings of how pictures are prepared: the user's batches are as they are."""
    from hookscope.models.preprocess import PLAIN_SOURCE

    return replace(loaded, warnings=tuple(said for said in loaded.warnings if PLAIN_SOURCE not in said))


def _no_pictures(loaded: LoadedModel) -> Found:
    from hookscope.images import Found

    return Found((), ())


def _report(job: Job, *, dry_run: bool) -> Report:
    from hookscope.run import execute, plan

    try:
        return plan(job) if dry_run else execute(job)
    except KeyboardInterrupt as stop:
        if job.out.unfinished:
            stop.add_note(f"what was finished is kept in {job.out.path} and listed in its .hookscope.jsonl")
        raise
    finally:
        if job.board is not None:
            job.board.close()


def resolved_options(*groups: Any) -> dict[str, Any]:
    """The flags of the groups by name; the number of threads, which does not bear on the numbers, is left out."""
    options = {name: value for group in groups for name, value in asdict(group).items()}
    options.pop("workers", None)
    return options


def _resolved(
    spec: str, images: Sequence[str] | None, shared: Shared, probes: dict[str, ProbeFlags]
) -> dict[str, Any]:
    """Every option that bears on the numbers; where they are written, and how much is said, does not."""
    groups = (shared.layers, shared.model, shared.preprocess, shared.pictures, shared.run)
    options = resolved_options(*groups) | {"model": spec, "images": list(images or ())}
    own = {name: asdict(flags) for name, flags in probes.items()}  # type: ignore[call-overload]
    return options | (next(iter(own.values())) if len(own) == 1 else own)


def parsed_size(flag: str, text: str, counts: Sequence[int], hint: str) -> tuple[int, ...]:
    """`224x320` as numbers above zero; how many there may be is one of `counts`.

    Raises:
        UsageError: it is anything else.
    """
    parts = text.lower().split("x")
    if len(parts) not in counts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag} {text!r} is not a size", hint)
    sizes = tuple(map(int, parts))
    if max(sizes) > _MOST_PX:
        raise UsageError(f"{flag} {text!r} is too large", f"{_MOST_PX} pixels at the most")
    return sizes


def _size(flag: str, text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    numbers = parsed_size(flag, text, (1, 2), "N, or HEIGHTxWIDTH")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _numbers(flag: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{flag} {text!r} is not a list of numbers", "such as 0.485,0.456,0.406")
    return numbers
