"""Gradient norms against autograd in float64, closed forms, and the hand cases of the definitions."""

from __future__ import annotations

import math

import nets
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from truth import reference, score

import hookscope
from hookscope.errors import UsageError
from hookscope.hooks import attached
from hookscope.layers import Site
from hookscope.losses import cross_entropy, loss_function, loss_objective
from hookscope.magnitudes import Magnitude, joined, magnitude, scaled
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.runner import running


@pytest.mark.parametrize(
    ("values", "norm", "largest"),
    [([3.0, 4.0], 5.0, 4.0), ([-12.0], 12.0, 12.0), ([0.0, 0.0], 0.0, 0.0), ([], 0.0, 0.0)],
)
def test_magnitudes_by_hand(values, norm, largest):
    found = magnitude(torch.tensor(values))
    assert (found.norm, found.largest, found.non_finite, found.count) == (norm, largest, 0, len(values))


def test_the_total_is_the_norm_of_the_norms():
    assert math.hypot(magnitude(torch.tensor([3.0, 4.0])).norm, magnitude(torch.tensor([12.0])).norm) == 13.0


@pytest.mark.parametrize("size", [1, 4096, 16384, 16385, 1_000_003])
def test_magnitudes_equal_float64(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3 + 1
    assert magnitude(values).norm == pytest.approx(float(values.double().norm()), rel=1e-6)


def test_a_norm_of_many_values_is_better_than_a_plain_float32_one():
    values = torch.randn(12_800_000, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    assert abs(magnitude(values, largest=False).norm - exact) / exact < 1e-6


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "strided", "expanded", "scalar"])
def test_any_memory_layout_gives_the_same(layout):
    values = torch.randn(4, 3, 5, 6)
    made = {
        "channels-last": values.to(memory_format=torch.channels_last),
        "transposed": values.permute(3, 1, 0, 2),
        "strided": values[:, :, ::2, 1:4],
        "expanded": torch.tensor([2.0]).expand(7, 3),
        "scalar": torch.tensor(-2.5),
    }[layout]
    assert magnitude(made).norm == pytest.approx(float(made.double().norm()), rel=1e-6)
    assert magnitude(made).largest == pytest.approx(float(made.abs().max()))


@pytest.mark.parametrize(
    ("values", "dtype", "norm"),
    [
        ([300.0] * 10_000, torch.float16, 30_000.0),
        ([1e-4] * 10_000, torch.float16, 1e-2),
        ([1e30, 1e30], torch.float32, math.sqrt(2) * 1e30),
        ([1e-30, 1e-30], torch.float32, math.sqrt(2) * 1e-30),
        ([1e-42], torch.float32, 1e-42),
        ([1e200, 0.0], torch.float64, 1e200),
    ],
)
def test_no_overflow_and_no_underflow(values, dtype, norm):
    assert magnitude(torch.tensor(values, dtype=dtype)).norm == pytest.approx(norm, rel=1e-3)


def test_non_finite_entries_are_counted():
    found = magnitude(torch.tensor([1.0, math.nan, math.inf, -math.inf]))
    assert found.non_finite == 3
    assert not math.isfinite(found.norm)
    assert math.isnan(found.largest)
    assert magnitude(torch.tensor([1.0, math.inf])).largest == math.inf


def test_joining_and_scaling_are_as_of_one_tensor():
    a, b = torch.randn(10), torch.randn(7)
    whole = joined(magnitude(a), magnitude(b))
    assert whole.norm == pytest.approx(magnitude(torch.cat([a, b])).norm)
    assert whole.count == 17
    assert scaled(Magnitude(2.0, 1.0, 0, 4), 3.0) == Magnitude(6.0, 3.0, 0, 4)
    assert Magnitude(6.0, None, 0, 9).rms == 2.0


