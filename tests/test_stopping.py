"""A pass that is left early has told all that was asked for, nothing else, and leaves no trace."""

from __future__ import annotations

import gc
import weakref

import nets
import pytest
import torch
from modelstate import assert_same_state, state_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from truth import Recorder, score

from hookscope.errors import ModelError, UsageError
from hookscope.hooks import Edit, Needs, Probe, attached
from hookscope.layers import Site
from hookscope.runner import Objective, running


class Outputs(Probe):
    needs = Needs(outputs=True)

    def __init__(self):
        self.outputs = {}

    def on_output(self, site, tensor):
        self.outputs[site] = tensor.clone()


def stopped(model, x, *sites, layers=("**", ".")):
    """What a pass that may be left after these sites told, and what it was."""
    probe = Outputs()
    with running(model, [probe], layers) as runner:
        done = runner.forward(x, until=frozenset(sites))
    return probe.outputs, done


def whole(model, x, layers=("**", ".")):
    probe = Outputs()
    with running(model, [probe], layers) as runner:
        done = runner.forward(x)
    return probe.outputs, done


@pytest.mark.parametrize("make", nets.AWKWARD.values(), ids=nets.AWKWARD)
def test_a_pass_left_after_any_site_told_what_a_whole_one_tells_until_then(make):
    model, x = nets.seeded(make), nets.picture()
    wanted, complete = whole(model, x)
    assert not complete.stopped
    before = state_of(model)
    for site in complete.sites:
        seen, done = stopped(model, x, site)
        same_call = [s for s in complete.sites if (s.layer, s.call) == (site.layer, site.call)]
        last = max(complete.sites.index(s) for s in same_call)
        assert done.sites == complete.sites[: last + 1] == tuple(seen)
        assert (done.stopped, done.output) == (True, None)
        for at, value in seen.items():
            torch.testing.assert_close(value, wanted[at], rtol=0, atol=0, msg=f"{at} until {site}")
    assert_same_state(before, state_of(model))


def test_the_model_runs_no_further_than_the_last_site():
    model, x, called = nets.seeded(nets.ReluThrice), nets.picture(), []
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
    _, done = stopped(model, x, Site("relu", 1), Site("a"), layers=["relu", "a"])
    assert called == ["a", "relu", "b", "relu"]
    assert [str(site) for site in done.sites] == ["a", "relu", "relu@1"]


@pytest.mark.parametrize(
    "sites",
    [(), (Site("relu", 3),), (Site("a"), Site("relu", 0, "0")), (Site("spare"),)],
    ids=["none", "call-too-many", "one-of-two", "layer-not-chosen"],
)
def test_a_pass_that_never_returns_them_all_is_a_whole_one(sites):
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    _, done = stopped(model, x, *sites)
    assert not done.stopped
    torch.testing.assert_close(done.output, model(x).detach(), rtol=0, atol=0)


def test_passes_of_one_runner_may_stop_or_not_in_any_order():
    model, x, probe = nets.seeded(nets.ReluThrice), nets.picture(), Outputs()
    with running(model, [probe], "**") as runner:
        for until, last in [("b", "b"), (None, "fc"), ("a", "a"), ("a", "a"), (None, "fc")]:
            done = runner.forward(x, until=until and frozenset({Site(until)}))
            assert str(done.sites[-1]) == last
            assert done.stopped is (until is not None)
            assert runner.attachment.calls["a"] == 1


