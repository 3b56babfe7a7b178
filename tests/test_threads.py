"""Threads that use one model, or models with common parts, each get what they would alone, or are refused."""

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import nets
import pytest
import torch
from modelstate import assert_same_state, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth import Recorder, score

from hookscope import turns
from hookscope.errors import UsageError
from hookscope.hooks import Edit, Needs, Probe, attached, preserved
from hookscope.layers import Site
from hookscope.library import feature_maps, gradcam, gradnorm
from hookscope.recording import Recorder as CallRecorder
from hookscope.recording import forwards_replaced
from hookscope.runner import Objective, running
from hookscope.turns import Shared, Turns

OBJECTIVE = Objective("score", score)
THREADS, ROUNDS = 4, 6


def together(*functions, limit_s=60):
    """What the functions return, each in a thread of its own, all begun at once; raises what one of them raised."""
    results = outcomes(*functions, limit_s=limit_s)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def outcomes(*functions, limit_s=60):
    """As `together`; what was raised is among the results."""
    barrier, results = threading.Barrier(len(functions)), [None] * len(functions)

    def run(number, function):
        try:
            barrier.wait(limit_s)
            results[number] = function()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return results


@pytest.fixture(autouse=True)
def hurried():
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    assert (turns.TURNS._had, turns.TURNS._waiting) == ([], [])


class Outputs(Probe):
    needs = Needs(inputs=True, outputs=True)

    def __init__(self):
        self.outputs, self.inputs = {}, {}

    def on_input(self, site, tensor):
        self.inputs[site] = tensor.clone()

    def on_output(self, site, tensor):
        self.outputs[site] = tensor.clone()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=str(key))


def attached_outputs(model, x):
    probe = Outputs()
    with torch.no_grad(), attached(model, [probe]) as hooks:
        model(x)
        assert set(hooks.calls) <= {site.layer for site in hooks.sites}
    return probe


# Hooks hear their own thread.


def test_threads_attached_to_one_model_at_once_each_hear_their_own_passes():
    model = nets.seeded(nets.ReluThrice)
    pictures = [nets.picture(seed=seed) for seed in range(THREADS)]
    wanted = [attached_outputs(model, x) for x in pictures]
    before = state_of(model)

    def listening(x):
        return lambda: [attached_outputs(model, x) for _ in range(ROUNDS)]

    for found, alone in zip(together(*map(listening, pictures)), wanted, strict=True):
        for probe in found:
            assert_same(probe.outputs, alone.outputs)
            assert_same(probe.inputs, alone.inputs)
    assert_same_state(before, state_of(model))


def test_threads_attached_for_gradients_each_get_their_own():
    model = nets.seeded(nets.ReluThrice)
    pictures = [nets.picture(seed=seed) for seed in range(THREADS)]

    def gradients(x):
        recorder = Recorder()
        with attached(model, [recorder]) as hooks:
            hooks.differentiate("score", score(model(x)))
        return recorder

    wanted = [gradients(x) for x in pictures]
    jobs = [lambda x=x: [gradients(x) for _ in range(ROUNDS)] for x in pictures]
    for found, alone in zip(together(*jobs), wanted, strict=True):
        for recorder in found:
            for kind in ("outputs", "gradients", "input_gradients", "params"):
                assert_same(getattr(recorder, kind), getattr(alone, kind))


def test_edits_of_one_thread_hold_in_its_own_passes_alone():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    plain = model(x).detach()

    def scaled(factor):
        with torch.no_grad(), attached(model, [], edits=[Edit("fc", lambda site, t: t * factor)]):
            return [model(x) for _ in range(ROUNDS)]

    def untouched():
        with torch.no_grad():
            return [model(x) for _ in range(ROUNDS)]

    found = together(lambda: scaled(2.0), lambda: scaled(-1.0), untouched)
    for factor, outputs in zip((2.0, -1.0, 1.0), found, strict=True):
        for output in outputs:
            torch.testing.assert_close(output, plain * factor, rtol=0, atol=0)


