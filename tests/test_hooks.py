"""Values and gradients at every site are the model's own, and the model is left as it was found."""

from __future__ import annotations

import copy

import nets
import pytest
import torch
from modelstate import assert_same_state, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth import Recorder, reference, score

from hookscope.errors import ModelError, UsageError
from hookscope.hooks import Edit, Needs, Probe, attached, preserved
from hookscope.layers import Site, Status
from hookscope.nested import rebuilt, tensors_in
from hookscope.runner import Objective, list_layers, running

OBJECTIVE = Objective("score", score)

# Two have no twin: without the side effect of their in-place op they compute something else. They have tests below.
TWINNED = {
    key: make for key, make in nets.AWKWARD.items() if key not in ("in-place-ignored", "identity-in-place")
}


def observe(model, x, layers="**", *, params=True):
    recorder = Recorder(params=params)
    with running(model, [recorder], layers) as runner:
        done = runner.forward(x, lambda output: [OBJECTIVE])
    return recorder, done


@pytest.mark.parametrize("params", [True, False], ids=["whole-graph", "cut-graph"])
@pytest.mark.parametrize("make", TWINNED.values(), ids=TWINNED)
def test_every_value_and_gradient_is_that_of_a_twin_without_in_place_ops(make, params):
    model, x = nets.seeded(make), nets.picture()
    values, gradients = reference(model, x)
    seen, _ = observe(model, x, ["**", "."], params=params)
    assert seen.outputs.keys() == values.keys()
    for site, value in values.items():
        # Not to the bit: torch's linear takes another kernel when its weight needs no gradient.
        torch.testing.assert_close(seen.outputs[site], value, rtol=1e-6, atol=1e-6, msg=str(site))
    expected = {site: g for site, g in gradients.items() if g is not None}
    assert seen.gradients.keys() == expected.keys()
    for site, gradient in expected.items():
        torch.testing.assert_close(seen.gradients[site], gradient, msg=str(site))


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (nets.Stashed, "enc"),
        (nets.DerivedStash, "enc"),
        (nets.TwiceReturned, "b"),
        (lambda: nets.NestedOutput("tuple"), "inner"),
        (lambda: nets.NestedOutput("dict"), "inner"),
        (nets.Permuted, "permute"),
        (nets.Permuted, "lin"),
        (nets.ReadBefore, "same"),
        (nets.InPlaceIgnored, "relu"),
        (nets.IdentityThenInPlace, "same"),
        (nets.Tokens, "lin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layer_chosen_alone_has_the_gradient_of_the_whole_graph(make, layer):
    model, x = nets.seeded(make), nets.picture()
    whole, _ = observe(model, x, layer, params=True)
    cut, done = observe(model, x, layer, params=False)
    torch.testing.assert_close(done.output, model(x).detach(), rtol=1e-6, atol=1e-6)
    assert cut.gradients.keys() == whole.gradients.keys() != set()
    for site, gradient in whole.gradients.items():
        torch.testing.assert_close(cut.gradients[site], gradient, msg=str(site))


@pytest.mark.parametrize(
    ("make", "layer", "attempts"),
    [
        (nets.Stashed, "enc", 1),
        (nets.ReluThrice, "b", 1),
        (nets.Tokens, "lin", 1),
        (nets.InPlaceIgnored, "relu", 1),
        (lambda: nets.NestedOutput("tuple"), "inner", 2),
        (nets.DerivedStash, "enc", 2),
    ],
    ids=["stash", "plain", "view", "in-place", "nested", "derived-stash"],
)
def test_a_cut_that_tells_the_truth_costs_one_pass_and_one_that_does_not_is_made_earlier(
    make, layer, attempts
):
    model, x = nets.seeded(make), nets.picture()
    passes, saved = [], []
    model.register_forward_pre_hook(lambda module, args: passes.append(args[0].requires_grad))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        observe(model, x, layer, params=False)
    assert passes == [False] * attempts


def test_nothing_that_outlives_the_pass_stays_in_a_graph():
    model, x = nets.seeded(nets.OwnTensor), nets.picture()
    observe(model, x, ["table", "plain"], params=False)
    for tensor in (model.table.values, model.plain.values):
        assert not tensor.requires_grad
        assert tensor.is_leaf


def test_an_ignored_in_place_result_has_no_gradient_path_and_the_model_computes_the_same():
    model, x = nets.seeded(nets.InPlaceIgnored), nets.picture()
    plain = model(x)
    for params in (True, False):
        seen, done = observe(model, x, params=params)
        torch.testing.assert_close(done.output, plain, rtol=0, atol=0)
        conv = model.conv(x)
        torch.testing.assert_close(seen.outputs[Site("conv")], conv.detach(), rtol=0, atol=0)
        torch.testing.assert_close(seen.outputs[Site("relu")], conv.detach().relu(), rtol=0, atol=0)
        # By hand: the score goes through the rectified values alone.
        rectified = conv.detach().relu().requires_grad_()
        (wanted,) = torch.autograd.grad(score(model.fc(rectified.mean((2, 3)))), rectified)
        torch.testing.assert_close(seen.gradients[Site("relu")], wanted)
        torch.testing.assert_close(seen.gradients[Site("conv")], wanted * (conv > 0))


def test_an_identity_whose_output_is_then_doubled_in_place_is_not_replaced():
    model, x = nets.seeded(nets.IdentityThenInPlace), nets.picture()
    plain = model(x)
    y = model.conv(x).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(score(model.fc((y * 2 + y * 2).mean((2, 3)))), y)
    for params in (True, False):
        seen, done = observe(model, x, params=params)
        torch.testing.assert_close(done.output, plain, rtol=0, atol=0)
        torch.testing.assert_close(seen.outputs[Site("same")], y.detach(), rtol=0, atol=0)
        torch.testing.assert_close(seen.gradients[Site("same")], wanted)
        torch.testing.assert_close(seen.gradients[Site("conv")], wanted)
    only, _ = observe(model, x, "same", params=False)
    torch.testing.assert_close(only.gradients[Site("same")], wanted)


def test_a_relu_used_three_times_has_three_sites_in_order():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    seen, done = observe(model, x, "relu", params=False)
    assert [str(site) for site in done.sites] == ["relu", "relu@1", "relu@2"]
    assert set(seen.gradients) == {Site("relu", call) for call in range(3)}


@pytest.mark.parametrize(
    ("kind", "paths"),
    [("tuple", ["0", "1.0"]), ("dict", ["out", "aux"]), ("list", ["0", "1"]), ("named", ["0", "1"])],
)
def test_nested_outputs_are_told_by_path_and_keep_their_type(kind, paths):
    model, x = nets.seeded(lambda: nets.NestedOutput(kind)), nets.picture()
    plain = type(model.inner(x))
    kept = []
    recorder = Recorder(params=False)
    with running(model, [recorder], "inner") as runner:
        handle = model.register_forward_hook(lambda m, a, o: None)
        inner = model.inner.register_forward_hook(lambda m, a, o: kept.append(type(o)))
        done = runner.forward(x, lambda output: [OBJECTIVE])
        handle.remove()
        inner.remove()
    assert [site.output for site in done.sites] == paths
    assert set(kept) == {plain}  # more than one pass where an output of several tensors cannot be cut
    assert {site.output for site in recorder.gradients} == set(paths)


def test_inputs_are_what_the_layer_received_before_in_place_ops():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    seen, _ = observe(model, x)
    torch.testing.assert_close(seen.inputs[Site("relu", 0, "0")], model.a(x).detach(), rtol=0, atol=0)
    assert seen.inputs[Site("relu", 0, "0")].min() < 0 <= seen.outputs[Site("relu")].min()


def test_what_is_told_shares_memory_and_count_of_writes_with_the_models_own_tensor():
    class Told(Probe):
        needs = Needs(inputs=True, outputs=True)

        def on_input(self, site, tensor):
            found[f"into {site.layer}", site.call] = (tensor.data_ptr(), tensor._version)

        def on_output(self, site, tensor):
            found[f"out of {site.layer}", site.call] = (tensor.data_ptr(), tensor._version)

    # What one layer returns and the next receives can be told to be the same, and what was written to not to be.
    model, x, found = nets.seeded(nets.ReluThrice), nets.picture(), {}
    with running(model, [Told()], "**") as runner:
        for objectives in (None, lambda output: [OBJECTIVE]):
            found.clear()
            runner.forward(x, objectives)
            address, version = found["out of a", 0]
            assert found["into relu", 0] == (address, version)
            assert found["out of relu", 0] == (address, version + 1) == found["into b", 0]
            assert found["out of b", 0][0] != address


def test_input_gradients_are_the_total_over_all_uses():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.branch = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x):
            y = self.stem(x)
            return y + self.branch(y)

    model = Residual()
    with torch.no_grad():
        model.stem.weight.fill_(1.0)
        model.branch.weight.fill_(-0.441)
    seen, _ = observe(model, torch.ones(1, 1))
    # By hand: 1 through the sum and -0.441 through the branch, times the weight of one output, 0.5.
    assert seen.input_gradients[Site("branch", 0, "0")].item() == pytest.approx(0.5 * (1 - 0.441))


