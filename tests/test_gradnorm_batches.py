"""Gradient norms over batches of the user's own, in train mode, in every norm, against plain autograd on twins."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import weakref
from itertools import count, islice

import nets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookscope
from hookscope.errors import ModelError, NothingMeasured, UsageError
from hookscope.layers import Site
from hookscope.models.data import batches_of
from hookscope.output.tables import to_csv, to_json_table, to_markdown
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.tasks import gradplots, gradtables
from hookscope.userdata import DataBatch, checked, placed

NORMS = {"L1": 1.0, "L2": 2.0, "Linf": math.inf}


class Hand(nn.Module):
    """Two parameters whose gradients are (3, 4) and 12, times the mean of the input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        return self.one(x * torch.tensor([3.0, 4.0])).sum() + self.two(x[:, :1] * 12).sum()


def plain_sum(output, targets):
    return output


def ones(batches, size=1):
    return [(torch.full((size, 2), float(scale)), None) for scale in batches]


@pytest.mark.parametrize(
    ("norm", "one", "two", "total"),
    [(1, 7.0, 12.0, 19.0), (2, 5.0, 12.0, 13.0), ("inf", 4.0, 12.0, 12.0)],
    ids=NORMS,
)
def test_the_hand_case_in_every_norm(norm, one, two, total):
    report = hookscope.gradnorm(nets.seeded(Hand), *ones([1.0])[0], loss=plain_sum, norm=norm)
    rows = {row.name: row for row in report.parameters}
    assert (rows["one.weight"].grad_norm, rows["two.weight"].grad_norm) == (one, two)
    assert report.total_norm == report.total.of(report.norm) == total
    assert (report.total.l1, report.total.norm, report.total.largest) == (19.0, 13.0, 12.0)
    assert report.total.rms == pytest.approx(13 / math.sqrt(3))
    assert rows["unused.weight"].grad_norm is None


def test_the_mean_of_norms_is_not_the_norm_of_the_mean():
    """Gradients g and -3g: their mean is -g, the mean of their norms 2 |g|."""
    report = hookscope.gradnorm(nets.seeded(Hand), batches=ones([1.0, -3.0]), loss=plain_sum)
    assert report.total_norm == pytest.approx(13.0)
    spread = report.total_spread
    assert (spread.mean, spread.maximum, spread.minimum, spread.last) == pytest.approx(
        (26.0, 39.0, 13.0, 39.0)
    )
    row = next(row for row in report.parameters if row.name == "one.weight")
    assert (row.grad_norm, row.spread.mean, row.spread.batches) == pytest.approx((5.0, 10.0, 2))
    layer = next(row for row in report.layers if row.site == Site("one"))
    assert (layer.parameter_grad_norm, layer.parameter_spread.mean) == pytest.approx((5.0, 10.0))


def test_a_gradient_that_only_some_batches_have_is_spread_over_these():
    probe = GradNormProbe()
    for gradient in (torch.tensor([3.0, 4.0]), None, torch.zeros(2)):
        probe.begin(1)
        probe.on_param_gradient("a.w", gradient, "loss")
        probe.finish_batch([], 0.0)
    spread = probe.param_spread("a.w")
    assert (spread.mean, spread.maximum, spread.minimum, spread.last, spread.batches) == (
        2.5,
        5.0,
        0.0,
        0.0,
        2,
    )
    assert probe.layer_spread("a") == spread
    assert probe.param_spread("b.w") is None
    assert probe.total_spread().batches == 2


def data(sizes=(3, 3, 1), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 3, 12, 12, generator=generator), torch.randint(5, (n,), generator=generator))
        for n in sizes
    ]


def twins_gradients(model, x, targets):
    """Gradients of parameters by name and of what each layer returned, of a float64 twin by plain autograd."""
    twin = copy.deepcopy(model).double()
    kept = {}
    for name, module in twin.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: kept.setdefault(name, []).append(output)
        )
    loss = F.cross_entropy(twin(x.double()), targets)
    flat = [
        (name, call, output) for name, outputs in kept.items() for call, output in enumerate(outputs) if name
    ]
    named = dict(twin.named_parameters())
    gradients = torch.autograd.grad(loss, [*named.values(), *(output for *_, output in flat)])
    params = dict(zip(named, gradients[: len(named)], strict=True))
    outputs = [Site(name, call) for name, call, _ in flat]
    return float(loss.detach()), params, dict(zip(outputs, gradients[len(named) :], strict=True))


