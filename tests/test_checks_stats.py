"""The rules of the gate of `stats`: each with a net that trips it and one that just does not, measured for real."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import hookscope
from hookscope.checks import statbaseline
from hookscope.checks.findings import Case
from hookscope.checks.measured import Made
from hookscope.checks.statdrift import drift_of, drifts
from hookscope.checks.statfigures import (
    FLOOR,
    StatsBaseline,
    figures_of,
    measured_by,
    parted,
    place_named,
    shares_of,
    stability_index,
)
from hookscope.checks.statrows import judged, places
from hookscope.checks.statrules import LIMITS, RULES
from hookscope.checks.stats import check_measured, default_settings, places_in, run_rules
from hookscope.checks.statspread import alike_by_depth, alike_in_words
from hookscope.checks.statunits import constant_units, dead_units, saturated_units
from hookscope.errors import ExitCode, NothingMeasured, UsageError
from hookscope.layers import Site
from hookscope.statsreport import StatsReport, StatsRow
from hookscope.tasks import Subject
from hookscope.tasks.gate import GateOptions
from hookscope.tasks.statsgate import StatsGate

DEFAULT = default_settings()
MADE = Made("net.py:build", "random", {"torch": "2.14.1"})
PICTURES = 120


class Fixed(nn.Module):
    """Adds a number of its own to each channel, and multiplies by another."""

    def __init__(self, shift, factor=1.0):
        super().__init__()
        self.shift = torch.as_tensor(shift)[:, None, None]
        self.factor = torch.as_tensor(factor)

    def forward(self, x):
        return x * self.factor.reshape(-1, 1, 1) + self.shift


def maps(channels=4, pictures=PICTURES, size=3, seed=0):
    """(pictures, channels, size, size): uniform in -1..1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(pictures, channels, size, size, generator=draw) * 2 - 1


def measured(net, x, **options):
    return hookscope.stats(net, list(x.split(50)), **options)


def cases(report, rule, given=DEFAULT, baseline=None):
    return {case.layer: case for case in run_rules(report, given, baseline) if case.rule == rule}


def found(report, rule, given=DEFAULT, baseline=None):
    """The findings of a rule by place."""
    return {name: case.finding for name, case in cases(report, rule, given, baseline).items() if case.finding}


def row_of(report, place):
    return next(row for row in report.rows if row.place == place)


# --- the vocabulary


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_what_why_and_what_to_try(rule):
    assert rule.severity in ("error", "warn")
    assert all(text and not text.endswith(" ") for text in (rule.summary, rule.why, rule.advice))


def test_the_limits_without_a_default_fall_back_on_one():
    for limit in LIMITS:
        assert DEFAULT.limit(limit.name, place_named("x")) is not None, limit.name


# --- dead


def relu(shift, act=nn.ReLU):
    return nn.Sequential(Fixed(shift), act())


def test_a_unit_that_is_never_above_zero_is_dead():
    report = measured(relu([0.0, -2.0, 0.5, -1.0]), maps())
    assert dead_units(row_of(report, "1")).tolist() == [1, 3]
    (finding,) = found(report, "dead").values()
    assert (finding.layer, finding.value, finding.limit, finding.severity) == ("1", 0.5, 0.0, "warn")
    assert finding.message == "1: 2 of 4 units are never above 0 in 120 pictures (1,3)"


def test_one_that_fires_once_at_one_place_is_alive():
    """What a mean over positions hides (true dead: [T, F, F, T]), and a share of zeros too."""
    x = torch.full((PICTURES, 4, 3, 3), -1.0)
    x[77, 1, 2, 0] = 1e-3
    x[:, 2] = 1.0
    report = measured(nn.Sequential(nn.ReLU()), x)
    assert dead_units(row_of(report, "0")).tolist() == [0, 3]
    assert row_of(report, "0").distribution.channels.alive.tolist() == [0, 1, 9 * PICTURES, 0]


def test_dead_in_every_batch_is_not_dead_in_all():
    x = torch.full((PICTURES, 2, 1, 1), -1.0)
    x[:50, 0], x[50:, 1] = 1.0, 1.0
    assert not found(measured(nn.Sequential(nn.ReLU()), x), "dead")
    assert found(measured(nn.Sequential(nn.ReLU()), x[50:]), "dead", DEFAULT.over(limits={"samples": 1}))


