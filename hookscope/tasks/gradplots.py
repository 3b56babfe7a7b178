"""A gradient report as plots: norms by depth, ratios to the weights, and how the batches differ.

Layers of unlike kinds have gradients of unlike size, so that one line through all of them is a zigzag that says
nothing: each kind has a line of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hookscope.magnitudes import Spread, norm_name
from hookscope.render.plot import Panel, Series, stacked

if TYPE_CHECKING:
    from hookscope.gradreport import GradReport, LayerGrad
    from hookscope.tasks.gradtables import Loss

_MOST_KINDS = 6
_OTHER = "other layers"


def documents(report: GradReport, loss: Loss) -> dict[str, bytes]:
    """Every plot that there is something to see in, as PNG by file name."""
    made = {
        "gradnorm.png": plot(report, loss),
        "gradnorm-ratio.png": ratio_plot(report, loss),
        "gradnorm-batches.png": spread_plot(report, loss),
    }
    return {name: data for name, data in made.items() if data is not None}


def plot(report: GradReport, loss: Loss) -> bytes:
    """PNG: norms at the outputs and of own parameters by depth, a line for each kind of layer, log scale."""
    name = norm_name(report.norm)
    panels = [
        Panel(f"{name} norm at the output", _by_kind(report.by_depth, lambda row: row.output_grad_norm)),
        Panel(f"{name} norm of own parameters", _by_kind(_once(report), lambda row: row.parameter_grad_norm)),
    ]
    return _png(panels, "Gradient norm by depth", report, loss)


def ratio_plot(report: GradReport, loss: Loss) -> bytes | None:
    """PNG: the gradient of own parameters over their weights, by depth; `None` where no layer has that."""
    series = _by_kind(_once(report), lambda row: row.ratio)
    if not series:
        return None
    ylabel = f"gradient / weights, {norm_name(report.norm)} norms"
    return _png([Panel(ylabel, series)], "Gradient to weights by depth", report, loss)


def spread_plot(report: GradReport, loss: Loss) -> bytes | None:
    """PNG: mean, minimum and maximum of the batches' norms by depth; `None` where there was one batch only."""
    if report.batches < 2:
        return None
    name = norm_name(report.norm)
    panels = [
        Panel(f"{name} norm at the output", _ranges(report.by_depth, lambda row: row.output_spread)),
        Panel(f"{name} norm of own parameters", _ranges(_once(report), lambda row: row.parameter_spread)),
    ]
    return _png(panels, f"Norms of each of {report.batches} batches by depth", report, loss)


def _png(panels: Sequence[Panel], what: str, report: GradReport, loss: Loss) -> bytes:
    """The panels that have something in them, one at least."""
    mode = "train mode" if report.train_mode else ""
    title = " · ".join(filter(None, (what, f"{loss.name} {loss.value:.4g}", mode, loss.note)))
    drawn = [panel for panel in panels if panel.series] or panels[:1]
    return stacked(drawn, title=title, order=[str(row.site) for row in report.by_depth])


def _once(report: GradReport) -> list[LayerGrad]:
    """The called layers, each once: a layer called twice has one set of parameters."""
    first: dict[str, LayerGrad] = {}
    for row in report.by_depth:
        first.setdefault(row.site.layer, row)
    return list(first.values())


def _by_kind(rows: Sequence[LayerGrad], value: Callable[[LayerGrad], float | None]) -> list[Series]:
    """A line for each of the most frequent classes of layers, and one for all others."""
    found = [(row, number) for row in rows if (number := value(row)) is not None]
    counts = Counter(row.type for row, _ in found)
    frequent = [kind for kind, _ in counts.most_common(_MOST_KINDS)]
    kinds = frequent if len(counts) <= _MOST_KINDS else [*frequent[:-1], _OTHER]
    made = []
    for kind in kinds:
        own = [(r, n) for r, n in found if r.type == kind or (kind == _OTHER and r.type not in kinds)]
        names, numbers = tuple(str(row.site) for row, _ in own), tuple(number for _, number in own)
        made.append(Series(kind, names, numbers, joined=kind != _OTHER))
    return made


def _ranges(rows: Sequence[LayerGrad], value: Callable[[LayerGrad], Spread | None]) -> list[Series]:
    """The mean of each layer's batches, with the least and the most."""
    found = [(str(row.site), spread) for row in rows if (spread := value(row)) is not None]
    if not found:
        return []
    spans = tuple((spread.minimum, spread.maximum) for _, spread in found)
    names, means = tuple(name for name, _ in found), tuple(spread.mean for _, spread in found)
    return [Series("mean of the batches", names, means, spans)]