def plain_net():
    """Nothing in place, so that what a hook keeps is what was returned."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Tanh(),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(256, 5),
    ).eval()


def norm_of(tensors, norm):
    return float(torch.nn.utils.get_total_norm(list(tensors), norm_type=norm))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_every_figure_equals_autograd_on_twins(norm):
    model, batches = plain_net(), data()
    report = hookscope.gradnorm(model, batches=batches, norm=norm)
    runs = [twins_gradients(model, x, targets) for x, targets in batches]
    weights = [len(x) / 7 for x, _ in batches]
    mean = {
        name: sum(weight * params[name] for weight, (_, params, _) in zip(weights, runs, strict=True))
        for name in runs[0][1]
    }
    assert report.loss == pytest.approx(
        sum(w * loss for w, (loss, *_) in zip(weights, runs, strict=True)), rel=1e-5
    )
    assert report.total_norm == pytest.approx(norm_of(mean.values(), norm), rel=1e-5)
    totals = [norm_of(params.values(), norm) for _, params, _ in runs]
    spread = report.total_spread
    found = (spread.mean, spread.maximum, spread.minimum, spread.last, spread.batches)
    assert found == pytest.approx((sum(totals) / 3, max(totals), min(totals), totals[-1], 3), rel=1e-5)
    for row in report.parameters:
        own = [norm_of([params[row.name]], norm) for _, params, _ in runs]
        weight = norm_of([model.get_parameter(row.name).detach()], norm)
        assert row.grad_norm == pytest.approx(norm_of([mean[row.name]], norm), rel=1e-5)
        assert (row.spread.mean, row.spread.last) == pytest.approx((sum(own) / 3, own[-1]), rel=1e-5)
        assert row.ratio == pytest.approx(row.grad_norm / weight, rel=1e-5)
        assert row.gradient.non_finite_share == 0
    for row in report.layers:
        gradients = [outputs[row.site] for *_, outputs in runs]
        whole = norm_of([w * g for w, g in zip(weights, gradients, strict=True)], norm)
        assert row.output_grad_norm == pytest.approx(whole, rel=1e-5)
        own = [norm_of([gradient], norm) for gradient in gradients]
        assert (row.output_spread.mean, row.output_spread.minimum) == pytest.approx(
            (sum(own) / 3, min(own)), rel=1e-5
        )
        below = [gradient for name, gradient in mean.items() if name.startswith(f"{row.site.layer}.")]
        wanted = pytest.approx(norm_of(below, norm), rel=1e-5) if below else None
        assert row.subtree_grad_norm == wanted
    rows = {row.site.layer: row for row in report.layers}
    assert (rows["2"].parameter_grad_norm, rows["2"].weight_norm, rows["2"].ratio) == (None, None, None)
    assert rows["2"].subtree_grad_norm == pytest.approx(rows["2.0"].parameter_grad_norm)
    assert rows["4"].input_grad_total == pytest.approx(rows["3"].output_grad_norm, rel=1e-6)
    assert [row.site.layer for row in report.by_depth] == ["0", "1", "2.0", "2.1", "2", "3", "4"]


def test_tied_parameters_are_counted_once_in_every_norm():
    model = nets.seeded(nets.Tied)
    report = hookscope.gradnorm(model, nets.picture(), torch.tensor([0, 1]), norm=1)
    assert report.total.count == sum(parameter.numel() for parameter in model.parameters())
    assert report.total_norm == pytest.approx(sum(row.grad_norm for row in report.parameters))
    assert {row.name: row.aliases for row in report.parameters if row.aliases} == {
        "first.weight": ("second.weight",), "first.bias": ("second.bias",), "out.weight": ("twin.weight",)
    }  # fmt: skip


def test_weights_that_are_zero_have_no_ratio_and_their_gradient_has():
    model = nets.seeded(nets.ReluThrice)
    nn.init.zeros_(model.fc.bias)
    report = hookscope.gradnorm(model, nets.picture(), torch.tensor([0, 1]))
    row = next(row for row in report.parameters if row.name == "fc.bias")
    assert (row.ratio, row.weight_norm) == (None, 0.0)
    assert row.grad_norm > 0
    document = gradtables.table(report, gradtables.Loss("l", report.loss, "")).data
    record = next(record for record in document["parameters"] if record["name"] == "fc.bias")
    assert record["grad_to_weight"] == "undefined"


def test_one_batch_of_x_is_the_same_as_batches_of_one():
    model, ((x, targets),) = nets.seeded(nets.ReluThrice), data((4,))
    assert hookscope.gradnorm(model, x, targets) == hookscope.gradnorm(model, batches=[(x, targets)])


def test_a_loader_is_batches():
    x, targets = data((7,))[0]
    loader = DataLoader(TensorDataset(x, targets), batch_size=3)
    report = hookscope.gradnorm(nets.seeded(nets.ReluThrice), batches=loader)
    whole = hookscope.gradnorm(nets.seeded(nets.ReluThrice), x, targets)
    assert (report.batches, report.pictures) == (3, 7)
    assert report.total_norm == pytest.approx(whole.total_norm, rel=1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, left, right):
        return self.a(left["x"]) + self.b(right)


@pytest.mark.parametrize("by_name", [False, True], ids=["tuple", "dict"])
def test_inputs_may_be_nested_and_targets_anything(by_name):
    model, left, right = nets.seeded(TwoInputs), {"x": torch.ones(2, 3)}, torch.ones(2, 2)
    x = {"left": left, "right": right} if by_name else (left, right)
    wanted = {"far": torch.full((2, 4), 5.0)}
    report = hookscope.gradnorm(
        model, batches=[(x, wanted)], loss=lambda output, targets: (output - targets["far"]).pow(2).mean()
    )
    loss = (model(left, right) - 5).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert report.pictures == 2
    assert report.total_norm == pytest.approx(norm_of(gradients, 2.0))


def test_memory_does_not_grow_with_the_number_of_batches():
    model = nets.seeded(nets.ReluThrice)
    alive, most = weakref.WeakSet(), []

    def batches():
        for seed in range(6):
            x = nets.picture(seed=seed)
            alive.add(x)
            most.append(len(alive))
            yield x, torch.tensor([0, 1])

    probe_sizes = []
    hookscope.gradnorm(model, batches=batches())
    assert max(most) <= 3
    for number in (3, 30):
        probe = GradNormProbe()
        for _ in range(number):
            probe.begin(1)
            probe.on_param_gradient("a.w", torch.ones(3), "loss")
            probe.on_gradient(Site("a"), torch.ones(3), "loss")
            probe.finish_batch([Site("a")], 0.5)
        probe_sizes.append(len(pickle.dumps(probe)))
    assert probe_sizes[1] <= probe_sizes[0] + 16


BAD = {
    "no-iterable": (3, UsageError, "the data 'd' is a int, which gives no batches"),
    "text": ("abc", UsageError, "the data 'd' is a str, which gives no batches"),
    "tensor": (torch.ones(2, 2), UsageError, r"the data 'd' is a tensor of shape \(2, 2\)"),
    "no-pairs": (
        [torch.ones(2, 3)],
        UsageError,
        r"batch 0 of the data 'd' is a tensor of shape \(2, 3\), no pair",
    ),
    "triples": ([(torch.ones(1), 1, 2)], UsageError, "batch 0 of the data 'd' is a tuple of 3, no pair"),
    "dict": ([{"x": 1}], UsageError, "batch 0 of the data 'd' is a dict, no pair"),
    "no-samples": ([(torch.ones(0, 3), 1)], UsageError, "batch 0 of the data 'd' holds no samples"),
    "no-axis": ([(torch.ones(()), 1)], UsageError, "batch 0 of the data 'd' holds no samples"),
    "number": ([(3, 1)], UsageError, "batch 0 of the data 'd' holds no samples: its input is a int"),
    "samples": (TensorDataset(torch.ones(2, 3)), UsageError, "single samples and no batches"),
    "empty": ([], NothingMeasured, "the data 'd' gave no batch"),
}


@pytest.mark.parametrize(("source", "error", "message"), BAD.values(), ids=BAD)
def test_bad_batches_are_told_plainly(source, error, message):
    with pytest.raises(error, match=message):
        list(checked(source, "d"))


def test_what_the_data_raises_names_the_batch():
    def failing():
        yield torch.ones(1), None
        yield torch.ones(1), None
        raise KeyError("no such file")

    found = checked(failing(), "d.py:failing")
    assert [next(found).number, next(found).number] == [0, 1]
    with pytest.raises(
        UsageError, match="'d.py:failing' raised KeyError: 'no such file', at batch 2"
    ) as caught:
        next(found)
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_more_batches_are_asked_for_than_wanted():
    asked = []

    def endless():
        for number in count():
            asked.append(number)
            yield torch.ones(2, 1), number

    found = list(checked(endless(), limit=3))
    assert [(batch.number, batch.targets, batch.pictures) for batch in found] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 2, 2),
    ]
    assert asked == [0, 1, 2]
    with pytest.raises(UsageError, match="0 batches are none"):
        list(checked([], limit=0))


def test_a_batch_is_placed_whole():
    batch = DataBatch(0, ({"x": torch.ones(2)}, torch.ones(2, dtype=torch.int64), "word"), [torch.ones(1)], 2)
    moved = placed(batch, torch.device("meta"), torch.float16)
    assert moved.x[0]["x"].device.type == moved.targets[0].device.type == "meta"
    assert (moved.x[0]["x"].dtype, moved.x[1].dtype, moved.targets[0].dtype) == (
        torch.float16, torch.int64, torch.float32
    )  # fmt: skip
    assert moved.x[2] == "word"


SOURCE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from helper import PICTURES

BATCHES = [(torch.ones(2, 3), torch.tensor([0, 1]))] * 4
LOADER = DataLoader(TensorDataset(torch.ones(5, 3), torch.arange(5)), batch_size=2)
NUMBER = 3

def function():
    from helper import PICTURES
    for _ in range(3):
        yield torch.ones(PICTURES, 3), torch.zeros(PICTURES, dtype=torch.long)

def needs(path):
    return []

def raises():
    raise OSError("the disk is gone")

class Stream:
    def __iter__(self):
        yield torch.ones(1, 3), None
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "helper.py").write_text("PICTURES = 2\n")
    (tmp_path / "mine.py").write_text(SOURCE)
    return lambda name: f"{tmp_path}/mine.py:{name}"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("BATCHES", [2, 2, 2, 2]), ("LOADER", [2, 2, 1]), ("function", [2, 2, 2]), ("Stream", [1])],
)
def test_data_of_a_file(source, name, sizes):
    assert [batch.pictures for batch in batches_of(source(name))] == sizes
    assert [batch.pictures for batch in batches_of(source(name), limit=1)] == sizes[:1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NUMBER", "is a int, which gives no batches"),
        ("needs", "cannot be called without arguments: missing a required argument: 'path'"),
        ("raises", "raised OSError: the disk is gone"),
        ("functoin", "did you mean 'function'"),
    ],
)
def test_data_of_a_file_that_is_none(source, name, message):
    with pytest.raises(UsageError, match=message):
        list(batches_of(source(name)))


def test_data_without_a_name_is_told():
    with pytest.raises(UsageError, match="the data 'mine.py' names no callable"):
        list(batches_of("mine.py"))


def test_gradnorm_takes_one_batch_or_many():
    model, x = nets.seeded(nets.ReluThrice), nets.picture()
    for given in ({}, {"x": x, "batches": [(x, None)]}, {"targets": torch.ones(2), "batches": [(x, None)]}):
        with pytest.raises(UsageError, match="one batch or many"):
            hookscope.gradnorm(model, **given)
    with pytest.raises(NothingMeasured, match="gave no batch"):
        hookscope.gradnorm(model, batches=[])
    with pytest.raises(UsageError, match="the norm 3 is unknown"):
        hookscope.gradnorm(model, x, norm=3)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            torch.ones(2, 5),
            r"the targets are a tensor of shape \(2, 5\), torch.float32, not one class a picture",
        ),
        ({"labels": 1}, "the targets are dict, not one class a picture"),
    ],
    ids=["soft", "dict"],
)
def test_targets_that_a_named_loss_cannot_take(targets, message):
    for loss in ("cross_entropy", "score"):
        with pytest.raises(UsageError, match=message):
            hookscope.gradnorm(nets.seeded(nets.ReluThrice), nets.picture(), targets, loss=loss)


class Noisy(nn.Module):
    """Dropout, batch norm, a counter, and draws of all three kinds of random numbers."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.frozen = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(), nn.Linear(4, 5)
        self.register_buffer("drawn", torch.zeros(()), persistent=False)
        self.error = None

    def forward(self, x):
        self.drawn += random.random() + np.random.rand() + float(torch.rand(()))
        y = self.frozen(torch.relu(self.bn(self.conv(x))))
        if self.error is not None:
            raise self.error
        return self.fc(self.drop(y).mean((2, 3))) * (1 + self.drawn)