def test_parameter_gradients_equal_autograd_and_a_missing_path_is_none():
    model, x = nets.seeded(nets.NeverCalled), nets.picture()
    seen, _ = observe(model, x)
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(score(model(x)), list(named.values()), allow_unused=True)
    for name, gradient in zip(named, wanted, strict=True):
        if gradient is None:
            assert seen.params[name] is None
        else:
            torch.testing.assert_close(seen.params[name], gradient)
    assert seen.params["spare.weight"] is None
    assert seen.params["bypassed.bias"] is None


def test_statuses_tell_not_called_and_no_tensor_apart():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.spare, self.words = nn.Linear(2, 2), nn.Linear(2, 2), nn.Identity()

        def forward(self, x):
            self.words("no tensor")
            return self.lin(x)

    with attached(Odd(), [Recorder(params=False)]) as attachment:
        attachment.model(torch.ones(1, 2))
        statuses = {name: attachment.status(name) for name in ("lin", "spare", "words")}
    assert statuses == {"lin": Status.OK, "spare": Status.NOT_CALLED, "words": Status.NO_TENSOR}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference_mode"])
@pytest.mark.parametrize("params", [True, False], ids=["whole-graph", "cut-graph"])
def test_frozen_parameters_and_disabled_gradients_change_nothing(frozen, mode, params):
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    wanted, _ = observe(model, x, params=params)
    model.requires_grad_(not frozen)
    context = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[
        mode
    ]
    with context():
        seen, _ = observe(model, x.clone(), params=params)
    assert seen.gradients.keys() == wanted.gradients.keys()
    for site, gradient in wanted.gradients.items():
        torch.testing.assert_close(seen.gradients[site], gradient, rtol=0, atol=0)


