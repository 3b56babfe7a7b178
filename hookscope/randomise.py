"""Layers with random parameters for a while: the model randomisation test of whether a map depends on the weights.

Swaps parameters' data and puts it back; it runs no model and compares no map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hookscope.errors import UsageError, near_misses
from hookscope.layers import modules_by_name


@contextmanager
def randomised(model: nn.Module, names: Iterable[str], seed: int) -> Iterator[None]:
    """A block in which the named modules' own parameters are random; after it they are as they were, bit for bit.

    Adebayo et al., Sanity Checks for Saliency Maps, NeurIPS 2018. Each floating-point parameter is drawn from a
    normal distribution of its own mean and standard deviation, so that one that is constant stays so. The draw
    depends on the seed and the parameter's first name alone. Put back by swapping, with nothing written: flags,
    gradients, version counters and the global random state are not touched. Parameters of modules inside a named one,
    those without values yet and those that are not floating-point stay as they are.

    Args:
        model: whose parameters are swapped in place.
        names: first names of modules, as in `layers.modules_by_name`; the root is `.`.
        seed: of the draws.

    Raises:
        UsageError: the model has no module of a name.
    """
    kept = []
    chosen = _chosen(model, names)
    try:
        for name, parameter in chosen.items():
            original = parameter.data
            drawn = _drawn(parameter, f"{seed}:{name}")
            kept.append((parameter, original))
            parameter.data = drawn
        yield
    finally:
        for parameter, original in kept:
            parameter.data = original


def cascade(names: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """Which layers each stage randomises, from the top down: with 4 stages the last quarter, half, ... and all.

    Cumulative, as the cascading randomisation of Adebayo et al. 2018. Shares are rounded up; stages that would
    repeat the one before are left out, so that there are never more stages than layers.

    Args:
        names: in execution order.
        stages: how many, at least 1.

    Raises:
        UsageError: fewer than 1.
    """
    if stages < 1:
        raise UsageError(f"{stages} stages are too few", "take 1 or more")
    counts = {-(-len(names) * stage // stages) for stage in range(1, stages + 1)}
    return [tuple(names[len(names) - count :]) for count in sorted(counts) if count]


def _chosen(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters to draw, each once, by its first name in the model, however it was reached."""
    modules = modules_by_name(model)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {}
    for name in names:
        if name not in modules:
            hint = near_misses(name, modules) or "`hookscope layers MODEL` lists the names"
            raise UsageError(f"no module is named {name!r}", hint)
        own = modules[name].parameters(recurse=False)
        chosen.update({first_names[id(one)]: one for one in own if _can_be_drawn(one)})
    return chosen


def _can_be_drawn(parameter: nn.Parameter) -> bool:
    return (
        not is_lazy(parameter)
        and parameter.is_floating_point()
        and not parameter.is_meta
        and parameter.numel() > 0
    )


def _drawn(parameter: nn.Parameter, key: str) -> torch.Tensor:
    """New values in the parameter's own shape, dtype, device and memory format; drawn on the CPU, alike anywhere."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1
    generator = torch.Generator().manual_seed(seed)
    values = parameter.detach()
    exact = values.cpu().to(torch.promote_types(values.dtype, torch.float32))
    noise = torch.randn(values.shape, generator=generator, dtype=exact.dtype)
    return torch.empty_like(values).copy_(exact.mean() + exact.std(correction=0) * noise)
