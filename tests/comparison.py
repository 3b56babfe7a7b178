"""What hookscope sees of a model, held against autograd on the plain model and against the naive recipe.

Owns what is compared and how much may differ; what is right is in `truth`, which models there are in the callers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import nn
from truth import Recorder, reference, score

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.library import feature_maps
from hookscope.nested import tensors_in
from hookscope.runner import Objective, running

# Whole graph: the same kernels run in the same order, and what is found is zero almost everywhere. The rest is
# float32 rounding: an in-place op and its twin may take another kernel, and a gradient is a sum over all uses of
# a tensor, whose order is not fixed.
ACTIVATION_LIMIT = 1e-6
GRADIENT_LIMIT = 1e-5
# Cut graph, or none: where a parameter needs no gradient, torch's linear takes another kernel, so that values
# differ in the last bits (1.3e-6 was seen), and every layer behind carries that on.
FROZEN_LIMIT = 1e-4
SPLITS = 3

_OWN_OUTPUT = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm)


@dataclass(frozen=True)
class Found:
    """What one model showed: gaps are max |seen - true| / max |true|, the worst over all sites.

    `activation` and `gradient` are against the twin without in-place ops, `parameter` against plain autograd,
    `split` against autograd on the model cut open at `SPLITS` layers. `cut`: values and gradients of those layers
    in hookscope's cut mode, against the twin; `stayed_cut`: it did not fall back on the whole graph. `graphless`:
    values at every site of a pass with nothing to differentiate, likewise.
    `rewritten` of the `leaves` are wrong if only `output.detach()` is kept; `raises`: full backward hooks do.
    """

    sites: int
    gradients: int
    zero_gradients: int
    same_sites: bool
    output: float
    activation: float
    gradient: float
    parameter: float
    split: float
    cut: float
    graphless: float
    stayed_cut: bool
    leaves: int
    rewritten: int
    raises: bool

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it must be, in words; empty where everything holds."""
        limits = {
            "output": ACTIVATION_LIMIT,
            "activation": ACTIVATION_LIMIT,
            "gradient": GRADIENT_LIMIT,
            "parameter": GRADIENT_LIMIT,
            "split": GRADIENT_LIMIT,
            "cut": FROZEN_LIMIT,
            "graphless": FROZEN_LIMIT,
        }
        off = {name: getattr(self, name) for name, limit in limits.items() if getattr(self, name) > limit}
        said = {
            "no sites": not self.sites,
            "not the twin's sites": not self.same_sites,
            "no gradients": not self.gradients,
            "the cut graph was run whole": not self.stayed_cut,
            "half the gradients are zero": 2 * self.zero_gradients > self.gradients,
        }
        gaps = (f"{name} off by {size:.2g}" for name, size in off.items())
        return (*gaps, *(words for words, holds in said.items() if holds))


class ParameterGaps(Probe):
    """Compares the parameters' gradients as they come: a copy of them all would not fit beside the largest model."""

    needs = Needs(param_gradients=True)

    def __init__(self, wanted: Mapping[str, torch.Tensor | None]):
        self._wanted = wanted
        self._gaps: dict[str, float] = {}

    def on_param_gradient(self, name, tensor, objective):
        self._gaps[name] = gap(tensor, self._wanted[name])

    @property
    def worst(self) -> float:
        return max(self._gaps.values()) if self._gaps.keys() == self._wanted.keys() else inf


