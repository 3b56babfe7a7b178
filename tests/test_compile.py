"""Hooks on compiled models, before and after compiling: the values of the eager model, and no trace afterwards."""

from __future__ import annotations

import sys
import threading

import nets
import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounter
from truth import Recorder, score

from hookscope.hooks import Edit, Needs, Probe, attached
from hookscope.layers import Site
from hookscope.library import feature_maps, gradnorm
from hookscope.runner import Objective, list_layers, running


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.lin(x)) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(3, 4), Block(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


class Outputs(Probe):
    needs = Needs(outputs=True)

    def __init__(self):
        self.outputs = {}

    def on_output(self, site, tensor):
        assert site not in self.outputs, f"{site} was told twice"
        self.outputs[site] = tensor.clone()


def picture(pictures=2):
    return torch.linspace(-1, 1, 3 * pictures).reshape(pictures, 3)


def told(model, call, x=None, layers=("**", ".")):
    probe = Outputs()
    with torch.no_grad(), attached(model, [probe], layers):
        call(picture() if x is None else x)
    return probe.outputs


def wanted_of(model):
    probe = Outputs()
    with torch.no_grad(), attached(model, [probe], ["**", "."]):
        model(picture())
    assert len(probe.outputs) == 6
    return probe.outputs


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for site, value in wanted.items():
        torch.testing.assert_close(found[site], value, rtol=0, atol=0, msg=str(site))


class Compiled:
    """A model compiled in one of the ways there are. `model`: what is attached to; `call`: what is called."""

    def __init__(self, how):
        self.plain = nets.seeded(Net)
        self.counter = CompileCounter()
        self.model, self.call = HOW[how](self.plain, self.counter)

    def run(self, times=1):
        with torch.no_grad():
            for _ in range(times):
                output = self.call(picture())
        return output


def in_place(model, backend):
    model.compile(backend=backend)
    return model, model


def wrapped(model, backend):
    compiled = torch.compile(model, backend=backend)
    return compiled, compiled


def inside_a_wrapper(model, backend):
    return model, torch.compile(model, backend=backend)


def beside_a_wrapper(model, backend):
    return torch.compile(model, backend=backend), model


def in_a_function(model, backend):
    return model, torch.compile(lambda x: model(x), backend=backend)


def by_its_method(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model, model


def by_a_block_in_place(model, backend):
    model.block.compile(backend=backend)
    return model, model


def by_a_blocks_method(model, backend):
    model.block.forward = torch.compile(model.block.forward, backend=backend)
    return model, model


HOW = {
    "wrapper": wrapped,
    "in-place": in_place,
    "the-model-inside-a-wrapper": inside_a_wrapper,
    "called-beside-its-wrapper": beside_a_wrapper,
    "function": in_a_function,
    "forward": by_its_method,
    "block-in-place": by_a_block_in_place,
    "block-forward": by_a_blocks_method,
}


@pytest.mark.parametrize("ran", [True, False], ids=["compiled-before", "compiled-after"])
@pytest.mark.parametrize("how", HOW)
def test_hooks_see_every_layer_of_a_compiled_model_and_leave_its_code_alone(how, ran):
    wanted = wanted_of(nets.seeded(Net))
    compiled = Compiled(how)
    plain = compiled.run(3).clone() if ran else None
    frames = compiled.counter.frame_count
    for _ in range(3):
        assert_same(told(compiled.model, compiled.call), wanted)
    assert compiled.counter.frame_count == frames, "something was compiled with hooks in it"
    output = compiled.run(3)
    torch.testing.assert_close(output, wanted[Site(".")], rtol=1e-6, atol=1e-6)
    if ran:
        torch.testing.assert_close(output, plain, rtol=0, atol=0)
        assert compiled.counter.frame_count == frames, "compiled again, though the hooks are gone"
    elif how != "called-beside-its-wrapper":
        assert compiled.counter.frame_count > frames, "the model is not compiled any more"
    after = compiled.counter.frame_count
    compiled.run(5)
    assert compiled.counter.frame_count == after, "compiled over and over"


@pytest.mark.parametrize("how", HOW)
def test_whole_inspections_of_a_compiled_model_leave_its_code_alone(how):
    x, targets = picture(), torch.tensor([0, 1])
    plain = nets.seeded(Net)
    maps, norms = feature_maps(plain, x, "**"), gradnorm(plain, x, targets)
    compiled = Compiled(how)
    compiled.run(2)
    frames = compiled.counter.frame_count
    assert_same(feature_maps(compiled.model, x, "**"), maps)
    assert gradnorm(compiled.model, x, targets) == norms
    assert [layer.name for layer in list_layers(compiled.model, x)] == [
        layer.name for layer in list_layers(plain, x)
    ]
    compiled.run(3)
    assert compiled.counter.frame_count == frames


def test_a_compiled_block_keeps_its_own_names_in_an_eager_model():
    model, wanted = nets.seeded(Net), wanted_of(nets.seeded(Net))
    counter = CompileCounter()
    model.block = torch.compile(model.block, backend=counter)
    with torch.no_grad():
        model(picture())
    frames = counter.frame_count
    assert frames
    found = told(model, model)
    renamed = {
        Site(site.layer.replace("block.", "block._orig_mod."), site.call, site.output): value
        for site, value in wanted.items()
    }
    assert_same(found, renamed | {Site("block._orig_mod"): wanted[Site("block")]})
    with torch.no_grad():
        model(picture())
    assert counter.frame_count == frames


def test_gradients_of_a_compiled_model_are_those_of_the_eager_one():
    def gradients(model, call):
        recorder = Recorder()
        with attached(model, [recorder]) as hooks:
            hooks.differentiate("score", score(call(picture().requires_grad_())))
        return recorder

    plain = nets.seeded(Net)
    wanted = gradients(plain, plain)
    model = nets.seeded(Net)
    compiled = torch.compile(model, backend="aot_eager")
    score(compiled(picture().requires_grad_())).backward()
    found = gradients(compiled, compiled)
    for kind in ("gradients", "input_gradients", "params"):
        assert_same(getattr(found, kind), getattr(wanted, kind))
    with running(compiled, [seen := Recorder()], "**") as runner:
        runner.forward(picture(), lambda output: [Objective("score", score)])
    assert_same(seen.params, wanted.params)


def test_edits_of_a_compiled_model_hold_until_the_block_ends():
    compiled = Compiled("the-model-inside-a-wrapper")
    plain = compiled.run(2).clone()
    with torch.no_grad(), attached(compiled.model, [], edits=[Edit("head", lambda site, t: t * 3)]):
        torch.testing.assert_close(compiled.call(picture()), plain * 3)
    torch.testing.assert_close(compiled.run(), plain, rtol=0, atol=0)


def test_a_pass_of_a_compiled_model_may_stop_early():
    compiled = Compiled("in-place")
    compiled.run(2)
    frames = compiled.counter.frame_count
    with running(compiled.model, [probe := Outputs()], "**") as runner:
        assert runner.forward(picture(), until=frozenset({Site("block.lin")})).stopped
    assert probe.outputs.keys() == {Site("stem"), Site("block.lin")}
    compiled.run(3)
    assert compiled.counter.frame_count == frames


def test_a_model_that_is_compiled_inside_the_block_runs_eagerly_there_and_is_compiled_after_it():
    model, wanted, counter = nets.seeded(Net), wanted_of(nets.seeded(Net)), CompileCounter()
    with torch.no_grad(), attached(model, [probe := Outputs()], ["**", "."]):
        compiled = torch.compile(model, backend=counter)
        for _ in range(10):
            probe.outputs.clear()
            compiled(picture())
            assert_same(probe.outputs, wanted)
    assert counter.frame_count == 0
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(picture()), wanted[Site(".")])
    assert counter.frame_count == 1
    assert probe.outputs.keys() == wanted.keys()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_model_compiled_inside_a_block_that_began_without_a_compiler_has_its_values_too(monkeypatch):
    """Nobody has imported the compiler when the block begins: then the hooks are compiled along, which is slow."""
    model, wanted, counter = nets.seeded(Net), wanted_of(nets.seeded(Net)), CompileCounter()
    with monkeypatch.context() as unloaded:
        unloaded.delitem(sys.modules, "torch._dynamo")
        block = attached(model, [probe := Outputs()], ["**", "."])
        block.__enter__()
    with torch.no_grad():
        compiled = torch.compile(model, backend=counter)
        for _ in range(3):
            probe.outputs.clear()
            compiled(picture())
            assert_same(probe.outputs, wanted)
        block.__exit__(None, None, None)
        probe.outputs.clear()
        torch.testing.assert_close(compiled(picture()), wanted[Site(".")])
    assert probe.outputs == {}


def test_hooks_of_others_that_were_compiled_in_keep_firing():
    def counted(module, args, output):
        heard.add_(1)

    model, heard, counter = nets.seeded(Net), torch.zeros(()), CompileCounter()
    handle = model.block.register_forward_hook(counted)
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        compiled(picture())
        frames = counter.frame_count
        told(compiled, compiled)
        compiled(picture())
    assert heard == 3
    assert counter.frame_count == frames
    handle.remove()


@pytest.mark.parametrize("stance", ["default", "fail_on_recompile", "eager_on_recompile"])
def test_the_compilers_stance_is_as_it_was_also_after_a_failure(stance):
    compiled = Compiled("wrapper")
    compiled.run(2)
    with torch.compiler.set_stance(stance):
        told(compiled.model, compiled.call)
        with pytest.raises(ValueError, match="mine"), attached(compiled.model, []):
            raise ValueError("mine")
        assert torch._dynamo.eval_frame._stance.stance == stance
        compiled.run(2)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_threads_that_attach_to_compiled_models_leave_them_compiled():
    models = [Compiled("wrapper") for _ in range(3)]
    wanted = wanted_of(nets.seeded(Net))
    for compiled in models:
        compiled.run(2)
    frames = [compiled.counter.frame_count for compiled in models]
    found, barrier = [], threading.Barrier(3)

    def listening(compiled):
        barrier.wait(30)
        found.extend(told(compiled.model, compiled.call) for _ in range(10))

    threads = [threading.Thread(target=listening, args=[compiled]) for compiled in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 30
    for one in found:
        assert_same(one, wanted)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    for compiled in models:
        compiled.run(3)
    assert [compiled.counter.frame_count for compiled in models] == frames
