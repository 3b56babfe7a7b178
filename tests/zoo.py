"""`python tests/zoo.py [GLOB]`: every torchvision classifier, held against autograd on the plain model.

Owns what is compared and how; what is right is in `truth`. Each model gets a process of its own, so that memory
returns, and random weights, so that no network is needed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import inf, isfinite

import torch
import torchvision
from torch import nn
from truth import Recorder, reference, score

from hookscope.hooks import Needs, Probe, tensors_in
from hookscope.layers import Site
from hookscope.runner import Objective, running

# Whole graph: the same kernels run in the same order, and what is found is zero almost everywhere. The rest is
# float32 rounding: an in-place op and its twin may take another kernel, and a gradient is a sum over all uses of
# a tensor, whose order is not fixed.
ACTIVATION_LIMIT = 1e-6
GRADIENT_LIMIT = 1e-5
# Cut graph: with frozen parameters torch's linear and convolution take other kernels, so that values differ in
# the last bits (1.3e-6 of the gradient was seen), and every layer behind carries that on.
CUT_LIMIT = 1e-4
SPLITS = 3
OPTIONS = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}
SIZES = {"inception_v3": 299}

_OWN_OUTPUT = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm)


@dataclass(frozen=True)
class Found:
    """What one model showed: gaps are max |seen - true| / max |true|, the worst over all sites.

    `activation` and `gradient` are against the twin without in-place ops, `parameter` against plain autograd,
    `split` against autograd on the model cut open at `SPLITS` layers. `cut`: values and gradients of those layers
    in hookscope's cut mode, against the twin; `stayed_cut`: it did not fall back on the whole graph.
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
            "cut": CUT_LIMIT,
        }
        gaps = [
            f"{name} off by {getattr(self, name):.2g}"
            for name in limits
            if getattr(self, name) > limits[name]
        ]
        said = {
            "no sites": not self.sites,
            "not the twin's sites": not self.same_sites,
            "no gradients": not self.gradients,
            "the cut graph was run whole": not self.stayed_cut,
            "half the gradients are zero": 2 * self.zero_gradients > self.gradients,
        }
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

    with torch.no_grad(), _listening(model, keep):
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


def _alone(name: str) -> None:
    """One model in this process: what it showed, as a line of JSON."""
    begun = time.perf_counter()
    size = SIZES.get(name, 224)
    x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    found = examine(built(torchvision.models.get_model_builder(name), x, **OPTIONS.get(name, {})), x)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"found": asdict(found), "seconds": time.perf_counter() - begun, "peak_mib": peak_mib}))


def _in_its_own_process(name: str) -> tuple[Found | None, dict, str]:
    command = [sys.executable, __file__, "--alone", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    told = json.loads(done.stdout.splitlines()[-1])
    found = Found(**told["found"])
    return found, told, "; ".join(found.problems)


_HEAD = (
    f"{'model':22}{'sites':>6}{'activation':>12}{'gradient':>10}{'parameter':>11}{'split':>9}{'cut':>9}"
    f"{'rewritten':>12}{'raises':>8}{'s':>7}{'MiB':>7}"
)


def _line(name: str, found: Found | None, told: dict, problem: str) -> str:
    verdict = f"FAIL: {problem}" if problem else "ok"
    if found is None:
        return f"{name:22}{verdict}"
    return (
        f"{name:22}{found.sites:6}{found.activation:12.1e}{found.gradient:10.1e}{found.parameter:11.1e}"
        f"{found.split:9.1e}{found.cut:9.1e}{f'{found.rewritten}/{found.leaves}':>12}"
        f"{'yes' if found.raises else 'no':>8}{told['seconds']:7.1f}{told['peak_mib']:7}  {verdict}"
    )


def _summary(results: list[tuple[Found | None, dict, str]]) -> str:
    found = [one for one, _, _ in results if one is not None]
    failed = sum(bool(problem) for _, _, problem in results)
    return (
        f"{len(results)} models, {failed} failed, {sum(one.sites for one in found)} sites; "
        f"the naive recipe keeps wrong values in {sum(one.rewritten > 0 for one in found)} "
        f"({sum(one.rewritten for one in found)} of {sum(one.leaves for one in found)} leaf outputs) "
        f"and raises in {sum(one.raises for one in found)}; "
        f"{sum(told.get('seconds', 0) for _, told, _ in results):.0f} s, "
        f"peak {max((told.get('peak_mib', 0) for _, told, _ in results), default=0)} MiB"
    )


def main() -> int:
    """0 where every chosen model holds, else 1; 2 where the glob chooses none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("glob", nargs="?", default="*", help="which of torchvision's classifiers")
    parser.add_argument("--alone", action="store_true", help="GLOB is one name: examine it here, print JSON")
    options = parser.parse_args()
    if options.alone:
        _alone(options.glob)
        return 0
    available = torchvision.models.list_models(module=torchvision.models)
    names = [name for name in available if fnmatchcase(name, options.glob)]
    if not names:
        parser.error(f"no classifier of torchvision matches {options.glob!r}")
    print(_HEAD)
    results = []
    for name in names:
        results.append(_in_its_own_process(name))
        print(_line(name, *results[-1]), flush=True)
    print(_summary(results))
    return int(any(problem for _, _, problem in results))


if __name__ == "__main__":
    sys.exit(main())