def mixed_modes():
    model = nets.seeded(Noisy)
    model.train()
    model.frozen.eval()
    model.drop.eval()
    return model


def state(model):
    return {
        "tensors": {
            name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]
        },
        "ids": {name: id(tensor) for name, tensor in model.named_buffers()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
    }


def same(one, other):
    assert one["tensors"].keys() == other["tensors"].keys()
    assert all(torch.equal(one["tensors"][name], other["tensors"][name]) for name in one["tensors"])
    for key in ("ids", "modes", "flags", "random"):
        assert one[key] == other[key], key


@pytest.mark.parametrize(
    "error", [None, ValueError("no"), KeyboardInterrupt()], ids=["ok", "raises", "interrupted"]
)
def test_train_mode_leaves_the_model_and_the_random_state_as_they_were(error):
    model = mixed_modes()
    before = state(model)
    assert int(model.bn.num_batches_tracked) == 0
    model.error = error
    if error is None:
        hookscope.gradnorm(model, batches=data(), train_mode=True)
    else:
        with pytest.raises((ModelError, KeyboardInterrupt)):
            hookscope.gradnorm(model, batches=data(), train_mode=True)
    same(before, state(model))


def test_what_the_data_draws_is_put_back_too():
    model = mixed_modes()

    def drawing():
        for _ in range(2):
            yield torch.randn(2, 3, 12, 12) + random.random() + np.random.rand(), torch.tensor([0, 1])

    before = state(model)
    first = hookscope.gradnorm(model, batches=drawing(), train_mode=True, seed=3)
    same(before, state(model))
    assert hookscope.gradnorm(model, batches=drawing(), train_mode=True, seed=3) == first