def test_a_pass_of_another_thread_in_the_middle_of_ones_own_is_not_recorded():
    class Interrupted(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            sites.append(site)
            if site.layer == "a":
                together(lambda: model(other))

    model, sites, other = nets.seeded(nets.ReluThrice), [], nets.picture(5)
    with attached(model, [Interrupted()]) as hooks:
        model(nets.picture())
        assert sites == hooks.sites
        assert [str(site) for site in sites] == ["a", "relu", "b", "relu@1", "c", "relu@2", "fc"]


def test_a_pass_that_is_left_early_leaves_that_of_no_other_thread():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    plain = model(x).detach()

    def stopping():
        with running(model, [], "**") as runner:
            return [runner.forward(x, until=frozenset({Site("b")})).stopped for _ in range(ROUNDS)]

    def whole():
        with torch.no_grad():
            return [model(x) for _ in range(ROUNDS)]

    stopped, *others = together(stopping, whole, whole)
    assert stopped == [True] * ROUNDS
    for output in [output for outputs in others for output in outputs]:
        torch.testing.assert_close(output, plain, rtol=0, atol=0)


def test_a_plain_pass_never_stumbles_over_hooks_that_come_and_go():
    model, x, done = nets.seeded(nets.ReluThrice), nets.picture(1, 8), threading.Event()

    def coming_and_going():
        try:
            for _ in range(60):
                with attached(model, [Outputs()], "**", [Edit("a", lambda site, t: t * 2)]):
                    model(x)
        finally:
            done.set()

    def passing():
        passes = 0
        while not done.is_set():
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain, rtol=0, atol=0)
            passes += 1
        return passes

    plain = model(x).detach()
    _, passes = together(coming_and_going, passing)
    assert passes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_that_are_not_yet_told_of_keywords_are_silent_for_other_threads():
    def called():
        """As torch calls hooks that another thread is registering, or removing, just now."""
        found = [hook(model.fc, (x,)) for hook in model.fc._forward_pre_hooks.values()]
        return found + [hook(model.fc, (x,), x) for hook in model.fc._forward_hooks.values()]

    model, x = nets.seeded(nets.ReluThrice), torch.ones(2, 4)
    with attached(model, [probe := Outputs()], "**", [Edit("fc", lambda site, t: t * 2)]):
        assert together(called) == [[None] * 4]
        assert probe.outputs == {}
        model(nets.picture())


@pytest.mark.parametrize("own", [False, True], ids=["only-others", "own-too"])
def test_a_block_that_only_heard_others_says_so(own):
    model, x, probe = nets.seeded(nets.ReluThrice), nets.picture(), Outputs()

    def listening():
        with attached(model, [probe], "a"):
            together(lambda: model(x))
            if own:
                model(x)

    if own:
        listening()
        assert probe.outputs.keys() == {Site("a")}
        return
    with pytest.raises(UsageError, match="only other threads ran the model") as caught:
        listening()
    assert caught.value.hint == "attach in each thread that runs it"
    assert probe.outputs == {}


def test_a_block_in_which_nobody_ran_the_model_is_fine():
    with attached(nets.seeded(nets.ReluThrice), [Outputs()]):
        pass


def test_what_a_failed_block_raises_is_not_hidden():
    def failing():
        with attached(model, []):
            together(lambda: model(nets.picture()))
            raise ValueError("mine")

    model = nets.seeded(nets.ReluThrice)
    with pytest.raises(ValueError, match="mine"):
        failing()


@pytest.mark.parametrize(
    "use",
    [
        lambda runner, x: runner.forward(x),
        lambda runner, x: runner.outputs(x),
        lambda runner, x: runner.continuation(x[:1], Site("a")),
        lambda runner, x: runner.aside([]).__enter__(),
    ],
    ids=["forward", "outputs", "continuation", "aside"],
)
def test_a_runner_is_for_the_thread_that_made_it(use):
    with running(nets.seeded(nets.ReluThrice), [], "**") as runner:
        with pytest.raises(UsageError, match="made by one thread and used by another") as caught:
            together(lambda: use(runner, nets.picture()))
        assert "make it in the thread that uses it" in str(caught.value)
        assert runner.forward(nets.picture()).sites


