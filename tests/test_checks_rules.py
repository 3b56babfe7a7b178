"""The machinery of gates: which severity and limit hold where, cases in order, and settings that are refused."""

from __future__ import annotations

import math
import tomllib

import pytest

from hookscope.checks.findings import Case, Rule
from hookscope.checks.rules import Limit, Place, Seen, Settings, assignments, findings, run
from hookscope.errors import ExitCode, UsageError

RULES = (
    Rule("low", "warn", "too low", "why low", "try more"),
    Rule("high", "error", "too high", "why high", "try less"),
    Rule("odd", "off", "odd", "why odd", "try even"),
)
LIMITS = (
    Limit("low", "least", 1.0),
    Limit("high", "most"),
    Limit("drift", "all", 0.5),
    Limit("drift-loss", "of the loss", or_else="drift"),
    Limit("whole", "of the model", 7.0, of_model=True),
)
GIVEN = Settings(RULES, LIMITS)
MODEL = Place()
CONV = Place("layer4.0.conv", "layer4.0.conv", "Conv2d")
WEIGHT = Place("layer4.0.conv.weight", "layer4.0.conv", "Conv2d", ("head.tied",))
AGAIN = Place("relu@1", "relu", "ReLU")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("layer4.**", {CONV, WEIGHT}),
        ("layer4.0.conv", {CONV, WEIGHT}),
        ("**.weight", {WEIGHT}),
        ("head.tied", {WEIGHT}),
        ("type:Conv*", {CONV, WEIGHT}),
        ("relu", {AGAIN}),
        ("relu@1", {AGAIN}),
        ("layer4", set()),
        ("type:Linear", set()),
    ],
)
def test_what_a_glob_means(pattern, wanted):
    assert {place for place in (MODEL, CONV, WEIGHT, AGAIN) if place.matches(pattern)} == wanted


def test_defaults_hold_where_nothing_is_set():
    assert [GIVEN.severity(rule.name, CONV) for rule in RULES] == ["warn", "error", "off"]
    assert (GIVEN.limit("low", CONV), GIVEN.limit("high", CONV)) == (1.0, None)
    assert (GIVEN.limit("drift-loss", MODEL), GIVEN.number("whole", MODEL)) == (0.5, 7.0)


def test_a_limit_that_is_not_set_follows_its_general_one_also_by_glob():
    made = GIVEN.over(limits={"drift": 0.1, "layer4.**": {"drift": 0.2}})
    assert (made.limit("drift-loss", AGAIN), made.limit("drift-loss", CONV)) == (0.1, 0.2)
    assert made.over(limits={"drift-loss": 3}).limit("drift-loss", CONV) == 3.0


TABLE = """
[limits."layer4.**"]
low = 3
[limits."**.weight"]
low = 4
[limits]
low = 2
whole = 9
[severity]
low = "error"
[severity."type:ReLU"]
low = "off"
"""


def test_plain_values_come_before_globs_and_of_those_the_last_holds():
    read = tomllib.loads(TABLE)
    made = GIVEN.over(read["severity"], read["limits"], "gate.toml")
    assert [made.limit("low", place) for place in (MODEL, AGAIN, CONV, WEIGHT)] == [2, 2, 3, 4]
    assert [made.severity("low", place) for place in (MODEL, AGAIN, CONV)] == ["error", "off", "error"]
    assert made.limit("whole", MODEL) == 9.0


def test_flags_hold_over_a_files_globs():
    made = GIVEN.over(limits={"layer4.**": {"low": 3}}, source="gate.toml").over(
        limits={"low": 8}, source="flags"
    )
    assert made.limit("low", CONV) == 8.0


def test_what_holds_is_told_in_the_form_in_which_it_is_set():
    made = GIVEN.over({"odd": "warn", "relu": {"low": "off"}}, {"high": 5, "layer4.**": {"low": 3}})
    told = made.described()
    assert told["severity"] == {"low": "warn", "high": "error", "odd": "warn", "relu": {"low": "off"}}
    assert told["limits"]["layer4.**"] == {"low": 3}
    again = GIVEN.over(told["severity"], told["limits"])
    assert again.described() == told
    assert "high" not in GIVEN.described()["limits"]


