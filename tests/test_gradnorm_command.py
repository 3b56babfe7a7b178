"""`hookscope gradnorm` as its user and a CI job meet it: a gate over commits, what it writes, says and refuses."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from command import Shell, assert_whole, manifest, picture, strict_json, tree
from torch.nn import functional as F

from hookscope.tasks import gradnorm as task

ROOT = Path(__file__).parent.parent

GATE = '''
import sys
import torch
from torch import nn

class Net(nn.Module):
    """What changes from commit to commit."""
    def __init__(self, second="second", detach=False, drop=0.5):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.name, self.detach = second, detach
        self.add_module(second, nn.Conv2d(6, 6, 3))
        self.drop, self.fc = nn.Dropout(drop), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        if self.detach: x = x.detach()
        return self.fc(self.drop(getattr(self, self.name)(x).relu().mean((2, 3))))

def good(): return Net()
def detached(): return Net(detach=True)
def renamed(): return Net(second="renamed")

@torch.no_grad()
def infinite():
    net = Net()
    net.second.weight[0, 0, 0, 0] = float("inf")
    return net

@torch.no_grad()
def scaled():
    net = Net()
    net.first.weight.mul_(1.5)
    return net

def frozen(): return Net().requires_grad_(False)

class Silent(Net):
    """Its layers are called, and its answer does not depend on them."""
    def forward(self, x): return super().forward(x).detach() + torch.zeros(3, requires_grad=True)

class Noted(Net):
    """Says what is left of it once the process has measured it."""
    def __init__(self):
        super().__init__()
        sys.modules["noted"] = self

class Strange(Net):
    """Layers whose names are formulas, tags and mentions."""
    def __init__(self):
        super().__init__()
        for name in NAMES: self.add_module(name, nn.Conv2d(6, 6, 1))

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        for name in NAMES: x = self._modules[name](x)
        return self.fc(x.mean((2, 3)))

NAMES = ["=cmd|' /C calc'!A0", "@octocat <b>|`", "+new\\nline", "a,b%"]

class Keyed(Net):
    def forward(self, picture, scale): return super().forward(picture) * scale
'''

DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def _pairs(count=3):
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.rand(4, 3, 9, 9, generator=draw), torch.randint(3, (4,), generator=draw)

def batches(): return _pairs()
def endless():
    while True: yield from _pairs()
LOADER = DataLoader(TensorDataset(torch.rand(6, 3, 9, 9), torch.zeros(6, dtype=torch.long)), batch_size=4)
LIST = list(_pairs(2))
def unlabelled(): return [(x, None) for x, _ in _pairs(1)]
def mixed(): return [*LIST, *unlabelled()]
def tuples(): return [((x, 2.0), y) for x, y in _pairs(1)]
def dicts(): return [({"picture": x, "scale": 2.0}, y) for x, y in _pairs(1)]
def nothing(): return []
def number(): return 7
def triples(): return [(1, 2, 3)]
def dataset(): return LOADER.dataset
def wants(path): return []
def raises():
    yield from _pairs(2)
    raise OSError("disk\\ngone")
def beyond(): return [(torch.rand(2, 3, 9, 9), torch.tensor([0, 7]))]
def square(output, targets): return ((output - nn_hot(targets)) ** 2).mean()
def nn_hot(targets): return torch.nn.functional.one_hot(targets, 3).float()
def vector(output, targets): return output.sum(1)
def angry(output, targets): raise ValueError("no such loss")
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    # Plots take most of the time of a small run, and have tests of their own.
    monkeypatch.setattr(task, "documents", lambda report, loss: {})
    (tmp_path / "gate.py").write_text(GATE)
    (tmp_path / "data.py").write_text(DATA)
    return Shell(tmp_path, capsys)


def gradnorm(shell, model, words="", where="pics -o out --overwrite"):
    """The command in a checkout in which `build` is the model."""
    text = Path("gate.py").read_text().partition("\n# commit\n")[0]
    Path("gate.py").write_text(f"{text}\n# commit\nbuild = {model}\n")
    return shell(f"gradnorm gate.py:build {where} {words}")


def complaints(done, kind="error"):
    return [line.removeprefix(f"{kind}: ") for line in done.err.splitlines() if line.startswith(f"{kind}: ")]


def found(directory="out"):
    """(rule, layer) of every finding of a run, but that the mean over the picture makes an outlier of what follows."""
    return {(one["rule"], one["layer"]) for one in manifest(directory)["findings"]} - {("outlier", "fc")}


def junit(directory="out", tag="failure"):
    """The same of the JUnit file's tests that failed."""
    root = ET.parse(Path(directory) / "gradnorm.junit.xml").getroot()
    return {
        (case.get("name"), "" if case.get("classname") == "model" else case.get("classname"))
        for case in root.iter("testcase")
        if case.find(tag) is not None
    }


