"""The rules of the gradient gate: each with a net that trips it and one that just does not, measured for real."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import nets
import pytest
import torch
import torchvision
from torch import nn

import hookscope
from hookscope.checks.findings import failing, parse_fail_on
from hookscope.checks.graddepth import depth_trend
from hookscope.checks.gradients import check_measured, default_settings, places_in, run_rules
from hookscope.checks.gradrows import places
from hookscope.checks.gradrules import RULES
from hookscope.checks.rules import findings
from hookscope.errors import NothingMeasured, UsageError
from hookscope.images import decode
from hookscope.models import demo

DEFAULT = default_settings()


def settings(**limits):
    return DEFAULT.over(limits=limits)


def measured(model, x, loss=lambda output, _: output.sum(), **options):
    return hookscope.gradnorm(model, x, loss=loss, **options)


def cases(report, rule, given=DEFAULT):
    return {case.layer: case for case in run_rules(report, given) if case.rule == rule}


def found(report, rule, given=DEFAULT):
    """The findings of a rule by layer."""
    return {name: case.finding for name, case in cases(report, rule, given).items() if case.finding}


class Scale(nn.Module):
    """Multiplies by a number of its own, trained or not."""

    def __init__(self, factor, trained=True):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)), requires_grad=trained)

    def forward(self, x):
        return x * self.factor


def chain(*factors):
    return nn.Sequential(*(Scale(factor) for factor in factors))


ONE = torch.ones(1, 1)


def weigh(value):
    """A net whose one weight has exactly this gradient, and the report of it."""
    net = nn.Linear(1, 1, bias=False)
    return measured(nn.Sequential(net), torch.full((1, 1), value))


def test_the_names_are_these():
    assert [rule.name for rule in RULES] == [
        "nonfinite", "none", "zero", "vanishing", "exploding", "depth-trend", "outlier", "max-norm", "min-norm",
        "drift", "layers-changed",
    ]  # fmt: skip
    assert all(rule.summary and rule.why and rule.advice for rule in RULES)


# --- vanishing, exploding


@pytest.mark.parametrize(
    ("rule", "limit", "value", "words"),
    [
        (
            "vanishing",
            2.0**-40,
            2.0**-41,
            "0.weight: the RMS of the gradient is 4.54747e-13, below 9.09495e-13",
        ),
        ("exploding", 1024.0, 2048.0, "0.weight: the RMS of the gradient is 2048, above 1024"),
    ],
)
def test_an_rms_beyond_its_limit_is_found_and_one_at_it_is_not(rule, limit, value, words):
    given = settings(**{rule: limit})
    assert not found(weigh(limit), rule, given)
    (finding,) = found(weigh(value), rule, given).values()
    assert (finding.layer, finding.value, finding.limit, finding.severity) == (
        "0.weight",
        value,
        limit,
        "warn",
    )
    assert finding.message == words
    assert finding.why
    assert finding.advice


def test_the_default_limits():
    assert (DEFAULT.number("vanishing", places(weigh(1.0))[0]), DEFAULT.limit("max-norm", places(weigh(1.0))[0])) == (
        1e-12, None,
    )  # fmt: skip
    assert not found(weigh(1.1e-12), "vanishing")
    assert found(weigh(0.9e-12), "vanishing")
    assert not found(weigh(999.0), "exploding")
    assert found(weigh(1001.0), "exploding")


def test_outputs_count_as_parameters_do_and_limits_go_by_glob():
    report = measured(chain(1.0, 1e-20, 1.0), ONE)
    assert set(found(report, "vanishing")) == {"0", "0.factor", "2.factor"}
    assert set(found(report, "vanishing", DEFAULT.over(limits={"0": {"vanishing": 1e-21}}))) == {"2.factor"}
    own = DEFAULT.over(limits={"*.factor": {"vanishing": 1e-21}})
    assert set(found(report, "vanishing", own)) == {"0"}
    assert set(found(report, "vanishing", DEFAULT.over({"type:Scale": {"vanishing": "off"}}))) == set()


def test_an_rms_does_not_grow_with_the_size():
    net = nn.Sequential(nn.Linear(4096, 1, bias=False))
    assert not found(measured(net, torch.full((1, 4096), 1000.0)), "exploding")
    assert found(measured(net, torch.full((1, 4096), 1001.0)), "exploding")


# --- zero, none, nonfinite


class Branches(nn.Module):
    """Layers of every fate: used, multiplied by nearly nothing, by nothing, cut off, never called, frozen."""

    def __init__(self):
        super().__init__()
        for name in ("used", "faint", "zeroed", "cut", "idle", "frozen"):
            self.add_module(name, nn.Linear(2, 2))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        kept = self.used(x) + self.faint(x) * 1e-10 + self.zeroed(x) * 0.0 + self.frozen(x)
        return kept + self.cut(x).detach()


def test_zero_none_never_called_and_frozen_are_told_apart():
    report = measured(nets.seeded(Branches), torch.ones(2, 2))
    assert set(found(report, "zero")) == {"zeroed", "zeroed.weight", "zeroed.bias"}
    assert {one.severity for one in found(report, "zero").values()} == {"warn"}
    assert set(found(report, "none")) == {"cut.weight", "cut.bias"}
    assert {one.severity for one in found(report, "none").values()} == {"error"}
    skipped = {name: case.skipped for name, case in cases(report, "zero").items() if case.skipped}
    assert skipped == {
        "cut": "it has no gradient",
        "cut.weight": "it has no gradient",
        "cut.bias": "it has no gradient",
        "idle": "it was never called",
        "idle.weight": "its layer was never called",
        "idle.bias": "its layer was never called",
        "frozen.weight": "it is frozen",
        "frozen.bias": "it is frozen",
    }
    skipped = {name: case.skipped for name, case in cases(report, "none").items() if case.skipped}
    assert set(skipped) == {"idle.weight", "idle.bias", "frozen.weight", "frozen.bias"}


def test_a_zero_gradient_is_said_with_its_numbers_and_is_not_vanishing():
    report = measured(nets.seeded(Branches), torch.ones(2, 2))
    assert found(report, "zero")["zeroed.weight"].message == (
        "zeroed.weight: all of 4 values of the gradient are exactly 0"
    )
    assert cases(report, "vanishing")["zeroed.weight"].skipped == "its gradient is exactly zero"


def test_tied_and_bypassed_parameters_are_looked_at_once_each():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.a, self.b = attention, nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.attention(x, x, x)[0]))

    report = measured(nets.seeded(Net), torch.randn(2, 3, 4))
    names = [case.layer for case in run_rules(report, DEFAULT) if case.rule == "none"]
    assert names.count("a.weight") == 1
    assert "b.weight" not in names
    assert not cases(report, "none")["attention.out_proj.weight"].skipped
    assert (
        cases(report, "outlier")["attention.out_proj"].skipped == "its parameters are used without calling it"
    )
    given = DEFAULT.over(limits={"b.weight": {"exploding": 0}})
    assert set(found(report, "exploding", given)) == {"a.weight"}


def test_a_planted_inf_names_the_first_layer():
    net = nets.seeded(nets.ReluThrice)
    x = nets.picture()
    assert not found(hookscope.gradnorm(net, x), "nonfinite")
    with torch.no_grad():
        net.b.weight[0, 0, 0, 0] = math.inf
    report = hookscope.gradnorm(net, x, torch.tensor([0, 1]))
    broken = found(report, "nonfinite")
    assert broken["b"].message.startswith("b: the first layer where something is not finite, going forward: ")
    assert "(b.weight)" in broken["b"].message
    assert "it began at b, going forward" in broken["a.weight"].message
    assert {one.severity for one in broken.values()} == {"error"}
    assert broken[""].message.startswith("the loss is nan")
    for rule in ("vanishing", "exploding", "zero"):
        assert cases(report, rule)["a.weight"].skipped == "its gradient is not finite"


class Rooted(nn.Module):
    """The slope of a square root at 0 is infinite, its value is not."""

    def __init__(self, least):
        super().__init__()
        self.before, self.after, self.least = nn.Linear(1, 1), nn.Linear(1, 1), least
        nn.init.zeros_(self.before.weight)
        nn.init.zeros_(self.before.bias)

    def forward(self, x):
        return self.after((self.before(x) + self.least).sqrt())


@pytest.mark.parametrize(("least", "bad"), [(0.0, True), (1e-30, False)])
def test_a_gradient_that_alone_is_not_finite_is_found(least, bad):
    report = measured(Rooted(least), ONE)
    assert math.isfinite(report.loss)
    broken = found(report, "nonfinite")
    assert ("before.weight" in broken) is bad
    assert any("going backward" in one.message for one in broken.values()) is bad


def test_where_it_began_is_told_though_that_layer_was_not_chosen():
    net = nets.seeded(nets.ReluThrice)
    with torch.no_grad():
        net.b.weight[0, 0, 0, 0] = math.inf
    report = hookscope.gradnorm(net, nets.picture(), torch.tensor([0, 1]), layers="a")
    broken = found(report, "nonfinite")
    assert [row.site.layer for row in report.layers] == ["a"]
    assert any("it began at " in one.message or "the first layer" in one.message for one in broken.values())


# --- depth-trend, outlier


@pytest.mark.parametrize(
    ("factor", "layers", "limit", "way"),
    [(0.1, 6, 5.0, "falls"), (10.0, 6, 5.0, "grows"), (2.0, 11, 10 * math.log10(2), "grows")],
    ids=["falls", "grows", "by-two"],
)
def test_a_trend_is_in_decades_over_the_whole_depth(factor, layers, limit, way):
    report = measured(chain(*[factor] * layers), ONE)
    (finding,) = found(report, "depth-trend", settings(**{"depth-trend": limit - 1e-4})).values()
    assert finding.layer == ""
    assert abs(finding.value) == pytest.approx(limit, abs=1e-5)
    assert f"the RMS of the gradient {way} by" in finding.message
    assert f"over {layers} layers" in finding.message
    assert not found(report, "depth-trend", settings(**{"depth-trend": limit + 1e-4}))


def test_a_trend_does_not_follow_one_layer():
    factors = [1.0] * 12
    factors[5], factors[6] = 1e-15, 1e15
    (case,) = cases(measured(chain(*factors), ONE), "depth-trend", settings(**{"depth-trend": 1e-3})).values()
    assert case.finding is None
    assert not case.skipped


def test_a_trend_needs_five_layers():
    (case,) = cases(measured(chain(*[0.01] * 4), ONE), "depth-trend").values()
    assert case.skipped == "4 layers with a finite gradient above zero, and 5 are needed"


@pytest.mark.parametrize("count", [2, 5, 40, 601, 1500])
def test_the_trend_is_theils_and_sens(count):
    stats = pytest.importorskip("scipy.stats")
    noise = torch.randn(count, generator=torch.Generator().manual_seed(count)).tolist()
    points = [(float(at), 0.03 * at + value * (1 + 9 * (at % 5 == 0))) for at, value in enumerate(noise)]
    wanted = stats.theilslopes([y for _, y in points], [x for x, _ in points]).slope * (count - 1)
    # Beyond 600 points an even choice of them is looked at.
    assert depth_trend(points) == pytest.approx(wanted, rel=1e-9 if count <= 600 else 0.05)


@pytest.mark.parametrize(
    ("factor", "bad"), [(1001.0, {"3"}), (999.0, set()), (1 / 1001, {"3"}), (1 / 999, set())]
)
def test_a_layer_unlike_its_neighbours_is_found(factor, bad):
    report = measured(chain(1, 1, 1, 1, factor, 1 / factor, 1, 1), ONE)
    # The gradient at the output of layer 4 is what layer 5 multiplies by; that at 3 is whole again.
    bad = {"4"} if bad else bad
    outliers = found(report, "outlier")
    assert set(outliers) == bad
    if bad:
        assert outliers["4"].limit == 3.0
        assert abs(outliers["4"].value) == pytest.approx(math.log10(1001), abs=1e-4)
        assert "decades " + ("below" if factor > 1 else "above") in outliers["4"].message


def test_neighbours_that_differ_among_themselves_allow_more():
    report = measured(chain(*[1e-5, 1e5] * 6), ONE)
    assert not found(report, "outlier")


def test_a_layer_with_few_neighbours_is_skipped_with_the_reason():
    three = cases(measured(chain(1, 1, 1), ONE), "outlier")
    assert {case.skipped for case in three.values()} == {"2 neighbours, and 3 are needed"}
    four = cases(measured(chain(1, 1, 1, 1), ONE), "outlier")
    assert {case.skipped for case in four.values()} == {""}


# --- max-norm, min-norm


def three_four():
    return measured(nn.Sequential(nn.Linear(2, 1, bias=False)), torch.tensor([[3.0, 4.0]]))


@pytest.mark.parametrize(
    ("rule", "good", "bad", "words"), [("max-norm", 5.0, 4.9, "above"), ("min-norm", 5.0, 5.1, "below")]
)
def test_the_total_norm_may_be_at_its_limit(rule, good, bad, words):
    assert rule not in {case.rule for case in run_rules(three_four(), DEFAULT)}
    (case,) = cases(three_four(), rule, settings(**{rule: good})).values()
    assert case.finding is None
    (finding,) = found(three_four(), rule, settings(**{rule: bad})).values()
    assert (finding.value, finding.limit, finding.layer) == (5.0, bad, "")
    assert finding.message == f"total gradient norm 5 is {words} {bad:g}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["max-norm", "min-norm"])
def test_a_total_that_is_no_number_passes_no_limit(rule, value):
    report = replace(three_four(), total_norm=value)
    given = settings(**{rule: 1.0})
    if not (rule == "min-norm" and value == math.inf):
        assert found(report, rule, given)
    assert (
        found(report, "nonfinite")[""].message == f"the total gradient norm is {value}, which is not finite"
    )


def test_the_norm_is_the_one_that_was_asked_for():
    x = torch.tensor([[3.0, 4.0]])
    report = measured(nn.Sequential(nn.Linear(2, 1, bias=False)), x, norm=1)
    assert found(report, "max-norm", settings(**{"max-norm": 6.9}))[""].value == 7.0
    # An RMS stays what it is.
    assert found(report, "exploding", settings(exploding=1))["0.weight"].value == pytest.approx(
        5 / math.sqrt(2)
    )


# --- nothing measured


def test_nothing_measured_is_an_error_and_never_passes():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    check_measured(measured(net, torch.ones(1, 2)), DEFAULT)
    report = measured(net, torch.ones(1, 2))
    none = replace(
        report,
        parameters=tuple(replace(row, gradient=None, status="no-grad-path") for row in report.parameters),
        layers=tuple(replace(row, output_grad=None, status="no-grad-path") for row in report.layers),
    )
    with pytest.raises(NothingMeasured):
        check_measured(none, DEFAULT)


def test_a_limit_on_a_total_that_is_not_there_is_an_error():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
    report = measured(net, torch.ones(1, 2).requires_grad_())
    assert any(row.output_grad is not None for row in report.layers), (
        "frozen, yet its activations have a gradient"
    )
    check_measured(report, DEFAULT)
    for rule in ("max-norm", "min-norm"):
        given = settings(**{rule: 1.0})
        assert cases(report, rule, given)[""].skipped == "no parameter has a gradient"
        with pytest.raises(NothingMeasured, match=rule):
            check_measured(report, given)


# --- all of it


def test_cases_come_in_one_order():
    report = measured(nets.seeded(Branches), torch.ones(2, 2))
    made = run_rules(report, settings(**{"max-norm": 1e9, "min-norm": 0}))
    names = [rule.name for rule in RULES]
    assert [names.index(case.rule) for case in made] == sorted(names.index(case.rule) for case in made)
    assert made == run_rules(report, settings(**{"max-norm": 1e9, "min-norm": 0}))
    everything = [*(row.name for row in report.parameters), *(str(row.site) for row in report.layers)]
    for rule in ("zero", "vanishing", "exploding"):
        assert [case.layer for case in made if case.rule == rule] == everything
    assert [case.layer for case in made if case.rule == "nonfinite"] == ["", *everything]
    assert [case.layer for case in made if case.rule == "none"] == [row.name for row in report.parameters]
    assert max(Counter((case.rule, case.layer) for case in made).values()) == 1


def test_two_calls_of_a_layer_have_a_case_each_and_one_glob_means_both():
    report = hookscope.gradnorm(nets.seeded(nets.ReluThrice), nets.picture(), torch.tensor([0, 1]))
    given = DEFAULT.over(limits={"relu": {"exploding": 0}})
    assert set(found(report, "exploding", given)) == {"relu", "relu@1", "relu@2"}
    assert set(found(report, "exploding", DEFAULT.over(limits={"relu@1": {"exploding": 0}}))) == {"relu@1"}


def test_a_glob_that_means_nothing_is_refused_before_and_after_the_run():
    net = nets.seeded(nets.ReluThrice)
    given = DEFAULT.over(limits={"rleu": {"vanishing": 0}}, source="gate.toml")
    with pytest.raises(UsageError, match="'rleu' in gate.toml limits") as caught:
        given.check(places_in(net))
    assert "'relu'" in caught.value.hint
    with pytest.raises(UsageError, match="rleu"):
        run_rules(hookscope.gradnorm(net, nets.picture()), given)
    DEFAULT.over(limits={"a.weight": {"vanishing": 0}, "type:Conv2d": {"vanishing": 0}}).check(places_in(net))


def test_what_fails_a_run_can_be_chosen():
    report = measured(nets.seeded(Branches), torch.ones(2, 2))
    names = [rule.name for rule in RULES]
    found_here = findings(run_rules(report, DEFAULT))

    def rules(text):
        return {finding.rule for finding in failing(found_here, parse_fail_on(text, names))}

    assert (rules("error"), rules("warn"), rules("zero")) == ({"none"}, {"none", "zero"}, {"zero"})


def bundled():
    loaded = hookscope.load_model("demo")
    photos = [loaded.preprocess.tensor(decode(path, str(path))) for path in demo.photos()]
    return loaded.module, loaded.batch(photos)


def random_net(name, size):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    return model, torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


HEALTHY = {
    "demo": bundled,
    "resnet18": lambda: random_net("resnet18", 96),
    "vit_b_32": lambda: random_net("vit_b_32", 224),
    "swin_t": lambda: random_net("swin_t", 96),
    "convnext_tiny": lambda: random_net("convnext_tiny", 96),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_healthy_models_have_no_errors(make):
    model, x = make()
    report = hookscope.gradnorm(model, x, torch.tensor([281, 504]))
    found_here = findings(run_rules(report, DEFAULT))
    assert [finding.message for finding in found_here if finding.severity == "error"] == []
    if make is bundled:
        assert found_here == ()
