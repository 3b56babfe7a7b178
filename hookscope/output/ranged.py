"""Maps whose colours reach over all of a run: their values are written at once, their pictures when the run is known.

Keeps what a map is, never its values: those are read back from the file that they were written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from hookscope.artifacts import Heat, Sheet
from hookscope.output.directory import OutputDir
from hookscope.output.writers import PictureOptions, Place, Writing, prepared

_NOTHING = np.zeros((1, 1), np.float32)


@dataclass
class _Kept:
    """The maps of one picture, each with the file of its values."""

    heats: list[tuple[Heat, str]] = field(default_factory=list)
    sheet: bool = False


class Ranged:
    """The maps of one task in a run.

    Args:
        out: where they are written.
        options: how they are drawn.
    """

    def __init__(self, out: OutputDir, options: PictureOptions) -> None:
        self._out = out
        self._options = options
        self._kept: dict[int, _Kept] = {}
        self._tops: dict[str, float] = {}

    @property
    def pictures(self) -> frozenset[int]:
        """The pictures that have maps, by their place in the run."""
        return frozenset(self._kept)

    def values(self, heat: Heat, place: Place, picture: int) -> Writing:
        """The writing of a map's values; its picture is due later."""
        writing = prepared(self._out, heat, place, replace(self._options, parts=("raw",)))
        bare = replace(heat, values=_NOTHING)
        self._kept.setdefault(picture, _Kept()).heats.append((bare, writing.names[0]))
        self._tops[heat.method] = max(self._tops.get(heat.method, 0.0), heat.peak)
        return writing

    def sheet(self, picture: int) -> None:
        """The picture is to have a contact sheet as well."""
        self._kept.setdefault(picture, _Kept()).sheet = True

    def drawn(self, place: Place, picture: int) -> Iterator[Writing]:
        """The writing of a picture's overlays, heat maps and contact sheet, once all values of the run are written."""
        kept = self._kept.get(picture, _Kept())
        heats = [
            replace(
                heat, values=np.load(self._out.path / name, allow_pickle=False), vmax=self._tops[heat.method]
            )
            for heat, name in kept.heats
        ]
        options = replace(self._options, parts=("overlay", "heatmap"))
        for heat in heats:
            yield prepared(self._out, heat, place, options)
        if kept.sheet:
            yield prepared(self._out, Sheet(0, tuple(heats)), place, options)
