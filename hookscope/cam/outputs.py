"""What a model returned: class scores, a map of them, detections, or an embedding.

Owns where in a nested output the numbers to explain are. It must not know which of them are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import UsageError, near_misses
from hookscope.nested import tensors_in

_BOX_KEYS = frozenset({"boxes", "labels", "scores"})
# What torchvision's segmentation models and the outputs of many classifiers call their scores.
_USUAL_NAMES = ("logits", "out")
# What the outputs of transformers call tensors that are no scores.
_NO_SCORES = frozenset({"hidden_states", "last_hidden_state", "pooler_output", "embeddings", "image_embeds"})
_ROWS, _MAP = (1, 2), (4,)


class Answer(StrEnum):
    """What kind of output a model has."""

    CLASSES = "class scores"
    DENSE = "a map of class scores"
    BOXES = "detections"
    EMBEDDING = "an embedding"


def answer_of(output: Any, key: str | None = None) -> Answer:
    """The kind of a model's output.

    Args:
        output: what the model returned.
        key: path of the tensor that counts, such as `logits`, `0` or `1.scores`; `None`: found by itself.

    Raises:
        UsageError: there is no tensor under the key, or there are several that could be meant.
    """
    if key is None and is_detections(output):
        return Answer.BOXES
    found = _scores(_candidates(output, key), key)
    usual = [(path, tensor) for path, tensor in found if _is_usual(path)]
    for candidates in (usual, found):
        for dims, answer in ((_ROWS, Answer.CLASSES), (_MAP, Answer.DENSE)):
            if any(tensor.dim() in dims for _, tensor in candidates):
                # Says which there are, where they are several.
                raw_scores(output, key) if answer is Answer.CLASSES else dense_scores(output, key)
                return answer
    return Answer.EMBEDDING


def raw_scores(output: Any, key: str | None = None) -> Tensor:
    """The class scores in a model's output as they are: a floating tensor of shape (N, K) or (N,).

    It is the one under `key`, the only one of such a shape, or the only one called `logits` or `out`.

    Raises:
        UsageError: the output has no such tensor, or several.
    """
    found = _scores(_candidates(output, key), key)
    scores = _chosen(found, _ROWS)
    if scores is None:
        several = [path for path, tensor in found if tensor.dim() in _ROWS]
        what = "several tensors that could be class scores" if several else "no class scores (N, classes)"
        raise UsageError(
            f"the model returns {what}: {described(output)}",
            _keys(several)
            or "a classifier returns one: wrap the model, or give gradnorm --loss file.py:callable",
        )
    return scores


def logits_of(output: Any, key: str | None = None) -> Tensor:
    """(N, K) class scores; of a single score a picture, class 1 is the score and class 0 its negative.

    Raises:
        UsageError: the output has no class scores.
    """
    scores = raw_scores(output, key)
    if scores.dim() == 1 or scores.shape[1] == 1:
        positive = scores.reshape(-1, 1)
        return torch.cat((-positive, positive), dim=1)
    return scores


def probabilities_of(output: Any, key: str | None = None) -> Tensor:
    """(N, K) float64: the softmax of the scores; of a single score, its sigmoid for class 1."""
    scores = raw_scores(output, key).double()
    if scores.dim() == 1 or scores.shape[1] == 1:
        positive = scores.reshape(-1, 1)
        return torch.cat((torch.sigmoid(-positive), torch.sigmoid(positive)), dim=1)
    return scores.softmax(dim=1)


def dense_scores(output: Any, key: str | None = None) -> Tensor:
    """(N, K, h, w) class scores of every pixel; of a single channel, class 1 is it and class 0 its negative.

    Raises:
        UsageError: the output has no such map.
    """
    scores = _raw_map(output, key)
    return torch.cat((-scores, scores), dim=1) if scores.shape[1] == 1 else scores


def dense_probabilities(output: Any, key: str | None = None) -> Tensor:
    """(N, K, h, w) float64: the softmax over the classes of every pixel; of a single channel, the sigmoid."""
    scores = _raw_map(output, key).double()
    if scores.shape[1] == 1:
        return torch.cat((torch.sigmoid(-scores), torch.sigmoid(scores)), dim=1)
    return scores.softmax(dim=1)


def is_one_channel(output: Any, key: str | None = None) -> bool:
    """Whether a map of class scores has a single channel; then class 0 is where nothing is."""
    return _raw_map(output, key).shape[1] == 1


def _raw_map(output: Any, key: str | None) -> Tensor:
    found = _scores(_candidates(output, key), key)
    scores = _chosen(found, _MAP)
    if scores is None:
        several = [path for path, tensor in found if tensor.dim() in _MAP]
        what = (
            "several tensors that could be a map of class scores"
            if several
            else "no map of class scores (N, K, h, w)"
        )
        raise UsageError(
            f"the model returns {what}: {described(output)}",
            _keys(several) or "--pixels and --point are for segmentation",
        )
    return scores


def embedding_of(output: Any, key: str | None = None) -> Tensor:
    """(N, D) the picture's tensor in the output, flattened.

    Raises:
        UsageError: there is none, or several and none of them is meant by the key or the only one of two axes.
    """
    if key is None and is_detections(output):
        raise UsageError(
            "the model returns detections, which are no embedding", "--target top:K explains its best boxes"
        )
    found = _candidates(output, key)
    tensor = _chosen(found, _ROWS)
    if tensor is None and len(found) == 1:
        tensor = found[0][1]
    if tensor is None:
        raise UsageError(
            f"the model returns no single tensor: {described(output)}",
            _keys([path for path, _ in found]) or "a model that returns one",
        )
    return tensor.reshape(tensor.shape[0], -1)


def is_detections(output: Any) -> bool:
    """Whether it is a detector's output: for each picture a dict with boxes, labels and scores."""
    return (
        isinstance(output, Sequence)
        and len(output) > 0
        and all(isinstance(item, Mapping) and item.keys() >= _BOX_KEYS for item in output)
    )


