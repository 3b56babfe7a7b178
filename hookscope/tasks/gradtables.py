"""A gradient report as tables, as JSON, as a plot and in a few lines. Numbers in, numbers and words out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hookscope.artifacts import Table
from hookscope.gradreport import GradReport, LayerGrad, ParamGrad
from hookscope.layers import Site
from hookscope.wording import counted

MEASURED = "after backward, before clipping, unscaled"

_COLUMNS = (
    "kind", "name", "call", "output", "type", "depth", "shape", "count", "grad_norm", "grad_rms", "grad_largest",
    "non_finite", "weight_norm", "grad_to_weight", "input_grad_total", "status",
)  # fmt: skip
_PARAM_COLUMNS = (
    "parameter", "shape", "grad_norm", "grad_rms", "grad_largest", "non_finite", "weight_norm", "grad_to_weight",
    "status",
)  # fmt: skip
_LAYER_COLUMNS = ("layer", "type", "output_grad_norm", "input_grad_total", "parameter_grad_norm", "status")


@dataclass(frozen=True)
class Loss:
    """The loss: its name, its mean over the pictures, and where the labels came from.

    `note`: what every reader must know of the model, such as that its weights are random.
    """

    name: str
    value: float
    labels: str
    note: str = ""


def table(report: GradReport, loss: Loss) -> Table:
    """Every parameter and every layer as one tidy table, for CSV; `data` is the JSON."""
    return Table(
        kind="gradnorm",
        title="Gradient norms",
        columns=_COLUMNS,
        rows=(*map(_param_cells, report.parameters), *map(_layer_cells, report.layers)),
        data=_document(report, loss),
        scores={"total_norm": report.total_norm, "loss": loss.value},
    )


def summary(report: GradReport, loss: Loss) -> tuple[Table, ...]:
    """The same for people: parameters and layers apart, with what a reader must know."""
    notes = (
        *([f"the model has {loss.note}"] if loss.note else []),
        f"measured {MEASURED}; averaged over {counted(report.pictures, 'picture')}",
        f"loss {loss.name} = {loss.value:.6g}, labels: {loss.labels}",
        f"total norm {report.total_norm:.6g} over {counted(len(report.parameters), 'parameter')}, tied ones once",
    )
    parameters = tuple(_param_summary(row) for row in report.parameters)
    layers = tuple(_layer_summary(row) for row in report.layers)
    return (
        Table("gradnorm", "Gradient norms", _PARAM_COLUMNS, parameters, notes),
        Table("gradnorm", "Layers, in execution order", _LAYER_COLUMNS, layers),
    )


def lines(report: GradReport, loss: Loss) -> tuple[str, ...]:
    """What the shell is told."""
    counts: dict[str, int] = {}
    for row in report.parameters:
        counts[row.status] = counts.get(row.status, 0) + 1
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return (
        f"total gradient norm {report.total_norm:.6g} over {counted(report.pictures, 'picture')}",
        f"loss {loss.name} {loss.value:.6g}, labels: {loss.labels}",
        f"parameters: {statuses or 'none'}",
    )


def plot(report: GradReport, loss: Loss) -> bytes:
    """PNG: norms by depth, log scale."""
    from hookscope.render.plot import Series, depth

    outputs = [(str(row.site), row.output_grad.norm) for row in report.layers if row.output_grad]
    own = [
        (str(row.site), row.parameter_grad_norm)
        for row in report.layers
        # A layer called twice has one set of parameters.
        if row.site == Site(row.site.layer) and row.parameter_grad_norm is not None
    ]
    series = [
        Series(name, tuple(n for n, _ in points), tuple(v for _, v in points))
        for name, points in (("gradient at the output", outputs), ("gradient of own parameters", own))
        if points
    ]
    return depth(
        series,
        title=" · ".join(
            filter(None, ("Gradient norm by depth", f"{loss.name} {loss.value:.4g}", loss.note))
        ),
        ylabel="L2 norm",
    )


def _param_summary(row: ParamGrad) -> tuple[Any, ...]:
    g = row.gradient
    sizes = (g.norm, g.rms, g.largest, g.non_finite) if g else (None,) * 4
    ratio = row.ratio if row.ratio is not None else "undefined"
    return (row.name, row.shape, *sizes, row.weight_norm, ratio, row.status)


def _layer_summary(row: LayerGrad) -> tuple[Any, ...]:
    norm = row.output_grad.norm if row.output_grad else None
    return (str(row.site), row.type, norm, row.input_grad_total, row.parameter_grad_norm, row.status)


def _param_cells(row: ParamGrad) -> tuple[Any, ...]:
    g = row.gradient
    sizes = (g.count, g.norm, g.rms, g.largest, g.non_finite) if g else (None,) * 5
    return (
        "parameter", row.name, None, "", "", None, row.shape, *sizes, row.weight_norm, row.ratio, None, row.status
    )  # fmt: skip


def _layer_cells(row: LayerGrad) -> tuple[Any, ...]:
    g, site = row.output_grad, row.site
    sizes = (g.count, g.norm, g.rms, None, g.non_finite) if g else (None,) * 5
    return (
        "layer", site.layer, site.call, site.output, row.type, row.depth, None, *sizes, None, None,
        row.input_grad_total, row.status,
    )  # fmt: skip


def _document(report: GradReport, loss: Loss) -> dict[str, Any]:
    return {
        "schema": 1,
        "note": loss.note,
        "measured": MEASURED,
        "loss": {"name": loss.name, "value": loss.value, "labels": loss.labels},
        "total_norm": report.total_norm,
        "pictures": report.pictures,
        "batches": report.batches,
        "parameters": [_param_record(row) for row in report.parameters],
        "layers": [_layer_record(row) for row in report.layers],
    }


def _param_record(row: ParamGrad) -> dict[str, Any]:
    g = row.gradient
    return {
        "name": row.name,
        "layer": row.layer,
        "shape": row.shape,
        "aliases": row.aliases,
        "weight_norm": row.weight_norm,
        "grad_norm": g.norm if g else None,
        "grad_rms": g.rms if g else None,
        "grad_largest": g.largest if g else None,
        "non_finite": g.non_finite if g else None,
        "grad_to_weight": row.ratio if row.ratio is not None else "undefined",
        "status": row.status,
    }


def _layer_record(row: LayerGrad) -> dict[str, Any]:
    g = row.output_grad
    return asdict(row.site) | {
        "type": row.type,
        "depth": row.depth,
        "output_grad_norm": g.norm if g else None,
        "output_grad_rms": g.rms if g else None,
        "output_grad_non_finite": g.non_finite if g else None,
        "input_grad_total": row.input_grad_total,
        "parameter_grad_norm": row.parameter_grad_norm,
        "status": row.status,
    }
