"""A gradient report as the JSON document that scripts read, with what every number in it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hookscope.gradreport import GradReport, LayerGrad, ParamGrad
from hookscope.magnitudes import Magnitude, Spread, norm_name
from hookscope.probes.finiteness import FirstNonFinite

MEASURED = "after backward, before clipping, unscaled"

UNDEFINED = "undefined"
"""The ratio to weights that are all zero."""

QUANTITIES = {
    "grad_norm": "the norm of the mean gradient over all pictures, not the mean of the batches' norms",
    "grad_rms": "the L2 norm of the mean gradient over the root of the number of entries",
    "grad_largest": "the largest absolute entry of the mean gradient, its L-infinity norm",
    "grad_to_weight": "grad_norm / weight_norm, both in the same norm; undefined where the weights are all zero",
    "output_grad_norm": "the norm of the gradient at what the layer returned, of all pictures laid end to end",
    "input_grad_total": "the norm of the gradient at what the layer received, through every use of it",
    "parameter_grad_norm": "the norm over the layer's own parameters, tied ones under their first name",
    "subtree_grad_norm": "the norm over the parameters of the layer and of all layers inside it",
    "total_norm": "the norm over all parameters that got a gradient, tied ones once",
    "batch_mean": "the mean of the norms of each batch's own gradient, over the batches that had one",
    "depth": "the place in the order in which the layers' calls ended",
    "non_finite_share": "entries that are not finite, over all",
}
"""What the numbers are, for readers of the JSON."""

SPREAD = ("batch_mean", "batch_max", "batch_min", "batch_last", "batches")
"""Columns of the figures of the batches."""


@dataclass(frozen=True)
class Loss:
    """The loss: its name, its mean over the pictures, and where the labels came from.

    `note`: what every reader must know of the model, such as that its weights are random.
    """

    name: str
    value: float
    labels: str
    note: str = ""


def document(report: GradReport, loss: Loss) -> dict[str, Any]:
    """The whole report, for scripts."""
    return {
        "schema": 1,
        "note": loss.note,
        "measured": MEASURED,
        "quantities": QUANTITIES,
        "norm": norm_name(report.norm),
        "mode": "train" if report.train_mode else "eval",
        "loss": {
            "name": loss.name,
            "value": loss.value,
            "labels": loss.labels,
            "by_batch": spread(report.loss_spread) or None,
        },
        "total_norm": report.total_norm,
        "total": sizes(report.total) or None,
        "total_by_batch": spread(report.total_spread) or None,
        "pictures": report.pictures,
        "batches": report.batches,
        "first_non_finite": {
            "forward": _first_record(report.first_forward),
            "backward": _first_record(report.first_backward),
        },
        "parameters": [_param_record(row) for row in report.parameters],
        "layers": [_layer_record(row) for row in report.layers],
    }


def _first_record(found: FirstNonFinite | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found) | {"why": found.why}


def _param_record(row: ParamGrad) -> dict[str, Any]:
    return (
        dict.fromkeys(sizes(Magnitude(0, 0, 0, 0)))
        | sizes(row.gradient)
        | {
            "name": row.name,
            "layer": row.layer,
            "shape": row.shape,
            "aliases": row.aliases,
            "weight_norm": row.weight_norm,
            "weight_non_finite": row.weight_non_finite,
            "grad_norm": row.grad_norm,
            "grad_to_weight": ratio(row),
            "by_batch": spread(row.spread) or None,
            "status": row.status,
        }
    )


def _layer_record(row: LayerGrad) -> dict[str, Any]:
    return asdict(row.site) | {
        "type": row.type,
        "depth": row.depth,
        "output_grad_norm": row.output_grad_norm,
        "output_grad": sizes(row.output_grad) or None,
        "output_grad_rms": row.output_grad.rms if row.output_grad else None,
        "output_grad_non_finite": row.output_grad.non_finite if row.output_grad else None,
        "output_by_batch": spread(row.output_spread) or None,
        "input_grad_total": row.input_grad_total,
        "input_grad": sizes(row.input_grad) or None,
        "input_by_batch": spread(row.input_spread) or None,
        "parameter_grad_norm": row.parameter_grad_norm,
        "parameter_grad": sizes(row.parameter_grad) or None,
        "parameters_by_batch": spread(row.parameter_spread) or None,
        "subtree_grad_norm": row.subtree_grad_norm,
        "subtree_grad": sizes(row.subtree_grad) or None,
        "weight_norm": row.weight_norm,
        "grad_to_weight": ratio(row),
        "status": row.status,
    }


def ratio(row: ParamGrad | LayerGrad) -> float | str | None:
    """The ratio to the weights; `undefined` where these are zero, nothing where there is no gradient."""
    gradient = row.gradient if isinstance(row, ParamGrad) else row.parameter_grad
    return row.ratio if gradient is None or row.ratio is not None else UNDEFINED


def sizes(size: Magnitude | None) -> dict[str, Any]:
    """Every norm that was measured, by column."""
    if size is None:
        return {}
    return {
        "grad_l1": size.l1,
        "grad_l2": size.norm,
        "grad_largest": size.largest,
        "grad_rms": size.rms,
        "count": size.count,
        "non_finite": size.non_finite,
        "non_finite_share": size.non_finite_share,
    }


def spread(found: Spread | None) -> dict[str, Any]:
    """The figures of the batches, by column; nothing where there are none."""
    if found is None:
        return {}
    figures = (found.mean, found.maximum, found.minimum, found.last, found.batches)
    return dict(zip(SPREAD, figures, strict=True))
