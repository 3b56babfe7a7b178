"""Reference values by the plainest means: stored outputs of a twin without in-place ops, and autograd on them."""

from __future__ import annotations

import torch
from nets import out_of_place
from torch import nn

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.nested import tensors_in


def score(output):
    """A scalar of any model output: every floating tensor in it, weighted so that no two entries count alike."""
    total = 0.0
    for _, tensor in tensors_in(output):
        if tensor.is_floating_point():
            weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            total = total + (tensor * weights).sum()
    return total


def reference(model: nn.Module, x: torch.Tensor, scalar=score):
    """Outputs and their gradients by site, of a forward and a backward pass with nothing in place."""
    stored: dict[Site, torch.Tensor] = {}
    counts: dict[str, int] = {}
    handles = []

    def hook_for(name):
        def hook(module, args, output):
            call = counts.get(name, 0)
            counts[name] = call + 1
            for path, tensor in tensors_in(output):
                stored[Site(name, call, path)] = tensor

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(hook_for(name or ".")))
    try:
        with out_of_place(model):
            value = scalar(model(x.clone().requires_grad_()))
    finally:
        for handle in handles:
            handle.remove()
    floating = {site: t for site, t in stored.items() if t.requires_grad}
    gradients = torch.autograd.grad(value, list(floating.values()), allow_unused=True)
    values = {site: tensor.detach() for site, tensor in stored.items()}
    return values, dict(zip(floating, gradients, strict=True))


class Recorder(Probe):
    """Copies of everything a probe can be told."""

    needs = Needs(inputs=True, outputs=True, gradients=True, input_gradients=True, param_gradients=True)

    def __init__(self, *, params=True):
        self.needs = Needs(
            inputs=True, outputs=True, gradients=True, input_gradients=params, param_gradients=params
        )
        self.inputs, self.outputs, self.gradients = {}, {}, {}
        self.input_gradients, self.params = {}, {}

    def on_input(self, site, tensor):
        self.inputs[site] = tensor.clone()

    def on_output(self, site, tensor):
        self.outputs[site] = tensor.clone()

    def on_gradient(self, site, tensor, objective):
        assert site not in self.gradients, f"{site} was told twice"
        self.gradients[site] = tensor.clone()

    def on_input_gradient(self, site, tensor, objective):
        self.input_gradients[site] = tensor.clone()

    def on_param_gradient(self, name, tensor, objective):
        self.params[name] = None if tensor is None else tensor.clone()