@pytest.mark.parametrize(("pictures", "told"), [(99, False), (100, True)])
def test_before_there_is_data_enough_nothing_is_called_dead(pictures, told):
    report = measured(relu([-2.0, 0.0]), maps(2, pictures))
    assert bool(found(report, "dead")) is told
    skipped = cases(report, "dead")["1"].skipped
    assert skipped == ("" if told else "not enough data: 99 of 100 pictures")


def test_how_much_data_is_enough_can_be_said_for_each_kind():
    report = measured(relu([-2.0, 0.0]), maps(2, 9))
    assert found(report, "dead", DEFAULT.over(limits={"dead-samples": 9}))
    assert found(report, "dead", DEFAULT.over(limits={"samples": 9}))
    assert not found(report, "dead", DEFAULT.over(limits={"samples": 9, "dead-samples": 10}))


SMOOTH = {"gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "leaky": nn.LeakyReLU, "hardswish": nn.Hardswish}


@pytest.mark.parametrize("act", SMOOTH.values(), ids=SMOOTH)
def test_what_is_not_rectified_is_never_called_dead(act):
    report = measured(relu([-9.0, 0.0], act), maps(2))
    assert dead_units(row_of(report, "1")) is None
    assert "1" not in cases(report, "dead")


def test_a_subclass_of_relu_counts_and_relu6_too():
    class Own(nn.ReLU):
        pass

    for act in (Own, nn.ReLU6):
        assert found(measured(relu([-9.0, 0.0], act), maps(2)), "dead"), act


def test_an_in_place_relu_is_judged_by_what_it_returned():
    report = measured(relu([-9.0, 0.0], lambda: nn.ReLU(inplace=True)), maps(2))
    assert set(found(report, "dead")) == {"1"}


def test_the_threshold_says_what_alive_is():
    report = measured(relu([0.0, -0.9]), maps(2), threshold=0.5)
    assert dead_units(row_of(report, "1")).tolist() == [1]
    assert "never above 0.5" in found(report, "dead")["1"].message


def test_a_share_of_units_may_be_allowed_to_be_dead():
    report = measured(relu([0.0, -2.0, 0.0, 0.0]), maps())
    assert found(report, "dead", DEFAULT.over(limits={"dead": 0.24}))
    assert not found(report, "dead", DEFAULT.over(limits={"dead": 0.25}))
    assert not found(report, "dead", DEFAULT.over(limits={"type:ReLU": {"dead": 1.0}}))


@pytest.mark.parametrize("layout", ["NC", "NTC"])
def test_units_are_on_the_channel_axis_of_every_layout(layout):
    linear = nn.Linear(5, 3)
    with torch.no_grad():
        linear.weight.mul_(0.1)
        linear.bias.copy_(torch.tensor([9.0, -9.0, 9.0]))
    x = torch.rand(PICTURES, 5) if layout == "NC" else torch.rand(PICTURES, 7, 5)
    report = measured(nn.Sequential(linear, nn.ReLU()), x)
    assert dead_units(row_of(report, "1")).tolist() == [1]


# --- constant


def test_a_unit_that_gives_the_same_for_everything_is_constant():
    net = nn.Sequential(nn.Conv2d(3, 3, 1))
    with torch.no_grad():
        net[0].weight[1] = 0
        net[0].bias[1] = 0.3
    report = measured(net, maps(3))
    (finding,) = found(report, "constant").values()
    assert finding.message == "0: 1 of 3 units is the same value in all of 120 pictures (1)"
    assert (finding.value, finding.limit) == (0.0, 1e-6)


def test_what_was_constant_already_when_it_came_is_not_the_layers_own():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Identity())
    with torch.no_grad():
        net[0].weight[1] = 0
    assert set(found(measured(net, maps(3)), "constant")) == {"0"}


class Cat(nn.Module):
    """Joins two rectified branches, as Fire modules do."""

    def __init__(self):
        super().__init__()
        self.one, self.two = relu([-9.0, 0.0]), relu([0.0, -9.0])

    def forward(self, x):
        return torch.cat([self.one(x), self.two(x)], 1)