def test_train_mode_repeats_for_a_seed_and_differs_for_another():
    model = mixed_modes()
    first = hookscope.gradnorm(model, batches=data(), train_mode=True)
    torch.manual_seed(99)
    random.seed(99)
    assert hookscope.gradnorm(model, batches=data(), train_mode=True) == first
    assert first.train_mode
    assert hookscope.gradnorm(model, batches=data(), train_mode=True, seed=1).total_norm != first.total_norm


def test_train_mode_is_the_modules_own():
    """Batch statistics are used: the twin is in train mode, all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 5)).eval()
    ((x, targets),) = data((6,))
    report = hookscope.gradnorm(model, x, targets, train_mode=True)
    twin = copy.deepcopy(model).train()
    gradients = torch.autograd.grad(F.cross_entropy(twin(x), targets), list(twin.parameters()))
    assert report.total_norm == pytest.approx(norm_of(gradients, 2.0), rel=1e-5)
    assert report.total_norm != pytest.approx(hookscope.gradnorm(model, x, targets).total_norm, rel=1e-2)


class Middle(nn.Module):
    """Three layers in a block between two others; `between` is called on what the middle one returns."""

    def __init__(self, between=lambda y: y, after=lambda y: y):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 5)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.between, self.after = between, after

    def forward(self, x):
        return self.after(self.last(self.between(self.block(self.first(x)))))


def first_found(model, x=None, **options):
    x = torch.ones(2, 3) if x is None else x
    options = {"loss": lambda output, targets: output.sum(), **options}
    report = hookscope.gradnorm(model, x, **options)
    return report.first_forward, report.first_backward


def planted(value):
    model = nets.seeded(Middle)
    with torch.no_grad():
        model.block[0].weight[1, 2] = value
    return model


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_infinity_planted_in_one_weight_is_named(value):
    forward, _ = first_found(planted(value))
    assert (str(forward.site), forward.cause, forward.parameters) == (
        "block.0",
        "parameter",
        ("block.0.weight",),
    )
    assert (forward.direction, forward.batch, forward.non_finite, forward.count) == ("forward", 0, 2, 8)
    assert hookscope.gradnorm(planted(value), torch.ones(2, 3)).first_non_finite == forward
    rows = hookscope.gradnorm(planted(value), torch.ones(2, 3)).parameters
    assert {row.name: row.weight_non_finite for row in rows if row.weight_non_finite} == {"block.0.weight": 1}


def test_an_infinity_in_a_buffer_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    model[1].running_mean[0] = math.nan
    forward, _ = first_found(model)
    assert (str(forward.site), forward.cause, forward.parameters) == ("1", "parameter", ("1.running_mean",))


class Divides(nn.Module):
    def forward(self, x):
        return x / (x - x)


def test_an_infinity_made_by_a_layers_own_division_is_named():
    model = nn.Sequential(nn.Linear(3, 4), Divides(), nn.Tanh()).eval()
    forward, _ = first_found(model)
    assert (str(forward.site), forward.cause, forward.parameters) == ("1", "layer", ())
    assert forward.why.startswith("it made them itself")


def test_an_infinity_made_between_layers_is_received_by_the_next():
    forward, _ = first_found(Middle(between=lambda y: y / (y - y)))
    assert (str(forward.site), forward.cause) == ("last", "received")


def test_an_input_that_is_not_finite_is_received():
    forward, _ = first_found(Middle(), torch.tensor([[1.0, math.nan, 1.0]]))
    assert (str(forward.site), forward.cause) == ("first", "received")


def test_an_in_place_layer_that_receives_an_infinity_did_not_make_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)).eval()
    forward, _ = first_found(model, torch.full((1, 3), math.inf))
    assert (str(forward.site), forward.cause) == ("0", "received")


def test_the_first_batch_with_an_infinity_is_named():
    x = torch.ones(2, 3)
    report = hookscope.gradnorm(
        Middle(),
        batches=[(x, None), (x * math.inf, None), (x * math.nan, None)],
        loss=lambda output, _: output.sum(),
    )
    assert (report.first_forward.batch, str(report.first_forward.site)) == (1, "first")


class Root(nn.Module):
    """The square root, whose gradient at 0 is infinite."""

    def forward(self, x):
        return (x - x.detach()).sqrt()


def test_a_gradient_made_infinite_by_a_layer_going_back_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), Root()), nn.Linear(4, 2)).eval()
    forward, backward = first_found(model)
    assert forward is None
    assert (backward.direction, str(backward.site), backward.cause) == ("backward", "1.1", "layer")
    assert (backward.non_finite, backward.count) == (8, 8)


def test_a_container_whose_first_layer_it_is_is_named_second():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Root(), nn.Tanh()), nn.Linear(4, 2)).eval()
    _, backward = first_found(model)
    assert (str(backward.site), backward.cause, backward.others) == ("1.0", "layer", (Site("1"),))


def test_a_gradient_made_infinite_between_layers_is_named_after_the_one_before():
    _, backward = first_found(Middle(between=lambda y: (y - y.detach()).sqrt() * 2))
    assert (str(backward.site), backward.cause, backward.others) == ("block.2", "after", (Site("block"),))


@pytest.mark.parametrize("where", ["loss", "after"])
def test_a_gradient_that_is_infinite_from_the_start_is_of_the_loss(where):
    def root(y):
        return (y - y.detach()).sqrt()

    if where == "loss":
        _, backward = first_found(Middle(), loss=lambda output, targets: root(output).sum())
    else:
        _, backward = first_found(Middle(after=root))
    assert (str(backward.site), backward.cause) == ("last", "loss")


class OwnRoot(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.weight.sqrt()


def test_a_gradient_that_only_a_parameter_has_infinite_is_named():
    model = nn.Sequential(nn.Linear(3, 4), OwnRoot(), nn.Linear(4, 2)).eval()
    forward, backward = first_found(model)
    assert forward is None
    assert (str(backward.site), backward.cause, backward.parameters) == ("1", "own", ("1.weight",))


def test_where_all_is_finite_nothing_is_named():
    assert first_found(nets.seeded(Middle)) == (None, None)
    assert hookscope.gradnorm(nets.seeded(Middle), torch.ones(2, 3)).first_non_finite is None


def test_half_precision_overflows_nothing():
    """Every entry is finite; sums and norms of them are not in float16."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half().eval()
    with torch.no_grad():
        for layer in model:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
    x = torch.full((32, 64), 1000.0, dtype=torch.float16)
    assert model(x).sum().isinf()
    report = hookscope.gradnorm(model, x, loss=lambda output, targets: output.float().sum() / 16)
    assert report.first_non_finite is None
    assert all(row.status == "ok" for row in (*report.parameters, *report.layers))
    weight = next(row for row in report.parameters if row.name == "1.weight")
    assert weight.grad_norm == pytest.approx(64 * 2000.0)
    assert torch.full((64, 64), 2000.0).half().norm().isinf()