REFUSED = {
    "unknown-rule": ({"lwo": "error"}, {}, "unknown rule 'lwo' in gate severity", "did you mean 'low'?"),
    "no-severity": (
        {"low": "warning"},
        {},
        "low = 'warning' in gate severity is no severity",
        "error, warn, off",
    ),
    "severity-list": ({"low": ["off"]}, {}, "is no severity", "error, warn, off"),
    "unknown-limit": ({}, {"hihg": 1}, "unknown limit 'hihg' in gate limits", "did you mean 'high'"),
    "text": (
        {},
        {"low": "1"},
        "low = '1' in gate limits is not a number",
        "a limit is a number of 0 or more",
    ),
    "nan": ({}, {"low": math.nan}, "is not a number", "0 or more"),
    "truth": ({}, {"low": True}, "low = True in gate limits is not a number", "0 or more"),
    "negative": ({}, {"low": -1e-9}, "low = -1e-09 in gate limits is negative", "0 or more"),
    "in-glob": ({}, {"a.*": {"low": -1}}, "in gate limits of 'a.*' is negative", "0 or more"),
    "of-model": ({}, {"a.*": {"whole": 1}}, "cannot be set for some layers", "without a glob"),
    "unknown-in-glob": ({"a.*": {"hi": "off"}}, {}, "unknown rule 'hi' in gate severity of 'a.*'", "high"),
    "glob-without-table": ({}, {"layer4.**": 3}, "unknown limit 'layer4.**'", "known: low"),
}


@pytest.mark.parametrize(("severity", "limits", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_settings_that_are_refused(severity, limits, message, hint):
    with pytest.raises(UsageError) as caught:
        GIVEN.over(severity, limits, "gate")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_limit_may_be_without_end_and_underscores_are_dashes():
    assert GIVEN.over(limits={"drift_loss": math.inf}).limit("drift-loss", MODEL) == math.inf


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layer4.0.cnov", "did you mean 'layer4.0.conv'"),
        ("type:Conv", "'type:Conv2d'"),
        ("zzz", "hookscope layers"),
    ],
)
def test_a_glob_that_means_nothing_is_refused(pattern, hint):
    for made in (
        GIVEN.over(limits={pattern: {"low": 1}}, source="gate"),
        GIVEN.over({pattern: {"low": "off"}}),
    ):
        with pytest.raises(UsageError, match="no layer and no parameter matches") as caught:
            made.check([CONV, WEIGHT])
        assert repr(pattern) in caught.value.message
        assert hint in caught.value.hint
    GIVEN.over(limits={"layer4.**": {"low": 1}}).check([AGAIN, CONV])


def looks(**values):
    """A look for each rule: a value below the limit at CONV or WEIGHT is a finding."""

    def look(name):
        def seen(settings):
            for place, value in values[name].items():
                limit = settings.limit("low", place)
                yield Seen(place, value, limit, f"{place.name}: {value} < {limit}" if value < limit else "")
            yield Seen(MODEL, skipped="nothing there")

        return seen

    return {name: look(name) for name in values}


def test_cases_come_by_rule_then_place():
    made = GIVEN.over(limits={"**.weight": {"low": 3}})
    cases = run(looks(high={CONV: 1}, low={CONV: 1, WEIGHT: 2.5}), made)
    assert [(case.rule, case.layer) for case in cases] == [
        ("low", CONV.name), ("low", WEIGHT.name), ("low", ""), ("high", CONV.name), ("high", ""),
    ]  # fmt: skip
    assert cases[0] == Case("low", CONV.name)
    assert cases[2] == Case("low", "", skipped="nothing there")
    found = cases[1].finding
    assert (found.rule, found.severity, found.layer, found.value, found.limit) == (
        "low", "warn", WEIGHT.name, 2.5, 3.0,
    )  # fmt: skip
    assert (found.why, found.advice) == ("why low", "try more")


def test_a_place_can_have_advice_of_its_own():
    (case,) = run({"low": lambda _: [Seen(CONV, message="low", advice="mind the gap")]}, GIVEN)
    assert case.finding.advice == "mind the gap"


def test_what_is_off_has_no_case_and_costs_nothing():
    def never(settings):
        raise AssertionError

    assert run({"odd": never}, GIVEN) == ()
    some = GIVEN.over({"low": "off", "**.weight": {"low": "error"}})
    (case,) = run(looks(low={CONV: 0, WEIGHT: 0}), some)
    assert (case.layer, case.finding.severity) == (WEIGHT.name, "error")


def test_errors_come_before_warnings():
    cases = run(looks(low={CONV: 0, WEIGHT: 0}, high={CONV: 0}), GIVEN)
    assert [(one.rule, one.layer) for one in findings(cases)] == [
        ("high", CONV.name), ("low", CONV.name), ("low", WEIGHT.name),
    ]  # fmt: skip


def test_assignments_are_tables():
    words = ["low=1e-9", "layer4.**:low = 2", "type:Conv2d:high=3", "layer4.**:high=inf", "odd=warn"]
    assert assignments(words, "--limit") == {
        "low": 1e-9, "layer4.**": {"low": 2.0, "high": math.inf}, "type:Conv2d": {"high": 3.0}, "odd": "warn",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["low", "=1", "low=", "layer4:=2", ""])
def test_what_is_no_assignment_is_refused(word):
    with pytest.raises(UsageError, match="--limit .* is no assignment"):
        assignments([word], "--limit")
