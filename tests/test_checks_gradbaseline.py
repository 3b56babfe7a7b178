"""A baseline of gradient figures: what is written, what is refused, what drifts, and how little an update changes."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookscope
from hookscope.checks import gradbaseline
from hookscope.checks.graddrift import updated
from hookscope.checks.gradfigures import (
    Figure,
    Figures,
    GradBaseline,
    Made,
    Measured,
    figures_of,
    measured_by,
    rounded,
)
from hookscope.checks.gradients import default_settings, run_rules
from hookscope.checks.gradrows import places
from hookscope.errors import ExitCode, UsageError
from hookscope.output.manifest import plain

DEFAULT = default_settings()
MADE = Made("net.py:build", "random", {"torch": "2.14.1"})
MEASURED = Measured("score", "", "**", "L2", "fp32", False, 2, 1)
TARGETS = torch.tensor([0, 1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


X = torch.randn(2, 6, generator=torch.Generator().manual_seed(5))


def report(model=None, **options):
    return hookscope.gradnorm(model if model is not None else nets.seeded(Net), X, TARGETS, **options)


def baseline(made=None, **changes):
    made = report() if made is None else made
    return GradBaseline(replace(measured_by(made, loss="cross_entropy"), **changes), MADE, figures_of(made))


def found(made, old, given=DEFAULT):
    """The findings against a baseline, by rule and layer."""
    return {
        (case.rule, case.layer): case.finding
        for case in run_rules(made, given, old)
        if case.rule in ("drift", "layers-changed") and case.finding
    }


def by_hand(norm=1.0, *, total=10.0, loss=2.0, status="ok", shape="3x2"):
    """Figures of one parameter and one layer."""
    figure = Figure(norm, norm, status, shape)
    return GradBaseline(MEASURED, MADE, Figures(loss, total, {"a.weight": figure}, {"a": figure}))


def drift(old, new, **limits):
    """Which places drifted from one hand-made baseline to another."""
    from hookscope.checks.graddrift import Compared, drifted

    seen = drifted(Compared(new.figures, old.figures), DEFAULT.over(limits=limits))
    return {one.place.name: one for one in seen if one.message}


# --- the document


def test_the_document_is_sorted_and_has_one_figure_a_line():
    text = baseline().encoded().decode()
    read = json.loads(text)
    assert json.dumps(read, sort_keys=True, indent=2) + "\n" == text
    assert set(read) == {"kind", "schema", "measured", "made", "loss", "total", "parameters", "layers"}
    assert read["measured"] == {
        "loss": "cross_entropy", "labels": "", "layers": "**", "norm": "L2", "precision": "fp32", "train_mode": False,
        "pictures": 2, "batches": 1,
    }  # fmt: skip
    assert sorted(read["parameters"]) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert read["parameters"]["first.weight"]["shape"] == "4x6"
    assert read["layers"]["first"]["shape"] == "4"
    assert sum('"norm":' in line for line in text.splitlines()) == 4 + 2 + 1


def test_its_figures_are_autograds_to_four_digits():
    net = nets.seeded(Net)
    named = dict(net.named_parameters())
    loss = F.cross_entropy(net(X), TARGETS)
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    read = json.loads(baseline().encoded())
    for name, gradient in gradients.items():
        norm = float(gradient.double().norm())
        assert read["parameters"][name]["norm"] == pytest.approx(norm, rel=6e-4)
        assert read["parameters"][name]["rms"] == pytest.approx(norm / math.sqrt(gradient.numel()), rel=6e-4)
        assert len(str(read["parameters"][name]["norm"]).lstrip("0.").replace(".", "")) <= 4
    assert read["loss"] == pytest.approx(float(loss.detach()), rel=6e-4)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(1.23456, 1.235), (123456.0, 123500.0), (1.23456e-12, 1.235e-12), (0.0, 0.0), (math.inf, math.inf)],
)
def test_rounding(value, wanted):
    assert rounded(value) == wanted


def test_the_norm_is_the_runs():
    wanted = rounded(float(torch.cat([X.sum(0), torch.ones(1)]).abs().sum()))
    net = nn.Sequential(nn.Linear(6, 1))
    made = hookscope.gradnorm(net, X, loss=lambda output, _: output.sum(), norm=1)
    made_of = figures_of(made)
    assert measured_by(made, loss="own").norm == "L1"
    assert made_of.parameters["0.weight"].norm + 2 == pytest.approx(wanted + 1, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_not_finite_survive(tmp_path, value):
    one = by_hand(value, status="non-finite")
    (tmp_path / "b.json").write_bytes(one.encoded())
    read = gradbaseline.read(tmp_path / "b.json").figures.parameters["a.weight"].norm
    assert str(read) == str(value)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "b.json"
    path.write_bytes(baseline().encoded())
    assert gradbaseline.read(path) == replace(baseline(), path=str(path))
    assert gradbaseline.to_update(path) == replace(baseline(), path=str(path))
    assert gradbaseline.to_update(tmp_path / "none.json") is None


def output_directory(folder, data, name="gradnorm-baseline.json", **changes):
    folder.mkdir()
    (folder / name).write_bytes(data)
    record = {"path": name, "kind": "gradnorm", "sha256": hashlib.sha256(data).hexdigest(), **changes}
    fields = {
        "schema": 1,
        "command": "gradnorm",
        "model": {},
        "versions": {"hookscope": "0"},
        "artifacts": [record],
    }
    (folder / "manifest.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("end", ["", "manifest.json"])
def test_an_output_directory_is_read(tmp_path, end):
    folder = output_directory(tmp_path / "out", baseline().encoded())
    assert gradbaseline.read(folder / end).figures == baseline().figures


# --- refused


def refusal(path, read=gradbaseline.read):
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.hint
    return caught.value


def test_a_missing_baseline_says_how_to_make_one(tmp_path):
    error = refusal(tmp_path / "none.json")
    assert "does not exist" in error.message
    assert "--update-baseline" in error.hint


def test_directories_that_hold_none_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty")
    other = output_directory(tmp_path / "maps", b"{}", "gradcam.json")
    assert "holds 0 files gradnorm-baseline.json" in refusal(other).message
    changed = output_directory(tmp_path / "changed", baseline().encoded(), sha256="0" * 64)
    assert "its hash differs" in refusal(changed).message


def document(**changes):
    return plain(json.loads(by_hand().encoded())) | changes


FIGURE = {"norm": 1.0, "rms": 1.0, "status": "ok", "shape": ""}
HOSTILE = {
    "empty": b"",
    "no-text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "list": b"[]",
    "other-kind": json.dumps(document(kind="gradcam")),
    "manifest": json.dumps({"schema": 1, "artifacts": []}),
    "schema": json.dumps(document(schema=2)),
    "schema-truth": json.dumps(document(schema=True)),
    "no-figures": json.dumps({"kind": "gradnorm-baseline", "schema": 1}),
    "figures-list": json.dumps(document(parameters=[])),
    "figure-text": json.dumps(document(parameters={"a": "x"})),
    "norm-text": json.dumps(document(parameters={"a": FIGURE | {"norm": "1"}})),
    "norm-missing": json.dumps(document(parameters={"a": {"rms": 1.0, "status": "ok", "shape": ""}})),
    "norm-truth": json.dumps(document(layers={"a": FIGURE | {"norm": True}})),
    "norm-huge": json.dumps(document(layers={"a": FIGURE | {"norm": 10**400}})),
    "status": json.dumps(document(layers={"a": FIGURE | {"status": None}})),
    "shape": json.dumps(document(layers={"a": FIGURE | {"shape": [1]}})),
    "loss": json.dumps(document(loss=None)),
    "total": json.dumps(document(total={})),
    "measured": json.dumps(document(measured={"loss": "score"})),
    "measured-kind": json.dumps(document(measured=plain(MEASURED) | {"pictures": 2.0})),
    "versions": json.dumps(document(made={"model": "a", "weights": "b", "versions": {"torch": 2}})),
    "name": json.dumps(document(parameters={"a" * 10_000: 3})),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_baseline_is_refused_and_not_overwritten(tmp_path, data):
    path = tmp_path / "b.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    for read in (gradbaseline.read, gradbaseline.to_update):
        error = refusal(path, read)
        assert len(error.message) < 600 + len(str(path))


def test_a_document_by_hand_is_what_the_hostile_ones_are_made_of(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(document()))
    assert gradbaseline.read(tmp_path / "b.json").figures == by_hand().figures


def test_other_things_than_files_are_refused(tmp_path):
    assert "is an output directory" in refusal(tmp_path, gradbaseline.to_update).message
    assert "neither a file" in refusal("/dev/null").message
    refusal("a\0b")
    refusal("a" * 5000)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refusal(loop)


def test_too_large_a_file_is_not_read(tmp_path):
    path = tmp_path / "b.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert "too large" in refusal(path).message


# --- comparable


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "cross_entropy"}, "loss 'score', here 'cross_entropy'"),
        ({"norm": "L1"}, "norm 'L2', here 'L1'"),
        ({"train_mode": True}, "train mode False, here True"),
        ({"pictures": 3}, "pictures 2, here 3"),
        ({"precision": "bf16"}, "precision 'fp32', here 'bf16'"),
        ({"layers": "layer4"}, "layers '**', here 'layer4'"),
        ({"labels": "class 3"}, "labels '', here 'class 3'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_was_measured_otherwise_cannot_be_compared(changes, words):
    one = replace(by_hand(), path="b.json")
    one.check_comparable(MEASURED)
    with pytest.raises(UsageError, match="'b.json' was measured otherwise") as caught:
        one.check_comparable(replace(MEASURED, **changes))
    assert words in caught.value.message
    assert "--update-baseline" in caught.value.hint


def test_another_number_of_batches_counts_in_train_mode_alone():
    # In eval mode figures of the mean loss over all pictures do not depend on how they came.
    by_hand().check_comparable(replace(MEASURED, batches=2))
    trained = replace(by_hand(), measured=replace(MEASURED, train_mode=True))
    with pytest.raises(UsageError, match="batches 1, here 2"):
        trained.check_comparable(replace(MEASURED, train_mode=True, batches=2))


def test_other_versions_and_models_are_only_told():
    one = by_hand()
    assert one.differences(MADE) == ()
    assert one.differences(Made("net.py:build", "own", {"torch": "3.0", "timm": "1"})) == (
        "the baseline was made with weights 'random', here it is 'own'",
        "the baseline was made with timm None, here it is '1'",
        "the baseline was made with torch '2.14.1', here it is '3.0'",
    )


# --- drift


def test_a_repeated_run_has_no_finding():
    assert found(report(), baseline()) == {}
    looked = {(case.rule, case.layer) for case in run_rules(report(), DEFAULT, baseline())}
    names = ["first", "second", "first.weight", "first.bias", "second.weight", "second.bias"]
    assert {("drift", name) for name in ["", *names]} <= looked
    assert {("layers-changed", name) for name in names} <= looked


def test_without_a_baseline_nothing_is_compared():
    assert not {case.rule for case in run_rules(report(), DEFAULT)} & {"drift", "layers-changed"}


def test_another_number_of_threads_has_no_finding():
    threads = torch.get_num_threads()
    net, x = nets.seeded(nets.ReluThrice), nets.picture(4, 32)
    made = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            made.append(
                hookscope.gradnorm(net, x.contiguous(memory_format=torch.channels_last), loss="score")
            )
    finally:
        torch.set_num_threads(threads)
    assert found(made[1], baseline(made[0])) == {}
    assert found(hookscope.gradnorm(net, x, loss="score"), baseline(made[0])) == {}


def test_a_perturbed_weight_drifts():
    net = nets.seeded(Net)
    with torch.no_grad():
        net.second.weight *= 1.2
    drifted = found(report(net), baseline())
    assert {rule for rule, _ in drifted} == {"drift"}
    assert {("drift", "first.weight"), ("drift", "first"), ("drift", "")} <= set(drifted)
    one = drifted["drift", "first.weight"]
    old = baseline().figures.parameters["first.weight"].norm
    new = figures_of(report(net)).parameters["first.weight"].norm
    assert (one.severity, one.value, one.limit) == ("error", pytest.approx(abs(new - old) / old), 0.01)
    assert one.message.startswith(
        f"first.weight: the norm of the gradient is {new:g}, the baseline's {old:g}: "
    )
    assert "--update-baseline" in one.advice


@pytest.mark.parametrize(
    ("old", "new", "limits", "bad"),
    [
        (1.0, 1.01, {}, False),
        (1.0, 1.0102, {}, True),
        (1.0, 0.9899, {}, True),
        (1.0, 1.5, {"drift": 0.5}, False),
        (1.0, 1.5001, {"drift": 0.5}, True),
        (1.0, 1.5, {"drift-parameter": 0.5, "drift-output": 0.5}, False),
        (1.0, 1.5, {"drift-abs": 0.5}, False),
        (1.0, 1.75, {"drift-abs": 0.5}, True),
        (1.0, 1.5, {"drift-parameter-abs": 0.5, "drift-output-abs": 0.5}, False),
        (0.0, 0.5, {"drift-abs": 0.5}, False),
        (0.0, 0.5, {"drift-abs": 0.25}, True),
        (1e-6, 9e-6, {}, False),
        (1e-6, 9e-6, {"drift-noise": 0}, True),
        (1e-6, 1.2e-5, {}, True),
        (math.nan, math.nan, {}, False),
        (math.nan, 1.0, {}, True),
        (1.0, math.inf, {}, True),
        (math.inf, -math.inf, {}, True),
    ],
)
def test_tolerances(old, new, limits, bad):
    assert set(drift(by_hand(old), by_hand(new), **limits)) == ({"a", "a.weight"} if bad else set())


def test_tolerances_are_by_metric():
    assert set(drift(by_hand(1.0), by_hand(1.5), **{"drift-output": 0.5})) == {"a.weight"}
    assert set(drift(by_hand(1.0), by_hand(1.5), **{"drift-parameter": 0.5})) == {"a"}


@pytest.mark.parametrize(
    ("changes", "limits", "words"),
    [
        ({"loss": 2.5}, {}, "the loss is 2.5, the baseline's 2: 25 % apart, more than 1 %"),
        ({"total": 11.0}, {}, "the total norm is 11, the baseline's 10: 10 % apart, more than 1 %"),
        ({"loss": 2.5, "total": 11.0}, {}, "the loss is 2.5"),
        ({"loss": 2.5}, {"drift-loss": 0.25}, ""),
        ({"total": 11.0}, {"drift-total": 0.1}, ""),
        ({"total": 11.0}, {"drift-total-abs": 1}, ""),
        ({"loss": 2.5, "total": 11.0}, {"drift-loss": 0.25}, "the total norm is 11"),
        ({"loss": math.nan}, {}, "the loss is nan, the baseline's 2"),
    ],
)
def test_the_loss_and_the_total_are_the_models(changes, limits, words):
    seen = drift(by_hand(), by_hand(**changes), **limits)
    assert [one.message.startswith(words) for one in seen.values()] == ([True] if words else [])


def test_a_zero_in_the_baseline_has_an_absolute_limit():
    seen = drift(by_hand(0.0), by_hand(0.5), **{"drift-abs": 0.25})["a"]
    assert (seen.value, seen.limit) == (0.5, 0.25)
    assert seen.message.endswith("0.5 apart, more than 0.25")


def test_tolerances_go_by_glob_class_and_alias():
    net = nets.seeded(Net)
    with torch.no_grad():
        net.second.weight *= 1.2
    for pattern in ("**", "type:Linear"):
        given = DEFAULT.over(limits={"drift-loss": 1, "drift-total": 1, pattern: {"drift": 1.0}})
        assert found(report(net), baseline(), given) == {}
    only = found(report(net), baseline(), DEFAULT.over(limits={"first": {"drift": 1.0}}))
    assert not {name for _, name in only if name.startswith("first")}
    assert only


# --- layers-changed


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_a_renamed_layer_is_removed_and_added():
    changed = found(report(nets.seeded(Renamed)), baseline())
    assert [name for rule, name in changed if rule == "layers-changed"] == [
        "last.weight", "last.bias", "last", "second.bias", "second.weight", "second",
    ]  # fmt: skip
    assert {rule for rule, _ in changed} == {"layers-changed"}
    assert changed["layers-changed", "last"].message == "last: this layer is not in the baseline"
    gone = changed["layers-changed", "second.weight"]
    assert gone.message == "second.weight: this parameter of the baseline is not there any more"
    assert gone.severity == "error"


def test_a_glob_may_mean_what_is_only_in_the_baseline():
    given = DEFAULT.over({"second": {"layers-changed": "off"}, "last": {"layers-changed": "warn"}})
    changed = found(report(nets.seeded(Renamed)), baseline(), given)
    assert {(name, one.severity) for (_, name), one in changed.items()} == {
        ("last", "warn"), ("last.weight", "warn"), ("last.bias", "warn"),
    }  # fmt: skip


def test_another_shape_or_status_is_a_change_and_no_drift():
    net = nets.seeded(Net)
    net.first, net.second = nn.Linear(6, 5), nn.Linear(5, 3)
    changed = found(report(net), baseline())
    assert changed["layers-changed", "first.weight"].message == (
        "first.weight: its shape is 5x6, the baseline's 4x6"
    )
    assert changed["layers-changed", "first"].message == "first: its shape is 5, the baseline's 4"
    assert ("drift", "first.weight") not in changed
    net = nets.seeded(Net)
    net.first.requires_grad_(False)
    changed = found(report(net), baseline())
    assert "its status is frozen, the baseline's ok" in changed["layers-changed", "first.weight"].message
    assert ("drift", "first.weight") not in changed


# --- updates


def test_an_update_keeps_what_is_within_tolerance_byte_for_byte():
    old, new = by_hand(1.0), by_hand(1.009, total=10.05, loss=2.01)
    assert new.encoded() != old.encoded()
    assert updated(old, new, DEFAULT).encoded() == old.encoded()


def test_an_update_changes_only_the_lines_that_drifted():
    old = baseline()
    net = nets.seeded(Net)
    with torch.no_grad():
        net.second.weight *= 1.003
    slightly = baseline(report(net))
    assert slightly.encoded() != old.encoded()
    assert updated(old, slightly, DEFAULT).encoded() == old.encoded()
    figures = slightly.figures
    moved = replace(
        slightly,
        figures=replace(figures, parameters=figures.parameters | {"first.bias": Figure(9.0, 4.5, "ok", "4")}),
    )
    before, after = (one.encoded().decode().splitlines() for one in (old, updated(old, moved, DEFAULT)))
    assert len(before) == len(after)
    different = [line.strip() for was, line in zip(before, after, strict=True) if was != line]
    assert different == ['"norm": 9.0,', '"rms": 4.5,']


def test_after_an_update_nothing_is_found():
    net = nets.seeded(Net)
    with torch.no_grad():
        net.second.weight *= 1.2
    made = report(net)
    assert found(made, baseline())
    after = updated(baseline(), baseline(made), DEFAULT, places(made))
    assert found(made, after) == {}
    assert updated(after, baseline(made), DEFAULT).encoded() == after.encoded()


def test_small_steps_do_not_creep():
    first = by_hand(1.0)
    second = updated(first, by_hand(1.008), DEFAULT)
    third = updated(second, by_hand(1.016), DEFAULT)
    assert (second.figures.layers["a"].norm, third.figures.layers["a"].norm) == (1.0, 1.016)


def test_layers_come_and_go_and_another_status_is_taken():
    old = baseline()
    new = baseline(report(nets.seeded(Renamed)))
    kept = updated(old, new, DEFAULT).figures
    assert (list(kept.parameters), list(kept.layers)) == (
        list(new.figures.parameters),
        list(new.figures.layers),
    )
    assert updated(by_hand(1.0), by_hand(1.0, status="zero-gradient"), DEFAULT).figures.layers[
        "a"
    ].status == ("zero-gradient")


def test_what_was_measured_otherwise_is_replaced_whole():
    new = by_hand(1.005)
    assert updated(None, new, DEFAULT) == new
    assert updated(replace(by_hand(), measured=replace(MEASURED, loss="own")), new, DEFAULT) == new
    assert updated(by_hand(), new, DEFAULT) != new


def test_the_tolerance_of_an_update_goes_by_glob():
    old, new = by_hand(1.0), by_hand(1.3)
    given = DEFAULT.over(limits={"a.weight": {"drift": 0.5}})
    kept = updated(old, new, given).figures
    assert (kept.parameters["a.weight"].norm, kept.layers["a"].norm) == (1.0, 1.3)
