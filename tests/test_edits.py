"""An edit changes what a layer returns, for everybody who goes on with it, and nothing else."""

from __future__ import annotations

import nets
import pytest
import torch
from nets import picture, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth import score

from hookscope.edits import Edit
from hookscope.errors import UsageError
from hookscope.hooks import Needs, Probe, attached
from hookscope.layers import Selection, Site
from hookscope.runner import Objective, running

NOBODY = Selection(())


def run(model, x, *edits, probes=(), layers=NOBODY):
    with torch.no_grad(), attached(model, probes, layers, edits):
        return model(x)


def first_channel_zero(site, tensor):
    new = tensor.clone()
    new[:, 0] = 0
    return new


def doubled(site, tensor):
    return tensor * 2


class Keep(Probe):
    needs = Needs(outputs=True)

    def __init__(self):
        self.kept = {}

    def on_output(self, site, tensor):
        self.kept[site] = tensor.clone()


def test_the_model_goes_on_with_the_new_values_and_probes_are_told_of_them():
    model, x, probe = seeded(nets.ReluThrice), picture(), Keep()
    found = run(model, x, Edit("b", first_channel_zero), probes=[probe], layers=["b", "c"])
    y = model.b(model.a(x).relu())
    y[:, 0] = 0
    torch.testing.assert_close(probe.kept[Site("b")], y)
    assert probe.kept.keys() == {Site("b"), Site("c")}
    torch.testing.assert_close(found, model.fc(model.c(y.relu()).relu().mean((2, 3))))


def test_edited_layers_that_nobody_chose_are_not_heard_of():
    model, probe = seeded(nets.ReluThrice), Keep()
    with torch.no_grad(), attached(model, [probe], "c", [Edit("b", doubled)]) as attachment:
        model(picture())
        assert [str(site) for site in attachment.sites] == ["c"]
        assert attachment.calls == {"c": 1}
    assert probe.kept.keys() == {Site("c")}


@pytest.mark.parametrize("call", [None, 0, 1, 2])
def test_an_edit_is_of_one_call_or_of_every_one(call):
    model, x = seeded(nets.ReluThrice), picture()
    with torch.no_grad(), attached(model, (), NOBODY, [Edit("relu", doubled, call)]):
        found, again = model(x), model(x)
    factors = [2.0 if call in (None, number) else 1.0 for number in range(3)]
    y = x
    for conv, factor in zip((model.a, model.b, model.c), factors, strict=True):
        y = conv(y).relu() * factor
    torch.testing.assert_close(found, model.fc(y.mean((2, 3))))
    assert torch.equal(found, again)


@pytest.mark.parametrize("path", [None, "0", "1.0"])
def test_an_edit_is_of_one_tensor_or_of_every_floating_one(path):
    model, x = seeded(lambda: nets.NestedOutput("tuple")), picture()
    found = run(model, x, Edit("inner", doubled, output=path))
    a, (b, _) = model.inner(x)
    a, b = a * (1 if path == "1.0" else 2), b * (1 if path == "0" else 2)
    torch.testing.assert_close(found, model.fc((a.relu() + b).mean((2, 3))))


def test_whole_numbers_are_edited_only_by_name():
    class Counted(nn.Module):
        def forward(self, x):
            return x * 1, torch.tensor([3])

    model = nn.Sequential(Counted())
    assert run(model, torch.ones(1), Edit("0", doubled))[1].item() == 3
    assert run(model, torch.ones(1), Edit("0", doubled, output="1"))[1].item() == 6


def test_several_edits_of_a_site_apply_in_their_order():
    model, x = seeded(nets.ReluThrice), picture()
    found = run(model, x, Edit("c", doubled), Edit("c", lambda site, tensor: tensor - 1))
    y = model.c(model.b(model.a(x).relu()).relu()) * 2 - 1
    torch.testing.assert_close(found, model.fc(y.relu().mean((2, 3))))