def sarif(directory="out", level="error"):
    """The same of the SARIF file's results of a level."""
    (run,) = strict_json((Path(directory) / "gradnorm.sarif").read_text())["runs"]
    return {
        tuple(result["partialFingerprints"]["hookscope/v1"].replace("::model", "::").split("::"))
        for result in run["results"]
        if result["level"] == level
    }


def report(directory="out"):
    return strict_json((Path(directory) / "gradnorm.json").read_text())


# --- the gate over commits


_BASELINE: list[bytes] = []


@pytest.fixture
def committed(shell):
    """A repository in which a baseline was made of the good model."""
    if not _BASELINE:
        done = gradnorm(shell, "good", "--baseline base.json --update-baseline", where="pics -o first-run")
        assert (done.code, "baseline base.json updated" in done.out) == (0, True)
        _BASELINE.append(Path("base.json").read_bytes())
    Path("base.json").write_bytes(_BASELINE[0])
    return shell


COMMITS = {
    "infinite": {("nonfinite", ""), ("nonfinite", "second"), ("nonfinite", "first.weight"), ("drift", "fc.bias")},
    "detached": {("none", "first.weight"), ("none", "norm.bias"), ("layers-changed", "first")},
    "scaled": {("drift", "first.weight"), ("drift", "norm.weight"), ("drift", "second.weight")},
    "renamed": {
        (rule, f"{name}{end}") for rule in ["layers-changed"] for name in ["second", "renamed"]
        for end in ["", ".weight", ".bias"]
    },
}  # fmt: skip


def test_a_commit_that_changes_nothing_passes(committed):
    kept = Path("base.json").read_bytes()
    done = gradnorm(committed, "good", "--baseline base.json")
    assert (done.code, found(), junit(), sarif()) == (0, set(), set(), set())
    assert Path("base.json").read_bytes() == kept
    assert {"drift", "layers-changed"} < {case for case, _ in _cases()}
    assert_whole("out")


def _cases():
    root = ET.parse("out/gradnorm.junit.xml").getroot()
    return {(case.get("name"), case.get("classname")) for case in root.iter("testcase")}


@pytest.mark.parametrize(("model", "expected"), COMMITS.items(), ids=COMMITS)
def test_a_bad_commit_fails_and_names_what_it_broke(committed, model, expected):
    kept = Path("base.json").read_bytes()
    done = gradnorm(committed, model, "--baseline base.json")
    assert done.code == 1
    assert expected <= found()
    errors = {
        (one["rule"], one["layer"]) for one in manifest("out")["findings"] if one["severity"] == "error"
    }
    assert junit() == sarif() == errors >= expected
    assert not any("unknown" in one["message"] for one in manifest("out")["findings"])
    if model in ("scaled", "renamed"):
        assert {rule for rule, _ in found()} == {rule for rule, _ in expected}
    if model == "renamed":
        assert found() == expected
    assert Path("base.json").read_bytes() == kept
    assert_whole("out")


def test_an_accepted_change_is_few_lines_and_passes_from_then_on(committed):
    before = Path("base.json").read_text().splitlines()
    assert gradnorm(committed, "renamed", "--baseline base.json --update-baseline").code == 0
    after = Path("base.json").read_text().splitlines()
    changed = {line.strip() for line in set(before) ^ set(after)}
    assert {line for line in changed if "second" not in line and "renamed" not in line} == set()
    assert gradnorm(committed, "renamed", "--baseline base.json").code == 0
    assert gradnorm(committed, "renamed", "--baseline base.json --update-baseline").code == 0
    assert Path("base.json").read_text().splitlines() == after


def test_where_an_infinity_began_is_told_before_what_follows(committed):
    done = gradnorm(committed, "infinite", "--baseline base.json")
    first, second, *others = complaints(done)
    assert first == "the loss is nan, which is not finite; it began at second, going forward"
    assert second.startswith("second: the first layer where something is not finite, going forward: ")
    assert second.endswith("a parameter or buffer of its own is not finite (second.weight)")
    assert others
    assert "first gradients that are not finite" not in done.out


