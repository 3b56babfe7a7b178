"""What the manifest says of a run's model, layers and pictures: plain records, as scripts read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import hookscope
from hookscope.cam.outputs import logits_of, probabilities_of
from hookscope.cam.targets import label_of
from hookscope.errors import UsageError
from hookscope.images import ImageFailure
from hookscope.layers import LayerInfo, Site, Status
from hookscope.models import LoadedModel

_TOP = 5


def layer_records(layer: LayerInfo) -> list[tuple[Site, dict[str, Any]]]:
    """The manifest's record of every tensor that a layer returned; one without a shape where there is none."""
    common = {"type": layer.type, "status": str(layer.status or Status.OK)}
    if not layer.outputs:
        site = Site(layer.name)
        return [(site, asdict(site) | {"shape": None, "layout": ""} | common)]
    return [
        (output.site, asdict(output.site) | {"shape": output.shape, "layout": output.layout} | common)
        for output in layer.outputs
    ]


def versions() -> dict[str, str]:
    """What produced the numbers."""
    return {
        "hookscope": hookscope.__version__,
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
    }


def model_record(loaded: LoadedModel) -> dict[str, Any]:
    """The model as the manifest describes it."""
    return {
        "name": loaded.name,
        "weights": loaded.weights,
        "random_weights": loaded.random_weights,
        "parameters": loaded.parameters,
        "preprocessing": loaded.preprocess,
    }


def failure_record(failure: ImageFailure) -> dict[str, Any]:
    return {"path": failure.path, "status": "error", "error": failure.error, "top": []}


def top_records(output: Any, pictures: int, categories: Sequence[str] | None) -> list[list[dict[str, Any]]]:
    """The best classes of every picture; none where the model is no classifier."""
    try:
        logits, probabilities = logits_of(output), probabilities_of(output)
    except UsageError:
        return [[] for _ in range(pictures)]
    if logits.shape[0] != pictures:
        return [[] for _ in range(pictures)]
    best = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices[:, :_TOP].tolist()
    return [
        [_top(index, row, logits, probabilities, categories) for index in best[row]]
        for row in range(pictures)
    ]


def _top(
    index: int, row: int, logits: Tensor, probabilities: Tensor, categories: Sequence[str] | None
) -> dict[str, Any]:
    return {
        "class": index,
        "label": label_of(index, categories),
        "score": float(logits[row, index]),
        "probability": float(probabilities[row, index]),
    }
