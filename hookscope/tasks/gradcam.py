"""`gradcam`: class-activation maps of every picture, target, layer and method, from one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.artifacts import Heat, Target
from hookscope.cam.choice import default_layer, spatial_selection
from hookscope.cam.methods import method
from hookscope.cam.targets import (
    TargetSpec,
    check_pictures,
    described,
    logits_of,
    parse_targets,
    score_objective,
)
from hookscope.layers import ROOT, OutputInfo, Selection, Site, select
from hookscope.probes.cam import CamProbe
from hookscope.runner import Objective
from hookscope.tasks import Conclusion, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Pass


_FLAT = {
    "zero-gradient": "the score's gradient is zero at every position of the picture",
    "no-grad-path": "the score does not depend on it",
}


@dataclass(frozen=True)
class GradcamOptions:
    """The flags of `hookscope gradcam` that decide which maps are made."""

    layer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    method: tuple[str, ...] = ("gradcam",)
    target: tuple[str, ...] = ("top1",)


class GradcamTask:
    """Explains class scores by layers."""

    name = "gradcam"

    def __init__(self, options: GradcamOptions) -> None:
        self._options = options
        self._methods = [method(name) for name in dict.fromkeys(options.method)]
        self._specs: tuple[TargetSpec, ...] = ()
        self._subject: Subject | None = None
        self._probe: CamProbe | None = None
        self._targets: dict[str, list[Target]] = {}
        self._statuses: dict[Site, set[str]] = {}
        self._without_path: frozenset[Site] = frozenset()
        self._unobservable: set[Site] = set()
        self._chosen_by_default: Site | None = None

    def select(self, subject: Subject) -> Selection | None:
        self._specs = parse_targets(self._options.target, subject.categories)
        options = self._options
        if not options.layer:
            _allowed(subject, options.exclude)
            return None
        return select(subject.model, options.layer, options.exclude)

    def choose(self, subject: Subject, x: Tensor) -> Selection:
        self._subject = subject
        selection = self.select(subject)
        if selection is None:
            outputs = _allowed(subject, self._options.exclude)
            self._chosen_by_default = default_layer(subject.model, x, outputs, self._scores)
            excluded = select(subject.model, ("**", ROOT), self._options.exclude).excluded
            selection = Selection((self._chosen_by_default.layer,), excluded=excluded)
        chosen = spatial_selection(selection, subject.outputs)
        names = frozenset(spec.name for spec in self._specs)
        self._probe = CamProbe(frozenset(chosen.names), subject.info, self._methods, names)
        return chosen

    def probe(self) -> Probe:
        return self._made()

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        categories = self._subject.categories if self._subject else None
        logits = logits_of(output)
        check_pictures(logits, len(batch.items))
        chosen = [(spec, spec.classes(logits)) for spec in self._specs]
        self._targets = {spec.name: described(spec, classes, output, categories) for spec, classes in chosen}
        return [score_objective(spec, classes) for spec, classes in chosen]

    def collect(self, done: Pass, batch: Batch) -> Iterable[Heat]:
        probe = self._made()
        probe.fill(done.unreached, done.unobservable)
        self._without_path |= frozenset[Site]().union(*done.unreached.values())
        self._unobservable |= done.unobservable
        seen: set[tuple[int, Site, str, int]] = set()
        for found in probe.artifacts():
            target = self._targets[found.objective][found.image]
            self._statuses.setdefault(found.site, set()).add(str(found.status))
            # `top1` and the same class by its id are one map.
            key = (found.image, found.site, found.method, target.index)
            if key not in seen and self._chosen_by_default in (None, found.site):
                seen.add(key)
                yield Heat(
                    kind=self.name,
                    image=found.image,
                    site=found.site,
                    method=found.method,
                    values=found.values,
                    minimum=found.minimum,
                    maximum=found.maximum,
                    status=found.status,
                    target=target,
                )

    def conclude(self) -> Conclusion:
        statuses = {site: self._status(site, said) for site, said in self._statuses.items()}
        warnings = [
            f"{site}: the gradient cannot be seen, its output is a view of its input and is written to later"
            for site in sorted(self._unobservable)
        ]
        for status, words in _FLAT.items():
            sites = [str(site) for site, found in statuses.items() if found == status]
            if sites:
                warnings.append(f"{', '.join(sites)}: {words}")
        lines = (
            f"layer {self._chosen_by_default} (the last one with a spatial output that the score depends on)",
        )
        return Conclusion(
            statuses=statuses, warnings=tuple(warnings), lines=lines if self._chosen_by_default else ()
        )

    def _scores(self, output: Any) -> list[Objective]:
        logits = logits_of(output)
        return [score_objective(spec, spec.classes(logits)) for spec in self._specs]

    def _status(self, site: Site, said: set[str]) -> str:
        """The layer's status over all its maps: broken where one is, flat only where all are."""
        if "non-finite" in said:
            return "non-finite"
        if site in self._unobservable:
            return "undefined"
        if site in self._without_path and said == {"zero-gradient"}:
            return "no-grad-path"
        return "zero-gradient" if said == {"zero-gradient"} else "ok"

    def _made(self) -> CamProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe


def _allowed(subject: Subject, exclude: Sequence[str]) -> dict[Site, OutputInfo]:
    """What is known of the sites that the default layer may be chosen from."""
    names = set(select(subject.model, ("**", ROOT), exclude).names)
    return {site: info for site, info in subject.outputs.items() if site.layer in names}
