"""The figures of a gradient report that a baseline keeps, rounded, and the document that they make.

Bytes out: it writes and reads no file.

Figures keep four significant digits. Runs repeated on one machine gave the same bits; with one thread or two, and
channels last or not, a figure of the bundled model and of eight torchvision models in eval mode differed by 2.4e-4 at
most (its middle by 2e-7), the total by 5e-6. In train mode with two pictures, where batch normalisation magnifies
rounding, it was 1e-2, but for gradients that are zero in exact arithmetic: those are pure noise, up to 1e-7 of the
total norm. So the relative tolerance is 0.01, and a difference below 1e-6 of the baseline's total never counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.checks import measured as how
from hookscope.checks.gradrows import layer_rows
from hookscope.checks.measured import Made as Made
from hookscope.checks.measured import check_same
from hookscope.checks.rules import Place
from hookscope.output.manifest import encoded, to_json

if TYPE_CHECKING:
    from hookscope.gradreport import GradReport
    from hookscope.magnitudes import Magnitude

KIND = "gradnorm-baseline"
SCHEMA = 1
DIGITS = 4
"""Significant digits of a figure."""


@dataclass(frozen=True)
class Measured:
    """How figures came about; unless all of this is the same, they cannot be compared.

    `loss`, `labels`: the loss's name and where the labels came from. `layers`: the globs that chose layers, in words.
    """

    loss: str
    labels: str
    layers: str
    norm: str
    precision: str
    train_mode: bool
    pictures: int
    batches: int


@dataclass(frozen=True)
class Figure:
    """One gradient: its norm (in the run's norm) and RMS, `None` where there is none; its status and shape.

    `shape`: `64x3x7x7` of a parameter; of a layer how many entries its output has for a picture, `""` if unknown.
    """

    norm: float | None
    rms: float | None
    status: str
    shape: str


@dataclass(frozen=True)
class Figures:
    """All figures of a run, rounded: `total` is the norm over all parameters, `layers` are by site."""

    loss: float
    total: float
    parameters: Mapping[str, Figure]
    layers: Mapping[str, Figure]

    def places(self) -> tuple[Place, ...]:
        """All that a glob may mean among them."""
        layers = [layer_place(name) for name in self.layers]
        return (*layers, *(parameter_place(name) for name in self.parameters))


@dataclass(frozen=True)
class GradBaseline:
    """The figures of one run, and how they came about. `path`: where they were read, for messages."""

    measured: Measured
    made: Made
    figures: Figures
    path: str = ""

    def encoded(self) -> bytes:
        """The document: JSON with sorted keys, one figure a line."""
        parts = {"measured": self.measured, "made": self.made, **vars(self.figures)}
        return encoded(to_json({"kind": KIND, "schema": SCHEMA, **parts}))

    def check_comparable(self, measured: Measured) -> None:
        """Nothing, where a run that is measured like this can be compared.

        Raises:
            UsageError: it was measured otherwise.
        """
        # Figures of the mean loss do not depend on the batches in eval mode.
        check_same(self.measured, measured, self.path, () if measured.train_mode else ("batches",))

    def differences(self, made: Made) -> tuple[str, ...]:
        """In words, what is not the same in this run, and does not forbid to compare."""
        return self.made.differences(made)


def figures_of(report: GradReport) -> Figures:
    """The figures of a report."""
    parameters = {
        row.name: _figure(row.gradient, report.norm, row.status, "x".join(map(str, row.shape)) or "scalar")
        for row in report.parameters
    }
    layers = {
        row.place.name: _figure(row.size, report.norm, layer.status, _entries(row.size, report.pictures))
        for row, layer in zip(layer_rows(report), report.layers, strict=True)
    }
    return Figures(rounded(report.loss), rounded(report.total_norm), parameters, layers)


def measured_by(
    report: GradReport, *, loss: str, labels: str = "", layers: str = "**", precision: str = "fp32"
) -> Measured:
    """How the figures of a report came about; what it does not know itself is given."""
    norm = {1.0: "L1", 2.0: "L2", math.inf: "L-infinity"}[report.norm]
    return Measured(loss, labels, layers, norm, precision, report.train_mode, report.pictures, report.batches)


def parameter_place(name: str) -> Place:
    """A parameter of which only the name is known."""
    return Place(name, name.rpartition(".")[0] or ".")


def layer_place(site: str) -> Place:
    """A layer's call of which only the site's text is known."""
    return Place(site, site.partition(":")[0].partition("@")[0])


def rounded(value: float) -> float:
    """The value to as many digits as are stable."""
    return how.rounded(value, DIGITS)


def _figure(size: Magnitude | None, norm: float, status: str, shape: str) -> Figure:
    if size is None:
        return Figure(None, None, status, shape)
    return Figure(rounded(size.of(norm)), rounded(size.rms), status, shape)


def _entries(size: Magnitude | None, pictures: int) -> str:
    return "" if size is None else f"{size.count / max(pictures, 1):.12g}"
