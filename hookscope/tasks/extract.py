"""`extract`: features of layers for every picture, in shards, with an index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hookscope.artifacts import Shard
from hookscope.errors import NothingMeasured, UsageError
from hookscope.layers import OutputInfo, Selection, Site, select
from hookscope.output.shards import INDEX, index
from hookscope.probes.extract import ExtractProbe, Features
from hookscope.runner import Objective
from hookscope.tasks import Conclusion, Subject, Task
from hookscope.wording import counted, listed

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.artifacts import Heat
    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Pass, Runner

MOST_PICTURES = 512
MOST_BYTES = 256 << 20
FEWEST_SHARDS = 8
"""A shard where none is asked for: so many pictures at most, so many bytes, and so many shards of a run at least."""

Row = tuple[str, int | str | None, str, int]


@dataclass(frozen=True)
class ExtractOptions:
    """The flags of `hookscope extract`. `shard_size`: in pictures; `None`: by the size of the features."""

    layer: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    features: Features = field(default_factory=Features)
    shard_size: int | None = None
    format: str = "safetensors"
    batch_size: int = 8


class ExtractTask(Task):
    """Collects features, a shard at a time."""

    name = "extract"

    def __init__(self, options: ExtractOptions) -> None:
        if not options.layer:
            raise UsageError("extract needs layers", "-l GLOB; `hookscope layers MODEL` lists them")
        if options.format == "npz" and options.features.dtype == torch.bfloat16:
            raise UsageError("npz has no bfloat16", "--features-format safetensors, or another --dtype")
        self._options = options
        self._outputs: dict[Site, OutputInfo] = {}
        self._missing: dict[Site, str] = {}
        self._probe: ExtractProbe | None = None
        self._parts: list[_Part] = []
        self._rows: list[Row] = []
        self._shards = 0

    def select(self, subject: Subject) -> Selection:
        return select(subject.model, self._options.layer, self._options.exclude)

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        selection, features = self.select(subject), self._options.features
        chosen = set(selection.names)
        for site, info in subject.outputs.items():
            if site.layer not in chosen:
                continue
            why = features.missing(info) if info.shape[:1] == (1,) else "it has no row for each picture"
            if why:
                self._missing[site] = why
            else:
                self._outputs[site] = info
        if not self._outputs:
            raise NothingMeasured(*self._nothing(selection))
        self._probe = ExtractProbe(self._outputs, features)
        self.portion = self._portion(subject.pictures)
        return selection

    def probes(self) -> Sequence[Probe]:
        return [self._made()]

    def until(self) -> frozenset[Site]:
        return frozenset(self._outputs)

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        return ()

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Heat]:
        part = _Part(self._made().take(), [(item.ref.path, item.ref.label) for item in batch.items])
        if self._parts and self._parts[-1].is_like(part):
            self._parts[-1].more.append(part)
        else:
            self._parts.append(part)
        return ()

    def close(self, portion: int) -> Iterable[Shard]:
        parts, self._parts = self._parts, []
        for number, part in enumerate(parts):
            whole = [part, *part.more]
            pictures = [picture for one in whole for picture in one.pictures]
            arrays = {str(site): torch.cat([one.arrays[site] for one in whole]) for site in part.arrays}
            shard = Shard(
                portion,
                number,
                arrays,
                tuple((row, path, label) for row, (path, label) in enumerate(pictures)),
                format=self._options.format,
            )
            self._rows += [(path, label, shard.stem, row) for row, (path, label) in enumerate(pictures)]
            self._shards += 1
            yield shard

    def conclude(self) -> Conclusion:
        probe, sites = self._made(), sorted(self._outputs)
        return Conclusion(
            documents={INDEX: index(self._rows)},
            statuses=dict.fromkeys(self._missing, "no-features"),
            warnings=(
                *(f"{site}: no features, {why}" for site, why in sorted(self._missing.items())),
                *(
                    f"{site}: {counted(count, 'value')} did not fit the type and are infinite now"
                    for site, count in sorted(probe.overflows.items())
                ),
            ),
            lines=(
                f"features of {listed([str(site) for site in sites])}",
                f"{counted(len(self._rows), 'picture')} in {counted(self._shards, 'shard')}",
            ),
        )

    def _portion(self, pictures: int) -> int:
        """How many batches make a shard."""
        batch = self._options.batch_size
        wanted = self._options.shard_size
        if wanted is None:
            each = sum(_bytes(info, self._options.features) for info in self._outputs.values())
            wanted = min(MOST_PICTURES, MOST_BYTES // max(each, 1), math.ceil(pictures / FEWEST_SHARDS))
        return max(1, math.ceil(wanted / batch))

    def _nothing(self, selection: Selection) -> tuple[str, str]:
        if not self._missing:
            return (
                f"no layer of {listed(selection.names)} returned a tensor",
                "`hookscope layers` tells what they return",
            )
        site, why = next(iter(self._missing.items()))
        return f"no features of any chosen layer: {site}, for one: {why}", "other layers, or another --reduce"

    def _made(self) -> ExtractProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe


@dataclass
class _Part:
    """Features of one batch, and of those after it that are as large."""

    arrays: dict[Site, Tensor]
    pictures: list[tuple[str, int | str | None]]
    more: list[_Part] = field(default_factory=list)

    def is_like(self, other: _Part) -> bool:
        """Whether both have the same sites, and a picture's features of each the same shape."""
        return {site: one.shape[1:] for site, one in self.arrays.items()} == {
            site: one.shape[1:] for site, one in other.arrays.items()
        }


def _bytes(info: OutputInfo, features: Features) -> int:
    """Of one picture's features."""
    dtype = getattr(torch, info.dtype)
    made = features.of(torch.empty(info.shape, dtype=dtype, device="meta"), info)
    return made.numel() * made.element_size()
