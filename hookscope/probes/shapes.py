"""Which tensors passed, in which order and of which shape: what `layers` prints and other probes rely on."""

from __future__ import annotations

from torch import Tensor

from hookscope.cutting import version_of
from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.layouts import Layouts, Record


class ShapeProbe(Probe):
    """Tells `layouts` of every output, before the probes that are attached after it hear of it.

    Of the values it keeps only the latest tensor, to know it again when a parent returns it.
    """

    needs = Needs(outputs=True)

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._latest: tuple[Site, Tensor, int] | None = None

    def begin(self, pictures: int) -> None:
        self._layouts.clear()
        self._latest = None

    def on_output(self, site: Site, tensor: Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._layouts.add(Record(site, tuple(tensor.shape), dtype, self._same_as(tensor)))
        # Held so that its memory cannot be given to another tensor before the next call ends.
        self._latest = (site, tensor, version_of(tensor))

    def _same_as(self, tensor: Tensor) -> Site | None:
        if self._latest is None:
            return None
        site, latest, version = self._latest
        same_memory = latest.data_ptr() == tensor.data_ptr() and latest.stride() == tensor.stride()
        return (
            site if same_memory and latest.shape == tensor.shape and version_of(tensor) == version else None
        )
