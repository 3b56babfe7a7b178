"""The rest of a model after a site: equal to whole passes, and no trace of how it was made."""

from __future__ import annotations

import nets
import pytest
import torch
import torchvision
from comparison import built
from nets import picture, seeded
from torch import nn

from hookscope.batch_axes import difference
from hookscope.errors import ModelError, UsageError
from hookscope.hooks import Needs, Probe
from hookscope.layers import Site, modules_by_name
from hookscope.nested import rebuilt, tensors_in
from hookscope.runner import Objective, running

COPIES = 3


def by_plain_hook(model, x, site, values):
    """What the model returns for copies of the picture with an ordinary forward hook that puts the values there.

    A layer whose output is its input's memory hands the values on in that memory, as whoever holds it expects.
    """
    calls = []

    def hook(module, args, output):
        calls.append(1)
        if len(calls) - 1 != site.call:
            return None
        tensor = dict(tensors_in(output))[site.output]
        given = [t.untyped_storage().data_ptr() for _, t in tensors_in(args)]
        if tensor.untyped_storage().data_ptr() in given:
            tensor.copy_(values)
            return None
        return rebuilt(output, {site.output: values.clone()})

    handle = modules_by_name(model)[site.layer].register_forward_hook(hook)
    try:
        with torch.no_grad():
            return model(x.repeat(values.shape[0], *[1] * (x.dim() - 1)))
    finally:
        handle.remove()


def assert_close(found, wanted, tolerance=1e-6):
    found, wanted = dict(tensors_in(found)), dict(tensors_in(wanted))
    assert found.keys() == wanted.keys() != set()
    for path, value in wanted.items():
        assert found[path].shape == value.shape
        assert (found[path] - value).abs().max() <= tolerance * value.abs().max(), path


def zeroed(value):
    """Copies of (1, ...) values, of each a third of the channels zeroed: those of the second axis."""
    values = value.repeat(COPIES, *[1] * (value.dim() - 1))
    for copy in range(COPIES):
        values[copy, copy::COPIES] = 0
    return values


def noisy(value):
    values = value.repeat(COPIES, *[1] * (value.dim() - 1))
    return values + values.std() * torch.randn(values.shape, generator=torch.Generator().manual_seed(2))


PERTURBED = {"zeroed-channels": zeroed, "noise": noisy}

ZOO = [
    ("resnet18", Site("layer3.0.conv2"), 64, {}),
    ("resnet18", Site("layer3.0.relu", 1), 64, {}),
    ("resnet18", Site("layer3.0.relu", 0), 64, {}),
    ("resnet50", Site("layer3.1.bn2"), 64, {}),
    ("alexnet", Site("features.7"), 96, {}),
    ("densenet121", Site("features.denseblock3.denselayer5.conv1"), 64, {}),
    ("inception_v3", Site("Mixed_6c.branch7x7_2"), 128, {"init_weights": False}),
    ("googlenet", Site("inception4b.branch2"), 64, {"init_weights": False}),
    ("shufflenet_v2_x1_0", Site("stage3.1.branch2.3"), 64, {}),
    ("vit_b_32", Site("encoder.layers.encoder_layer_6.ln_2"), 64, {"image_size": 64}),
    ("small-vit", Site("encoder.layers.encoder_layer_1.self_attention", 0, "0"), 64, {}),
    ("small-swin", Site("features.3.0"), 64, {}),
    ("small-swin", Site("features.3.0.norm1"), 64, {}),
    ("small-maxvit", Site("blocks.0.layers.1.layers.window_attention"), 64, {}),
    ("mobilenet_v2", Site("features.10.conv.1"), 64, {}),
    ("mobilenet_v2", Site("features.18.2"), 64, {}),
    ("efficientnet_b0", Site("features.4.1"), 64, {}),
    ("regnet_y_400mf", Site("trunk_output.block3.block3-1.f.b"), 64, {}),
    ("convnext_tiny", Site("features.5.2"), 64, {}),
    ("squeezenet1_1", Site("features.7.expand3x3"), 64, {}),
    ("lraspp_mobilenet_v3_large", Site("backbone.13"), 64, {}),
]