def test_new_values_are_the_models_own_copy_and_take_its_dtype_and_layout():
    model, x = seeded(nets.ReluThrice).to(memory_format=torch.channels_last), picture()
    given = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    kept, seen = given.clone(), []
    model.relu.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, args[0].stride())))
    run(model, x.contiguous(memory_format=torch.channels_last), Edit("b", lambda site, tensor: given))
    assert torch.equal(given, kept)
    assert seen[1] == (torch.float32, (256, 1, 32, 4))


@pytest.mark.parametrize(
    ("make", "layer", "by_hand"),
    [
        (nets.InPlaceIgnored, "relu", lambda m, y: m.fc((y.relu() * 2).mean((2, 3)))),
        (nets.IdentityThenInPlace, "same", lambda m, y: m.fc((y * 2 * 2 + y * 2 * 2).mean((2, 3)))),
        (
            nets.HalfInPlace,
            "relu",
            lambda m, y: m.fc(torch.cat([y[:, :2].relu() * 2, y[:, 2:]], 1).mean((2, 3))),
        ),
        (nets.ReadBefore, "same", lambda m, y: m.fc((y * 2 + y.tanh()).mean((2, 3)))),
    ],
    ids=["in-place-ignored", "identity", "half-in-place", "read-before"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_that_hands_on_its_inputs_memory_is_changed_there(make, layer, by_hand, mode):
    model, x = seeded(make), picture()
    with mode(), attached(model, (), NOBODY, [Edit(layer, doubled)]):
        found = model(x)
    torch.testing.assert_close(found, by_hand(model, model.conv(x)).detach())


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "parameter"])
def test_what_belongs_to_the_model_is_never_written_to(buffer):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            values = torch.randn(4)
            if buffer:
                self.register_buffer("values", values)
            else:
                self.values = nn.Parameter(values)
            self.same, self.plain = nn.Identity(), torch.ones(4)

        def forward(self, x):
            return x * self.same(self.values) + self.same(self.plain)

    model = Owner()
    kept = model.values.detach().clone()
    found = run(model, torch.ones(4), Edit("same", doubled))
    torch.testing.assert_close(found, kept * 2 + 2)
    assert torch.equal(model.values, kept)
    assert torch.equal(model.plain, torch.ones(4))


