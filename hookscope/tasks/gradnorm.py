"""`gradnorm`: one backward pass over the pictures, and how large every gradient was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from hookscope.artifacts import Heat, Table, Tiles
from hookscope.cam.targets import class_index
from hookscope.errors import NothingMeasured, UsageError
from hookscope.gradreport import GradReport, LayerGrad, ParamGrad, grad_report
from hookscope.layers import Selection, Site, Status, select
from hookscope.losses import LossFunction, loss_function, loss_objective
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.runner import Objective
from hookscope.tasks import Conclusion, Finding, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Pass

MEASURED = "after backward, before clipping, unscaled"

_COLUMNS = (
    "kind", "name", "call", "output", "type", "depth", "shape", "count", "grad_norm", "grad_rms", "grad_largest",
    "non_finite", "weight_norm", "grad_to_weight", "input_grad_total", "status",
)  # fmt: skip


@dataclass(frozen=True)
class GradnormOptions:
    """The flags of `hookscope gradnorm` that decide what is measured. `loss` is a name or a callable."""

    layer: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = ()
    loss: str | LossFunction = "cross_entropy"
    loss_name: str = "cross_entropy"
    target: str | None = None
    max_norm: float | None = None


class GradnormTask:
    """Measures gradients of a loss."""

    name = "gradnorm"

    def __init__(self, options: GradnormOptions) -> None:
        self._options = options
        self._loss = loss_function(options.loss)
        self._subject: Subject | None = None
        self._probe: GradNormProbe | None = None
        self._selection = Selection(())
        self._labels = ""

    def select(self, subject: Subject) -> Selection:
        self._subject = subject
        if self._options.target is not None:
            self._target_index(self._options.target)
        return select(subject.model, self._options.layer or ("**",), self._options.exclude)

    def choose(self, subject: Subject, x: Tensor) -> Selection:
        self._selection = self.select(subject)
        self._probe = GradNormProbe(layers=frozenset(self._selection.names))
        return self._selection

    def probe(self) -> Probe:
        return self._made()

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        return [loss_objective(self._loss, self._targets(batch))]

    def collect(self, done: Pass, batch: Batch) -> Iterable[Tiles | Heat]:
        self._made().finish_batch(done.sites, done.values["loss"])
        return ()

    def conclude(self) -> Conclusion:
        report = self._report()
        if not any(row.gradient is not None for row in report.parameters) and not any(
            row.output_grad is not None for row in report.layers
        ):
            raise NothingMeasured(
                "the loss has no gradient at any parameter or layer", "does it depend on the output?"
            )
        table = Table(
            kind=self.name,
            title="Gradient norms",
            columns=_COLUMNS,
            rows=(*map(_param_cells, report.parameters), *map(_layer_cells, report.layers)),
            notes=self._notes(report),
            data=_document(report, self._options.loss_name, self._labels),
        )
        return Conclusion(
            tables=(table,),
            documents={"gradnorm.png": _plot(report)},
            statuses={row.site: row.status for row in report.layers},
            findings=tuple(self._findings(report)),
            lines=_lines(report, self._options.loss_name, self._labels),
        )

    def _targets(self, batch: Batch) -> Tensor | None:
        labels = [item.ref.label for item in batch.items]
        if self._options.target is not None:
            index = self._target_index(self._options.target)
            self._labels = f"class {index} for every picture"
            return torch.full((len(labels),), index)
        if any(label is None for label in labels):
            self._labels = "the model's own predictions"
            return None
        self._labels = "the folders of the data set"
        return torch.tensor(labels)

    def _target_index(self, text: str) -> int:
        if text.isdecimal():
            return int(text)
        return class_index(text, self._subject.categories if self._subject else None)

    def _report(self) -> GradReport:
        assert self._subject is not None
        chosen = set(self._selection.names)
        known = {layer.name: layer.status or Status.OK for layer in self._subject.layers}
        called = frozenset(name for name, status in known.items() if status is not Status.NOT_CALLED)
        statuses = {name: status for name, status in known.items() if name in chosen}
        return grad_report(self._made(), self._subject.model, statuses, called)

    def _findings(self, report: GradReport) -> Iterable[Finding]:
        limit = self._options.max_norm
        # Written so that a norm that is not a number fails too.
        if limit is not None and not report.total_norm <= limit:
            message = f"total gradient norm {report.total_norm:.6g} is above {limit:g}"
            yield Finding("max-norm", "error", "", report.total_norm, limit, message)

    def _notes(self, report: GradReport) -> tuple[str, ...]:
        return (
            f"measured {MEASURED}; averaged over {report.pictures} pictures in {report.batches} batches",
            f"loss {self._options.loss_name} = {report.loss:.6g}, labels: {self._labels}",
            f"total norm {report.total_norm:.6g} over {len(report.parameters)} parameters, tied ones once",
        )

    def _made(self) -> GradNormProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe


def check_max_norm(limit: float | None) -> None:
    """Nothing, where the limit is a number that can be exceeded.

    Raises:
        UsageError: it is negative or not a number.
    """
    if limit is not None and not limit >= 0:
        raise UsageError(f"--max-norm {limit!r} is not a number of 0 or more")


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


def _document(report: GradReport, loss: str, labels: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "measured": MEASURED,
        "loss": {"name": loss, "value": report.loss, "labels": labels},
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


def _plot(report: GradReport) -> bytes:
    from hookscope.render.plot import Series, depth

    outputs = [(str(row.site), row.output_grad.norm) for row in report.layers if row.output_grad]
    own = [
        (str(row.site), row.parameter_grad_norm)
        for row in _once(report.layers)
        if row.parameter_grad_norm is not None
    ]
    series = [
        Series(name, tuple(n for n, _ in points), tuple(v for _, v in points))
        for name, points in (("gradient at the output", outputs), ("gradient of own parameters", own))
        if points
    ]
    return depth(series, title="Gradient norm by depth", ylabel="L2 norm")


def _once(rows: Iterable[LayerGrad]) -> Iterable[LayerGrad]:
    return (row for row in rows if row.site == Site(row.site.layer))


def _lines(report: GradReport, loss: str, labels: str) -> tuple[str, ...]:
    return (
        f"total gradient norm {report.total_norm:.6g} over {report.pictures} pictures",
        f"loss {loss} {report.loss:.6g}, labels: {labels}",
        *(_counted(report),),
    )


def _counted(report: GradReport) -> str:
    counts: dict[str, int] = {}
    for row in report.parameters:
        counts[row.status] = counts.get(row.status, 0) + 1
    return "parameters: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