def test_what_is_recorded_for_a_replay_is_this_threads():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    recorder = CallRecorder(model.c, lambda: True)
    with torch.no_grad(), forwards_replaced(model.modules(), recorder.forward_of):
        together(lambda: model(x))
        assert recorder.steps == []
        model(x)
        assert recorder.steps


# Autograd's threads are nobody else's.


class Deep(torch.autograd.Function):
    """A backward pass inside a backward pass inside ...: after 60 of them, autograd goes on in threads of its own."""

    @staticmethod
    def forward(ctx, x, depth, deepest):
        ctx.depth, ctx.deepest = depth, deepest
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.depth:
            ctx.deepest()
            return gradient, None, None
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            Deep.apply(x, ctx.depth - 1, ctx.deepest).backward()
        return x.grad, None, None


def test_gradients_and_repeated_calls_in_autograds_threads_are_ones_own():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            calls.append(threading.get_ident())
            return checkpoint(lambda x: self.lin(x) * self.lin(x), x, use_reentrant=False)

    def deepest():
        calls.append(threading.get_ident())
        total.backward()

    model, x, calls, recorder = nets.seeded(Checkpointed), torch.randn(2, 3), [], Recorder(params=False)
    with attached(model, [recorder], "lin", [Edit("lin", lambda site, t: t * 2)]):
        total = model(x).sum()
        Deep.apply(torch.ones(1, requires_grad=True), 70, deepest).backward()
    assert len(set(calls)) == 2, "autograd kept to this thread: the test shows nothing"
    assert recorder.gradients.keys() == {Site("lin"), Site("lin", 1)}
    # By hand: of the sum of (2 W x) ** 2, which holds where the calls made again are edited, but not heard again.
    weight = model.lin.weight.detach()
    torch.testing.assert_close(model.lin.weight.grad, 8 * (x @ weight.T).T @ x)
    torch.testing.assert_close(recorder.gradients[Site("lin")], 2 * x @ weight.T)


# Inspections take turns.


def inspections(model, x):
    return {
        "feature_maps": lambda: {str(k): v for k, v in feature_maps(model, x, "**").items()},
        "gradcam": lambda: {
            f"{one.image}": torch.as_tensor(one.raw) for one in gradcam(model, x, layers="c", targets=[1])
        },
        "gradnorm": lambda: {
            one.name: torch.tensor(one.grad_norm)
            for one in gradnorm(model, x, torch.tensor([1, 2])).parameters
            if one.grad_norm is not None
        },
    }


def test_inspections_of_one_model_by_many_threads_give_what_they_give_alone():
    model, _ = training_model()
    x = nets.picture()
    wanted = {name: job() for name, job in inspections(model, x).items()}
    before = state_of(model)
    jobs = [job for _ in range(3) for job in inspections(model, x).values()]
    for found, alone in zip(together(*jobs), list(wanted.values()) * 3, strict=True):
        assert_same(found, alone)
    assert_same_state(before, state_of(model))


def training_model():
    model = nets.seeded(nets.ReluThrice).train()
    model.a.weight.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    return model, nets.picture()