def built(make: Callable[..., nn.Module], x: torch.Tensor, **options) -> nn.Module:
    """A seeded random model in eval mode through which both values and gradients keep a sensible size."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # Of torchvision's own making: googlenet and inception announce another default.
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = make(weights=None, **options).eval()
    _fill_zeros(model)
    _calibrate(model, x)
    return model


def examine(model: nn.Module, x: torch.Tensor) -> Found:
    """Every site of the model under hookscope, against the plainest ways to the same numbers."""
    values, gradients = reference(model, x)
    gradients = {site: gradient for site, gradient in gradients.items() if gradient is not None}
    leaves, rewritten = naive_rewritten(model, x, values)
    places = split_sites(model, gradients)
    chosen = {site.layer for site in places}
    cut, stayed_cut = _cut(model, x, sorted(chosen))
    output, parameters = _plain(model, x)
    # That a probe needs the parameters' gradients is what keeps the graph whole for both.
    seen, at_parameters = Recorder(params=False), ParameterGaps(parameters)
    seen.needs = Needs(outputs=True, gradients=True)
    with running(model, [seen, at_parameters], ["**", "."]) as runner:
        done = runner.forward(x, lambda output: [Objective("score", score)])
    return Found(
        sites=len(seen.outputs),
        gradients=len(seen.gradients),
        zero_gradients=sum(not gradient.any() for gradient in seen.gradients.values()),
        same_sites=seen.outputs.keys() == values.keys() and seen.gradients.keys() == gradients.keys(),
        output=worst_gap(dict(tensors_in(done.output)), output),
        activation=worst_gap(seen.outputs, values),
        gradient=worst_gap(seen.gradients, gradients),
        parameter=at_parameters.worst,
        split=worst_gap(
            {site: seen.gradients.get(site) for site in places}, split_gradients(model, x, places)
        ),
        cut=max(
            worst_gap(cut.outputs, _of(chosen, values)), worst_gap(cut.gradients, _of(chosen, gradients))
        ),
        graphless=worst_gap(feature_maps(model, x, ["**", "."]), values),
        stayed_cut=stayed_cut,
        leaves=leaves,
        rewritten=rewritten,
        raises=naive_raises(model, x),
    )


def worst_gap(seen: Mapping, wanted: Mapping) -> float:
    """The largest gap over all keys; infinite where a key is on one side only."""
    return max((gap(seen.get(key), wanted.get(key)) for key in {*seen, *wanted}), default=0.0)


def gap(seen: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """max |seen - wanted| / max |wanted|; infinite where they cannot be compared."""
    if seen is None or wanted is None:
        return 0.0 if seen is wanted else inf
    if seen.shape != wanted.shape or seen.dtype != wanted.dtype:
        return inf
    if torch.equal(seen, wanted):
        return 0.0
    ratio = float((seen.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    return ratio if isfinite(ratio) else inf


def split_sites(model: nn.Module, gradients: Mapping[Site, torch.Tensor]) -> list[Site]:
    """Some sites along the model whose output is memory of the layer's own: there it can be cut open by hand."""
    modules = dict(model.named_modules())
    fit = [site for site in gradients if isinstance(modules.get(site.layer), _OWN_OUTPUT)]
    return [fit[(2 * part + 1) * len(fit) // (2 * SPLITS)] for part in range(SPLITS)]


def split_gradients(model: nn.Module, x: torch.Tensor, sites: list[Site]) -> dict[Site, torch.Tensor]:
    """Plain autograd on the model cut open at each site: the layer's output becomes a leaf."""
    return {site: _split_gradient(model, x, site) for site in sites}


def naive_rewritten(
    model: nn.Module, x: torch.Tensor, values: Mapping[Site, torch.Tensor]
) -> tuple[int, int]:
    """Of how many leaf outputs, how many are no longer true if a forward hook keeps `output.detach()`."""
    kept: dict[Site, torch.Tensor] = {}

    def keep(site: Site, output):
        kept.update(
            {Site(site.layer, site.call, path): tensor.detach() for path, tensor in tensors_in(output)}
        )

    # With the graph that the recipe has: without one, attention takes a fused path of slightly other values.
    with _listening(model, keep):
        model(x)
    return len(kept), sum(gap(tensor, values[site]) > ACTIVATION_LIMIT for site, tensor in kept.items())


def naive_raises(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a full backward hook on every leaf makes the model raise."""
    entering = x.clone().requires_grad_()
    with ExitStack() as stack:
        for module in _leaves(model).values():
            stack.callback(module.register_full_backward_hook(lambda module, inward, outward: None).remove)
        try:
            torch.autograd.grad(score(model(entering)), entering)
        except RuntimeError as error:
            return "BackwardHookFunction" in str(error)
    return False


def _fill_zeros(model: nn.Module) -> None:
    """Heads that begin at zero (ViT's) would stop every gradient."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)


def _calibrate(model: nn.Module, x: torch.Tensor) -> None:
    """One pass that fits the batch norms: unfitted ones let a deep net's values explode or die out."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def _plain(model: nn.Module, x: torch.Tensor) -> tuple[dict, dict]:
    """Output and gradients of the parameters with no hook anywhere."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    output = model(x)
    gradients = torch.autograd.grad(score(output), list(named.values()), allow_unused=True)
    values = {path: tensor.detach() for path, tensor in tensors_in(output)}
    return values, dict(zip(named, gradients, strict=True))


def _cut(model: nn.Module, x: torch.Tensor, layers: list[str]) -> tuple[Recorder, bool]:
    """What is seen at the layers when the graph begins there, and whether it did to the end."""
    seen = Recorder(params=False)
    with running(model, [seen], layers) as runner:
        runner.forward(x, lambda output: [Objective("score", score)])
        return seen, runner.attachment.cut


def _of(layers: set[str], by_site: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
    return {site: tensor for site, tensor in by_site.items() if site.layer in layers}


def _split_gradient(model: nn.Module, x: torch.Tensor, site: Site) -> torch.Tensor:
    leaves = []

    def split(module, args, output):
        leaves.append(output.detach().clone().requires_grad_())
        # Not the leaf itself: autograd refuses to write into one.
        return leaves[-1].clone() if len(leaves) == site.call + 1 else None

    handle = model.get_submodule(site.layer).register_forward_hook(split)
    try:
        return torch.autograd.grad(score(model(x)), leaves[site.call : site.call + 1] or [x])[0]
    finally:
        handle.remove()


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if not list(module.children())}


@contextmanager
def _listening(model: nn.Module, told: Callable):
    counts: dict[str, int] = {}

    def hook_for(name: str):
        def hook(module, args, output):
            counts[name] = counts.get(name, -1) + 1
            told(Site(name, counts[name]), output)

        return hook

    with ExitStack() as stack:
        for name, module in _leaves(model).items():
            stack.callback(module.register_forward_hook(hook_for(name)).remove)
        yield