def written(**options):
    report = hookscope.gradnorm(nets.seeded(nets.Dropping), batches=data(), **options)
    return report, gradtables.Loss("cross_entropy", report.loss, "the data's own")


def test_tables_say_what_is_measured():
    report, loss = written(norm="inf", train_mode=True)
    document = json.loads(to_json_table(gradtables.table(report, loss)))
    assert (document["measured"], document["norm"]) == (
        "after backward, before clipping, unscaled",
        "L-infinity",
    )
    assert (document["mode"], document["batches"], document["pictures"]) == ("train", 3, 7)
    assert document["total_norm"] == document["total"]["grad_largest"] == report.total_norm
    assert document["total_by_batch"]["batch_mean"] == report.total_spread.mean
    assert document["first_non_finite"] == {"forward": None, "backward": None}
    record = document["layers"][0]
    assert (
        record["output_grad_norm"]
        == record["output_grad"]["grad_largest"]
        == report.layers[0].output_grad_norm
    )
    text = "\n".join(map(to_markdown, gradtables.summary(report, loss)))
    assert (
        "L-infinity norm of the mean gradient, after backward, before clipping, unscaled; train mode" in text
    )
    assert gradtables.lines(report, loss)[0].startswith(
        f"total gradient norm {report.total_norm:.6g} (L-infinity"
    )