SMALL = {
    "small-vit": lambda weights: torchvision.models.VisionTransformer(64, 16, 3, 4, 32, 64),
    "small-swin": lambda weights: torchvision.models.SwinTransformer(
        [4, 4], 24, [2, 2, 2], [1, 2, 4], [7, 7]
    ),
    "small-maxvit": lambda weights: torchvision.models.MaxVit((64, 64), 16, 4, [16, 32], [2, 2], 16, 0.0),
}


def zoo(name, x, options):
    if "raspp" in name:
        options = {"weights_backbone": None}
    make = SMALL.get(name) or torchvision.models.get_model_builder(name)
    return built(make, x.float(), **options)


@pytest.mark.parametrize(
    ("name", "site", "size", "options"), ZOO, ids=[f"{name}-{site}" for name, site, *_ in ZOO]
)
def test_a_replay_equals_whole_passes_of_the_plain_model(name, site, size, options):
    # In float64 the batch size, which chooses the kernels, makes no difference that could be taken for another.
    x = picture(1, size).double()
    model = zoo(name, x, options).double()
    plain = repeated_output(model, x)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, site)
        assert (rest.replayed, rest.note) == (True, "")
        found = {key: rest(make(rest.value)) for key, make in PERTURBED.items()}
    for key, make in PERTURBED.items():
        wanted = by_plain_hook(model, x, site, make(rest.value))
        assert_close(found[key], wanted, 1e-9)
        assert difference(wanted, plain) > 1e-3, "the values do not matter"


def repeated_output(model, x):
    with torch.no_grad():
        return model(x.repeat(COPIES, 1, 1, 1))


class Functional(nn.Module):
    """Between its layers: a residual sum, an in-place op, a concatenation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        z = self.b(y)
        z += y
        return self.fc(self.c(torch.cat([z, y], 1)).relu_().mean((2, 3)))


class WritesBefore(nn.Module):
    """A layer's output is written to in place before the target is called, and the picture itself as well."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        x[:, 1] = 0
        y = self.a(x)
        y[:, 0].fill_(1.0)
        y.relu_()
        return self.fc(self.b(y).mean((2, 3)) + y.mean((2, 3)))


class HeldIdentity(nn.Module):
    """Both the identity's input and its output are used: new values at one are new values at the other."""

    def __init__(self):
        super().__init__()
        self.a, self.same, self.fc = nn.Conv2d(3, 4, 3), nn.Identity(), nn.Linear(4, 5)

    def forward(self, x):
        y = self.a(x)
        return self.fc((self.same(y).relu() - 2 * y).mean((2, 3)))


class TimeFirst(nn.Module):
    """Pictures lie along the second axis."""

    def __init__(self):
        super().__init__()
        self.a, self.rnn, self.fc = nn.Conv2d(3, 6, 3), nn.GRU(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        tokens = self.a(x).flatten(2).permute(2, 0, 1)
        return self.fc(self.rnn(tokens)[0].mean(0))


class Windows(nn.Module):
    """The rows of a picture become entries of the batch: all of a picture together, or each of all pictures."""

    class Rows(nn.Module):
        def __init__(self, together):
            super().__init__()
            self.order = (0, 2, 1, 3) if together else (2, 0, 1, 3)

        def forward(self, x):
            return x.permute(self.order).flatten(0, 1)

    def __init__(self, together):
        super().__init__()
        self.together = together
        self.a, self.rows, self.b, self.fc = (
            nn.Conv2d(3, 4, 3),
            self.Rows(together),
            nn.Tanh(),
            nn.Linear(10, 5),
        )
        self.mix = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        return self.rest(self.b(self.mix(self.rows(self.a(x)))), len(x))

    def rest(self, y, pictures):
        by_picture = (
            y.unflatten(0, (pictures, 10))
            if self.together
            else y.unflatten(0, (10, pictures)).transpose(0, 1)
        )
        return self.fc(by_picture.mean((1, 2)))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.shared, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 5)
        self.block = nn.Sequential(self.shared, nn.Tanh())

    def forward(self, x):
        return self.fc(self.shared(self.block(torch.tanh(self.shared(self.conv(x))))).mean((2, 3)))