class Holder(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x


def buffered(tensor):
    model = Holder()
    model.register_buffer("kept", tensor)
    return model


def tied(parameter):
    model = nn.Linear(3, 3)
    model.weight = parameter
    return model


_LINEAR, _TENSOR = nn.Linear(3, 3), torch.zeros(6)
COMMON = {
    "the-same": lambda: (_LINEAR, _LINEAR),
    "a-module": lambda: (Holder(a=_LINEAR), Holder(b=_LINEAR)),
    "one-inside-the-other": lambda: (Holder(a=_LINEAR), _LINEAR),
    "a-parameter": lambda: (_LINEAR, tied(_LINEAR.weight)),
    "a-buffer": lambda: (buffered(_TENSOR), buffered(_TENSOR)),
    "memory": lambda: (buffered(_TENSOR), buffered(_TENSOR[2:])),
    "a-wrapper": lambda: (_LINEAR, nn.DataParallel(_LINEAR)),
}


@pytest.mark.parametrize("make", COMMON.values(), ids=COMMON)
def test_blocks_of_models_with_common_parts_come_one_after_another(make):
    one, other = make()
    inside, most = [], []

    def working(model):
        for _ in range(20):
            with preserved(model):
                inside.append(1)
                most.append(len(inside))
                for module in model.modules():
                    module.training = not module.training
                inside.pop()

    modes = [module.training for model in (one, other) for module in model.modules()]
    together(*(lambda model=model: working(model) for model in (one, other, one)))
    assert set(most) == {1}
    assert modes == [module.training for model in (one, other) for module in model.modules()]


def test_models_without_common_parts_are_inspected_at_once():
    models = [nets.seeded(nets.ReluThrice) for _ in range(3)]
    met = threading.Barrier(3)

    def meeting(model):
        with running(model, [], "**") as runner:
            met.wait(30)  # they are inside at the same time, or this breaks
            runner.forward(nets.picture())
            met.wait(30)

    together(*(lambda model=model: meeting(model) for model in models))


def test_a_thread_may_inspect_within_its_own_inspection():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()

    def nested():
        with running(model, [], "**") as runner:
            inner = feature_maps(model, x, "a")
            runner.forward(x)
        return inner

    wanted = feature_maps(model, x, "a")
    for found in together(nested, nested, nested):
        assert_same(found, wanted)


def test_a_seeded_inspection_is_alone_and_gives_what_it_gives_alone():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(12, 5), nn.Dropout(0.5)

        def forward(self, x):
            return self.fc(self.drop(x) + torch.rand_like(x))

    models, x = [nets.seeded(Noisy) for _ in range(3)], torch.ones(2, 12)

    def seeded(model, seed):
        probe = Outputs()
        with running(model, [probe], "fc", train_seed=seed) as runner:
            runner.forward(x)
        return probe.outputs

    def unseeded(model):
        for _ in range(ROUNDS):
            feature_maps(model, x, "fc")

    wanted = [seeded(models[0], seed) for seed in (0, 1)]
    states = torch.get_rng_state(), random.getstate()
    jobs = [lambda seed=seed: [seeded(models[seed], seed) for _ in range(ROUNDS)] for seed in (0, 1)]
    *found, _ = together(*jobs, lambda: unseeded(models[2]))
    for alone, many in zip(wanted, found, strict=True):
        for one in many:
            assert_same(one, alone)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_the_random_state_is_what_the_first_found_when_the_last_has_left():
    def first():
        with preserved(models[0]):
            torch.rand(3), random.random()
            drawn.set()
            entered.wait(30)
        left.set()

    def last():
        drawn.wait(30)
        with preserved(models[1]), preserved(models[2]):
            entered.set()
            left.wait(30)

    models = [nn.Linear(2, 2) for _ in range(3)]
    drawn, entered, left = (threading.Event() for _ in range(3))
    states = torch.get_rng_state(), random.getstate()
    together(first, last)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_a_block_within_a_block_puts_back_the_random_state_that_it_found():
    model = nn.Linear(2, 2)
    with preserved(model):
        torch.rand(3)
        state = torch.get_rng_state()
        with preserved(model):
            torch.rand(3)
        assert torch.equal(state, torch.get_rng_state())


def test_who_waits_longer_comes_first():
    def having():
        with these.taken(one):
            held.set()
            released.wait(30)

    def waiting(name, model, *, alone=False):
        held.wait(30)
        while len(these._waiting) < ["alone", "later"].index(name):
            pass
        with these.taken(model, alone=alone):
            order.append(name)

    def releasing():
        held.wait(30)
        while len(these._waiting) < 2 and not order:
            pass
        released.set()

    these, one, order, held, released = Turns(), nn.Linear(2, 2), [], threading.Event(), threading.Event()
    # A thread that needs nobody's part of a model could otherwise keep one that must be alone waiting for ever.
    together(
        having,
        releasing,
        lambda: waiting("alone", nn.Linear(2, 2), alone=True),
        lambda: waiting("later", nn.Linear(2, 2)),
    )
    assert order == ["alone", "later"]


# Waiting that would never end is refused.


def test_two_threads_that_wait_for_each_other_are_told_apart():
    one, other, met = nn.Linear(2, 2), nn.Linear(2, 2), threading.Barrier(2)

    def crossing(first, second):
        with preserved(first):
            met.wait(30)
            with preserved(second):
                return "both"

    found = outcomes(lambda: crossing(one, other), lambda: crossing(other, one))
    assert sorted(map(str, found))[0] == "both"
    (refused,) = [error for error in found if isinstance(error, UsageError)]
    assert "another thread, which waits for this one" in str(refused)


def test_three_threads_in_a_ring_are_told_apart():
    models, met = [nn.Linear(2, 2) for _ in range(3)], threading.Barrier(3)

    def crossing(number):
        with preserved(models[number]):
            met.wait(30)
            with preserved(models[(number + 1) % 3]):
                return "both"

    found = outcomes(*(lambda number=number: crossing(number) for number in range(3)))
    assert sum(isinstance(error, UsageError) for error in found) == 1
    assert found.count("both") == 2


def joined(inspect):
    return together(inspect)


def awaited(inspect):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inspect).result()