def test_memory_that_cannot_be_written_to_is_replaced():
    class Expanding(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            return self.same(x.expand(3, 4))

    torch.testing.assert_close(
        run(Expanding(), torch.ones(1, 4), Edit("same", doubled)), torch.full((3, 4), 2.0)
    )
    with torch.inference_mode():
        x = torch.ones(4)
    model = nn.Sequential(nn.Identity())
    torch.testing.assert_close(run(model, x, Edit("0", doubled)), torch.full((4,), 2.0))
    assert torch.equal(x, torch.ones(4))


def test_an_unchanged_tensor_is_handed_on_as_it_is():
    model, seen = seeded(nets.ReluThrice), []
    with torch.no_grad(), attached(model, (), NOBODY, [Edit("b", lambda site, t: seen.append(id(t)) or t)]):
        model.relu.register_forward_pre_hook(lambda module, args: seen.append(id(args[0])))
        model(picture())
    assert seen[1] == seen[2]


@pytest.mark.parametrize(
    ("make", "layer", "by_hand"),
    [
        (nets.ReluThrice, "b", lambda m, x: m.fc(m.c((m.b(m.a(x).relu()) * 2).relu()).relu().mean((2, 3)))),
        (
            nets.ReluThrice,
            "relu",
            lambda m, x: m.fc((m.c(m.b(m.a(x).relu() * 2).relu() * 2).relu() * 2).mean((2, 3))),
        ),
        (nets.InPlaceIgnored, "relu", lambda m, x: m.fc((m.conv(x).relu() * 2).mean((2, 3)))),
        (
            nets.HalfInPlace,
            "relu",
            lambda m, x: m.fc(torch.cat([m.conv(x)[:, :2].relu() * 2, m.conv(x)[:, 2:]], 1).mean((2, 3))),
        ),
        (nets.Tokens, "lin", lambda m, x: m.fc((m.lin(m.patch(x).flatten(2).mT) * 2).relu().mean(1))),
        (lambda: nets.ReluThrice().train(), ".", lambda m, x: m(x) * 2),
    ],
    ids=["plain", "in-place", "in-place-ignored", "half-in-place", "view", "root"],
)
def test_with_a_graph_the_change_is_part_of_it(make, layer, by_hand):
    model, x = seeded(make), picture()
    named = dict(model.named_parameters())
    wanted = by_hand(model, x)
    gradients = torch.autograd.grad(score(wanted), list(named.values()))
    with attached(model, (), NOBODY, [Edit(layer, doubled)]):
        found = model(x)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(torch.autograd.grad(score(found), list(named.values())), gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_with_a_graph_what_autograd_saved_is_not_written_to():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(3, 3), nn.Dropout(inplace=True)

        def forward(self, x):
            return self.drop(torch.sigmoid(self.fc(x)))

    model, x = seeded(Dropped), torch.randn(2, 3)
    with attached(model, (), NOBODY, [Edit("drop", doubled)]):
        score(model(x)).backward()
    (wanted,) = torch.autograd.grad(score(torch.sigmoid(model.fc(x)) * 2), model.fc.weight)
    torch.testing.assert_close(model.fc.weight.grad, wanted)


def test_a_change_may_have_a_graph_of_its_own():
    model, x = seeded(nets.ReluThrice), picture()
    mask = torch.full((4, 1, 1), 0.5, requires_grad=True)
    with attached(model, (), NOBODY, [Edit("relu", lambda site, tensor: tensor * mask, 1)]):
        score(model(x)).backward()
    y = model.b(model.a(x).relu()).relu()
    (wanted,) = torch.autograd.grad(score(model.fc(model.c(y * mask).relu().mean((2, 3)))), mask)
    torch.testing.assert_close(mask.grad, wanted)


@pytest.mark.parametrize("call", [None, 0])
def test_a_checkpointed_layer_is_changed_in_both_its_passes(call):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.b(checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=False))

    model, x = seeded(Checkpointed), torch.randn(2, 3)
    with attached(model, (), NOBODY, [Edit("a", doubled, call)]):
        score(model(x)).backward()
    (wanted,) = torch.autograd.grad(score(model.b(torch.tanh(model.a(x) * 2))), model.a.weight)
    torch.testing.assert_close(model.a.weight.grad, wanted)


def test_a_gradient_probe_hears_of_the_edited_value():
    found = {}

    class Gradient(Probe):
        needs = Needs(gradients=True)

        def on_gradient(self, site, tensor, objective):
            found[site] = tensor.clone()

    model, x = seeded(nets.ReluThrice), picture()
    edit = Edit("b", doubled)
    with running(model, [], ".") as runner, runner.aside([Gradient()], ["a", "b"], [edit]) as aside:
        aside.forward(x, lambda output: [Objective("score", score)])
    a = model.a(x).detach().requires_grad_()
    b = model.b(a.relu()) * 2
    wanted = torch.autograd.grad(score(model.fc(model.c(b.relu()).relu().mean((2, 3)))), [a, b])
    torch.testing.assert_close(found[Site("a")], wanted[0])
    torch.testing.assert_close(found[Site("b")], wanted[1])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("bb", doubled), "no layer is named 'bb'"),
        (
            Edit("b", lambda site, tensor: tensor[:1]),
            r"the change at b made a tensor of shape \(1, 4, 8, 8\)",
        ),
        (Edit("b", lambda site, tensor: None), "the change at b made NoneType of one of shape"),
    ],
    ids=["layer", "shape", "nothing"],
)
def test_an_edit_that_cannot_be_made_is_a_usage_error_and_leaves_no_hook(edit, message):
    model = seeded(nets.ReluThrice)
    with pytest.raises(UsageError, match=message):
        run(model, picture(), edit)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_a_change_raises_is_not_the_models_failure():
    def failing(site, tensor):
        raise ValueError("mine")

    with running(seeded(nets.ReluThrice), [], ".") as runner, pytest.raises(ValueError, match="mine"):
        runner.outputs(picture(), [Edit("b", failing)])