def described(output: Any) -> str:
    """The tensors of an output and their shapes, for a message."""
    shapes = [f"{path or 'output'} {tuple(tensor.shape)}" for path, tensor in tensors_in(output)]
    return ", ".join(shapes[:6]) or "no tensor"


Candidates = list[tuple[str, Tensor]]


def _candidates(output: Any, key: str | None) -> Candidates:
    found = [(path, tensor) for path, tensor in tensors_in(output) if tensor.is_floating_point()]
    if key is None:
        return found
    kept = [(path, tensor) for path, tensor in found if path == key]
    if not kept:
        paths = [path or "(the output itself)" for path, _ in found]
        hint = near_misses(key, paths) or f"there are: {', '.join(paths[:8])}"
        raise UsageError(f"--logits {key!r}: the model's output has no such tensor", hint)
    return kept


def _scores(candidates: Candidates, key: str | None) -> Candidates:
    """Those that can be scores: what is called something else is, unless the key says so."""
    if key is not None:
        return candidates
    return [(path, tensor) for path, tensor in candidates if _NO_SCORES.isdisjoint(path.split("."))]


def _chosen(candidates: Candidates, dims: tuple[int, ...]) -> Tensor | None:
    """The only candidate of so many axes, or the only one of them that has the usual name."""
    fitting = [(path, tensor) for path, tensor in candidates if tensor.dim() in dims]
    if len(fitting) > 1:
        fitting = [(path, tensor) for path, tensor in fitting if _is_usual(path)]
    return fitting[0][1] if len(fitting) == 1 else None


def _is_usual(path: str) -> bool:
    return path.rpartition(".")[2] in _USUAL_NAMES


def _keys(paths: Sequence[str]) -> str:
    """How to choose one of them, in words."""
    return " or ".join(f"--logits {path}" for path in paths[:3] if path)