class Functional(nn.Module):
    """Rectifies by a function, which no hook sees."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        with torch.no_grad():
            self.conv.bias[1] = -9.0

    def forward(self, x):
        return self.conv(x).relu()


def test_a_layer_that_joins_dead_units_is_not_blamed_for_them():
    report = measured(nn.Sequential(Cat(), nn.MaxPool2d(2), nn.Flatten()), maps(2))
    assert set(found(report, "dead")) == {"0.one.1", "0.two.1"}
    assert not found(report, "constant")
    assert constant_units(row_of(report, "0")).tolist() == [0, 3]


def test_units_that_a_function_inside_a_layer_keeps_at_zero_are_told_of_that_layer():
    report = measured(nn.Sequential(Functional(), nn.Identity()), maps(2))
    assert not found(report, "dead")
    (finding,) = found(report, "constant").values()
    assert finding.message == "0: 1 of 2 units is the same value in all of 120 pictures (1)"


def test_a_dead_unit_is_not_called_constant_too_nor_what_pools_it():
    net = nn.Sequential(Fixed([0.0, -2.0]), nn.ReLU(), nn.MaxPool2d(2))
    assert not found(measured(net, maps(2)), "constant")


def test_rounding_alone_is_no_change():
    net = nn.Sequential(nn.Conv2d(2, 2, 1))
    with torch.no_grad():
        net[0].weight[1] = 1e-9
        net[0].bias[1] = 1.0
    report = measured(net, maps(2))
    assert set(found(report, "constant")) == {"0"}
    assert not found(report, "constant", DEFAULT.over({"type:Conv2d": {"constant": "off"}}))
    with torch.no_grad():
        net[0].weight[1] = 1e-4
    assert not found(measured(net, maps(2)), "constant")


def test_one_value_alone_is_not_called_constant():
    report = measured(nn.Sequential(nn.Linear(3, 2)), torch.rand(1, 3))
    assert not found(report, "constant", DEFAULT.over(limits={"samples": 1}))


# --- saturated

BOUNDED = {
    "sigmoid": (nn.Sigmoid, 9.0, 0.0),
    "sigmoid-low": (nn.Sigmoid, -9.0, 0.0),
    "tanh": (nn.Tanh, 9.0, 0.0),
    "hardsigmoid": (nn.Hardsigmoid, 9.0, 0.0),
    "hardtanh": (nn.Hardtanh, -9.0, 0.0),
    "relu6": (nn.ReLU6, 9.0, 1.0),
}


@pytest.mark.parametrize(("act", "far", "near"), BOUNDED.values(), ids=BOUNDED)
def test_a_unit_that_stays_at_a_bound_is_saturated(act, far, near):
    report = measured(relu([near, far, near], act), maps(3) * 0.9)
    assert saturated_units(row_of(report, "1"), 0.95).tolist() == [1]
    (finding,) = found(report, "saturated").values()
    assert finding.message == "1: 1 of 3 units is at a bound in more than 95 % of their values (1)"
    assert finding.value == 1.0


def test_zeros_of_relu6_are_not_saturation():
    report = measured(relu([-9.0, 1.0], nn.ReLU6), maps(2))
    assert not found(report, "saturated")
    assert found(report, "dead")


@pytest.mark.parametrize(("many", "told"), [(114, False), (115, True)])
def test_the_share_of_values_at_a_bound_decides(many, told):
    x = torch.full((PICTURES, 1, 1, 1), 1.0)
    x[:many] = 7.0
    assert bool(found(measured(nn.Sequential(nn.ReLU6()), x), "saturated")) is told


# --- norm-shift


def normed(mean, deviation, after=nn.ReLU):
    net = nn.Sequential(nn.BatchNorm2d(4), after())
    with torch.no_grad():
        net[0].weight.fill_(deviation)
        net[0].bias.fill_(mean)
    net[0].running_mean.zero_()
    net[0].running_var.fill_(1 / 3)  # of values that are uniform in -1..1
    return net


@pytest.mark.parametrize(
    ("mean", "deviation", "words"),
    [
        (0.0, 1.0, ""),
        (2.9, 1.0, ""),
        (-3.1, 1.0, "has mean -3."),
        (0.0, 9.5, ""),
        (0.0, 10.5, "has deviation 10."),
        (0.0, 0.11, ""),
        (0.0, 0.09, "has deviation 0.0"),
        (0.0, 0.0, "has deviation 0,"),
    ],
)
def test_what_a_normalisation_gives_should_be_about_zero_and_one(mean, deviation, words):
    report = measured(normed(mean, deviation), maps(pictures=1000))
    told = found(report, "norm-shift")
    assert set(told) == ({"1:0<"} if words else set())
    assert all(words in finding.message for finding in told.values())
    assert all(finding.value > finding.limit in (3.0, 10.0) for finding in told.values())


def test_what_no_layer_receives_as_it_is_has_no_such_rule():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.relu = normed(50.0, 1.0)

        def forward(self, x):
            return self.relu(self.norm(x) + x)

    report = measured(Added(), maps())
    assert not cases(report, "norm-shift")


def test_a_normalisation_that_several_receive_is_judged_once():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one = normed(50.0, 1.0)
            self.two = nn.ReLU()

        def forward(self, x):
            x = self.norm(x)
            return self.one(x) + self.two(x)

    assert list(cases(measured(Forked(), maps()), "norm-shift")) == ["one:0<"]


# --- concentrated, alike


# channels, factor of one: which limit it is below, "" for none
LED = {
    "wide": (256, 40.0, "% of them, below 1 %"),
    "wide-but-two": (256, 25.0, "% of them, below 1 %"),
    "wide-enough": (256, 18.0, ""),
    "narrow": (16, 12.0, "below 1.5"),
    "narrow-enough": (16, 6.0, ""),
}


@pytest.mark.parametrize(("channels", "factor", "words"), LED.values(), ids=LED)
def test_energy_in_few_channels_is_concentrated(channels, factor, words):
    x = torch.ones(4, channels, 1, 1)
    x[:, 5] = factor
    report = measured(nn.Sequential(nn.Conv2d(channels, channels, 1)), x)
    ratio = (channels - 1 + factor**2) ** 2 / (channels - 1 + factor**4)
    told = found(report, "concentrated").get("0:0<")
    assert (told is None) is (ratio >= 1.5 and ratio / channels >= 0.01)
    assert (told is not None) is bool(words)
    if told:
        assert words in told.message
        assert told.value == pytest.approx(min(ratio / channels, ratio) if "%" in words else ratio)
        assert f"channel 5 has {100 * factor**2 / (channels - 1 + factor**2):.3g} %" in told.message


def test_of_few_channels_one_may_lead():
    report = measured(nn.Sequential(nn.Conv2d(3, 7, 1)), maps(3) * 1e6)
    assert cases(report, "concentrated")["0:0<"].skipped == "it has 3 channels only"
    assert cases(report, "concentrated")["0"].skipped == "it has 7 channels only"


def test_zeros_alone_have_no_concentration():
    report = measured(nn.Sequential(nn.Conv2d(8, 8, 1)), torch.zeros(3, 8, 2, 2))
    assert "no energy" in cases(report, "concentrated")["0:0<"].skipped


def same(channels, common):
    """Channels that share a part: |r| is common^2 / (1 + common^2)."""
    own, shared = maps(channels, 40, 5), maps(1, 40, 5, seed=1)
    return own + common * shared


@pytest.mark.parametrize(("common", "told"), [(0.8, False), (1.2, True)])
def test_channels_that_say_the_same_are_alike(common, told):
    report = measured(nn.Sequential(nn.Conv2d(8, 8, 1)), same(8, common), spectrum=True)
    value = row_of(report, "0:0<").spectrum.mean_abs_correlation
    assert value == pytest.approx(common**2 / (1 + common**2), abs=0.03)
    assert ("0:0<" in found(report, "alike")) is told


def test_without_a_spectrum_nothing_is_said_of_likeness():
    assert not cases(measured(nn.Sequential(nn.Conv2d(8, 8, 1)), same(8, 9.0)), "alike")


def test_fewer_rows_than_channels_are_not_enough_for_likeness():
    report = measured(nn.Sequential(nn.Linear(40, 40)), torch.rand(39, 40), spectrum=True)
    assert cases(report, "alike")["0"].skipped == "39 rows of 40 channels: fewer rows than channels"


def test_shallow_layers_are_set_against_deep_ones():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(8, 8, 1) for _ in range(5)))
    report = measured(net, same(8, 1.0), spectrum=True)
    values = [row.spectrum.mean_abs_correlation for row in judged(report) if row.side == "output"]
    assert alike_by_depth(report) == (float(np.median(values[:2])), float(np.median(values[-2:])))
    assert "in the shallow half" in alike_in_words(report)
    assert alike_in_words(measured(net, same(8, 1.0))) == ""


# --- nonfinite


def test_the_first_layer_that_is_not_finite_comes_first():
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1))
    with torch.no_grad():
        net[0].bias[0] = math.inf
    report = measured(net, maps(2, 10))
    told = list(found(report, "nonfinite").values())
    assert [one.severity for one in told] == ["error"] * len(told)
    assert told[0].layer == "0"
    assert "the first layer where something is not finite: 90 of 180 values of batch 0" in told[0].message
    assert "0.bias" in told[0].message
    assert {"1", "2"} <= {one.layer for one in told}


def test_finite_values_pass():
    report = measured(nn.Sequential(nn.Conv2d(2, 2, 1)), maps(2, 3))
    assert all(case == Case("nonfinite", case.layer) for case in cases(report, "nonfinite").values())


# --- the same tensor at two places


def test_a_tensor_at_two_places_is_judged_once():
    net = nn.Sequential(nn.Sequential(Fixed([-9.0, 0.0]), nn.ReLU()), nn.MaxPool2d(2))
    report = measured(net, maps(2))
    assert set(cases(report, "dead")) == {"0.1"}
    assert len(cases(report, "nonfinite")) == sum(row.same_as is None for row in report.rows)


# --- drift


def conv(channels=4, scale=1.0, shift=0.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU())
    with torch.no_grad():
        net[0].weight.mul_(scale)
        net[0].bias.add_(shift)
    return net


def kept(report, **how):
    return StatsBaseline(measured_by(report, **how), MADE, figures_of(report))


def test_the_same_data_does_not_drift_at_all():
    report = measured(conv(), maps())
    assert not found(report, "drift", baseline=kept(report))
    assert not found(report, "layers-changed", baseline=kept(report))
    assert {drift.index for drift in drifts(report, kept(report).figures).values()} == {0.0}


@pytest.mark.parametrize("pictures", [1, 10, 120])
def test_other_data_of_the_same_kind_does_not_drift(pictures):
    baseline = kept(measured(conv(), maps(seed=0)))
    for seed in range(1, 6):
        assert not found(measured(conv(), maps(pictures=pictures, seed=seed)), "drift", baseline=baseline)


def test_a_shifted_input_drifts_from_the_input_on():
    baseline = kept(measured(conv(), maps()))
    told = list(found(measured(conv(), maps(seed=1) + 0.5), "drift", baseline=baseline).values())
    assert told[0].layer == "0:0<"
    assert told[0].severity == "error"
    assert "its stability index against the baseline is" in told[0].message
    assert "its mean went from" in told[0].message


def test_a_change_of_form_with_the_same_mean_is_seen_by_the_index_alone():
    baseline = kept(measured(conv(), maps()))
    finding = found(measured(conv(), maps(seed=1) * 2.5), "drift", baseline=baseline)["0:0<"]
    assert "stability index" in finding.message
    assert "its mean went" not in finding.message


def test_without_histograms_the_mean_decides():
    baseline = kept(measured(conv(), maps()))
    report = measured(conv(), maps(seed=1) + 0.5, histogram=False)
    baseline.check_comparable(measured_by(report))
    finding = found(report, "drift", baseline=baseline)["0:0<"]
    assert "its mean went" in finding.message
    assert "stability index" not in finding.message
    assert finding.value == pytest.approx(0.5 * math.sqrt(3), rel=0.1)


def test_the_shift_is_in_deviations_of_the_baseline():
    report = measured(conv(), maps())
    row = row_of(report, "0:0<")
    old = replace(kept(report).figures.places["0:0<"], mean=1.0, deviation=0.25)
    assert drift_of(row, old).shift == pytest.approx(abs(row.distribution.mean - 1.0) / 0.25, rel=1e-9)


def test_limits_of_drift_go_by_glob_and_noise_can_be_switched_off():
    baseline = kept(measured(conv(), maps()))
    report = measured(conv(), maps(seed=1) + 0.5)
    loose = DEFAULT.over(limits={"**": {"drift-psi": 99, "drift-shift": 99}})
    assert not found(report, "drift", loose, baseline)
    strict = DEFAULT.over(limits={"drift-psi": 0, "drift-shift": 0, "drift-noise": 0})
    assert found(measured(conv(), maps(seed=1)), "drift", strict, baseline)


def test_the_index_is_the_sum_over_bins():
    p, q = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]
    assert stability_index(p, q) == pytest.approx(0.1 * math.log(1.25) + 0.1 * math.log(4 / 3))
    assert stability_index(p, q) == pytest.approx(stability_index(q, p))
    assert stability_index([1.0, 0.0], [0.5, 0.5]) == pytest.approx(
        0.5 * math.log(2) + (0.5 - FLOOR) * math.log(0.5 / FLOOR)
    )


def test_its_mean_by_chance_is_what_the_limit_is_raised_by():
    """(bins - 1)(1/n + 1/m), over many pairs of samples."""
    draw = np.random.default_rng(0)
    cuts = np.linspace(0, 1, 11)[1:-1]
    pairs = [(draw.uniform(size=500), draw.uniform(size=2000)) for _ in range(400)]
    values = [
        stability_index(
            *(np.diff([0, *np.searchsorted(np.sort(one), cuts), one.size]) / one.size for one in pair)
        )
        for pair in pairs
    ]
    assert np.mean(values) == pytest.approx(9 * (1 / 500 + 1 / 2000), rel=0.1)


@pytest.mark.parametrize(
    ("counts", "cuts"),
    [
        ([0, 1, 1, 1, 1, 0], (2, 3, 4)),
        ([0, 0, 90, 1, 9, 0], (3,)),
        ([5, 0, 95], (2,)),
        ([0, 7, 0], ()),
        ([0, 0, 0], ()),
    ],
)
def test_fine_bins_are_parted_by_quantiles_and_never_split(counts, cuts):
    assert parted(np.array(counts), 4) == cuts


def test_parts_of_a_fine_histogram_have_a_tenth_each():
    counts = np.histogram(np.random.default_rng(0).normal(size=20_000), bins=800)[0]
    cuts = parted(counts)
    assert len(cuts) == 9
    assert shares_of(counts, cuts) == pytest.approx([0.1] * 10, abs=0.01)


def test_a_heavy_bin_of_zeros_is_a_bin_of_its_own():
    report = measured(nn.Sequential(nn.ReLU()), maps())
    figure = figures_of(report).places["0"]
    assert figure.shares[0] == pytest.approx(0.5, abs=0.02)
    assert figure.zeros == pytest.approx(figure.shares[0], abs=0.02)
    assert len(figure.shares) >= 5


# --- layers-changed, and the document


def test_a_layer_that_came_went_or_has_another_shape_is_told():
    old, new = nn.Sequential(*conv()), nn.Sequential(*conv())
    new.append(nn.Sigmoid())
    baseline, report = kept(measured(old, maps())), measured(new, maps())
    assert (
        found(report, "layers-changed", baseline=baseline)["2"].message
        == "2: this place is not in the baseline"
    )
    back = found(measured(old, maps()), "layers-changed", baseline=kept(report))
    assert back["2"].message == "2: this place of the baseline is not there any more"
    other = found(measured(old, maps(size=5)), "layers-changed", baseline=baseline)
    assert other["0"].message == "0: its shape is 4x5x5, the baseline's 4x3x3"


def test_a_document_comes_back_as_it_was(tmp_path):
    baseline = kept(measured(conv(), maps()), layers="0")
    file = tmp_path / "base.json"
    file.write_bytes(baseline.encoded())
    assert statbaseline.read(file) == replace(baseline, path=str(file))
    assert statbaseline.to_update(file) == statbaseline.read(file)
    assert statbaseline.to_update(tmp_path / "other.json") is None


def broken(document, **changes):
    return {**document, **changes}


BROKEN = {
    "kind": lambda d: broken(d, kind="gradnorm-baseline"),
    "schema": lambda d: broken(d, schema=2),
    "list": lambda d: [d],
    "no-places": lambda d: broken(d, places=[]),
    "no-same": lambda d: broken(d, same=None),
    "same": lambda d: broken(d, same={"a": 1}),
    "measured": lambda d: broken(d, measured={**d["measured"], "bins": True}),
    "mean": lambda d: broken(d, places={"0": {**d["places"]["0"], "mean": "x"}}),
    "count": lambda d: broken(d, places={"0": {**d["places"]["0"], "count": -1}}),
    "cut-out": lambda d: broken(d, places={"0": {**d["places"]["0"], "cuts": [10**9]}}),
    "cuts-back": lambda d: broken(d, places={"0": {**d["places"]["0"], "cuts": [5, 3]}}),
    "cut-text": lambda d: broken(d, places={"0": {**d["places"]["0"], "cuts": ["1"]}}),
    "share": lambda d: broken(d, places={"0": {**d["places"]["0"], "shares": [2.0]}}),
    "shares": lambda d: broken(d, places={"0": {**d["places"]["0"], "shares": [0.5]}}),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_document_that_is_none_is_refused(spoil, tmp_path):
    file = tmp_path / "base.json"
    file.write_text(json.dumps(spoil(json.loads(kept(measured(conv(), maps())).encoded()))))
    for read in (statbaseline.read, statbaseline.to_update):
        with pytest.raises(UsageError, match=r"base\.json") as caught:
            read(file)
        assert caught.value.hint
        assert caught.value.exit_code == ExitCode.USAGE


def test_figures_of_another_precision_or_other_layers_are_not_compared():
    report = measured(conv(), maps())
    baseline = kept(report, layers="0", precision="fp32")
    baseline.check_comparable(measured_by(replace(report, pictures=7, batches=1), layers="0"))
    for other in ({"layers": "1"}, {"layers": "0", "precision": "bf16"}):
        with pytest.raises(UsageError, match="was measured otherwise"):
            baseline.check_comparable(measured_by(report, **other))


# --- the gate


def judge(net, x, **options):
    gate = StatsGate(GateOptions(**options))
    gate.check(net)
    return gate.judge(measured(net, x), Subject(net, None, {"name": "net.py:build", "weights": "random"}))


def test_a_verdict_has_findings_documents_and_words(tmp_path):
    verdict = judge(relu([0.0, -2.0]), maps(2), fail_on="dead", root=tmp_path)
    assert verdict.gate.failed
    assert set(verdict.documents) == {"stats.junit.xml", "stats.sarif", "stats-baseline.json"}
    assert "1 finding, 1 of them failing" in verdict.lines[0]
    assert not judge(relu([0.0, -2.0]), maps(2), root=tmp_path).gate.failed


def test_a_baseline_is_made_and_then_compared_with(tmp_path):
    file = str(tmp_path / "base.json")
    verdict = judge(conv(), maps(), baseline=file, update_baseline=True)
    ((path, data),) = verdict.updates.items()
    path.write_bytes(data)
    assert data == verdict.documents["stats-baseline.json"]
    assert not judge(conv(), maps(), baseline=file).gate.failed
    drifted = judge(conv(scale=4.0), maps(), baseline=file)
    assert drifted.gate.failed
    assert {one.rule for one in drifted.gate.findings} == {"drift"}


REFUSED = {
    "update-alone": ({"update_baseline": True}, "--update-baseline without --baseline"),
    "rule": ({"severity": {"deed": "error"}}, "unknown rule 'deed'"),
    "limit": ({"limits": {"dead": -1}}, "is negative"),
    "fail-on": ({"fail_on": "deads"}, "neither a severity nor a rule"),
    "baseline": ({"baseline": "nosuch.json"}, "does not exist"),
    "glob": ({"limits": {"nosuch.**": {"dead": 1}}}, "matches 'nosuch.**'"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_runs(options, words):
    with pytest.raises(UsageError) as caught:
        StatsGate(GateOptions(**options)).check(conv())
    assert words in caught.value.message


def test_where_nothing_passed_there_is_nothing_to_judge():
    with pytest.raises(NothingMeasured):
        check_measured(StatsReport(1, 1, (StatsRow(Site("a"), "output", "ReLU", "not-called"),)))


def test_places_of_a_model_are_its_layers_by_all_names():
    net = nn.ModuleDict({"a": nn.ReLU()})
    net["b"] = net["a"]
    known = {place.name: place for place in places_in(net)}
    assert known["a"].aliases == ("b",)
    report = measured(conv(), maps(pictures=2))
    assert {place.name for place in places(report)} >= {"0:0<", "0", "1:0<", "1"}
    assert all(place.layer == place_named(place.name).layer for place in places(report))
