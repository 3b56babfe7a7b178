"""Random parameters for a while: drawn as they should be, and gone without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookscope.errors import UsageError
from hookscope.preserve import preserved
from hookscope.randomise import cascade, randomised


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(30) + 1)
        self.a = nn.Conv2d(3, 30, 3)
        self.b = nn.Sequential(nn.Conv2d(30, 30, 3), nn.BatchNorm2d(30))
        self.c = nn.Conv2d(30, 30, 3)
        self.c.weight = self.b[0].weight  # tied

    def forward(self, x):
        x = self.b(self.a(x).relu() * self.scale[:, None, None]).relu()
        return self.c(x).mean((2, 3))


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model, before):
    return {name for name, kept in before.items() if not torch.equal(model.get_parameter(name), kept)}


EVERYTHING = [".", "a", "b", "b.0", "b.1", "c"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], set()),
        (["."], {"scale"}),
        (["a"], {"a.weight", "a.bias"}),
        (["b"], set()),
        (["b.1"], set()),
        (["c"], {"b.0.weight", "c.bias"}),
        (["b.0", "c", "c"], {"b.0.weight", "b.0.bias", "c.bias"}),
    ],
    ids=[
        "nothing",
        "the root's own",
        "a layer",
        "a container has none of its own",
        "constants stay",
        "tied",
        "twice",
    ],
)
def test_the_named_modules_own_parameters_are_random(names, expected):
    model = Net()
    before = values(model)
    with randomised(model, names, 0):
        assert changed(model, before) == expected
        assert model.c.weight is model.b[0].weight
    assert changed(model, before) == set()


def test_draws_are_normal_with_the_parameters_own_mean_and_deviation():
    model = nn.Linear(300, 400)
    with torch.no_grad():
        model.weight.mul_(0.2).add_(7)
    old = model.weight.detach().clone()
    mean, deviation = float(old.mean()), float(old.std())
    with randomised(model, ["."], 5):
        drawn = model.weight.detach()
        assert float(drawn.mean()) == pytest.approx(mean, abs=5 * deviation / 120_000**0.5)
        assert float(drawn.std()) == pytest.approx(deviation, rel=0.01)
        # A uniform distribution of that deviation ends at 1.73 of it; within one lie 68 of 100.
        assert float((drawn - mean).abs().max()) > 3.5 * deviation
        assert float(((drawn - mean).abs() < deviation).double().mean()) == pytest.approx(0.6827, abs=0.01)
        assert abs(float(torch.corrcoef(torch.stack([drawn.flatten(), old.flatten()]))[0, 1])) < 0.02


def drawn(names, seed, model=None):
    model = model or Net()
    with randomised(model, names, seed):
        return values(model)


def test_a_draw_depends_on_the_seed_and_the_name_alone():
    everything, again, other = drawn(EVERYTHING, 1), drawn(EVERYTHING, 1), drawn(EVERYTHING, 2)
    few = drawn(["c", "a"], 1)
    assert all(torch.equal(everything[name], again[name]) for name in everything)
    for name in ("a.weight", "a.bias", "b.0.weight", "c.bias"):
        assert torch.equal(few[name], everything[name])
        assert not torch.equal(other[name], everything[name])
    # The same shape under another name is another draw.
    assert not torch.allclose(everything["b.0.bias"], everything["c.bias"], atol=0.05)


def test_nothing_is_left_behind():
    model = Net()
    model.a.weight.requires_grad_(False)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    model.c.to(memory_format=torch.channels_last)
    before = values(model)
    state = torch.get_rng_state()

    def traces():
        return {
            name: (id(p), p.data_ptr(), p._version, p.requires_grad, id(p.grad), p.stride(), p.dtype)
            for name, p in model.named_parameters()
        }

    traced = traces()
    with randomised(model, EVERYTHING, 0):
        inside = traces()
        assert model.c.weight.is_contiguous(memory_format=torch.channels_last)
    assert traces() == traced
    assert torch.equal(torch.get_rng_state(), state)
    assert changed(model, before) == set()
    for name, (identity, place, *rest) in inside.items():
        assert (identity, *rest) == (traced[name][0], *traced[name][2:])
        assert place != traced[name][1]


def test_a_preserved_model_may_be_randomised():
    model = Net().eval()
    x = torch.randn(1, 3, 8, 8)
    before = model(x)
    with preserved(model), randomised(model, EVERYTHING, 0):
        assert not torch.allclose(model(x), before)
        model(x).sum().backward()
    assert torch.equal(model(x), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_puts_them_back(error):
    model = Net()
    before = values(model)
    with pytest.raises(error), randomised(model, EVERYTHING, 0):
        raise error
    assert changed(model, before) == set()


def test_an_error_while_drawing_puts_them_back(monkeypatch):
    model, drawn_so_far = Net(), []
    before = values(model)
    real = torch.empty_like

    def failing(*arguments, **options):
        if len(drawn_so_far) == 3:
            raise MemoryError
        drawn_so_far.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "empty_like", failing)
    with pytest.raises(MemoryError), randomised(model, EVERYTHING, 0):
        pass
    assert changed(model, before) == set()


def test_blocks_nest():
    model = Net()
    before = values(model)
    with randomised(model, ["c"], 0):
        first = values(model)
        with randomised(model, EVERYTHING, 1):
            assert "c.bias" in changed(model, first)
        assert changed(model, first) == set()
    assert changed(model, before) == set()


def test_what_has_no_values_or_is_not_floating_point_stays():
    model = nn.Module()
    model.lazy, model.meta = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    model.whole = nn.Parameter(torch.arange(4), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.register_parameter("none", None)
    with randomised(model, [".", "lazy", "meta"], 0):
        assert model.whole.tolist() == [0, 1, 2, 3]
        assert isinstance(model.lazy.weight, nn.UninitializedParameter)
    assert model.lazy(torch.ones(1, 2)).shape == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_is_kept(dtype):
    model = nn.Linear(40, 50).to(dtype)
    deviation = float(model.weight.detach().double().std())
    with randomised(model, ["."], 0):
        assert model.weight.dtype == dtype
        assert float(model.weight.detach().double().std()) == pytest.approx(deviation, rel=0.1)


def test_unknown_modules_name_the_nearest():
    with (
        pytest.raises(UsageError, match=r"no module is named 'b\.2'") as caught,
        randomised(Net(), ["b.2"], 0),
    ):
        pass
    assert "'b.0'" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "stages", "expected"),
    [
        ("abcd", 4, ["d", "cd", "bcd", "abcd"]),
        ("abcdefgh", 2, ["efgh", "abcdefgh"]),
        ("abcde", 4, ["de", "cde", "bcde", "abcde"]),
        ("ab", 4, ["b", "ab"]),
        ("abc", 1, ["abc"]),
        ("", 4, []),
    ],
    ids=["quarters", "halves", "rounded up", "fewer layers than stages", "all at once", "no layers"],
)
def test_a_cascade_goes_from_the_top_down(names, stages, expected):
    assert cascade(list(names), stages) == [tuple(stage) for stage in expected]


def test_a_cascade_has_a_stage():
    with pytest.raises(UsageError, match="0 stages"):
        cascade(["a"], 0)
