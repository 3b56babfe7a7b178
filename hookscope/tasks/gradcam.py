"""`gradcam`: class-activation maps of every picture, target, layer and method, of as few passes as they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hookscope.artifacts import Heat, Sheet
from hookscope.cam.choice import default_layer, last_layer, spatial_selection
from hookscope.cam.explain import Explainer
from hookscope.cam.geometry import Point, covered, on_input
from hookscope.cam.here import Passes
from hookscope.cam.methods import METHODS, method
from hookscope.cam.outputs import embedding_of
from hookscope.cam.plan import Plan, Smooth
from hookscope.cam.questions import Asked, Question, scores_for
from hookscope.cam.scores import objective
from hookscope.cam.targets import check_count, parse_targets
from hookscope.errors import ImageError, NothingMeasured, UsageError
from hookscope.layers import ROOT, OutputInfo, Selection, Site, select
from hookscope.layouts import with_grid
from hookscope.runner import running
from hookscope.tasks import Conclusion, Subject, Task
from hookscope.tasks.camchecks import CamChecks, CheckOptions
from hookscope.tasks.camheats import distinct, heat_of, sheets
from hookscope.tasks.cammaps import BatchMaps

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Objective, Pass, Runner


_FLAT = {
    "zero-gradient": "the score's gradient is zero at every position of the picture",
    "no-grad-path": "the score does not depend on it",
}


@dataclass(frozen=True)
class GradcamOptions:
    """The flags of `hookscope gradcam` that decide which maps are made, as they were typed."""

    layer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    method: tuple[str, ...] = ("gradcam",)
    target: tuple[str, ...] = ("top1",)
    contrast: tuple[str, ...] = ()
    similar_to: str | None = None
    logits: str | None = None
    pixels: str = "mask"
    point: Point | None = None
    min_score: float = 0.5
    smooth: Smooth | None = None
    fuse: str | None = None
    relu: bool = True
    grid: tuple[int, int] | None = None
    samples: int = 16
    noise: float = 0.15
    top_channels: int | None = None
    seed: int = 0
    range_over_image: bool = False
    sheet: bool = False
    checks: CheckOptions = field(default_factory=CheckOptions)


class GradcamTask(Task):
    """Explains what a model answers by its layers."""

    name = "gradcam"
    train_seed: int | None = None

    def __init__(self, options: GradcamOptions) -> None:
        self._options = options
        self._methods = tuple(method(name) for name in dict.fromkeys(options.method))
        self._checks = CamChecks(options.checks)
        self._subject: Subject | None = None
        self._question: Question | None = None
        self._explainer: Explainer | None = None
        self._first: tuple[Tensor, Asked] | None = None
        self._statuses: dict[Site, set[str]] = {}
        self._missing: dict[str, None] = {}
        self._without_path: frozenset[Site] = frozenset()
        self._unobservable: set[Site] = set()
        self._chosen_by_default: Site | None = None
        self._notes: dict[str, None] = {}
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._gridded: tuple[Mapping[Site, OutputInfo], Mapping[Site, OutputInfo]] | None = None

    def select(self, subject: Subject) -> Selection | None:
        options = self._options
        specs = parse_targets(options.target, subject.categories)
        contrast = parse_targets(options.contrast, subject.categories)
        check_count((*specs, *contrast), subject.pictures)
        self._question = Question(
            specs=specs,
            key=options.logits,
            contrast=contrast,
            pixels=options.pixels,
            point=options.point,
            min_score=options.min_score,
            categories=subject.categories,
        )
        if not options.layer:
            select(subject.model, ("**", ROOT), options.exclude)
            return None
        return select(subject.model, options.layer, options.exclude)

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        self._subject = subject
        subject.logits = self._options.logits
        selection = self.select(subject)
        assert self._question is not None, "select() has just made it"
        if self._options.similar_to is not None:
            self._question = replace(self._question, like=_reference(subject, self._question, self._options))
        self._first = x, self._asked(x, batch)
        if not self._plan().needs_layers:
            selection = Selection(())
        elif selection is None:
            selection = self._default(subject, x)
        chosen = spatial_selection(selection, self._known()) if selection.names else selection
        self._explainer = Explainer(
            self._plan(),
            subject.model,
            frozenset(chosen.names),
            self._known,
            self._chosen_by_default,
            scored=self._checks.scored,
        )
        self._announce(subject)
        return chosen

    def probes(self) -> Sequence[Probe]:
        return [self._made().probe]

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        assert self._first is not None, "choose() comes first"
        size = batch.items[0].tensor.shape[1:]
        return self._made().ask(output, self._asked_of(batch, (int(size[0]), int(size[1]))))

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Heat | Sheet]:
        explainer = self._made()
        self._without_path |= frozenset[Site]().union(*done.unreached.values())
        self._unobservable |= done.unobservable
        made = list(distinct(explainer.maps(runner, x, done)))
        covers = covered(runner.model, x)
        heats = [heat_of(one, (1.0, 1.0) if METHODS[one.method].on_input else covers) for one in made]
        assert self._subject is not None, "choose() comes first"
        images = [item.ref.path for item in batch.items]
        heats = self._checks.checked(BatchMaps(heats, made, explainer, runner, x, self._subject, images))
        for heat in heats:
            self._statuses.setdefault(heat.site, set()).add(str(heat.status))
            if heat.target is not None and heat.target.missing:
                self._missing[f"{batch.items[heat.image].ref.path}: {heat.target.missing}"] = None
        yield from self._ranged(heats)
        if self._options.sheet:
            yield from sheets(self._ranged(heats))

    def conclude(self) -> Conclusion:
        if not self._statuses:
            raise NothingMeasured(
                "no map could be made: the chosen layers do not return one activation for each picture",
                "`hookscope layers MODEL IMAGE` shows what they return",
            )
        statuses = {site: self._status(site, said) for site, said in self._statuses.items()}
        warnings = [
            *self._notes,
            *self._missing,
            *(
                f"{site}: the gradient cannot be seen, its output is a view of its input and is written to later"
                for site in sorted(self._unobservable)
            ),
        ]
        for status, words in _FLAT.items():
            sites = [site for site, found in statuses.items() if found == status]
            if sites:
                warnings.append(f"{', '.join(map(str, sites))}: {words}{self._instead(sites[-1])}")
        lines = (
            [
                f"layer {self._chosen_by_default} (the last one with a spatial output that the score depends on)"
            ]
            if self._chosen_by_default
            else []
        )
        assert self._subject is not None, "choose() comes first"
        said = self._checks.conclude(self._subject)
        return replace(
            said,
            statuses=statuses,
            warnings=(*warnings, *said.warnings),
            lines=(*lines, *said.lines),
        )

    def _plan(self) -> Plan:
        options = self._options
        assert self._question is not None, "select() comes first"
        passes = Passes(
            options.samples, options.noise, options.top_channels, options.seed, self._passed, self._noted
        )
        return Plan(self._methods, self._question, options.smooth, options.fuse, options.relu, passes)

    def _default(self, subject: Subject, x: Tensor) -> Selection:
        allowed = select(subject.model, ("**", ROOT), self._options.exclude)
        names = set(allowed.names)
        outputs = {site: info for site, info in self._known().items() if site.layer in names}
        try:
            self._chosen_by_default = default_layer(
                subject.model, x, outputs, self._scores, self._options.logits
            )
        except (NothingMeasured, UsageError):
            if any(method.needs_gradient for method in self._methods):
                raise
            self._chosen_by_default = last_layer(outputs)
        return Selection((self._chosen_by_default.layer,), excluded=allowed.excluded)

    def _announce(self, subject: Subject) -> None:
        """Say how many passes there will be, where there are more than a picture's own."""
        pictures = subject.pictures or 1
        needed = self._made().passes_a_picture()
        self._total = {name: count * pictures for name, count in needed.items()}
        for name, count in needed.items():
            what = f"{'1 forward pass' if count == 1 else f'{count:,} forward passes'} a picture"
            total = f", {count * pictures:,} in all" if pictures > 1 else ""
            subject.tell(f"{name}: {what}{total}")
        for line in self._checks.passes():
            subject.tell(line)

    def _noted(self, line: str) -> None:
        self._notes[line] = None

    def _passed(self, name: str, count: int) -> None:
        self._done[name] = self._done.get(name, 0) + count
        if self._subject is not None:
            self._subject.progress(name, self._done[name], max(self._total.get(name, 0), self._done[name]))

    def _known(self) -> Mapping[Site, OutputInfo]:
        """What is known of the sites, with the grid that the user says."""
        assert self._subject is not None, "choose() comes first"
        outputs = self._subject.outputs
        if self._options.grid is None:
            return outputs
        if self._gridded is None or self._gridded[0] is not outputs:
            self._gridded = outputs, with_grid(outputs, self._options.grid)
        return self._gridded[1]

    def _scores(self, output: Any) -> list[Objective]:
        assert self._first is not None, "choose() comes first"
        assert self._question is not None, "select() comes first"
        scores = scores_for(self._question, output, self._first[1])
        return list(filter(None, map(objective, scores)))

    def _asked(self, x: Tensor, batch: Batch) -> Asked:
        return self._asked_of(batch, (x.shape[2], x.shape[3]))

    def _asked_of(self, batch: Batch, size: tuple[int, int]) -> Asked:
        point = self._options.point
        return Asked(
            size=size,
            positions=[item.ref.index for item in batch.items],
            labels=[item.ref.label for item in batch.items],
            points=[on_input(point, item.view) for item in batch.items] if point is not None else (),
        )

    def _ranged(self, heats: Sequence[Heat]) -> Iterator[Heat]:
        """The maps with one range for each method of a picture, where that is asked for."""
        if not self._options.range_over_image:
            yield from heats
            return
        tops: dict[tuple[int, str], float] = {}
        for heat in heats:
            key = (heat.image, heat.method)
            tops[key] = max(tops.get(key, 0.0), heat.peak)
        for heat in heats:
            yield replace(heat, vmax=tops[heat.image, heat.method])

    def _instead(self, site: Site) -> str:
        """Which layer before it to take, in words."""
        assert self._subject is not None
        assert self._first is not None
        known = self._known()
        if site not in known:
            return ""
        before = {other: info for other, info in known.items() if info.order < known[site].order}
        try:
            found = default_layer(
                self._subject.model, self._first[0], before, self._scores, self._options.logits
            )
        except (NothingMeasured, UsageError):
            return ""
        return f"; use {found}"

    def _status(self, site: Site, said: set[str]) -> str:
        """The layer's status over all its maps: broken where one is, flat only where all are."""
        if "non-finite" in said:
            return "non-finite"
        if site in self._unobservable:
            return "undefined"
        if site in self._without_path and said == {"zero-gradient"}:
            return "no-grad-path"
        return "zero-gradient" if said == {"zero-gradient"} else "ok"

    def _made(self) -> Explainer:
        assert self._explainer is not None, "choose() comes first"
        return self._explainer


def _reference(subject: Subject, question: Question, options: GradcamOptions) -> tuple[Tensor, str]:
    """The embedding of the picture that others are to be similar to, and its name, without the folder it lies in."""
    path = options.similar_to or ""
    assert subject.picture is not None, "a run can read pictures"
    try:
        picture = subject.picture(path)
    except ImageError as error:
        raise UsageError(f"--similar-to: {error.message}", "give a picture that can be read") from error
    with running(subject.model, [], Selection(())) as runner:
        output = runner.outputs(picture)
    return embedding_of(output, question.key)[0], PurePath(path).name