def test_activation_checkpointing_is_seen_once():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=False))

    model, x = nets.seeded(Checkpointed), torch.randn(2, 3)
    seen, done = observe(model, x)
    assert [str(site) for site in done.sites] == ["a", "b"]
    wanted = torch.autograd.grad(score(model(x)), list(model.parameters()))
    for gradient, name in zip(wanted, dict(model.named_parameters()), strict=True):
        torch.testing.assert_close(seen.params[name], gradient)


def test_wrappers_are_unwrapped_and_compiled_models_run_eagerly():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    wanted, _ = observe(model, x)
    wrapped = nn.DataParallel(model)
    seen, _ = observe(wrapped, x)
    assert seen.outputs.keys() == wanted.outputs.keys()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    seen, _ = observe(compiled, x)
    assert seen.outputs.keys() == wanted.outputs.keys()
    model.compile(backend="eager")
    model(x)
    seen, _ = observe(model, x)
    assert seen.outputs.keys() == wanted.outputs.keys()


def test_attention_is_seen_layer_by_layer_though_it_has_a_fused_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    recorder = Recorder(params=False)
    before = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), attached(model, [recorder]):
        model(torch.randn(1, 5, 8))
    assert torch.backends.mha.get_fastpath_enabled() is before
    assert Site("0.layers.1.linear2") in recorder.outputs
    assert Site("0.layers.0.self_attn", 0, "0") in recorder.outputs


