"""Score-CAM and Ablation-CAM: the model on pictures seen through a channel, and without a channel.

Run without a graph, in batches under a memory bound, all scores from the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.cam.formulas import masks, most_varied
from hookscope.cam.here import Here, Passes
from hookscope.cam.methods import Method
from hookscope.cam.scores import Score
from hookscope.continuation import Continuation, ReplayFailed
from hookscope.errors import ModelError
from hookscope.layers import OutputInfo, Site
from hookscope.layouts import to_nchw
from hookscope.probes.cam import Key, Raw

MEMORY_MIB = 64
"""What the passes of perturbed pictures may take beside the model, by estimate: decides how many run at once.

Larger batches are not faster on a processor: they leave its caches.
"""

# A layer's input, its output and what it works in, all at once.
_TENSORS_ALIVE = 3


def masked(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
    """Score-CAM: the model on the picture seen through each channel, scaled up to a mask."""
    size = (here.x.shape[2], here.x.shape[3])
    together = at_once(here.infos, here.x)

    def scored(site: Site, picture: int, activation: Tensor) -> Callable[[int], Tensor]:
        wanted = passes.top_channels or activation.shape[1]
        channels = most_varied(activation, min(wanted, activation.shape[1]))

        def run(part: Tensor) -> Tensor:
            mask = masks(activation, part, size).to(here.x)
            output = here.runner.outputs(here.x[picture : picture + 1] * mask)
            passes.tell(method.name, len(part))
            return _values(here.scores, output, picture, len(part))

        values = _in_parts(channels, together, run).to(activation)
        return lambda score: method.compute(activation, values[score], channels)

    return _picture_by_picture(method, here, scored)


def ablated(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
    """Ablation-CAM: the rest of the model after the layer with each channel in turn set to zero."""

    def scored(site: Site, picture: int, activation: Tensor) -> Callable[[int], Tensor]:
        rest = here.runner.continuation(here.x[picture : picture + 1], site)
        info, channels = here.infos[site], torch.arange(activation.shape[1])
        together = at_once(here.infos, here.x, site if rest.replayed else None)
        alone = _values(here.scores, rest(rest.value.clone()), picture, 1)

        def run(part: Tensor) -> Tensor:
            passes.tell(method.name, len(part))
            without = _values(here.scores, _without(rest, part, info), picture, len(part) + (len(part) > 1))
            if len(part) == 1:
                return torch.cat((alone, without))
            # The first row is the unchanged picture: what differs by the size of a batch alone is no drop.
            return torch.cat((without[:, :1].expand(-1, len(part)), without[:, 1:]))

        clean, without = _in_parts(channels, together, run).to(activation).chunk(2)
        if rest.note:
            passes.note(f"{method.name}: {rest.note}")
        if _depends_on_company(
            clean, _values(here.scores, rest(rest.value.clone()), picture, 1).to(activation)
        ):
            passes.note(
                f"{method.name}: the score of an unchanged picture depends on what runs beside or before it; "
                "so does its map"
            )
        drops = clean[:, :1] - (clean - without)
        return lambda score: method.compute(activation, clean[score, 0], drops[score])

    return _picture_by_picture(method, here, scored)


def _in_parts(channels: Tensor, together: int, run: Callable[[Tensor], Tensor]) -> Tensor:
    """What `run` gives for all channels, along the last axis: so many at once, or one by one where the model must."""
    parts = []
    for part in torch.split(channels, together):
        try:
            parts.append(run(part))
        except ModelError:
            if len(part) == 1:
                raise
            # A model may take one picture only.
            parts += [run(single) for single in torch.split(part, 1)]
    return torch.cat(parts, dim=-1)


def _depends_on_company(clean: Tensor, alone: Tensor) -> bool:
    """Whether scores (S, M) of one unchanged picture beside others are not what it has alone, (S, 1)."""
    slack = 1e-2 * alone.abs() + 1e-6
    return bool(((clean - alone).abs() > slack).any())


def _picture_by_picture(
    method: Method,
    here: Here,
    scored: Callable[[Site, int, Tensor], Callable[[int], Tensor]],
) -> dict[Key, Raw]:
    """The maps of every score, each picture's passes made once for all of them; 0 for a picture without the target."""
    found: dict[Key, list[Tensor]] = {}
    for site, activations in here.activations.items():
        for picture in range(len(activations)):
            activation = activations[picture : picture + 1]
            there = [not score.targets[picture].missing for score in here.scores]
            made = scored(site, picture, activation) if any(there) else None
            for place, score in enumerate(here.scores):
                empty = activation.new_zeros(1, *activation.shape[2:])
                one = made(place) if made is not None and there[place] else empty
                found.setdefault(Key(site, method.name, score.name), []).append(one)
    return {key: _stacked(maps) for key, maps in found.items()}


def _without(rest: Continuation, channels: Tensor, info: OutputInfo) -> Any:
    """The model's output with each of the channels in turn zero on the picture; of several, unchanged before them."""
    first = int(len(channels) > 1)

    def values() -> Tensor:
        copies = rest.value.expand(len(channels) + first, *rest.value.shape[1:]).clone()
        to_nchw(copies, info.layout, info.grid)[torch.arange(len(channels)) + first, channels] = 0
        return copies

    try:
        return rest(values(), given_away=True)
    except ReplayFailed:
        return rest(values(), given_away=True)


def _values(scores: Sequence[Score], output: Any, picture: int, count: int) -> Tensor:
    """(S, M) every score of an output of `count` changed copies of one picture."""
    pictures = torch.full((count,), picture)
    return torch.stack([score.values(output, pictures).float() for score in scores])


def _stacked(maps: Sequence[Tensor]) -> Raw:
    values = torch.cat(list(maps)).float().cpu()
    return Raw(values, (False,) * len(values))


def at_once(infos: Mapping[Site, OutputInfo], x: Tensor, after: Site | None = None) -> int:
    """How many pictures may run at once; `after`: only what is computed after that site takes memory."""
    first = infos[after].order if after is not None else 0
    numbers = max((_numbers(info) for info in infos.values() if info.order >= first), default=x[0].numel())
    return max(1, int(MEMORY_MIB * 2**20 / (_TENSORS_ALIVE * numbers * x.element_size())))


def _numbers(info: OutputInfo) -> int:
    total = 1
    for size in info.shape:
        total *= size
    return total // max(1, info.shape[0]) if info.shape else 1