AWKWARD = [
    (Functional, Site("b")),
    (WritesBefore, Site("b")),
    (WritesBefore, Site("a")),
    (HeldIdentity, Site("same")),
    (nets.InPlaceIgnored, Site("relu")),
    (nets.InPlaceIgnored, Site("conv")),
    (nets.IdentityThenInPlace, Site("same")),
    (nets.ReluThrice, Site("relu", 1)),
    (nets.ReluThrice, Site("b")),
    (Shared, Site("shared", 0)),
    (Shared, Site("shared", 1)),
    (Shared, Site("shared", 2)),
    (nets.Tied, Site("first", 1)),
    (nets.CallsItself, Site("inner", 1)),
    (lambda: nets.NestedOutput("tuple"), Site("inner", 0, "1.0")),
    (lambda: nets.NestedOutput("dict"), Site("inner", 0, "aux")),
    (lambda: nets.NestedOutput("named"), Site("relu")),
    (nets.Tokens, Site("lin")),
    (nets.Permuted, Site("permute")),
    (nets.Permuted, Site("lin")),
    (nets.ReadBefore, Site("same")),
    (nets.OwnTensor, Site("conv")),
    (nets.TwoViews, Site("conv")),
    (nets.HalfInPlace, Site("relu")),
    (nets.HalfInPlace, Site("conv")),
    (nets.Dropping, Site("drop")),
]


@pytest.mark.parametrize(
    ("make", "site"), AWKWARD, ids=[f"{getattr(m, '__name__', 'nested')}-{s}" for m, s in AWKWARD]
)
def test_awkward_models_are_replayed_right(make, site):
    model, x = seeded(make), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x.clone(), site)
        assert (rest.replayed, rest.note) == (True, "")
        values = noisy(rest.value)
        found, single = rest(values), rest(values[1:2])
        again = runner.continuation(x, site)(values)
    wanted = by_plain_hook(model, x.clone(), site, values)
    assert_close(found, wanted)
    assert_close(again, wanted)
    assert_close(single, wanted[1:2])
    assert (wanted[0] - wanted[1]).abs().max() > 1e-4 * wanted.abs().max()


def test_pictures_along_another_axis_take_values_along_it():
    model, x = seeded(TimeFirst), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("rnn", 0, "0"))
        assert rest.replayed
        values = torch.randn(rest.value.shape[0], COPIES, 6)
        torch.testing.assert_close(rest(values), model.fc(values.mean(0)))


@pytest.mark.parametrize("together", [True, False])
def test_many_entries_of_the_batch_a_picture_stay_in_the_models_order(together):
    model, x = seeded(lambda: Windows(together)), picture(1)
    with running(model, [], ".") as runner:
        rest, after = (runner.continuation(x, Site(layer)) for layer in ("mix", "b"))
        assert (rest.replayed, after.replayed) == (True, True)
        assert rest.value.shape == (10, 4, 10)
        values = torch.randn(COPIES * 10, 4, 10)
        found, found_after = rest(values), after(values.tanh())
    wanted = model.rest(values.tanh(), COPIES)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_after, wanted)


class AfterWindows(nn.Module):
    """What came of the windows is used again after the site, so that its order matters there."""

    def __init__(self, together):
        super().__init__()
        self.windows, self.site = Windows(together), nn.Linear(5, 5)

    def forward(self, x):
        y = self.windows.b(self.windows.rows(self.windows.a(x)))
        z = self.site(self.windows.rest(y, len(x)))
        weights = torch.arange(1.0, 11)[:, None, None]
        weights = (
            weights.repeat(len(x), 1, 1) if self.windows.together else weights.repeat_interleave(len(x), 0)
        )
        return z + self.windows.rest(y * weights, len(x))


@pytest.mark.parametrize("together", [True, False])
def test_many_recorded_entries_a_picture_are_repeated_in_the_models_order(together):
    model, x = seeded(lambda: AfterWindows(together)), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("site"))
        assert rest.replayed
        values = noisy(rest.value)
        found = rest(values)
    assert_close(found, by_plain_hook(model, x, Site("site"), values))


class Undecided(nn.Module):
    """How often a layer is called depends on the values, of a site and before it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.shrink, self.fc = (
            nn.Conv2d(3, 4, 3),
            nn.Conv2d(4, 4, 3),
            nn.Tanh(),
            nn.Linear(4, 5),
        )

    def forward(self, x):
        y = self.b(self.a(x))
        while y.abs().max() > 0.5:
            y = 0.7 * self.shrink(y)
        return self.fc(y.mean((2, 3)))


class Noisy(nn.Module):
    """Not two passes are alike."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.fc(self.b(self.a(x)).mean((2, 3))) * self.passes