def test_a_view_of_the_input_that_is_written_to_later_is_said_to_be_unobservable():
    class Flattened(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.flat, self.fc = nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 10 * 10, 5)

        def forward(self, x):
            y = self.flat(self.conv(x))
            y.relu_()
            return self.fc(y)

    model, x = nets.seeded(Flattened), nets.picture()
    seen, done = observe(model, x, "flat", params=False)
    assert done.unobservable == {Site("flat")}
    assert seen.gradients == {}
    torch.testing.assert_close(done.output, model(x), rtol=0, atol=0)


class Failing(Probe):
    needs = Needs(outputs=True, gradients=True, param_gradients=True)

    def __init__(self, where, error):
        self.where, self.error = where, error

    def on_output(self, site, tensor):
        if self.where == "output":
            raise self.error

    def on_gradient(self, site, tensor, objective):
        if self.where == "gradient":
            raise self.error


def used_model(make):
    """A model in the middle of training: mixed modes, a frozen layer, gradients, a foreign hook."""
    model = nets.seeded(make).train()
    model.bn.eval()
    model.conv.weight.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    fired = []
    model.fc.register_forward_hook(lambda module, args, output: fired.append(1))
    return model, fired


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("where", ["nowhere", "model", "output", "gradient"])
def test_the_model_is_left_as_it_was_found_whatever_happens(where, error):
    model, fired = used_model(nets.Raises if where == "model" else nets.Dropping)
    if where == "model":
        model.error = error
    before = state_of(model)
    probe = Failing(where, error)
    # A probe's own failure is not the model's.
    expected = ModelError if where == "model" and isinstance(error, RuntimeError) else type(error)

    def go():
        with running(model, [probe], "**") as runner:
            assert not model.training
            runner.forward(nets.picture(), lambda output: [OBJECTIVE])

    if where == "nowhere":
        go()
        assert fired == [1]
    else:
        with pytest.raises(expected):
            go()
    assert_same_state(before, state_of(model))


def test_preserved_puts_back_replaced_resized_and_rewritten_buffers():
    model = nets.seeded(nets.Dropping)
    model.register_buffer("grown", torch.arange(3.0))
    before = state_of(model)
    with preserved(model):
        model.calls = torch.ones((), dtype=torch.long)
        model.grown.resize_(5)
        model.bn.running_mean.add_(1)
        model.register_buffer("new", torch.ones(1))
    assert "new" not in dict(model.named_buffers())
    assert_same_state(before, state_of(model))


def test_preserved_does_not_touch_a_buffer_that_was_not_written():
    model = nets.seeded(nets.Dropping)
    versions = [buffer._version for buffer in model.buffers()]
    with preserved(model):
        pass
    assert [buffer._version for buffer in model.buffers()] == versions


def test_the_users_input_is_never_written_to_though_the_model_writes_to_its_own():
    class Normalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            x.sub_(0.5)
            return self.conv(x).mean((2, 3))

    model, x = nets.seeded(Normalising), nets.picture()
    kept = x.clone()
    seen, _ = observe(model, x)
    assert torch.equal(x, kept)
    torch.testing.assert_close(seen.outputs[Site("conv")], model.conv(kept - 0.5).detach(), rtol=0, atol=0)


def test_a_plain_backward_inside_attached_is_reported_as_loss_and_fills_grad():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    recorder = Recorder(params=False)
    with attached(model, [recorder], "a"):
        score(model(x)).backward()
        first = recorder.gradients.pop(Site("a"))
        score(model(x)).backward()
    torch.testing.assert_close(recorder.gradients[Site("a")], first, rtol=0, atol=0)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_several_objectives_from_one_forward_equal_separate_runs():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    calls = []
    model.a.register_forward_hook(lambda module, args, output: calls.append(1))

    class PerObjective(Probe):
        needs = Needs(gradients=True)

        def __init__(self):
            self.got = {}

        def on_gradient(self, site, tensor, objective):
            self.got[objective, site] = tensor.clone()

    def objectives(classes):
        return [Objective(str(c), lambda output, c=c: output[:, c].sum()) for c in classes]

    together = PerObjective()
    with running(model, [together], ["b", "c"]) as runner:
        runner.forward(x, lambda output: objectives([0, 3]))
    assert len(calls) == 1
    for wanted in (0, 3):
        alone = PerObjective()
        with running(model, [alone], ["b", "c"]) as runner:
            runner.forward(x, lambda output, wanted=wanted: objectives([wanted]))
        for key, gradient in alone.got.items():
            torch.testing.assert_close(together.got[key], gradient, rtol=0, atol=0)


