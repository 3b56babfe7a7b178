"""`featuremaps`: a grid of channels for every chosen layer and picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hookscope.artifacts import Heat, Tiles
from hookscope.errors import NothingMeasured
from hookscope.layers import Selection, Site, select
from hookscope.probes.featuremaps import Channels, FeatureMapsProbe
from hookscope.tasks import Conclusion, Subject, Task

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Objective, Pass, Runner

DEFAULT_LAYERS = ("type:Conv2d",)


@dataclass(frozen=True)
class FeatureMapsOptions:
    """The flags of `hookscope featuremaps` that decide what is kept."""

    layer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    channels: str | None = None
    max_channels: int | None = None
    overlay: bool = False
    seed: int = 0


class FeatureMapsTask(Task):
    """Copies channels as they pass."""

    name = "featuremaps"
    train_seed: int | None = None

    def __init__(self, options: FeatureMapsOptions) -> None:
        self._options = options
        self._channels = Channels.parse(options.channels, options.max_channels, options.seed)
        self._selection = Selection(())
        self._subject: Subject | None = None
        self._probe: FeatureMapsProbe | None = None
        self._statuses: dict[Site, str] = {}
        self._some = False

    def select(self, subject: Subject) -> Selection:
        return select(subject.model, self._options.layer or DEFAULT_LAYERS, self._options.exclude)

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        self._subject = subject
        self._selection = self.select(subject)
        self._probe = FeatureMapsProbe(
            frozenset(self._selection.names), subject.info, self._channels, overlay=self._options.overlay
        )
        return self._selection

    def probes(self) -> Sequence[Probe]:
        return [self._made()]

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        return ()

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Tiles | Heat]:
        types = {layer.name: layer.type for layer in self._subject.layers} if self._subject else {}
        for artefact in self._made().artifacts():
            if artefact.status == "non-finite":
                self._statuses[artefact.site] = "non-finite"
            self._some = True
            if isinstance(artefact, Tiles):
                artefact = replace(artefact, type=types.get(artefact.site.layer, ""))
            yield artefact

    def conclude(self) -> Conclusion:
        unmapped = ", ".join(map(str, sorted(self._made().unmapped)))
        without = ", ".join(map(str, sorted(self._made().without)))
        if not self._some:
            what = f"the layout of {unmapped} is not known" if unmapped else "none of the layers was called"
            what = f"{without} has no channel {self._options.channels}" if without else what
            raise NothingMeasured(
                f"no feature maps: {what}", "`hookscope layers MODEL IMAGE` shows the outputs"
            )
        warnings = [f"no maps of {unmapped}: the output's layout is not known"] if unmapped else []
        if without:
            warnings.append(f"no maps of {without}: none of the channels {self._options.channels} is there")
        return Conclusion(statuses=self._statuses, warnings=tuple(warnings))

    def _made(self) -> FeatureMapsProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe
