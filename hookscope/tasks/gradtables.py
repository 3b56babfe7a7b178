"""A gradient report as tables and in a few lines. Numbers in, numbers and words out.

What is measured is named where the numbers are: a norm of the mean gradient is not a mean of norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hookscope.artifacts import Table
from hookscope.gradreport import GradReport
from hookscope.magnitudes import Spread, norm_name
from hookscope.tasks.graddocument import MEASURED, SPREAD, document, ratio, sizes, spread
from hookscope.tasks.graddocument import Loss as Loss
from hookscope.tasks.gradplots import plot as plot
from hookscope.wording import counted, listed

_COLUMNS = (
    "kind", "name", "call", "output", "type", "depth", "shape", "count", "norm", "grad_norm", "grad_l1", "grad_l2",
    "grad_largest", "grad_rms", "non_finite", "non_finite_share", "weight_norm", "grad_to_weight",
    "input_grad_total", "parameter_grad_norm", "subtree_grad_norm", *SPREAD, "status",
)  # fmt: skip
_PARAM_COLUMNS = (
    "parameter", "shape", "grad_norm", "grad_rms", "grad_largest", "non_finite", "weight_norm", "grad_to_weight",
)  # fmt: skip
_LAYER_COLUMNS = (
    "depth", "layer", "type", "output_grad_norm", "output_grad_rms", "input_grad_total", "parameter_grad_norm",
    "subtree_grad_norm", "grad_to_weight",
)  # fmt: skip


def table(report: GradReport, loss: Loss) -> Table:
    """The total, every parameter and every layer as one tidy table, for CSV; `data` is the JSON."""
    rows = (_total_cells(report), *_param_rows(report), *_layer_rows(report))
    return Table(
        kind="gradnorm",
        title="Gradient norms",
        columns=_COLUMNS,
        rows=tuple(tuple(row.get(column) for column in _COLUMNS) for row in rows),
        data=document(report, loss),
        scores={"total_norm": report.total_norm, "loss": loss.value},
    )


def summary(report: GradReport, loss: Loss) -> tuple[Table, ...]:
    """The same for people: totals, parameters and layers by depth, with what a reader must know."""
    batches = SPREAD[:-1] if report.batches > 1 else ()
    return (
        Table("gradnorm", "Gradient norms", ("what", "value"), tuple(_totals(report, loss)), _notes(report, loss)),
        _for_people("Parameters", (*_PARAM_COLUMNS, *batches, "status"), _param_rows(report), parameter="name"),
        _for_people(
            "Layers by depth", (*_LAYER_COLUMNS, *batches, "status"), _layer_rows(report),
            layer="site", output_grad_norm="grad_norm", output_grad_rms="grad_rms",
        ),
    )  # fmt: skip


def lines(report: GradReport, loss: Loss) -> tuple[str, ...]:
    """What the shell is told."""
    counts: dict[str, int] = {}
    for row in report.parameters:
        counts[row.status] = counts.get(row.status, 0) + 1
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    alone = report.total_spread
    return (
        _total_line(report),
        *([f"of each batch alone: {_range(alone)}"] if alone and report.batches > 1 else []),
        f"loss {loss.name} {loss.value:.6g}, labels: {loss.labels}",
        f"parameters: {statuses or 'none'}",
        *_first_lines(report),
    )


def _total_line(report: GradReport) -> str:
    if report.total is None:
        return f"no total gradient norm, as no parameter has a gradient, over {_over(report)}"
    return f"total gradient norm {report.total_norm:.6g} ({_norm_words(report)}) over {_over(report)}"


def measured(report: GradReport) -> str:
    """What the norms are, in one line."""
    mode = "train" if report.train_mode else "eval"
    return f"{_norm_words(report)} of the mean gradient, {MEASURED}; {mode} mode, over {_over(report)}"


def _norm_words(report: GradReport) -> str:
    return f"{norm_name(report.norm)} norm"


def _over(report: GradReport) -> str:
    batches = f" in {report.batches} batches" if report.batches > 1 else ""
    return f"{counted(report.pictures, 'picture')}{batches}"


def _range(of: Spread) -> str:
    return f"mean {of.mean:.6g}, {of.minimum:.6g} to {of.maximum:.6g}, last {of.last:.6g}"


def _first_lines(report: GradReport) -> Iterator[str]:
    """Where something first was not finite."""
    found = report.first_non_finite
    if found is not None:
        what = "values" if found.direction == "forward" else "gradients"
        named = f" ({listed(found.parameters)})" if found.parameters else ""
        yield (
            f"first {what} that are not finite: {found.site}, batch {found.batch}, "
            f"{found.non_finite} of {found.count}: {found.why}{named}"
        )


def _notes(report: GradReport, loss: Loss) -> tuple[str, ...]:
    return (
        *([f"the model has {loss.note}"] if loss.note else []),
        f"measured: {measured(report)}",
        f"loss {loss.name} = {loss.value:.6g}, labels: {loss.labels}",
        *_first_lines(report),
    )


def _totals(report: GradReport, loss: Loss) -> Iterator[tuple[str, Any]]:
    name = _norm_words(report)
    yield f"total {name}", report.total_norm
    yield from sizes(report.total).items()
    yield "loss", loss.value
    if report.batches > 1:
        for what, found in (
            (f"{name} of a batch", report.total_spread),
            ("loss of a batch", report.loss_spread),
        ):
            yield from (
                (f"{what}: {key.removeprefix('batch_')}", value) for key, value in spread(found).items()
            )


def _for_people(title: str, columns: tuple[str, ...], rows: Iterator[dict[str, Any]], **names: str) -> Table:
    cells = tuple(tuple(row.get(names.get(column, column)) for column in columns) for row in rows)
    return Table("gradnorm", title, columns, cells)


def _total_cells(report: GradReport) -> dict[str, Any]:
    return {
        "kind": "total",
        "name": "",
        "norm": norm_name(report.norm),
        "grad_norm": report.total_norm,
        **sizes(report.total),
        **spread(report.total_spread),
    }


def _param_rows(report: GradReport) -> Iterator[dict[str, Any]]:
    for row in report.parameters:
        yield {
            "kind": "parameter",
            "name": row.name,
            "shape": row.shape,
            "norm": norm_name(report.norm),
            "grad_norm": row.grad_norm,
            **sizes(row.gradient),
            "weight_norm": row.weight_norm,
            "grad_to_weight": ratio(row),
            **spread(row.spread),
            "status": row.status,
        }


def _layer_rows(report: GradReport) -> Iterator[dict[str, Any]]:
    for row in report.layers:
        yield {
            "kind": "layer",
            "name": row.site.layer,
            "site": str(row.site),
            "call": row.site.call,
            "output": row.site.output,
            "type": row.type,
            "depth": row.depth,
            "norm": norm_name(report.norm),
            "grad_norm": row.output_grad_norm,
            **sizes(row.output_grad),
            "weight_norm": row.weight_norm,
            "grad_to_weight": ratio(row),
            "input_grad_total": row.input_grad_total,
            "parameter_grad_norm": row.parameter_grad_norm,
            "subtree_grad_norm": row.subtree_grad_norm,
            **spread(row.output_spread),
            "status": row.status,
        }