def float64_gradients(model, x, targets):
    import copy

    exact = copy.deepcopy(model).double().eval()
    named = dict(exact.named_parameters())
    loss = F.cross_entropy(exact(x.double()), targets)
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return float(loss.detach()), dict(zip(named, gradients, strict=True))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "densenet121"])
def test_norms_equal_autograd_in_float64(name):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10).eval()
    x, targets = torch.randn(4, 3, 64, 64), torch.tensor([0, 3, 3, 9])
    report = hookscope.gradnorm(model, x, targets, layers="type:Conv2d")
    loss, gradients = float64_gradients(model, x, targets)
    assert report.loss == pytest.approx(loss, rel=1e-4)
    total = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert report.total_norm == pytest.approx(total, rel=1e-3)
    for row in report.parameters:
        exact = gradients[row.name]
        assert row.gradient.norm == pytest.approx(float(exact.norm()), rel=2e-3, abs=1e-7 * total)
        assert row.gradient.rms == pytest.approx(row.gradient.norm / math.sqrt(exact.numel()))
        assert row.gradient.largest == pytest.approx(float(exact.abs().max()), rel=5e-3, abs=1e-7 * total)


def test_layers_equal_autograd_on_the_split_model():
    model, x = nets.seeded(nets.ReluThrice), nets.picture(3)
    targets = torch.tensor([0, 1, 2])
    report = hookscope.gradnorm(model, x, targets)
    rows = {str(row.site): row for row in report.layers}
    a = model.a(x).detach().requires_grad_()
    loss = F.cross_entropy(model.fc(model.c(model.b(a.relu()).relu()).relu().mean((2, 3))), targets)
    (g,) = torch.autograd.grad(loss, a)
    assert rows["a"].output_grad.norm == pytest.approx(float(g.norm()), rel=1e-5)
    assert rows["relu"].input_grad_total == pytest.approx(float(g.norm()), rel=1e-5)
    assert [row.depth for row in report.layers] == list(range(len(report.layers)))
    assert [str(row.site) for row in report.layers] == ["a", "relu", "b", "relu@1", "c", "relu@2", "fc"]
    own = math.hypot(*(row.gradient.norm for row in report.parameters if row.layer == "b"))
    assert rows["b"].parameter_grad_norm == pytest.approx(own)