class Alternating(nn.Module):
    """Which of two layers is called first depends on the picture."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.fc = (
            nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        )  # fmt: skip

    def forward(self, x):
        layers = (self.a, self.b) if x[0].mean() > 0 else (self.b, self.a)
        for layer in layers:
            x = layer(x)
        return self.fc(self.c(x).tanh().mean((2, 3)))


class Mixing(nn.Module):
    """What it makes of a picture depends on the others in the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.a(x)
        return self.b(y - y.sum(0)).mean((2, 3))


class Bundled(nn.Module):
    """Returns a list with an entry a picture, as detectors do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return [{"score": y.mean((1, 2))} for y in self.b(self.a(x))]


@pytest.mark.parametrize(
    ("make", "site", "why"),
    [
        (nets.Stashed, Site("fc"), "keeps values aside as 'skip'"),
        (nets.DerivedStash, Site("fc"), "keeps values aside as 'skip'"),
        (nets.LateView, Site("fc"), "keeps values aside as 'kept'"),
        (Mixing, Site("b"), "depends on the others in the batch"),
        (Bundled, Site("b"), "1 tensors become 2 for two pictures"),
    ],
    ids=["stash", "derived-stash", "late-view", "mixing", "list"],
)
def test_what_cannot_be_replayed_is_said_and_passes_are_whole(make, site, why):
    model, x = seeded(make), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, site)
        assert not rest.replayed
        assert why in rest.note
        assert rest.note.startswith(f"whole passes are made for {site}: ")
        values = noisy(rest.value)
        found = rest(values)
    assert_close(found, by_plain_hook(model, x, site, values))


def test_control_flow_after_the_site_may_depend_on_the_values():
    model, x = seeded(Undecided), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("b"))
        for values in (noisy(rest.value) * 5, noisy(rest.value) * 0.01):
            assert_close(rest(values), by_plain_hook(model, x, Site("b"), values))


def test_a_model_of_which_no_two_passes_are_alike_is_not_replayed():
    model, x = seeded(Noisy), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("b"))
        assert not rest.replayed
        assert "changes its output by" in rest.note


def test_another_picture_with_another_order_of_calls_gets_whole_passes():
    model, x = seeded(Alternating), picture(1).abs()
    with running(model, [], ".") as runner:
        for sign, replayed in ((1, True), (-1, False), (1, True)):
            rest = runner.continuation(sign * x, Site("c"))
            assert rest.replayed is replayed
            values = noisy(rest.value)
            assert_close(rest(values), by_plain_hook(model, sign * x, Site("c"), values))
        assert "order in which it calls its layers" in runner.continuation(-x, Site("c")).note


class Count(Probe):
    needs = Needs(outputs=True)

    def __init__(self):
        self.heard = []

    def on_output(self, site, tensor):
        self.heard.append(site)


def test_layers_before_the_site_are_spared_and_known_models_cost_one_pass_more():
    model = seeded(Functional)
    runs = dict.fromkeys("abc", 0)
    for name in runs:
        forward = getattr(model, name).forward

        def counting(*args, name=name, forward=forward):
            runs[name] += 1
            return forward(*args)

        getattr(model, name).forward = counting

    def counted():
        found = dict(runs)
        runs.update(dict.fromkeys(runs, 0))
        return found

    with running(model, [], ".") as runner:
        rest = runner.continuation(picture(1), Site("b"))
        counted()
        rest(noisy(rest.value))
        assert counted() == {"a": 0, "b": 0, "c": 1}
        other = runner.continuation(picture(1, seed=5), Site("b"))
        assert counted() == {"a": 1, "b": 1, "c": 2}  # recorded, and checked
        values = noisy(other.value)
        found = other(values)
    assert_close(found, by_plain_hook(model, picture(1, seed=5), Site("b"), values))


def test_pictures_do_not_share_a_recording():
    model, one, two = seeded(Functional), picture(1), picture(1, seed=5)
    with running(model, [], ".") as runner:
        first, second = (runner.continuation(x, Site("b")) for x in (one, two))
        for rest, x in ((first, one), (second, two), (first, one)):
            values = noisy(rest.value)
            assert_close(rest(values), by_plain_hook(model, x, Site("b"), values))


def test_probes_of_the_main_pass_hear_nothing_of_it():
    model, probe, x = seeded(Functional), Count(), picture(1)
    with running(model, [probe], "**") as runner:
        runner.forward(x)
        heard, sites, calls = list(probe.heard), list(runner.attachment.sites), dict(runner.attachment.calls)
        rest = runner.continuation(x, Site("b"))
        rest(noisy(rest.value))
        assert (probe.heard, runner.attachment.sites, runner.attachment.calls) == (heard, sites, calls)


def everything(model):
    """All that a module holds, by identity, and its hooks."""
    return (
        [
            (
                {name: id(value) for name, value in vars(module).items()},
                list(module._forward_hooks.items()),
                list(module._forward_pre_hooks.items()),
            )
            for module in model.modules()
        ],
        [parameter.requires_grad for parameter in model.parameters()],
        [b.clone() for b in model.buffers()],
    )


class Failing(nn.Module):
    """Raises in `b` once `error` is set, after so many calls of it."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.error, self.after = nn.Conv2d(4, 4, 3), [], [0]

        def forward(self, x):
            self.after[0] -= 1
            if self.error and self.after[0] < 0:
                raise self.error[0]
            return self.conv(x)

    def __init__(self):
        super().__init__()
        self.a, self.bn, self.b, self.fc = (
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            self.Inner(),
            nn.Linear(4, 5),
        )
        # A forward of its own that somebody gave the instance, and a foreign hook.
        kept = self.a.forward
        self.a.forward = lambda x: kept(x)
        self.fired = []
        self.fc.register_forward_hook(lambda module, args, output: self.fired.append(1))

    def forward(self, x):
        return self.fc(self.b(self.bn(self.a(x)).relu_()).mean((2, 3)))


