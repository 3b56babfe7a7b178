"""All of a model, and of the process, that an inspection must leave as it was."""

from __future__ import annotations

import random

import numpy as np
import torch


def state_of(model):
    return {
        "training": [module.training for module in model.modules()],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [parameter.grad for parameter in model.parameters()],
        "buffers": [(id(buffer), buffer.clone()) for buffer in model.buffers()],
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "hooks": [
            [
                *module._forward_hooks.items(),
                *module._forward_pre_hooks.items(),
                *module._backward_hooks.items(),
            ]
            for module in model.modules()
        ],
        "random": torch.get_rng_state(),
        "python_random": random.getstate(),
        "numpy_random": str(np.random.get_state()),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "grad_mode": torch.is_grad_enabled(),
    }


def assert_same_state(before, after):
    assert before["training"] == after["training"]
    assert before["flags"] == after["flags"]
    assert all(a is b for a, b in zip(before["grads"], after["grads"], strict=True))
    assert [identity for identity, _ in before["buffers"]] == [identity for identity, _ in after["buffers"]]
    for key in ("weights",):
        assert all(torch.equal(a, b) for a, b in zip(before[key], after[key], strict=True))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before["buffers"], after["buffers"], strict=True))
    for key in ("hooks", "python_random", "numpy_random"):
        assert before[key] == after[key]
    assert torch.equal(before["random"], after["random"])
    assert (before["fast"], before["grad_mode"]) == (after["fast"], after["grad_mode"])