class SumPooled(nn.Module):
    """Pooling by a sum gives a gradient of stride 0: many entries in the memory of one."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.conv(x).sum((2, 3)))


NETS = {**nets.AWKWARD, "sum-pooled": SumPooled}
del NETS["in-place-ignored"], NETS["identity-in-place"]  # these have no twin


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_every_layers_figures_are_those_of_the_plain_gradients(make):
    model, x = nets.seeded(make), nets.picture()
    _, gradients = reference(model, x, scalar=lambda output: score(output))
    report = hookscope.gradnorm(model, x, loss=lambda output, targets: score(output))
    rows = {row.site: row for row in report.layers}
    for site, gradient in gradients.items():
        if site.layer != ".":
            found = rows[site].output_grad
            wanted = None if gradient is None else pytest.approx(float(gradient.double().norm()), rel=1e-5)
            assert (found and found.norm) == wanted, site
            assert gradient is None or found.count == gradient.numel()


def test_attentions_input_is_counted_once():
    model = torchvision.models.VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3).eval()
    nn.init.normal_(model.heads.head.weight)
    report = hookscope.gradnorm(model, torch.randn(1, 3, 16, 16), torch.tensor([0]))
    rows = {row.site.layer: row for row in report.layers}
    block = "encoder.layers.encoder_layer_0"
    wanted = rows[f"{block}.ln_1"].output_grad.norm
    assert rows[f"{block}.self_attention"].input_grad_total == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "value", "batches"),
    [(torch.bfloat16, 1.0, 1024), (torch.float16, 3000.0, 64)],
    ids=["bf16", "fp16"],
)
def test_many_batches_of_halves_neither_stall_nor_overflow(dtype, value, batches):
    probe = GradNormProbe()
    for _ in range(batches):
        probe.begin(8)
        probe.on_param_gradient("w", torch.full((4,), value, dtype=dtype), "loss")
        probe.finish_batch([], 0.0)
    assert probe.param_gradient("w").norm == pytest.approx(2 * value, rel=1e-3)
    assert probe.param_gradient("w").non_finite == 0


def test_a_gradient_that_only_some_batches_have_is_averaged_over_all():
    probe = GradNormProbe()
    for pictures, gradient in ((3, torch.tensor([8.0])), (1, None)):
        probe.begin(pictures)
        probe.on_param_gradient("w", gradient, "loss")
        probe.finish_batch([], 0.0)
    assert probe.param_gradient("w").norm == 6.0


def test_what_cannot_be_seen_is_undefined_not_zero_and_not_without_a_path():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(200, 5)).eval()
    report = hookscope.gradnorm(model, nets.picture(), torch.tensor([0, 1]))
    assert {row.site.layer: row.status for row in report.layers} == {
        "0": "ok",
        "1": "undefined",
        "2": "ok",
        "3": "ok",
    }


def test_a_lazy_layer_that_is_never_called_has_a_row():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.spare = nn.Conv2d(3, 4, 3), nn.LazyLinear(3)

        def forward(self, x):
            return self.conv(x).mean((2, 3))

    report = hookscope.gradnorm(Lazy(), nets.picture(), torch.tensor([0, 1]))
    row = next(row for row in report.parameters if row.name == "spare.weight")
    assert (row.status, row.shape, row.gradient) == ("not-called", (), None)


def test_a_loss_of_ones_own_needs_no_classifier():
    model = nn.Sequential(nn.Conv2d(3, 2, 3))
    report = hookscope.gradnorm(model, nets.picture(), loss=lambda output, targets: output.pow(2).mean())
    assert report.loss == pytest.approx(float(model(nets.picture()).pow(2).mean().detach()))
    with pytest.raises(UsageError, match="no class scores"):
        hookscope.gradnorm(model, nets.picture())


def test_a_class_out_of_range_is_said_as_such():
    with pytest.raises(UsageError, match="class 7 is out of range: the model has 5 classes"):
        hookscope.gradnorm(nets.seeded(nets.ReluThrice), nets.picture(), torch.tensor([0, 7]))


def in_batches(model, x, targets, sizes):
    probe = GradNormProbe()
    start = 0
    with running(model, [probe]) as runner:
        for size in sizes:
            part = slice(start, start + size)
            start += size
            objective = loss_objective(cross_entropy, targets[part])
            done = runner.forward(x[part], lambda output, objective=objective: [objective])
            probe.finish_batch(done.sites, done.values["loss"])
    return probe


def test_figures_do_not_depend_on_the_batch_size():
    model, x = nets.seeded(nets.ReluThrice), nets.picture(7)
    targets = torch.arange(7) % 5
    whole = in_batches(model, x, targets, [7])
    parts = in_batches(model, x, targets, [3, 3, 1])
    assert parts.mean_loss() == pytest.approx(whole.mean_loss())
    for name, _ in model.named_parameters():
        assert parts.param_gradient(name).norm == pytest.approx(whole.param_gradient(name).norm, rel=1e-5)
    for site in whole.sites:
        assert parts.output_gradient(site).norm == pytest.approx(whole.output_gradient(site).norm, rel=1e-5)
        one, other = parts.input_gradient(site), whole.input_gradient(site)
        # The picture itself needs no gradient.
        assert (one is None) == (other is None) == (site == Site("a"))
        assert one is None or one.norm == pytest.approx(other.norm, rel=1e-5)


def test_statuses_tell_tied_frozen_unused_and_bypassed_apart():
    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.frozen, self.spare = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.bypassed, self.side, self.zero = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.twin = nn.Linear(3, 3)
            self.twin.weight = self.stem.weight
            self.frozen.requires_grad_(False)
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)

        def forward(self, x):
            y = self.frozen(self.stem(x))
            self.side(y)
            y = F.linear(y, self.bypassed.weight)
            return self.twin(y) + self.zero(y) * 0

    report = hookscope.gradnorm(nets.seeded(Everything), torch.ones(2, 3), torch.tensor([0, 1]))
    params = {row.name: row for row in report.parameters}
    layers = {row.site.layer: row for row in report.layers}
    assert {name: row.status for name, row in params.items()} == {
        "stem.weight": "ok", "stem.bias": "ok", "frozen.weight": "frozen", "frozen.bias": "frozen",
        "spare.weight": "not-called", "spare.bias": "not-called", "bypassed.weight": "ok",
        "bypassed.bias": "not-called", "side.weight": "no-grad-path", "side.bias": "no-grad-path",
        "zero.weight": "zero-gradient", "zero.bias": "zero-gradient", "twin.bias": "ok",
    }  # fmt: skip
    assert params["stem.weight"].aliases == ("twin.weight",)
    assert params["side.weight"].gradient is None
    assert params["zero.weight"].gradient.norm == 0
    assert params["zero.weight"].ratio is None
    assert params["stem.bias"].ratio == pytest.approx(
        params["stem.bias"].gradient.norm / params["stem.bias"].weight_norm
    )
    assert {name: row.status for name, row in layers.items()} == {
        "stem": "ok", "frozen": "ok", "side": "no-grad-path", "zero": "zero-gradient", "twin": "ok",
        "spare": "not-called", "bypassed": "bypassed",
    }  # fmt: skip
    assert layers["frozen"].parameter_grad_norm is None
    assert (layers["bypassed"].depth, layers["bypassed"].output_grad) == (None, None)
    assert layers["bypassed"].parameter_grad_norm == params["bypassed.weight"].grad_norm
    # A tied weight belongs to the layer of its first name.
    assert layers["twin"].parameter_grad_norm == params["twin.bias"].grad_norm
    got = [row.gradient.norm for row in params.values() if row.gradient is not None]
    assert report.total_norm == pytest.approx(math.hypot(*got))
    assert params["zero.weight"].spread.mean == 0
    assert params["side.weight"].spread is None


def test_a_fully_frozen_model_still_has_activation_gradients():
    model = nets.seeded(nets.ReluThrice)
    wanted = hookscope.gradnorm(model, nets.picture(), torch.tensor([0, 1]))
    model.requires_grad_(False)
    report = hookscope.gradnorm(model, nets.picture(), torch.tensor([0, 1]))
    assert {row.status for row in report.parameters} == {"frozen"}
    assert report.total_norm == 0
    for row, same in zip(report.layers, wanted.layers, strict=True):
        assert row.output_grad.norm == pytest.approx(same.output_grad.norm, rel=1e-6)


def test_a_planted_infinity_is_counted_and_said():
    model = nets.seeded(nets.ReluThrice)
    with torch.no_grad():
        model.b.weight[0, 0, 0, 0] = math.inf
    report = hookscope.gradnorm(model, nets.picture(), torch.tensor([0, 1]))
    assert "non-finite" in {row.status for row in report.parameters}
    assert not math.isfinite(report.total_norm)


def test_losses_by_name_and_by_callable():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    targets = torch.tensor([1, 2])
    by_score = hookscope.gradnorm(model, x, targets, loss="score")
    assert by_score.loss == pytest.approx(float(model(x).gather(1, targets[:, None]).mean().detach()))
    own = hookscope.gradnorm(model, x, targets, loss=lambda output, wanted: (output**2).mean())
    assert own.loss == pytest.approx(float((model(x) ** 2).mean().detach()))
    predicted = hookscope.gradnorm(model, x)
    assert predicted.loss == pytest.approx(float(F.cross_entropy(model(x), model(x).argmax(1)).detach()))
    assert loss_function("score") is not loss_function("cross_entropy")


def test_a_single_score_gets_the_binary_loss():
    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            return self.fc(x)

    model, x = nets.seeded(Binary), torch.randn(4, 3)
    targets = torch.tensor([0, 1, 1, 0])
    report = hookscope.gradnorm(model, x, targets)
    wanted = F.binary_cross_entropy_with_logits(model(x)[:, 0], targets.float())
    assert report.loss == pytest.approx(float(wanted.detach()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("cross_entorpy", "unknown loss 'cross_entorpy'"),
        (lambda output, targets: output, r"the loss gave a tensor of shape \(2, 5\), not one number"),
        (lambda output, targets: 3.0, "the loss gave float, not one number"),
        (lambda output, targets: 1 / 0, "the loss raised ZeroDivisionError"),
    ],
    ids=["name", "shape", "type", "raises"],
)
def test_bad_losses_are_usage_errors(loss, message):
    with pytest.raises(UsageError, match=message):
        hookscope.gradnorm(nets.seeded(nets.ReluThrice), nets.picture(), loss=loss)


def test_dot_grad_of_the_user_is_set_aside_not_lost():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    model(x).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    hookscope.gradnorm(model, x)
    assert all(a is b.grad for a, b in zip(kept, model.parameters(), strict=True))


def test_the_probe_works_inside_a_plain_training_step():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    probe = GradNormProbe()
    probe.begin(2)
    with attached(model, [probe]):
        F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    probe.finish_batch([Site("a")], 0.0)
    alone = hookscope.gradnorm(model, x, torch.tensor([0, 1]))
    wanted = next(row for row in alone.layers if row.site == Site("a"))
    assert probe.output_gradient(Site("a")).norm == pytest.approx(wanted.output_grad.norm)