def test_the_csv_has_the_total_and_every_parameter_and_layer():
    report, loss = written()
    header, *rows = (line.split(",") for line in to_csv(gradtables.table(report, loss)).splitlines())
    found = [dict(zip(header, row, strict=True)) for row in rows]
    kinds = [row["kind"] for row in found]
    assert [kinds.count(kind) for kind in ("total", "parameter", "layer")] == [
        1, len(report.parameters), len(report.layers)
    ]  # fmt: skip
    assert float(found[0]["batch_mean"]) == report.total_spread.mean
    assert float(found[0]["grad_norm"]) == report.total_norm
    depths = [int(row["depth"]) for row in found if row["kind"] == "layer"]
    assert depths == sorted(depths)


def test_the_first_infinity_is_in_every_output():
    report = hookscope.gradnorm(planted(math.inf), torch.ones(2, 3), loss=lambda output, _: output.sum())
    loss = gradtables.Loss("sum", report.loss, "none")
    said = "first values that are not finite: block.0, batch 0, 2 of 8: a parameter or buffer of its own is not finite"
    assert any(line.startswith(said) for line in gradtables.lines(report, loss))
    assert said in to_markdown(gradtables.summary(report, loss)[0]).replace("\\", "")
    document = json.loads(to_json_table(gradtables.table(report, loss)))
    assert document["first_non_finite"]["forward"]["parameters"] == ["block.0.weight"]
    assert gradplots.documents(report, loss).keys() == {"gradnorm.png", "gradnorm-ratio.png"}


