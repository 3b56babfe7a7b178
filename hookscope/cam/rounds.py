"""The further passes that some methods need: noisy pictures, masked pictures, silenced channels, the input's gradient.

Everything is run by the runner, beside its own probes, in batches under a memory bound. What is made of a pass is the
method's (`formulas`), which passes there are is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookscope.cam.here import Here, Passes
from hookscope.cam.methods import Kind, Method
from hookscope.cam.perturbed import ablated, masked
from hookscope.cam.scores import objective
from hookscope.layers import ROOT, Selection, Site
from hookscope.probes.cam import BiasProbe, InputGradientProbe, Key, MomentsProbe, Raw, flat_pictures
from hookscope.runner import Objective

if TYPE_CHECKING:
    from hookscope.hooks import Probe

INPUT = Site("input")
"""The site of maps that lie on the model's input, not on a layer."""


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


_MAKERS: dict[Kind, Callable[[Method, Here, Passes], dict[Key, Raw]]] = {
    Kind.NOISY: _noisy_gradients,
    Kind.INPUT: _at_input,
    Kind.BIASES: _of_biases,
    Kind.MASKED: masked,
    Kind.ABLATED: ablated,
}