def test_a_sources_line_is_that_of_the_users_class(committed):
    gradnorm(committed, "scaled", "--baseline base.json")
    (run,) = strict_json(Path("out/gradnorm.sarif").read_text())["runs"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    line = GATE.splitlines().index("class Net(nn.Module):") + 1
    assert {(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in places} == {
        ("gate.py", line)
    }


def test_an_earlier_output_directory_is_a_baseline(shell):
    assert gradnorm(shell, "good", where="pics -o earlier").code == 0
    assert gradnorm(shell, "good", "--baseline earlier").code == 0
    assert gradnorm(shell, "scaled", "--baseline earlier/manifest.json").code == 1


REFUSED = {
    "missing": ("--baseline none.json", "the baseline 'none.json' does not exist", "--update-baseline makes one"),
    "in-output": ("--baseline out/base.json", "is where this run writes", "another directory with -o"),
    "is-output": ("--baseline out", "is where this run writes", "another directory with -o"),
    "update-in-output": ("--baseline out/b.json --update-baseline", "is where this run writes", "with -o"),
    "update-nothing": ("--update-baseline", "--update-baseline without --baseline", "--baseline FILE"),
    "no-baseline": ("--baseline gate.py", "is no JSON", "make it again"),
    "not-overwritten": ("--baseline gate.py --update-baseline", "is no JSON", "make it again"),
    "another-loss": ("--baseline base.json --loss score", "loss 'cross_entropy', here 'score'", "measure as it was"),
    "another-norm": ("--baseline base.json --norm 1", "norm 'L2', here 'L1'", "measure as it was"),
    "another-mode": ("--baseline base.json --train-mode", "train mode False, here True", "measure as it was"),
    "other-layers": ("--baseline base.json -x fc", "layers '**', here '** without fc'", "measure as it was"),
    "fail-on": ("--fail-on errors", "--fail-on 'errors' is neither a severity nor a rule", "'error'"),
    "fail-on-rule": ("--fail-on warn,outlir", "--fail-on 'outlir' is neither", "'outlier'"),
    "severity-rule": ("--severity outliers=off", "unknown rule 'outliers'", "'outlier'"),
    "severity": ("--severity outlier=bad", "outlier = 'bad'", "error, warn, off"),
    "limit": ("--limits vanish=1", "unknown limit 'vanish'", "'vanishing'"),
    "limit-value": ("--limits vanishing=small", "vanishing = 'small'", "a number of 0 or more"),
    "limit-glob": ("--limits secnd:vanishing=1", "no layer and no parameter matches 'secnd'", "'second'"),
    "limit-of-model": ("--limits fc:max-norm=1", "cannot be set for some layers", "without a glob"),
    "no-assignment": ("--limits vanishing", "--limits 'vanishing' is no assignment", "NAME=VALUE"),
    "max-norm": ("--max-norm -1", "--max-norm -1 is no limit", "a number of 0 or more"),
    "norm": ("--norm 3", "the norm '3' is unknown", "1, 2, inf"),
    "config-rule": ("--config rule.toml", "unknown rule 'zeros'", "'zero'"),
    "config-glob": ("--config glob.toml", "no layer and no parameter matches 'fcc'", "'fc'"),
    "config-value": ("--config value.toml", "is True", "text or a number"),
    "loss": ("--loss data.py:squares", "'data.py' has no 'squares'", "'square'"),
    "no-loss": ("--loss data.py:LIST", "the loss 'data.py:LIST' is no callable", "the targets"),
}  # fmt: skip


@pytest.mark.parametrize("dry", ["", "--dry-run"], ids=["run", "dry-run"])
@pytest.mark.parametrize(("words", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_run(committed, words, message, hint, dry):
    committed.toml("rule.toml", '[gradnorm.severity]\nzeros = "off"')
    committed.toml("glob.toml", '[gradnorm.limits."fcc"]\nvanishing = 1')
    committed.toml("value.toml", "[gradnorm.limits]\nvanishing = true")
    before = tree(".")
    done = gradnorm(committed, "good", f"{words} {dry}")
    assert (done.code, done.out) == (2, "")
    assert message in complaints(done)[0]
    assert hint in complaints(done, "hint")[0]
    after = tree(".")
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert {name for name in changed if "pycache" not in name} <= {"gate.py"}


def test_other_pictures_than_the_baselines_are_told_with_what_was_measured(committed):
    done = gradnorm(committed, "good", "--baseline base.json --limit 2")
    assert done.code == 2
    assert complaints(done) == ["the baseline 'base.json' was measured otherwise: pictures 3, here 2"]
    assert report()["pictures"] == 2
    assert not Path("out/gradnorm.junit.xml").exists()
    assert_whole("out")


def test_a_baseline_that_cannot_be_written_is_an_output_error(shell):
    Path("file").write_text("in the way")
    done = gradnorm(shell, "good", "--baseline file/base.json --update-baseline")
    assert done.code == 6
    assert "-o" not in complaints(done, "hint")[0]


# --- which findings fail


LEVELS = {
    "passes": ("", 0),
    "set-to-error": ("--severity zero=error", 1),
    "set-by-glob": ("--severity second.weight:zero=error", 1),
    "set-elsewhere": ("--severity fc:zero=error", 0),
    "fail-on-warn": ("--fail-on warn", 1),
    "fail-on-rule": ("--fail-on none,zero", 1),
    "fail-on-another": ("--fail-on none,vanishing", 0),
    "off": ("--fail-on warn --severity zero=off", 0),
    "off-by-glob": ("--fail-on zero --severity second.**:zero=off --severity first.**:zero=off "
                    "--severity norm.**:zero=off --severity drop:zero=off", 0),
    "config": ("--config level.toml", 1),
    "flags-replace-config": ("--config level.toml --severity zero=warn", 0),
}  # fmt: skip


@pytest.mark.parametrize(("words", "code"), LEVELS.values(), ids=LEVELS)
def test_severities_and_fail_on(shell, words, code):
    """Nothing comes through a layer that is frozen at zero: all before it has gradients of zero."""
    with (shell.folder / "gate.py").open("a") as file:
        file.write(
            "\n@torch.no_grad()\ndef dead():\n    net = Net()\n    net.fc.weight.zero_()\n    return net\n"
        )
    shell.toml(
        "level.toml", '[gradnorm.severity]\noutlier = "off"\n[gradnorm.severity."second.**"]\nzero = "error"'
    )
    # A list of flags replaces that of a configuration.
    done = gradnorm(
        shell, "dead", words if words == "--config level.toml" else f"--severity outlier=off {words}"
    )
    assert done.code == code, done.err
    if "off" not in words:
        assert ("zero", "second.weight") in found()
    assert bool(junit()) is (code == 1)


RMS = "the RMS of the gradient"
LIMITS = {
    "none": ("", set()),
    "all": ("--limits exploding=0", {"first.weight", "fc.weight", "fc"}),
    "glob": ("--limits fc.weight:exploding=0", {"fc.weight"}),
    "layer-and-parameters": ("--limits fc:exploding=0", {"fc", "fc.weight", "fc.bias"}),
    "class": ("--limits type:Linear:exploding=0", {"fc", "fc.weight", "fc.bias"}),
    "but-for-a-glob": ("--limits exploding=0 --limits **:exploding=inf", set()),
    "config": ("--config limits.toml", {"fc.bias"}),
    "flag-over-config": ("--config limits.toml --limits fc.bias:exploding=9", set()),
}  # fmt: skip


@pytest.mark.parametrize(("words", "layers"), LIMITS.values(), ids=LIMITS)
def test_limits(shell, words, layers):
    shell.toml("limits.toml", '[gradnorm.limits]\nexploding = 9\n[gradnorm.limits."fc.bias"]\nexploding = 0')
    assert gradnorm(shell, "good", f"--fail-on exploding {words}").code == (1 if layers else 0)
    exploded = {layer for rule, layer in found() if rule == "exploding"}
    assert layers <= exploded if words == "--limits exploding=0" else exploded == layers


def test_the_total_has_an_upper_and_a_lower_limit(shell):
    gradnorm(shell, "good")
    total = report()["total_norm"]
    for flag, passing, failing in (("max", 1.01, 0.99), ("min", 0.99, 1.01)):
        assert gradnorm(shell, "good", f"--{flag}-norm {passing * total}").code == 0
        done = gradnorm(shell, "good", f"--{flag}-norm {failing * total}")
        assert (done.code, found() - {("outlier", "fc")}) == (1, {(f"{flag}-norm", "")})
        assert complaints(done)[0].startswith(f"total gradient norm {total:.6g} is ")
    shell.toml("c.toml", f"[gradnorm.limits]\nmax-norm = {total / 2}")
    assert gradnorm(shell, "good", "--config c.toml").code == 1


def test_the_example_for_ci(shell):
    done = shell(f"gradnorm demo --config {ROOT}/configs/gradnorm-ci.toml --limit 1 -o out")
    assert (done.code, found()) == (0, set()), done.err
    done = shell(
        f"gradnorm demo --config {ROOT}/configs/gradnorm-ci.toml --limit 1 -o out --overwrite --max-norm 1"
    )
    assert (done.code, found()) == (1, {("max-norm", "")})


# --- what is said


def test_few_findings_are_told_and_the_advice_once(committed):
    done = gradnorm(committed, "infinite", "--baseline base.json")
    *told, rest = complaints(done)
    assert len(told) == 10
    count = len(manifest("out")["findings"]) - 10
    assert rest.startswith(f"and {count} more findings: ")
    hints = complaints(done, "hint")
    assert len(hints) == len(set(hints))
    assert hints[-1] == "all are in out/manifest.json"
    assert "for instance out/gradnorm.md\n" in done.out


def test_the_page_for_people_has_the_findings(committed):
    gradnorm(committed, "detached", "--baseline base.json")
    page = Path("out/gradnorm.md").read_text()
    assert page.startswith("## Findings\n")
    assert page.count("\n- none: It takes part in the answer and will never be trained.") == 1
    for one in manifest("out")["findings"]:
        assert one["message"].split(":")[0].replace("_", "\\_") in page
    gradnorm(committed, "good", "--severity outlier=off")
    assert Path("out/gradnorm.md").read_text().startswith("## Gradient norms\n")


@pytest.mark.parametrize(("words", "kind"), [("", "warning"), ("--fail-on exploding", "error")])
def test_what_fails_the_run_is_an_error_and_is_told_when_quiet(shell, words, kind):
    words += " --severity outlier=off --limits fc.weight:exploding=0"
    done = gradnorm(shell, "good", words)
    told = [line for line in complaints(done, kind) if "fc.weight: the RMS" in line]
    assert len(told) == 1
    done = gradnorm(shell, "good", f"{words} -q")
    assert (done.out, complaints(done)) == ("", told if kind == "error" else [])


def test_json_has_stdout_for_itself(committed):
    done = gradnorm(committed, "scaled", "--baseline base.json --json")
    assert strict_json(done.out) == manifest("out")
    assert done.code == 1
    assert complaints(done)[0].startswith("first.weight: the norm of the gradient is ")


# --- nothing to measure


@pytest.mark.parametrize(
    ("model", "where"),
    [("Silent", "pics"), ("hushed", "pics"), ("hushed", "--data data.py:batches")],
    ids=["detached", "frozen-too", "data"],
)
def test_where_nothing_has_a_gradient_nothing_passes(shell, model, where):
    with (shell.folder / "gate.py").open("a") as file:
        file.write("\ndef hushed(): return Silent().requires_grad_(False)\n")
    done = gradnorm(shell, model, where=f"{where} -o out")
    assert done.code == 5
    assert complaints(done) == ["the loss has no gradient at any parameter or layer"]


def test_a_total_limit_without_a_total_is_nothing_measured(shell):
    assert gradnorm(shell, "frozen").code == 0  # its layers have gradients
    assert report()["total"] is None
    done = gradnorm(shell, "frozen", "--max-norm 1")
    assert done.code == 5
    assert complaints(done) == ["no parameter has a gradient, so there is no total norm for max-norm"]


# --- the user's own data and loss

SERVES = {
    "function": ("batches", 3), "loader": ("LOADER", 2), "list": ("LIST", 2), "cut": ("endless --batches 2", 2),
}  # fmt: skip


@pytest.mark.parametrize(("words", "count"), SERVES.values(), ids=SERVES)
def test_batches_of_the_users_own(shell, words, count):
    done = shell(f"gradnorm gate.py:good --data data.py:{words} -o out")
    assert (done.code, complaints(done), complaints(done, "warning")) == (0, [], [])
    assert (report()["batches"], report()["loss"]["labels"]) == (count, "the data's own")
    assert report()["total_by_batch"]["batches"] == count
    assert_whole("out")


def test_the_figures_of_data_are_autograds(shell):
    namespace: dict[str, object] = {}
    exec(GATE + DATA, namespace)
    net, loss = namespace["good"]().eval(), 0
    for x, y in namespace["batches"]():
        loss = loss + F.cross_entropy(net(x), y) / 3
    wanted = dict(
        zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True)
    )
    shell("gradnorm gate.py:good --data data.py:batches -o out --norm 1")
    rows = {row["name"]: row["grad_norm"] for row in report()["parameters"]}
    assert rows == pytest.approx({name: float(grad.abs().sum()) for name, grad in wanted.items()}, rel=1e-4)
    assert report()["total_norm"] == pytest.approx(
        sum(float(grad.abs().sum()) for grad in wanted.values()), rel=1e-4
    )


@pytest.mark.parametrize("kind", ["tuples", "dicts"])
def test_inputs_may_be_several(shell, kind):
    assert shell(f"gradnorm gate.py:Keyed --data data.py:{kind} -o out").code == 0
    assert report()["pictures"] == 4


def test_data_without_targets_uses_predictions_and_says_so(shell):
    shell("gradnorm gate.py:good --data data.py:unlabelled -o out")
    assert report()["loss"]["labels"] == "the model's own predictions"
    shell("gradnorm gate.py:good --data data.py:mixed -o out --overwrite")
    assert report()["loss"]["labels"] == "the data's own and the model's own predictions"


WRONG = {
    "nothing": ("nothing", 5, "the data 'data.py:nothing' gave no batch"),
    "number": ("number", 2, "which gives no batches"),
    "triples": ("triples", 2, "batch 0 of the data 'data.py:triples' is a tuple of 3, no pair"),
    "dataset": ("dataset", 2, "single samples and no batches"),
    "wants": ("wants", 2, "cannot be called without arguments"),
    "raises": ("raises", 2, "the data 'data.py:raises' raised OSError: disk gone, at batch 2"),
    "beyond": ("beyond", 2, "class 7 is out of range: the model has 3 classes"),
    "unknown": ("batchs", 2, "'data.py' has no 'batchs'"),
    "and-pictures": ("batches pics", 2, "both pictures and --data are given"),
    "and-maps": ("batches --maps", 2, "--maps draws on pictures"),
    "and-target": ("batches -t 1", 2, "--target is a class for every picture"),
    "loss-no-number": ("batches --loss data.py:vector", 2, "the loss gave a tensor of shape (4,), not one number"),
    "loss-raises": ("batches --loss data.py:angry", 2, "the loss raised ValueError: no such loss"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "code", "message"), WRONG.values(), ids=WRONG)
def test_data_that_cannot_serve(shell, words, code, message):
    done = shell(f"gradnorm gate.py:good --data data.py:{words} -o out")
    assert (done.code, done.out) == (code, "")
    assert message in complaints(done)[0]
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("data", "code"),
    [("data.py:batches", 0), ("data.py:LIST", 0), ("data.py:batchs", 2), ("data.py:wants", 2), ("data.py", 2),
     ("data.py:raises", 0)],
)  # fmt: skip
def test_a_dry_run_looks_whether_the_data_is_there_and_does_not_call_it(shell, data, code):
    done = shell(f"gradnorm gate.py:good --data {data} -o out --dry-run")
    assert done.code == code
    assert ("nothing was run" in done.out) is (code == 0)
    assert not Path("out").exists()


def test_a_loss_of_the_users_own(shell):
    shell("gradnorm gate.py:good --data data.py:LIST --loss data.py:square -o out")
    namespace: dict[str, object] = {}
    exec(GATE + DATA, namespace)
    net = namespace["good"]().eval()
    losses = [namespace["square"](net(x), y) for x, y in namespace["LIST"]]
    assert report()["loss"]["value"] == pytest.approx(sum(loss.item() for loss in losses) / 2, rel=1e-5)
    assert report()["loss"]["name"] == "data.py:square"


def test_the_folders_of_a_data_set_are_labels(shell):
    for label in range(3):
        picture(shell.folder / f"set/{label}/a.png", label)
    assert gradnorm(shell, "good", where="--dataset set -o out").code == 0
    assert (report()["loss"]["labels"], report()["pictures"]) == ("the folders of the data set", 3)


def test_no_more_batches_of_pictures_than_asked_for(shell):
    assert gradnorm(shell, "good", "--batch-size 2 --batches 1").code == 0
    assert (report()["pictures"], report()["batches"], len(manifest("out")["images"])) == (2, 1, 2)


# --- modes and norms


def test_train_mode_repeats_and_leaves_the_model_as_it_was(shell):
    def state():
        import sys

        net = sys.modules.pop("noted")
        return {name: value.clone() for name, value in net.state_dict().items()}, [
            module.training for module in net.modules()
        ]

    assert gradnorm(shell, "Noted").code == 0
    plain, modes = state()
    texts = []
    for seed in (3, 3, 4):
        assert gradnorm(shell, "Noted", f"--train-mode --seed {seed} --batch-size 2").code == 0
        after, after_modes = state()
        assert after_modes == modes
        assert all(torch.equal(value, plain[name]) for name, value in after.items())
        assert report()["mode"] == "train"
        texts.append(Path("out/gradnorm.json").read_bytes())
    assert texts[0] == texts[1] != texts[2]
    gradnorm(shell, "Noted")
    assert report()["mode"] == "eval"


@pytest.mark.parametrize(("norm", "words"), [("1", "L1"), ("2", "L2"), ("inf", "L-infinity")])
def test_the_norm_is_named_in_every_output(shell, norm, words):
    done = gradnorm(shell, "good", f"--norm {norm}")
    assert f"({words} norm)" in done.out
    assert report()["norm"] == words
    assert f"| total {words} norm |" in Path("out/gradnorm.md").read_text()
    with Path("out/gradnorm.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["norm"] for row in rows} == {words}
    column = {"1": "grad_l1", "2": "grad_l2", "inf": "grad_largest"}[norm]
    assert float(rows[0]["grad_norm"]) == float(rows[0][column]) == report()["total_norm"]
    assert json.loads(Path("out/gradnorm-baseline.json").read_text())["measured"]["norm"] == words
    assert manifest("out")["options"]["norm"] == norm


# --- what CI is told


@pytest.fixture
def ci(committed, monkeypatch):
    page = committed.folder / "summary.md"
    page.write_text("# of an earlier step\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(committed.folder))
    return committed, page


def commands(text):
    return [line for line in text.splitlines() if line.startswith("::")]


def test_annotations_and_a_summary(ci):
    shell, page = ci
    done = gradnorm(shell, "detached", "--baseline base.json")
    assert done.code == 1
    line = GATE.splitlines().index("class Net(nn.Module):") + 1
    first = commands(done.out)[0]
    assert first.startswith(
        f"::error file=gate.py,line={line},title=none%3A first.weight::first.weight: no gradient"
    )
    assert sum(command.startswith("::error") for command in commands(done.out)) == 10
    assert commands(done.err) == []
    text = page.read_text()
    assert text.startswith("# of an earlier step\n## Gradient norms\n\n**Failed**: ")
    gradnorm(shell, "good", "--baseline base.json")
    assert page.read_text().startswith(text)
    assert "**Passed**: " in page.read_text().removeprefix(text)


def test_annotations_leave_stdout_to_json(ci):
    shell, _ = ci
    done = gradnorm(shell, "detached", "--baseline base.json --json")
    assert strict_json(done.out)["findings"]
    assert len(commands(done.err)) > 5


def test_no_annotations_elsewhere(committed):
    done = gradnorm(committed, "detached", "--baseline base.json")
    assert commands(done.out + done.err) == []


@pytest.mark.parametrize("words", ["", "--json"])
def test_a_summary_that_cannot_be_written_takes_nothing_away(ci, monkeypatch, words):
    shell, page = ci
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page.parent))
    done = gradnorm(shell, "scaled", f"--baseline base.json {words}")
    assert done.code == 6
    assert strict_json(done.out)["findings"] if words else "for instance out/gradnorm.md" in done.out
    assert found()
    assert_whole("out")


def test_foreign_names_neither_run_nor_break_anything(ci):
    shell, page = ci
    picture(shell.folder / "odd/=1+1 <i>|.png", 1)
    done = gradnorm(shell, "Strange", "--limits exploding=0 --maps -l '*'", where="odd -o out")
    assert done.code == 0, done.err
    with Path("out/gradnorm.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {row["name"] for row in rows if row["kind"] == "layer"}
    assert {"'=cmd|' /C calc'!A0", "'@octocat <b>|`", "'+new\nline", "a,b%"} <= names
    assert not any(cell and cell[0] in "=+@" for row in rows for cell in row.values())
    for text in (Path("out/gradnorm.md").read_text(), page.read_text()):
        lines = [line for line in text.splitlines() if "octocat" in line]
        assert lines
        assert not any("<b>" in line for line in lines)
        assert all(line.startswith(("|", "- ")) for line in lines)
    assert "@octocat" not in page.read_text()
    assert all("\n" not in command and "%0A" in command for command in commands(done.out)[:10])
    exploded = {layer for rule, layer in junit(tag="system-out") if rule == "exploding"}
    assert {"=cmd|' /C calc'!A0.weight", "@octocat <b>|`", "+new\nline.bias", "a,b%"} <= exploded
    assert_whole("out")


# --- maps


def test_maps_are_drawn_where_each_resolution_begins(shell):
    assert gradnorm(shell, "good", "--maps --limit 1").code == 0
    assert sorted(path.name for path in Path("out/0").iterdir()) == [
        f"{layer}.mean-abs-gradient{end}" for layer in ("first", "second")
        for end in (".heat.png", ".npy", ".overlay.jpg")
    ]  # fmt: skip
    assert np.load("out/0/first.mean-abs-gradient.npy").min() >= 0


def test_a_map_that_is_the_same_everywhere_is_said_to_be(shell):
    """Of a layer that is averaged over the picture every position counts alike."""
    with (shell.folder / "gate.py").open("a") as file:
        file.write(
            "\nclass Linear(Net):\n"
            "    def forward(self, x): return self.fc(self.second(self.first(x)).mean((2, 3)))\n"
        )
    done = gradnorm(shell, "Linear", "--maps -l first -l second")
    flat = [line for line in complaints(done, "warning") if "the same everywhere" in line]
    assert [line.partition(":")[0] for line in flat] == ["second"]
    assert math.isclose(np.ptp(np.load("out/0/second.mean-abs-gradient.npy")), 0)


# --- together with others

TOGETHER = """
model = "gate.py:detached"
images = "pics"
[gradcam]
layer = "second"
[gradnorm]
fail-on = "none"
[gradnorm.severity]
outlier = "off"
[gradnorm.severity."first.bias"]
none = "off"
[gradnorm.limits]
max-norm = 1e6
[gradnorm.limits."fc.*"]
exploding = 0
"""


def test_a_gate_in_a_run_with_others(shell):
    shell.toml("r.toml", TOGETHER)
    done = shell("run r.toml -o out")
    assert done.code == 1, done.err
    assert found() == {("none", f"{name}") for name in ("first.weight", "norm.weight", "norm.bias")} | {
        ("exploding", "fc.weight"), ("exploding", "fc.bias"),
    }  # fmt: skip
    assert junit("out/gradnorm") == {one for one in found() if one[0] == "none"}
    assert len(list(Path("out/gradcam").rglob("*.overlay.jpg"))) == 3
    assert_whole("out")


def test_a_run_with_others_is_a_baseline_and_has_one(shell):
    shell.toml("r.toml", TOGETHER.replace("detached", "good"))
    assert shell("run r.toml -o earlier").code == 0
    compared = TOGETHER.replace('fail-on = "none"', 'fail-on = "layers-changed"\nbaseline = "earlier"')
    shell.toml("r.toml", compared.replace("detached", "good"))
    assert shell("run r.toml -o same").code == 0
    shell.toml("r.toml", compared)
    assert shell("run r.toml -o other").code == 1
    assert ("layers-changed", "first") in junit("other/gradnorm")
    assert shell("run r.toml -o earlier --overwrite").code == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [("severity]\nnoe = 'off'", "unknown rule 'noe'"), ("limits.'fcc']\nexploding = 1", "matches 'fcc'")],
    ids=["rule", "glob"],
)
def test_a_recipes_tables_are_checked(shell, table, message):
    shell.toml("r.toml", f"model = 'gate.py:good'\nimages = 'pics'\n[gradnorm.{table}\n")
    done = shell("run r.toml -o out")
    assert done.code == 2
    assert message in complaints(done)[0]
    assert not Path("out").exists()