class Guarded(nn.Module):
    """Does what models do about exceptions: `how` it takes that of its first layer."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.fallback = nn.Linear(3, 3), nn.Linear(3, 3)
        self.cleaned = 0

    def forward(self, x):
        try:
            x = self.first(x)
        except Exception:
            x = self.fallback(x)
        except BaseException as error:
            if self.how == "swallows":
                x = self.fallback(x)
            elif self.how == "translates":
                raise RuntimeError("the first layer failed") from error
            elif self.how == "interrupts":
                raise KeyboardInterrupt from error
            else:
                raise
        finally:
            self.cleaned += 1
        return self.fallback(x)


@pytest.mark.parametrize("how", ["passes", "swallows", "translates"])
def test_what_a_model_does_about_exceptions_does_not_matter(how):
    model = nets.seeded(lambda: Guarded(how))
    seen, done = stopped(model, torch.ones(1, 3), Site("first"))
    assert seen.keys() == {Site("first")} == set(done.sites)
    assert (done.stopped, done.output, model.cleaned) == (True, None, 1)


def test_an_interrupt_on_the_way_out_is_one():
    with pytest.raises(KeyboardInterrupt):
        stopped(Guarded("interrupts"), torch.ones(1, 3), Site("first"))


class Contexts(nn.Module):
    """Its inner layer runs inside of all that a model may enter; `within` the last of it."""

    def __init__(self, within):
        super().__init__()
        self.a, self.b, self.within = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), within

    def forward(self, x):
        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        x = self.a(x).requires_grad_()
        with (
            Mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.enable_grad(),
            torch.random.fork_rng(devices=[]),
        ):
            return WITHIN[self.within](self.b, x)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return module(x)


def inference(module, x):
    with torch.inference_mode():
        return module(x)


WITHIN = {
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "reentrant-checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "vmap": lambda module, x: torch.func.vmap(module)(x),
    "grad": lambda module, x: torch.func.grad(lambda y: module(y).sum())(x),
    "function": lambda module, x: Function.apply(x, module),
    "inference-mode": inference,
}


@pytest.mark.parametrize("within", WITHIN)
def test_every_context_that_the_model_is_in_is_left(within):
    model, x = nets.seeded(lambda: Contexts(within)), torch.ones(2, 3)
    _, done = stopped(model, x, Site("b.0"), layers=["a", "b.0"])
    assert done.stopped
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_other_peoples_hooks_are_left_in_place_and_see_nothing_odd():
    model, x, heard = nets.seeded(nets.ReluThrice), nets.picture(), []

    def told(module, args, output):
        assert isinstance(output, torch.Tensor)
        heard.append(type(module).__name__)

    for module in (model, model.b, model.fc):
        module.register_forward_hook(told, always_call=True)
    before = state_of(model)
    stopped(model, x, Site("b"), layers="b")
    assert heard == ["Conv2d"]  # not the root, whose output there never was
    assert_same_state(before, state_of(model))
    model(x)
    assert heard == ["Conv2d", "Conv2d", "Linear", "ReluThrice"]


def test_edits_hold_in_what_is_told_before_the_stop():
    model, x, probe = nets.seeded(nets.ReluThrice), nets.picture(), Outputs()
    with (
        running(model, [], ".") as runner,
        runner.aside([probe], ["a", "b"], [Edit("a", lambda site, t: t * 0)]) as aside,
    ):
        assert aside.forward(x, until=frozenset({Site("b")})).stopped
        assert not runner.forward(x).stopped
    bias = model.b.bias.detach()[:, None, None].expand(2, 4, 8, 8)
    torch.testing.assert_close(probe.outputs[Site("b")], bias)


def test_a_stop_aside_does_not_stop_the_pass_that_is_under_way():
    class Asking(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            with runner.aside([inner], "a") as aside:
                stops.append(aside.forward(x, until=frozenset({Site("a")})).stopped)

    model, x, stops, inner = nets.seeded(nets.ReluThrice), nets.picture(), [], Outputs()
    with running(model, [Asking()], "relu") as runner:
        done = runner.forward(x, until=frozenset({Site("relu", 1)}))
    assert stops == [True, True]
    assert [str(site) for site in done.sites] == ["relu", "relu@1"]
    assert done.stopped


@pytest.mark.parametrize("until", [frozenset({Site("a")}), frozenset()], ids=["a-site", "none"])
def test_objectives_need_a_whole_pass(until):
    with (
        running(nets.seeded(nets.ReluThrice), [Recorder()], "a") as runner,
        pytest.raises(UsageError, match="objectives need the model's output"),
    ):
        runner.forward(nets.picture(), lambda output: [Objective("score", score)], until=until)


def test_a_probe_that_fails_at_the_last_site_is_heard():
    class Failing(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            raise ValueError("mine")

    with running(nets.seeded(nets.ReluThrice), [Failing()], "a") as runner:
        with pytest.raises(ValueError, match="mine"):
            runner.forward(nets.picture(), until=frozenset({Site("a")}))
        assert runner.attachment.sites == [Site("a")]


def test_a_model_that_fails_before_the_last_site_is_a_model_error():
    model = nets.seeded(nets.Raises)
    model.error = RuntimeError("no")
    with pytest.raises(ModelError, match="no"):
        stopped(model, nets.picture(), Site("fc"))


def test_nothing_of_the_pass_stays_in_memory():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.a(x)
            made.append(weakref.ref(y))
            return self.b(self.b(y))

    model, made = nets.seeded(Watched), []
    gc.disable()
    try:
        with running(model, [Outputs()], "**") as runner:
            runner.forward(torch.ones(1, 3), until=frozenset({Site("b")}))
            assert [reference() for reference in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_block_goes_on_after_a_pass_that_was_broken_off(error):
    model, x, probe = nets.seeded(nets.Raises), nets.picture(), Outputs()
    with attached(model, [probe]) as hooks:
        model.error = error
        for _ in range(2):
            with pytest.raises(type(error)):
                model(x)
        model.error = None
        for _ in range(2):
            model(x)
            # Every pass starts afresh, though nobody is told of the end of one that was interrupted.
            assert set(hooks.calls.values()) == {1}
            assert {site.call for site in hooks.sites} == {0}
    model = nets.seeded(nets.CallsItself)
    with attached(model, [probe], "inner") as hooks:
        model(x)
        assert hooks.calls == {"inner": 3}
