"""What the manifest says of a run's model, layers and pictures: plain records, as scripts read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

import hookscope
from hookscope.cam.areas import class_areas
from hookscope.cam.outputs import (
    Answer,
    answer_of,
    dense_probabilities,
    dense_scores,
    logits_of,
    probabilities_of,
)
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


def top_records(
    output: Any, pictures: int, categories: Sequence[str] | None, key: str | None = None
) -> list[list[dict[str, Any]]]:
    """What the model says of every picture, the best first: classes with their score and probability.

    Of a detector the classes of the best boxes. Of a segmentation those of the most pixels, with their mean score and
    probability over these and their share of the picture (`area`). Nothing where the output says no class, or not
    which tensor does (`key`).
    """
    try:
        found = _BEST[answer_of(output, key)](output, key)
    except UsageError:
        found = []
    if len(found) != pictures:
        return [[] for _ in range(pictures)]
    return [[_top(best, categories) for best in picture] for picture in found]


@dataclass(frozen=True)
class _Best:
    index: int
    score: float
    probability: float
    area: float | None = None


def _top(best: _Best, categories: Sequence[str] | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "class": best.index,
        "label": label_of(best.index, categories),
        "score": best.score,
        "probability": best.probability,
    }
    return record if best.area is None else record | {"area": best.area}


def _best_classes(output: Any, key: str | None) -> list[list[_Best]]:
    logits, probabilities = logits_of(output, key).detach(), probabilities_of(output, key).detach()
    order = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices[:, :_TOP].tolist()
    return [
        [_Best(index, float(logits[row, index]), float(probabilities[row, index])) for index in indices]
        for row, indices in enumerate(order)
    ]


def _best_boxes(output: Any, key: str | None) -> list[list[_Best]]:
    found = []
    for answer in output:
        scores = answer["scores"].detach().float()
        order = torch.sort(scores, descending=True, stable=True).indices[:_TOP].tolist()
        found.append([_Best(int(answer["labels"][at]), float(scores[at]), float(scores[at])) for at in order])
    return found


def _largest_areas(output: Any, key: str | None) -> list[list[_Best]]:
    found = []
    sure = dense_probabilities(output, key).detach()
    for scores, probabilities in zip(dense_scores(output, key).detach()[:, None], sure, strict=True):
        winners = scores[0].argmax(dim=0)
        areas = class_areas(winners[None], len(scores[0]))[0]
        order = torch.sort(areas, descending=True, stable=True).indices[:_TOP].tolist()
        found.append(
            [
                _Best(
                    index,
                    float(scores[0, index][winners == index].double().mean()),
                    float(probabilities[index][winners == index].mean()),
                    float(areas[index]) / winners.numel(),
                )
                for index in order
                if areas[index]
            ]
        )
    return found


_BEST: dict[Answer, Callable[[Any, str | None], list[list[_Best]]]] = {
    Answer.CLASSES: _best_classes,
    Answer.BOXES: _best_boxes,
    Answer.DENSE: _largest_areas,
    Answer.EMBEDDING: lambda output, key: [],
}