@pytest.mark.parametrize("when", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_the_model_is_left_as_it_was_found(error, when):
    model, x = seeded(Failing), picture(1)
    model.train()
    model.fc.weight.requires_grad_(False)
    before = everything(model)

    def go():
        with running(model, [], ".") as runner:
            inside = everything(model)
            model.b.after[0] = 0 if when is None else when
            if when is not None:
                model.b.error.append(error)
            try:
                rest = runner.continuation(x, Site("bn"))
                rest(noisy(rest.value))
            finally:
                for found, wanted in zip(everything(model)[0], inside[0], strict=True):
                    assert found == wanted

    if when is None:
        go()
        assert model.fired
    else:
        with pytest.raises(ModelError if isinstance(error, RuntimeError) else KeyboardInterrupt):
            go()
    after = everything(model)
    assert after[:2] == before[:2]
    assert all(torch.equal(one, other) for one, other in zip(before[2], after[2], strict=True))
    assert model.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_changes_nothing(mode):
    model = seeded(Functional)
    with mode():
        x = picture(1)
        with running(model, [], ".") as runner:
            rest = runner.continuation(x, Site("b"))
            values = noisy(rest.value)
            assert rest.replayed
            found = rest(values)
    assert not found.requires_grad
    assert_close(found, by_plain_hook(model, picture(1), Site("b"), values))


def test_values_and_picture_are_never_written_to_and_results_are_copies():
    model, x = seeded(WritesBefore), picture(1)
    kept = x.clone()
    with running(model, [], ".") as runner:
        for site in (Site("a"), Site("b"), Site("fc"), Site(".")):
            rest = runner.continuation(x, site)
            values = noisy(rest.value)
            given, own = values.clone(), rest.value.clone()
            found = rest(values)
            again = found.clone()
            rest(values).zero_()
            assert torch.equal(found, again)
            assert torch.equal(values, given)
            assert torch.equal(rest.value, own)
    assert torch.equal(x, kept)


def test_bfloat16_is_replayed_within_its_rounding():
    x = picture(1, 64)
    model, x = zoo("resnet18", x, {}).bfloat16(), x.bfloat16()
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("layer3.0.conv2"))
        assert rest.replayed
        assert rest.value.dtype == torch.bfloat16
        values = noisy(rest.value.float()).bfloat16()
        assert_close(rest(values), by_plain_hook(model, x, Site("layer3.0.conv2"), values), 2e-2)


def test_channels_last_models_are_replayed_in_their_own_layout():
    x = picture(1, 64)
    model = zoo("resnet18", x, {}).to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    strides = []
    model.layer3[0].bn2.register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("layer3.0.conv2"))
        strides.clear()
        values = noisy(rest.value).contiguous()
        found = rest(values)
    assert rest.replayed
    assert strides == [(values[0].numel(), 1, 4 * 256, 256)]
    assert_close(found, by_plain_hook(model, x, Site("layer3.0.conv2"), values), 1e-4)


