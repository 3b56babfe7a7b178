"""The further passes that some methods need: noisy pictures, masked pictures, silenced channels, the input's gradient.

Everything is run by the runner, beside its own probes, in batches under a memory bound. What is made of a pass is the
method's (`formulas`), which passes there are is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookscope.cam.formulas import masks, most_varied
from hookscope.cam.methods import Kind, Method
from hookscope.cam.scores import Score, objective
from hookscope.continuation import Continuation, ReplayFailed
from hookscope.errors import ModelError, UsageError
from hookscope.layers import ROOT, OutputInfo, Selection, Site
from hookscope.layouts import to_nchw
from hookscope.probes.cam import BiasProbe, InputGradientProbe, Key, MomentsProbe, Raw, flat_pictures
from hookscope.runner import Objective, Runner

if TYPE_CHECKING:
    from hookscope.hooks import Probe

INPUT = Site("input")
"""The site of maps that lie on the model's input, not on a layer."""

MEMORY_MIB = 64
"""What the passes of perturbed pictures may take beside the model, by estimate: decides how many run at once.

Larger batches are not faster on a processor: they leave its caches.
"""

# A layer's input, its output and what it works in, all at once.
_TENSORS_ALIVE = 3


@dataclass(frozen=True)
class Passes:
    """How the further passes are made.

    `samples`, `noise`: how many noisy pictures, and the noise's standard deviation as a share of the picture's range
    of values (SmoothGrad: Smilkov et al. 2017). `top_channels`: how many channels Score-CAM tries, all where `None`.
    `seed`: of the noise, which is the same for every picture. `tell`: hears which method has made how many passes
    more. `note`: hears what a reader of the maps should know.
    """

    samples: int = 16
    noise: float = 0.15
    top_channels: int | None = None
    seed: int = 0
    tell: Callable[[str, int], None] = lambda what, done: None
    note: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"samples {self.samples!r} are none", "1 or more noisy pictures")
        if not 0 < self.noise < float("inf"):
            raise UsageError(f"noise {self.noise!r} is no deviation", "a share above 0, such as 0.15")
        if self.top_channels is not None and self.top_channels < 1:
            raise UsageError(f"top channels {self.top_channels!r} are none", "1 or more")


@dataclass(frozen=True)
class Here:
    """What the passes are about: a batch, its scores, and the activations that its pass left.

    `x`: (N, C, H, W). `output`: the model's answer to it. `activations`: (N, C, h, w) float32 by site.
    """

    runner: Runner
    x: Tensor
    output: Any
    scores: Sequence[Score]
    activations: Mapping[Site, Tensor]
    infos: Mapping[Site, OutputInfo]
    biases: Mapping[str, Tensor]


def further(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
    """The maps of a method that needs passes of its own; none where one pass has given them."""
    made = _MAKERS.get(method.kind)
    # No picture of the batch may have what is asked for.
    return made(method, here, passes) if made is not None and here.scores else {}


def noisy(x: Tensor, count: int, deviation: float, seed: int) -> Iterator[Tensor]:
    """`count` copies of (N, C, H, W) with normal noise of `deviation` times each picture's range of values."""
    flat = x.float().flatten(1)
    scale = deviation * (flat.amax(dim=1) - flat.amin(dim=1))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        # The same for every picture, so that a batch is its pictures one by one.
        noise = torch.randn(x.shape[1:], generator=generator).to(x.device)
        yield (x.float() + scale[:, None, None, None] * noise).to(x)


def passes_needed(method: Method, channels: int, passes: Passes) -> int:
    """How many forward passes of one picture the method makes beside the first, for a site of that many channels."""
    tried = min(channels, passes.top_channels or channels)
    return {
        Kind.NOISY: passes.samples,
        Kind.INPUT: passes.samples if method.name == "smoothgrad" else 1,
        Kind.BIASES: 1,
        Kind.MASKED: tried,
        Kind.ABLATED: channels,
    }.get(method.kind, 0)


def _noisy_gradients(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
    layers = frozenset(site.layer for site in here.activations)
    probe = MomentsProbe(layers, here.infos.get)
    inputs = noisy(here.x, passes.samples, passes.noise, passes.seed)
    lost = _differentiated(here, method, inputs, probe, Selection(tuple(layers)), passes)
    found = {
        Key(site, method.name, score.name): _unseen(here.activations[site])
        for site, score in product(lost & here.activations.keys(), here.scores)
    }
    for (site, name), sums in probe.sums.items():
        if site in here.activations:
            first, second, third = (total / passes.samples for total in sums)
            made = method.compute(here.activations[site], (first, second, third))
            found[Key(site, method.name, name)] = Raw(made.float().cpu(), flat_pictures(second))
    return found


def _at_input(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
    several = method.name == "smoothgrad"
    inputs = noisy(here.x, passes.samples, passes.noise, passes.seed) if several else iter([here.x])
    probe = InputGradientProbe()
    _differentiated(here, method, inputs, probe, Selection((ROOT,)), passes)
    count = passes.samples if several else 1
    return {
        Key(INPUT, method.name, name): Raw(method.compute(total / count).cpu(), flat_pictures(total))
        for name, total in probe.sums.items()
    }


def _of_biases(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
    at_input, at_layers = InputGradientProbe(), BiasProbe(here.biases, here.infos.get)
    selection = Selection((ROOT, *(name for name in here.biases if name != ROOT)))
    lost = _differentiated(here, method, [here.x], (at_input, at_layers), selection, passes)
    defined = not any(site.layer in here.biases for site in lost)
    found = {}
    size = tuple(here.x.shape[2:])
    for name, gradient in at_input.sums.items():
        terms = [gradient * here.x.float(), *at_layers.terms.get(name, ())]
        made = method.compute(terms, size)
        made = made if defined else torch.full_like(made, float("nan"))
        found[Key(INPUT, method.name, name)] = Raw(made.cpu(), flat_pictures(gradient), defined)
    return found


def _differentiated(
    here: Here,
    method: Method,
    inputs: Any,
    probes: Probe | Sequence[Probe],
    selection: Selection,
    passes: Passes,
) -> frozenset[Site]:
    """One forward pass of each input, and a backward pass for each score; the sites whose gradient is not seen."""
    objectives: list[Objective] = list(filter(None, map(objective, here.scores)))
    told = probes if isinstance(probes, Sequence) else (probes,)
    lost = frozenset[Site]()
    with here.runner.aside(told, selection) as aside:
        for x in inputs:
            lost |= aside.forward(x, lambda output: objectives).unobservable
            passes.tell(method.name, len(x))
    return lost


def _unseen(activation: Tensor) -> Raw:
    """The maps of a site whose gradient cannot be seen: not zero, not known."""
    pictures, _, height, width = activation.shape
    return Raw(torch.full((pictures, height, width), float("nan")), (False,) * pictures, defined=False)


def _masked(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
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


def _ablated(method: Method, here: Here, passes: Passes) -> dict[Key, Raw]:
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


_MAKERS: dict[Kind, Callable[[Method, Here, Passes], dict[Key, Raw]]] = {
    Kind.NOISY: _noisy_gradients,
    Kind.INPUT: _at_input,
    Kind.BIASES: _of_biases,
    Kind.MASKED: _masked,
    Kind.ABLATED: _ablated,
}


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