def mapped(inspect):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda number: inspect(), range(3)))


def shut_down(inspect):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(inspect)
    return future.result()


def joined_by_another(inspect):
    return together(lambda: together(inspect))


@pytest.mark.parametrize("waiting", [joined, awaited, mapped, shut_down, joined_by_another])
def test_an_inspection_that_waits_for_another_of_the_same_model_is_refused(waiting):
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    with running(model, [], "**") as runner:
        with pytest.raises(UsageError, match="waits for this one: it would never be free"):
            waiting(lambda: feature_maps(model, x, "a"))
        assert runner.forward(x).sites
    assert waiting(lambda: sorted(map(str, feature_maps(model, x, "a"))))


def test_a_model_that_a_thread_left_under_inspection_is_refused_until_it_is_let_go():
    model, left = nn.Linear(2, 2), []

    def leaving():
        block = preserved(model)
        block.__enter__()
        left.append(block)

    together(leaving)
    with pytest.raises(UsageError, match="has ended without leaving it"), preserved(model):
        pass
    left.pop().__exit__(None, None, None)
    with preserved(model):
        pass


def test_a_thread_that_is_interrupted_while_it_waits_holds_up_nobody(monkeypatch):
    these = Turns()
    model, entered, interrupted = nn.Linear(2, 2), threading.Event(), threading.Event()
    wait = these._changed.wait

    def interrupting(seconds):
        if threading.current_thread() is not threading.main_thread() and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return wait(seconds)

    monkeypatch.setattr(these._changed, "wait", interrupting)

    def waiting():
        entered.wait(30)
        with these.taken(model):
            return "had"

    def having():
        with these.taken(model):
            entered.set()
            interrupted.wait(30)

    first, _ = outcomes(waiting, having)
    assert isinstance(first, KeyboardInterrupt)
    assert (these._had, these._waiting) == ([], [])
    assert together(waiting) == ["had"]


# Hooks while another thread inspects.


@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("seed", [None, 0], ids=["in-eval-mode", "in-train-mode"])
@pytest.mark.parametrize("training", [False, True], ids=["found-in-eval", "found-in-train"])
def test_a_pass_of_a_model_that_another_thread_has_changed_is_refused(training, seed, gradients):
    model, x = nets.seeded(nets.ReluThrice).train(training), nets.picture()

    def listening():
        with attached(model, [Recorder() if gradients else Outputs()], "a"):
            return model(x).detach()

    plain = model(x).detach()
    with running(model, [], "**", train_seed=seed):
        (found,) = outcomes(listening)
    if training or gradients or seed is not None:
        assert isinstance(found, UsageError)
        assert "another thread is inspecting the model" in str(found)
    else:
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert torch.equal(together(listening)[0], plain)


