"""Which tensors passed, in which order and of which shape: what `layers` prints and other probes rely on."""

from __future__ import annotations

from torch import Tensor

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.layouts import Record


class ShapeProbe(Probe):
    """Keeps shapes, and of the values only the latest tensor, to know it again when a parent returns it."""

    needs = Needs(outputs=True)

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._latest: tuple[Tensor, int] | None = None

    def begin(self, pictures: int) -> None:
        self.records.clear()
        self._latest = None

    def on_output(self, site: Site, tensor: Tensor) -> None:
        same = self.records[-1].site if self.records and self._is_latest(tensor) else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.records.append(Record(site, tuple(tensor.shape), dtype, same))
        # Held so that its memory cannot be given to another tensor before the next call ends.
        self._latest = (tensor, tensor._version)

    def _is_latest(self, tensor: Tensor) -> bool:
        if self._latest is None:
            return False
        latest, version = self._latest
        same_memory = latest.data_ptr() == tensor.data_ptr() and latest.stride() == tensor.stride()
        return same_memory and latest.shape == tensor.shape and tensor._version == version