def test_the_cut_graph_saves_nothing_before_the_first_chosen_layer():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        observe(model, x, "c", params=False)
    assert not [shape for shape in saved if shape[-1] == 10]  # what `a` and the first relu would have saved


def test_no_match_is_a_usage_error_and_leaves_no_hook():
    model = nets.seeded(nets.ReluThrice)
    before = state_of(model)
    with pytest.raises(UsageError, match="no layer matches 'reul'"), attached(model, [], "reul"):
        pass
    assert_same_state(before, state_of(model))


def test_a_copy_made_inside_computes_the_same_and_the_original_is_clean():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    with attached(model, [Recorder(params=False)]):
        copied = copy.deepcopy(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)


def test_a_buffer_that_is_not_a_number_is_not_taken_for_changed():
    model = nets.seeded(nets.Dropping)
    model.register_buffer("odd", torch.tensor([float("nan"), 1.0]))
    version = model.odd._version
    with preserved(model):
        pass
    assert model.odd._version == version


def test_a_probes_own_failure_is_not_called_the_models():
    class Broken(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), running(nets.seeded(nets.ReluThrice), [Broken()]) as runner:
        runner.forward(nets.picture())


class WritesToWhatBackwardNeeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        y = torch.sigmoid(self.conv(x))
        y += 1
        return self.fc(y.mean((2, 3)))


@pytest.mark.parametrize("params", [True, False])
def test_a_model_whose_backward_raises_is_a_model_error(params):
    with pytest.raises(ModelError, match="no gradient can be taken of the model"):
        observe(nets.seeded(WritesToWhatBackwardNeeds), nets.picture(), "conv", params=params)


def test_one_tensor_under_several_arguments_has_one_gradient():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.attention = nn.Linear(6, 6), nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            y = self.lin(x)
            return self.attention(y, y, y)[0]

    model, x = nets.seeded(Attention), torch.randn(2, 3, 6)
    seen, _ = observe(model, x)
    assert [site.output for site in seen.input_gradients if site.layer == "attention"] == ["0"]
    torch.testing.assert_close(seen.input_gradients[Site("attention", 0, "0")], seen.gradients[Site("lin")])


@pytest.mark.parametrize(
    "make", [nets.TwoViews, nets.LateView, nets.HalfInPlace, nets.CallsItself, nets.Tokens]
)
def test_looking_never_changes_a_parameters_gradient(make):
    model, x = nets.seeded(make), nets.picture()
    seen, _ = observe(model, x)
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(score(model(x)), list(named.values()))
    for name, gradient in zip(named, wanted, strict=True):
        torch.testing.assert_close(seen.params[name], gradient, msg=name)


def test_a_model_that_calls_itself_keeps_all_its_calls():
    model, x = nets.seeded(nets.CallsItself), nets.picture()
    seen, done = observe(model, x, ["conv", "inner"])
    assert [str(site) for site in done.sites] == ["conv", "inner", "inner@1", "inner@2"]
    first = model.inner(model.conv(x)).detach()
    torch.testing.assert_close(seen.outputs[Site("inner")], first, rtol=1e-6, atol=1e-6)
    y = first.requires_grad_()
    last = model.inner(torch.tanh(model.inner(torch.tanh(y))))
    (wanted,) = torch.autograd.grad(score(model.fc(last.mean((2, 3)))), y)
    torch.testing.assert_close(seen.gradients[Site("inner")], wanted)


def test_an_in_place_layer_on_a_dropped_slice_is_unobservable_not_without_a_path():
    for params in (True, False):
        _, done = observe(nets.seeded(nets.HalfInPlace), nets.picture(), "relu", params=params)
        assert done.unobservable == {Site("relu")}
        assert not done.unreached["score"]


def test_a_model_that_writes_to_its_own_weights_is_refused():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            with torch.no_grad():
                self.fc.weight.mul_(0.5)
            self.other.weight = nn.Parameter(torch.zeros(2, 3))
            return self.fc(x) + self.other(x)

    model = nets.seeded(Shrinking)
    kept = model.other.weight
    with pytest.raises(ModelError, match="wrote to 1 parameter of its own"):
        observe(model, torch.ones(1, 3))
    assert model.other.weight is kept