@pytest.mark.parametrize("still", [True, False], ids=["goes-on", "is-over"])
def test_a_pass_during_which_another_thread_begins_to_inspect_is_refused(still):
    class Meeting(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            begun.set()
            (inside if still else ended).wait(30)

    model, x, left = nets.seeded(nets.ReluThrice).train(), nets.picture(), threading.Event()
    begun, inside, ended = (threading.Event() for _ in range(3))

    def inspecting():
        begun.wait(30)
        with running(model, [], "**"):
            inside.set()
            if still:
                left.wait(30)
        ended.set()

    def listening():
        try:
            with attached(model, [Meeting()], "a"):
                model(x)
        finally:
            left.set()

    _, found = outcomes(inspecting, listening)
    assert isinstance(found, UsageError)
    with attached(model, [Meeting()], "a"):
        model(x)


def test_inspections_of_other_models_do_not_matter():
    model, x = nets.seeded(nets.ReluThrice).train(), nets.picture()
    with attached(model, [Recorder()]):
        with running(nets.seeded(nets.ReluThrice).train(), [], "**"):
            together(lambda: attached_outputs(model, x))
        model(x)


def test_random_numbers_that_another_thread_may_have_taken_are_refused():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()

    class Interrupted(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            together(lambda: model(x))

    with (
        running(model, [Interrupted()], "a", train_seed=0) as runner,
        pytest.raises(UsageError, match="another thread ran the model while it was in train mode"),
    ):
        runner.forward(x)
    with running(model, [Interrupted()], "a") as runner:
        assert runner.forward(x).sites == (Site("a"),)


def test_copies_are_inspected_at_once():
    model = nets.seeded(nets.ReluThrice)
    met = threading.Barrier(2)

    def meeting(model):
        with preserved(model):
            met.wait(30)

    together(lambda: meeting(model), lambda: meeting(copy.deepcopy(model)))


# What belongs to the whole process.


def test_a_shared_change_is_made_by_the_first_and_undone_by_the_last():
    told, first, last = [], threading.Barrier(3), threading.Barrier(3)

    class Change:
        def __enter__(self):
            told.append("made")

        def __exit__(self, *error):
            told.append("undone")

    shared = Shared(Change)

    def inside():
        with shared.held():
            first.wait(30)
            assert told == ["made"]
            last.wait(30)

    together(inside, inside, inside)
    assert told == ["made", "undone"]
    with shared.held(), shared.held():
        pass
    assert told == ["made", "undone"] * 2


def test_a_shared_change_that_fails_holds_nobody_up():
    class Change:
        def __enter__(self):
            if failing:
                raise RuntimeError("no")

        def __exit__(self, *error):
            pass

    shared, failing = Shared(Change), [1]
    with pytest.raises(RuntimeError, match="no"), shared.held():
        pass
    failing.clear()
    with shared.held():
        pass


@pytest.mark.parametrize("fast", [True, False])
def test_the_fused_path_is_as_it_was_when_all_threads_have_left(fast):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    models = [nn.TransformerEncoder(copy.deepcopy(layer), 1, enable_nested_tensor=False) for _ in range(3)]
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:

        def seen(model):
            for _ in range(ROUNDS):
                found = feature_maps(model, torch.ones(1, 2, 8), "**")
                assert Site("layers.0.linear2") in found

        together(*(lambda model=model: seen(model) for model in models))
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_replays_by_many_threads_leave_the_warnings_as_they_were():
    models, x = [nets.seeded(nets.ReluThrice) for _ in range(THREADS)], nets.picture(1)
    filters = list(warnings.filters)

    def replayed(model):
        with running(model, [], "**") as runner:
            rest = runner.continuation(x, Site("b"))
            return rest(rest.value)

    for model, output in zip(
        models, together(*(lambda model=model: replayed(model) for model in models)), strict=True
    ):
        torch.testing.assert_close(output, model(x).detach(), rtol=1e-5, atol=1e-6)
    assert warnings.filters == filters