@pytest.mark.parametrize(
    ("site", "pictures", "message"),
    [
        (Site("bb"), 1, "no layer is named 'bb'"),
        (Site("b", 1), 1, "no value at b@1"),
        (Site("b", 0, "out"), 1, "no value at b:out"),
        (Site("b"), 2, r"shape \(2, 3, 12, 12\) is not one picture"),
    ],
    ids=["layer", "call", "path", "batch"],
)
def test_a_site_that_there_is_not_is_a_usage_error(site, pictures, message):
    with running(seeded(Functional), [], ".") as runner, pytest.raises(UsageError, match=message):
        runner.continuation(picture(pictures), site)


def test_values_of_another_shape_are_a_usage_error():
    with running(seeded(Functional), [], ".") as runner:
        rest = runner.continuation(picture(1), Site("b"))
        for values in (rest.value[0], rest.value[:, :2], rest.value[:0]):
            with pytest.raises(UsageError, match="cannot be put at b"):
                rest(values)
        assert rest.replayed


def test_a_continuation_may_be_used_inside_a_pass_of_the_main_probes():
    model, x = seeded(Functional), picture(1)
    found = {}

    class Gradient(Probe):
        needs = Needs(outputs=True, gradients=True)

        def on_gradient(self, site, tensor, objective):
            found["gradient"] = tensor.clone()

    with running(model, [Gradient()], "b") as runner:

        def objectives(output):
            rest = runner.continuation(x, Site("b"))
            found["output"] = rest(rest.value)
            return [Objective("score", lambda output: output.sum())]

        runner.forward(x, objectives)
    y = torch.tanh(model.a(x))
    b = model.b(y).detach().requires_grad_()
    output = model.fc(model.c(torch.cat([b + y, y], 1)).relu().mean((2, 3)))
    torch.testing.assert_close(found["output"], output.detach())
    torch.testing.assert_close(found["gradient"], torch.autograd.grad(output.sum(), b)[0])


def test_a_model_that_leaves_python_while_it_is_learnt_gets_whole_passes():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            if len(x) == 2:
                raise SystemExit(3)
            return self.b(self.a(x)).mean((2, 3))

    model, x = seeded(Leaving), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("a"))
        assert not rest.replayed
        values = noisy(rest.value)
        assert_close(rest(values), by_plain_hook(model, x, Site("a"), values))
        with pytest.raises(ModelError, match="the model raised SystemExit"):
            rest(values[:2])


def test_values_with_a_graph_are_put_into_shared_memory_all_the_same():
    model, x = seeded(HeldIdentity), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("same"))
        values = noisy(rest.value)
        assert_close(rest(values.clone().requires_grad_()), by_plain_hook(model, x, Site("same"), values))


class FillsLater(nn.Module):
    """Fills what a layer returned after it was read: torch lets that pass even on a view of one row for all."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        y = self.a(x)
        early = y.mean((2, 3))
        y.zero_()
        return self.fc(self.b(early[:, :, None, None] * torch.ones(3, 3)).mean((2, 3)) + early)


def test_a_recording_that_the_model_would_fill_is_copied():
    model, x = seeded(FillsLater), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("b"))
        values = noisy(rest.value)
        for _ in range(2):
            assert_close(rest(values), by_plain_hook(model, x, Site("b"), values))
        assert rest.replayed


class OrderByCount(nn.Module):
    """The order in which layers are called changes with more than two pictures."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.c, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(7, 5)

    def forward(self, x):
        y = self.b(self.a(x)) if len(x) <= 2 else self.a(self.b(x))
        return self.fc(torch.cat([self.c(y), y[:, :, 1:-1, 1:-1]], 1).mean((2, 3)))


def test_calls_in_another_order_than_learnt_are_noticed_and_passes_are_whole_from_then_on():
    model, x = seeded(OrderByCount), picture(1)
    with running(model, [], ".") as runner:
        rest = runner.continuation(x, Site("c"))
        values = noisy(rest.value)
        assert rest.replayed
        assert_close(rest(values[:2]), by_plain_hook(model, x, Site("c"), values[:2]))
        assert_close(rest(values), by_plain_hook(model, x, Site("c"), values))
        assert not rest.replayed
        assert "the order in which it calls its layers" in rest.note