def test_leaving_python_is_the_models_failure():
    class Leaving(nn.Module):
        def forward(self, x):
            raise SystemExit(0)

    with (
        pytest.raises(ModelError, match="the model raised SystemExit"),
        running(Leaving(), [], ".") as runner,
    ):
        runner.forward(nets.picture())


def test_a_layer_inside_checkpointing_is_explained_by_the_whole_graph():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)

        def forward(self, x):
            y = checkpoint(lambda t: self.b(t).relu(), self.a(x), use_reentrant=False)
            return self.fc(y.mean((2, 3)))

    model, x = nets.seeded(Checkpointed), nets.picture()
    whole, _ = observe(model, x, "b")
    cut, _ = observe(model, x, "b", params=False)
    torch.testing.assert_close(cut.gradients[Site("b")], whole.gradients[Site("b")])


def test_a_layer_that_the_model_adds_while_it_runs_is_left_out():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            self.new = nn.ReLU()
            return self.new(self.conv(x)).mean((2, 3))

    assert [layer.name for layer in list_layers(nets.seeded(Growing), nets.picture(1))] == [".", "conv"]


def test_nested_values_are_rebuilt_with_only_the_named_tensors_replaced():
    a, b, new = torch.ones(1), torch.zeros(1), torch.full((1,), 7.0)
    value = {"x": [a, (b, None)], "y": "text"}
    assert [path for path, _ in tensors_in(value)] == ["x.0", "x.1.0"]
    made = rebuilt(value, {"x.1.0": new})
    assert made["x"][0] is a
    assert made["x"][1] == (new, None)
    assert made["y"] == "text"
    assert value["x"][1][0] is b


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_an_input_gradient_at_the_root_is_that_of_the_models_input_and_no_parameter_takes_part(frozen):
    class Saliency(Probe):
        needs = Needs(input_gradients=True)

        def on_input_gradient(self, site, tensor, objective):
            found[site] = tensor.clone()

    model, x, found, flags = seeded_and_frozen(nets.ReluThrice, frozen), nets.picture(), {}, []
    model.a.register_forward_pre_hook(
        lambda module, args: flags.extend(p.requires_grad for p in model.parameters())
    )
    with running(model, [Saliency()], ["."]) as runner:
        runner.forward(x, lambda output: [OBJECTIVE])
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(score(model(leaf)), leaf)
    assert found.keys() == {Site(".", 0, "0")}
    torch.testing.assert_close(found[Site(".", 0, "0")], wanted)
    assert not any(flags[: len(list(model.parameters()))])
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())


def seeded_and_frozen(make, frozen):
    return nets.seeded(make).requires_grad_(not frozen)


class Gradients(Probe):
    """The gradients of what layers return, and of what else it needs."""

    def __init__(self, **needs):
        self.needs = Needs(outputs=True, gradients=True, **needs)
        self.outputs, self.gradients, self.inputs, self.params = {}, {}, {}, {}

    def on_output(self, site, tensor):
        self.outputs[site] = tensor.clone()

    def on_gradient(self, site, tensor, objective):
        self.gradients[site] = tensor.clone()

    def on_input_gradient(self, site, tensor, objective):
        self.inputs[site] = tensor.clone()

    def on_param_gradient(self, name, tensor, objective):
        self.params[name] = tensor