def test_plots_have_a_line_for_each_kind_in_one_order(monkeypatch):
    shown = []
    monkeypatch.setattr(
        gradplots, "stacked", lambda panels, **options: shown.append((panels, options)) or b"png"
    )
    report, loss = written()
    assert gradplots.documents(report, loss).keys() == {
        "gradnorm.png",
        "gradnorm-ratio.png",
        "gradnorm-batches.png",
    }
    (norms, options), (ratios, _), (batches, _) = shown
    assert [line.name for line in norms[0].series] == ["Conv2d", "BatchNorm2d", "Dropout", "Linear"]
    assert [line.name for line in norms[1].series] == ["Conv2d", "BatchNorm2d", "Linear"]
    assert options["order"] == ["conv", "bn", "drop", "fc"]
    assert ratios[0].ylabel == "gradient / weights, L2 norms"
    (band,) = batches[0].series
    row = report.layers[0]
    assert band.values[0] == row.output_spread.mean
    assert band.ranges[0] == (row.output_spread.minimum, row.output_spread.maximum)


def test_plots_are_pictures_and_repeat():
    report, loss = written()
    first = gradplots.documents(report, loss)
    assert all(data.startswith(b"\x89PNG") for data in first.values())
    assert gradplots.documents(report, loss) == first


def test_an_endless_stream_of_batches_is_cut_by_the_caller():
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(3, 12, 12), 1

    loader = DataLoader(Endless(), batch_size=2)
    report = hookscope.gradnorm(nets.seeded(nets.ReluThrice), batches=islice(loader, 3))
    assert (report.batches, report.pictures) == (3, 6)