@pytest.mark.parametrize("main", [{}, {"input_gradients": True}, {"param_gradients": True}], ids=str)
@pytest.mark.parametrize("aside", [{}, {"input_gradients": True}, {"param_gradients": True}], ids=str)
def test_passes_aside_have_probes_of_their_own_and_disturb_nobody(main, aside):
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    model.a.bias.requires_grad_(False)
    trainable = [p.requires_grad for p in model.parameters()]
    alone, alone_aside = Gradients(**main), Gradients(**aside)
    with running(model, [alone], ["b", "."]) as runner:
        runner.forward(x, lambda output: [OBJECTIVE])
    with running(model, [alone_aside], ["c"]) as runner:
        runner.forward(2 * x, lambda output: [OBJECTIVE])
    mine, other = Gradients(**main), Gradients(**aside)

    def objectives(output):
        # In the middle of the main pass, whose graph is alive.
        flags = [p.requires_grad for p in model.parameters()]
        with runner.aside([other], ["c"]) as second:
            assert any(p.requires_grad for p in model.parameters()) is ("param_gradients" in aside)
            second.forward(2 * x, lambda output: [OBJECTIVE])
        assert [p.requires_grad for p in model.parameters()] == flags
        return [OBJECTIVE]

    with running(model, [mine], ["b", "."]) as runner:
        done = runner.forward(x, objectives)
        assert [str(site) for site in done.sites] == ["b", "."]
        assert runner.attachment.calls == {".": 1, "b": 1}
    for found, wanted in ((mine, alone), (other, alone_aside)):
        for kind in ("outputs", "gradients", "inputs", "params"):
            assert getattr(found, kind).keys() == getattr(wanted, kind).keys()
            for key, value in getattr(wanted, kind).items():
                torch.testing.assert_close(getattr(found, kind)[key], value, msg=f"{kind} {key}")
    assert bool(other.params) is ("param_gradients" in aside)
    assert [p.requires_grad for p in model.parameters()] == trainable


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_what_happens_aside_leaves_the_main_probes_hearing_and_the_parameters_as_they_were(error):
    model, x, probe = nets.seeded(nets.Raises), nets.picture(), Gradients(param_gradients=True)
    with running(model, [probe], "conv") as runner:
        flags = [p.requires_grad for p in model.parameters()]
        before = state_of(model)
        model.error = error
        with (
            pytest.raises(ModelError if isinstance(error, RuntimeError) else KeyboardInterrupt),
            runner.aside([Gradients()], "conv") as aside,
        ):
            aside.forward(x, lambda output: [OBJECTIVE])
        with pytest.raises(ModelError if isinstance(error, RuntimeError) else KeyboardInterrupt):
            runner.outputs(x)
        assert_same_state(before, state_of(model))
        assert [p.requires_grad for p in model.parameters()] == flags
        assert not probe.outputs
        model.error = None
        runner.forward(x, lambda output: [OBJECTIVE])
        assert probe.outputs.keys() == probe.gradients.keys() == {Site("conv")}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_are_copies_without_a_graph_that_no_probe_hears_of(mode):
    model, x, probe = nets.seeded(lambda: nets.NestedOutput("dict")), nets.picture(), Gradients()
    with mode(), running(model, [probe], "inner") as runner:
        found = runner.outputs(x)
        edited = runner.outputs(x, [Edit("inner", lambda site, t: t * 2, output="aux")])
        assert (probe.outputs, runner.attachment.sites) == ({}, [])
    torch.testing.assert_close(found, model(x).detach())
    inner = model.inner(x)
    torch.testing.assert_close(
        edited, model.fc((inner["out"].relu() + 2 * inner["aux"]).mean((2, 3))).detach()
    )
    assert not found.requires_grad
    assert not found.is_inference()


def test_a_probe_may_ask_for_outputs_while_it_is_told():
    class Asking(Probe):
        needs = Needs(outputs=True)

        def on_output(self, site, tensor):
            answers.append((site, runner.outputs(x[:1])))

    model, x, answers = nets.seeded(nets.ReluThrice), nets.picture(), []
    with running(model, [Asking()], ["b", "c"]) as runner:
        done = runner.forward(x)
    assert [site for site, _ in answers] == [Site("b"), Site("c")] == list(done.sites)
    for _, answer in answers:
        torch.testing.assert_close(answer, model(x[:1]).detach())
    torch.testing.assert_close(done.output, model(x).detach(), rtol=1e-6, atol=1e-6)


def test_a_pass_aside_within_a_pass_aside_keeps_the_first_ones_edits_to_it():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    with (
        running(model, [], ".") as runner,
        runner.aside([], edits=[Edit("b", lambda site, t: t * 0)]) as outer,
    ):
        zeroed = outer.forward(x).output
        with outer.aside([]) as inner:
            plain = inner.forward(x).output
    torch.testing.assert_close(plain, model(x).detach())
    torch.testing.assert_close(
        zeroed, model.fc(model.c(torch.zeros(2, 4, 8, 8)).relu().mean((2, 3))).detach()
    )
