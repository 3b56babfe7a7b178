"""`hookscope gradcam` as its user meets it: what is refused, said, written, measured and compared."""

from __future__ import annotations

import csv
import gc
import math
import os
import subprocess
import sys
import weakref
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Shell, assert_journal, assert_whole, manifest, picture, strict_json, tree
from PIL import Image

from hookscope.artifacts import Heat
from hookscope.cam.methods import METHODS
from hookscope.cli import session
from hookscope.layers import Site
from hookscope.output.directory import OutputDir
from hookscope.output.ranged import Ranged
from hookscope.output.writers import PictureOptions, Place
from hookscope.render.colour import table

ROOT = Path(__file__).parent.parent

MODELS = '''
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    """Notes how many pictures each pass has, and stops at the pass that `stop` names."""
    def __init__(self, seed=1, favourite=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.relu = nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()
        self.deep, self.fc = nn.Conv2d(4, 4, 3), nn.Linear(4, 3)
        with torch.no_grad(): self.fc.bias.copy_(torch.eye(3)[favourite] * 3)

    def forward(self, x):
        with open("passes", "a") as log: log.write(f"{len(x)}\\n")
        stop = Path("stop")
        if stop.exists() and len(Path("passes").read_text().split()) == int(stop.read_text()): raise KeyboardInterrupt
        return self.fc(self.deep(self.relu(self.conv(x))).tanh().mean((2, 3)))

class Mean(nn.Module):
    """The probability of class 0 is the sigmoid of eight times the picture's mean."""
    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x):
        score = 8 * self.same(x).mean((1, 2, 3))
        return torch.stack([score, 0 * score], 1)

class Itself(Net):
    """A layer that returns the picture: what is seen there is none of the weights' doing."""
    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x): return super().forward(self.same(x))

class Silent(Net):
    """Its scores do not depend on the picture."""
    def forward(self, x): return super().forward(x) * 0

class HalfSilent(nn.Module):
    """Its scores depend on the picture by `deep` alone."""
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.relu, self.deep = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.deep(x).mean((2, 3)) + 0 * self.relu(self.conv(x)).mean((2, 3))

class Alternating(nn.Module):
    """Which of two layers is called first depends on the picture."""
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.c, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        for layer in (self.a, self.b) if x[0].mean() < 0.5 else (self.b, self.a): x = layer(x)
        return self.fc(self.c(x).tanh().mean((2, 3)))
'''


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MODELS)
    return Shell(tmp_path, capsys)


@pytest.fixture
def loaded(monkeypatch):
    """The models that commands have loaded, each with its state as it was then."""
    found, load = [], session.load

    def noting(*given):
        model = load(*given)
        found.append(
            (model.module, {name: value.clone() for name, value in model.module.state_dict().items()})
        )
        return model

    monkeypatch.setattr(session, "load", noting)
    return found


def ran(shell, words, code=0):
    done = shell(f"gradcam {words}")
    assert done.code == code, done.err
    return done


def maps(directory):
    """Raw values by file name."""
    return {name: np.load(Path(directory, name)) for name in tree(directory) if name.endswith(".npy")}


def raw_records(directory):
    return [record for record in manifest(directory)["artifacts"] if record["part"] == "raw"]


def csv_rows(name):
    with open(name, newline="") as file:
        return list(csv.DictReader(file))


def pictures_passed():
    """How many pictures have gone through the model since this was asked last."""
    log = Path("passes")
    total = sum(map(int, log.read_text().split()))
    log.unlink()
    return total


# What is refused.


def test_the_methods_are_listed_a_line_each_without_loading_torch():
    program = (
        "import sys; from hookscope.cli.app import main; code = main(['gradcam', '--list-methods']); "
        "print(sorted({'torch', 'numpy', 'PIL'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], **piped())
    assert (done.returncode, done.stderr) == (0, "[]\n")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    for line, method in zip(lines, METHODS.values(), strict=True):
        assert all(words in line for words in (method.summary, method.needs, method.cost, method.when))


def test_a_reader_that_wants_one_line_of_the_help_gets_no_error():
    done = subprocess.run(
        f"{sys.executable} -m hookscope gradcam demo --help | head -1", shell=True, **piped()
    )
    assert (done.returncode, done.stderr) == (0, "")


def piped():
    return {
        "capture_output": True,
        "text": True,
        "check": False,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
    }


REFUSED = {
    "method": ("-m gradkam", "unknown method 'gradkam'", "gradcam"),
    "fuse": ("--fuse men", "--fuse 'men' is unknown", "mean"),
    "fuse-signed": ("--fuse mean --no-relu", "--no-relu keeps the rest", "give one of them"),
    "smooth": ("--smooth blur", "--smooth 'blur' is not understood", "noise:8,0.1"),
    "smooth-none": ("--smooth noise:0,1", "--smooth 'noise:0,1' is not understood", "flip"),
    "smooth-nan": ("--smooth noise:4,nan", "--smooth 'noise:4,nan' is not understood", "flip"),
    "noise": ("--noise -1", "--noise -1.0 is no deviation", "a share above 0"),
    "vmax": ("--vmax imag", "--vmax 'imag' is unknown", "image"),
    "pixels": ("--pixels some", "--pixels 'some' is unknown", "mask"),
    "point": ("--point 3", "--point '3' is no pixel", "X,Y"),
    "grid": ("--grid 7", "--grid '7' is not a size", "14x14"),
    "sanity-max-alone": ("--sanity-max 0.5", "--sanity-max is a limit of --sanity", "give both"),
    "sanity-max": ("--sanity --sanity-max 2", "--sanity-max 2.0 is out of range", "-1 to 1"),
    "min-iou-alone": ("--min-iou 0.5", "compare with a baseline", "--baseline DIR"),
    "min-corr-alone": ("--min-corr 0.5", "compare with a baseline", "--baseline DIR"),
    "no-baseline": ("--baseline nowhere", "the baseline 'nowhere' does not exist", "output directory"),
    "top-channels": ("-m scorecam --top-channels 0", "'--top-channels'", "gradcam --help"),
    "score-steps": ("--score --score-steps 0", "'--score-steps'", "gradcam --help"),
    "contrast": ("--contrast 1 -t norm", "--contrast needs a class", "--target CLASS"),
}


@pytest.mark.parametrize(("words", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(shell, words, message, hint):
    before = tree(".")
    done = ran(shell, f"own.py:Net pics {words}", code=2)
    error, advice = done.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert message in error
    assert advice.startswith("hint: ")
    assert hint in advice
    assert done.out == ""
    assert set(tree(".")) - {"passes"} == set(before)


# Passes.

PASSES = {
    "scorecam": ("-m scorecam -l relu", "scorecam: 4 forward passes a picture, 12 in all", 12),
    "top-channels": (
        "-m scorecam -l relu --top-channels 3",
        "scorecam: 3 forward passes a picture, 9 in all",
        9,
    ),
    "two-layers": ("-m scorecam -l relu -l conv", "scorecam: 8 forward passes a picture, 24 in all", 24),
    "smoothgradcam++": (
        "-m smoothgradcam++ --samples 5",
        "smoothgradcam++: 5 forward passes a picture, 15 in all",
        15,
    ),
    "saliency": ("-m saliency", "saliency: 1 forward pass a picture, 3 in all", 3),
    "noise": ("--smooth noise:4,0.1", "smooth: 4 forward passes a picture, 12 in all", 12),
    "flip": ("--smooth flip", "smooth: 1 forward pass a picture, 3 in all", 3),
    "score": ("--score --score-steps 4", "score: 10 forward passes a map", 30),
}


@pytest.mark.parametrize(("words", "said", "more"), PASSES.values(), ids=PASSES)
def test_the_number_of_passes_is_said_and_is_what_is_made(shell, words, said, more):
    # One class for all pictures: a map is never negative only, of which no score is asked.
    ran(shell, "own.py:Net pics -l relu -m eigencam -t 0 -q -o plain")
    plain = pictures_passed()
    both = words if "-m" in words else f"{words} -m eigencam"
    layers = "" if "-l" in words else " -l relu"
    done = ran(shell, f"own.py:Net pics {both}{layers} -t 0 --json -o out")
    assert f"note: {said}\n" in done.err
    assert pictures_passed() - plain == more
    assert strict_json(done.out) == manifest("out")


def test_quiet_says_no_number_of_passes(shell):
    assert ran(shell, "own.py:Net pics -m scorecam -m ablationcam --score --sanity -q").err == ""


def test_progress_counts_the_passes_up_to_what_was_said(shell, monkeypatch):
    seen = []
    monkeypatch.setattr("hookscope.cli.talk.ProgressBar.update", lambda bar, *state: seen.append(state))
    ran(shell, "own.py:Net pics -l relu -m scorecam -m ablationcam --batch-size 2")
    for name in ("scorecam", "ablationcam"):
        assert [state for state in seen if state[0] == name] == [(name, done, 12) for done in (4, 8, 12)]


@pytest.mark.parametrize(
    "words", ["-m scorecam", "-m ablationcam", "--sanity", "--score", "-m smoothgradcam++"]
)
def test_ctrl_c_between_passes_keeps_what_is_whole_and_the_model(shell, loaded, words):
    line = f"own.py:Net pics -l relu {words} --batch-size 1"
    ran(shell, f"{line} -o whole")
    # In the middle of what is done for the last picture.
    Path("stop").write_text(str(len(Path("passes").read_text().split())))
    Path("passes").unlink()
    done = ran(shell, f"{line} -o out", code=130)
    assert done.err.splitlines()[-2] == "error: interrupted"
    assert "what was finished is kept in out" in done.err
    kept = assert_journal("out")
    assert {name for name in kept if name.startswith("0/")} == {
        n for n in tree("whole") if n.startswith("0/")
    }
    assert not any(name.startswith("2/") for name in kept)
    module, state = loaded[-1]
    assert_as_it_was(module, state)


def assert_as_it_was(module, state):
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(each, name) for each in module.modules() for name in hooks)


def test_where_control_flow_forbids_a_replay_the_passes_are_whole_and_this_is_said(shell):
    picture(Path("pics/9.png"), 9, low=200, high=255)
    done = ran(shell, "own.py:Alternating pics -l c -t 1 -m ablationcam -o out --batch-size 1")
    (said,) = [line for line in manifest("out")["warnings"] if line.startswith("ablationcam")]
    assert said.startswith("ablationcam: whole passes are made for c: ")
    assert "the order in which it calls its layers" in said
    assert f"warning: {said}" in done.err
    space: dict = {}
    exec(MODELS, space)
    model = space["Alternating"]().eval()
    for name, found in maps("out").items():
        pixels = np.asarray(Image.open(f"pics/{name.partition('/')[0]}.png"))
        with torch.no_grad():
            x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
            for layer in (model.a, model.b) if x.mean() < 0.5 else (model.b, model.a):
                x = layer(x)
            activation = model.c(x)
            score = model.fc(activation.tanh().mean((2, 3)))[0, 1]
            wanted = torch.zeros(activation.shape[2:])
            for channel in range(4):
                without = activation.clone()
                without[:, channel] = 0
                dropped = score - model.fc(without.tanh().mean((2, 3)))[0, 1]
                wanted += dropped / score.abs() * activation[0, channel]
        np.testing.assert_allclose(found, wanted.clamp(min=0), rtol=1e-4, atol=1e-6)


# Faithfulness.


def sigmoid(score):
    return 1 / (1 + math.exp(-score))


def columns(path, values, size=(24, 20)):
    """A grey picture with a column, an equal share of the width, of each value."""
    pixels = np.repeat(np.array(values, np.uint8), size[0] // len(values))
    Image.fromarray(np.broadcast_to(pixels[None, :, None], (size[1], size[0], 3)).copy()).save(path)


def test_scores_are_those_of_a_closed_form(shell):
    columns("steps.png", [200, 100, 0])
    columns("even.png", [120])
    words = "own.py:Mean steps.png even.png -l same -m hirescam -t 0 -t 1 --score --score-steps 3"
    ran(shell, f"{words} -o out")
    found = {(row["image"], row["target"]): row for row in csv_rows("out/scores.csv")}
    scores = {key: {name: float(row[name]) for name in SCORES} for key, row in found.items()}
    # What goes first is the brightest third: of a mean of 100 a third is left, then nothing.
    left = [sigmoid(8 * mean / 255) for mean in (100, 100 / 3, 0, 0)]
    assert scores["steps.png", "0"]["deletion_auc"] == pytest.approx(trapezoid(left), abs=1e-5)
    # The map is 1, 1/2 and 0, so that what it shows is 200, 50 and 0.
    seen = sigmoid(8 * 250 / 3 / 255)
    assert scores["steps.png", "0"]["average_drop"] == pytest.approx((left[0] - seen) / left[0], abs=1e-5)
    assert scores["steps.png", "0"]["increase_in_confidence"] == 0
    # An even picture is its own blurred one; all of it is shown.
    shares = [sigmoid(8 * 120 / 255 * (1 - step / 3)) for step in range(4)]
    assert scores["even.png", "0"] == pytest.approx(
        {
            "deletion_auc": trapezoid(shares),
            "insertion_auc": shares[0],
            "average_drop": 0,
            "increase_in_confidence": 0,
        },
        abs=1e-5,
    )
    # Nothing speaks for class 1: its map has nothing above zero.
    assert [found[image, "1"][name] for image in ("steps.png", "even.png") for name in SCORES] == ["nan"] * 8
    records = {(record["image"], str(record["target"])): record["scores"] for record in raw_records("out")}
    assert records["steps.png", "0"] == scores["steps.png", "0"]
    assert set(records["even.png", "1"].values()) == {"nan"}
    rows = strict_json(Path("out/scores.json").read_text())["rows"]
    assert [row["deletion_auc"] for row in rows if row["target"] == 1] == ["nan", "nan"]


SCORES = ("deletion_auc", "insertion_auc", "average_drop", "increase_in_confidence")


def trapezoid(values):
    return sum((a + b) / 2 for a, b in pairwise(values)) / (len(values) - 1)


def test_scores_follow_the_seed_and_not_the_batch_size(shell):
    line = "own.py:Net pics -m gradcam -m eigencam -l conv -t top:2 --score --score-steps 5"
    for name, words in {"one": "", "again": "", "single": "--batch-size 1", "other": "--seed 5"}.items():
        ran(shell, f"{line} {words} -o {name}")
    assert tree("one") == tree("again")

    def scores(name):
        return [[float(row[column]) for column in SCORES] for row in csv_rows(f"{name}/scores.csv")]

    np.testing.assert_allclose(scores("one"), scores("single"), atol=1e-5)
    assert [list(record["scores"]) for record in raw_records("one")] == [sorted(SCORES)] * 9
    assert {record["part"] for record in manifest("one")["artifacts"] if record["kind"] == "scores"} == {
        "table"
    }


def test_a_map_of_no_class_is_scored_by_the_first_target(shell):
    ran(shell, "own.py:Net pics -m eigencam -l conv --score -t 2 -o alone")
    ran(shell, "own.py:Net pics -m eigencam -m gradcam -l conv --score -t 2 -o both")
    both = [row for row in csv_rows("both/scores.csv") if row["method"] == "eigencam"]
    assert csv_rows("alone/scores.csv") == both
    assert all(math.isfinite(float(row[name])) for row in both for name in SCORES)


# Random weights.


def test_sanity_compares_with_random_weights_and_puts_them_back(shell, loaded):
    line = "own.py:Net pics -l conv -l relu -t 0"
    ran(shell, f"{line} -o plain")
    done = ran(shell, f"{line} --sanity --sanity-max 1 -o out")
    module, state = loaded[-1]
    assert_as_it_was(module, state)
    rows = csv_rows("out/sanity.csv")
    # Three layers have weights: the top one, the two above, all.
    assert [(row["layers"], row["of"]) for row in rows] == [
        (str(n), "3") for n in (1, 2, 3) for _ in range(6)
    ]
    figures = [float(row["spearman"]) for row in rows]
    assert all(-1 <= figure <= 1 for figure in figures)
    greatest = max(figures[-6:])
    assert f"with random weights, rank correlation at most {greatest:.2f}" in done.out
    assert (manifest("out")["findings"], tree("out").keys() - tree("plain").keys()) == (
        [],
        {"sanity.csv", "sanity.json"},
    )
    assert all(np.array_equal(found, maps("plain")[name]) for name, found in maps("out").items())
    failed = ran(shell, f"{line} --sanity --sanity-max {greatest - 0.01} -o failed", code=1)
    findings = manifest("failed")["findings"]
    assert findings
    assert {(finding["rule"], finding["severity"]) for finding in findings} == {("sanity-max", "error")}
    assert [line for line in failed.err.splitlines() if line.startswith("error: ")] == [
        f"error: {finding['message']}" for finding in findings
    ]
    assert max(finding["value"] for finding in findings) == pytest.approx(greatest)


def test_a_map_that_is_none_of_the_weights_doing_is_found(shell):
    ran(shell, "own.py:Itself pics -l same -m eigencam --sanity --sanity-max 0.99 -o out", code=1)
    assert [finding["value"] for finding in manifest("out")["findings"]] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("model", "why"),
    [("own.py:Silent", "uniform or undefined"), ("own.py:Mean", "the model has no weights")],
    ids=["uniform", "no-weights"],
)
def test_where_nothing_can_be_compared_with_random_weights_the_gate_does_not_pass(shell, model, why):
    words = f"{model} pics -m gradcam -l {'relu' if 'Silent' in model else 'same'} -t 0 --sanity"
    said = "no map could be compared with that of random weights"
    done = ran(shell, f"{words} --sanity-max 0.5 -o gate", code=5)
    assert said in done.err
    assert why in done.err
    assert f"warning: {said}: " in ran(shell, f"{words} -o plain").err


# Baselines.


def test_the_same_run_again_equals_its_baseline(shell):
    line = "own.py:Net pics -l conv -l relu -m gradcam -m layercam -t top:2"
    ran(shell, f"{line} -o old")
    done = ran(shell, f"{line} --baseline old --min-iou 1 --min-corr 1 -o new")
    assert "24 maps compared with old, 24 of them the same" in done.out
    rows = csv_rows("new/compare.csv")
    assert {(row["spearman"], row["iou"], row["shift"]) for row in rows if row["status"] == "ok"} == {
        ("1.0", "1.0", "0.0")
    }
    assert manifest("new")["findings"] == []
    assert not [name for name in tree("new") if "compare." in name and name.endswith(".png")]


def test_other_weights_fail_the_gate_with_a_finding_for_each_map(shell):
    ran(shell, "own.py:Net pics -l conv -m eigencam -o old")
    line = "own.py:Net --model-arg seed=7 pics -l conv -m eigencam --baseline"
    passed = ran(shell, f"{line} old/manifest.json -o seen")
    assert "0 of them the same" in passed.out
    assert manifest("seen")["findings"] == []
    failed = ran(shell, f"{line} old --min-iou 0.99 --min-corr 0.999 -o out", code=1)
    findings = manifest("out")["findings"]
    assert {finding["rule"] for finding in findings} == {"min-iou", "min-corr"}
    assert len(findings) == 6
    assert [line for line in failed.err.splitlines() if line.startswith("error: ")] == [
        f"error: {finding['message']}" for finding in findings
    ]
    pairs = [record for record in manifest("out")["artifacts"] if record["part"] == "pair"]
    assert {record["image"] for record in pairs} == {f"pics/{number}.png" for number in range(3)}
    rows = {row["image"]: row for row in csv_rows("out/compare.csv")}
    for record in pairs:
        assert record["scores"]["iou"] == pytest.approx(float(rows[record["image"]]["iou"]))
        assert np.asarray(Image.open(Path("out", record["path"]))).shape[1] > 500
    assert_whole("out")


def test_another_prediction_is_a_finding_that_names_both_classes(shell):
    ran(shell, "own.py:Net pics/0.png -l relu -o old")
    line = "own.py:Net --model-arg favourite=2 pics/0.png -l relu -t top1 -t 0 --baseline old"
    ran(shell, f"{line} --min-iou 0.1 -o out", code=1)
    (finding,) = manifest("out")["findings"]
    assert finding["rule"] == "not-in-baseline"
    assert "class 2" in finding["message"]
    assert "the baseline explains class 0 there" in finding["message"]


def test_a_baseline_is_not_written_over(shell):
    ran(shell, "own.py:Net pics -l relu -o old")
    before = tree("old")
    done = ran(shell, "own.py:Net pics -l relu --baseline old/manifest.json -o old/ --overwrite", code=2)
    assert "is where this run writes" in done.err
    assert tree("old") == before


# Ranges.


def test_colours_follow_the_range_and_values_do_not(shell):
    columns("pics/dim.png", [40, 20, 10])
    line = "own.py:Mean pics -l same -m hirescam -m layercam -t 0 --alpha 1 --format png"
    for name in ("map", "image", "run"):
        ran(shell, f"{line} --vmax {name} -o {name}")
        assert_whole(name)
    found = maps("map")
    tops = {name: float(values.max()) for name, values in found.items()}
    for name in ("image", "run"):
        assert maps(name).keys() == found.keys()
        assert all(np.array_equal(values, found[key]) for key, values in maps(name).items())
        assert set(tree(name)) == set(tree("map"))
    for key, values in found.items():
        place = np.unravel_index(values.argmax(), values.shape)
        method = key.split(".")[1]
        of_image = {
            tops[other] for other in tops if other.split("/")[0] == key.split("/")[0] and method in other
        }
        limits = {
            "map": tops[key],
            "image": max(of_image),
            "run": max(top for other, top in tops.items() if method in other),
        }
        original = np.asarray(Image.open(f"pics/{key.split('/')[0]}.png"))[place]
        for name, limit in limits.items():
            drawn = np.asarray(Image.open(Path(name, key.replace(".npy", ".overlay.png"))))[place]
            share = tops[key] / limit
            weight = 0.3 + 0.7 * share
            wanted = (1 - weight) * original + weight * table("turbo")[round(255 * share)].astype(float)
            # Half a step of 255 each: of the share, the weight and the mean.
            np.testing.assert_allclose(drawn, wanted, atol=4, err_msg=f"{name}: {key}")
    assert tops["dim/same.hirescam.0.npy"] < 0.5 * max(tops.values())


def test_one_range_for_a_picture_is_that_of_its_greatest_map(shell):
    line = "own.py:Net pics/0.png -l conv -l relu -m eigencam --format png"
    ran(shell, f"{line} --vmax map -o map")
    ran(shell, f"{line} --vmax image -o image")
    tops = {name: values.max() for name, values in maps("map").items()}
    same = {name for name in tree("map") if tree("map")[name] == tree("image")[name]}
    greatest = max(tops, key=tops.get)
    for name in tops:
        assert (name.replace(".npy", ".overlay.png") in same) == (tops[name] == tops[greatest])


@pytest.mark.parametrize("words", ["--workers 0", "--workers 3"])
def test_a_range_over_the_run_does_not_depend_on_the_threads(shell, words):
    Path("pics/1b.png").write_bytes(b"no picture")
    line = "own.py:Net pics -l conv -l relu -t top:2 --vmax run --sheet -o"
    ran(shell, f"{line} one --workers 1", code=4)
    ran(shell, f"{line} two {words}", code=4)
    assert tree("one") == tree("two")
    assert [(image["path"], image["status"]) for image in manifest("one")["images"]] == [
        ("pics/0.png", "ok"),
        ("pics/1.png", "ok"),
        ("pics/1b.png", "error"),
        ("pics/2.png", "ok"),
    ]
    assert_whole("one")
    sheets = [record["path"] for record in manifest("one")["artifacts"] if record["part"] == "sheet"]
    assert sheets == [f"{number}/sheet.png" for number in range(3)]
    overlays = [name for name in tree("one") if ".overlay." in name]
    assert len(overlays) == 3 * 2 * 2


@pytest.mark.parametrize("words", ["", "--vmax run"], ids=["map", "run"])
def test_names_and_numbers_do_not_depend_on_the_batch_size(shell, words):
    line = f"own.py:Net pics -l conv -m gradcam -m scorecam -m ablationcam --smooth noise:2,0.1 --sheet {words} -o"
    for size in (1, 2, 3):
        ran(shell, f"{line} by{size} --batch-size {size}")
        assert set(tree(f"by{size}")) == set(tree("by1"))
        for name, values in maps(f"by{size}").items():
            np.testing.assert_allclose(values, maps("by1")[name], rtol=1e-4, atol=1e-7)
    assert [record["path"] for record in manifest("by1")["artifacts"]] == [
        record["path"] for record in manifest("by3")["artifacts"]
    ]


def test_values_do_not_wait_in_memory_for_the_runs_range(tmp_path):
    out = OutputDir(tmp_path / "out", command="gradcam")
    out.begin()
    ranged = Ranged(out, PictureOptions())
    left = []
    for number in range(4):
        values = np.full((8, 8), number, np.float32)
        left.append(weakref.ref(values))
        heat = Heat("gradcam", 0, Site("conv"), "gradcam", values, number, number)
        ranged.values(heat, Place(str(number), f"{number}.png"), number)()
    del values, heat
    gc.collect()
    assert [kept() for kept in left] == [None] * 4
    for number in range(4):
        for writing in ranged.drawn(Place(str(number), f"{number}.png"), number):
            writing()
    assert sum(record["part"] == "heatmap" for record in out.records) == 4


# Sheets, fusion, smoothing, signs.


@pytest.mark.parametrize("how", ["mean", "max", "refine"])
def test_fused_maps_are_one_for_all_layers(shell, how):
    line = "own.py:Net pics/0.png -l relu -l deep -m gradcam -m eigencam -m saliency -t 0"
    ran(shell, f"{line} -o single")
    ran(shell, f"{line} --fuse {how} -o out")
    single, found = maps("single"), maps("out")
    assert set(found) == {
        f"0/{name}.npy" for name in ("relu+deep.gradcam.0", "relu+deep.eigencam", "input.saliency.0")
    }
    np.testing.assert_array_equal(found["0/input.saliency.0.npy"], single["0/input.saliency.0.npy"])
    for name in ("gradcam.0", "eigencam"):
        scaled = []
        for layer in ("relu", "deep"):
            positive = torch.from_numpy(single[f"0/{layer}.{name}.npy"]).clamp(min=0)
            positive = positive - positive.min() if how == "refine" else positive
            scaled.append(positive / positive.max().clamp(min=1e-30))
        large = torch.nn.functional.interpolate(
            scaled[1][None, None], size=scaled[0].shape, mode="bilinear", align_corners=False
        )[0, 0]
        wanted = {
            "mean": (scaled[0] + large) / 2,
            "max": scaled[0].maximum(large),
            "refine": scaled[0] * large,
        }[how]
        np.testing.assert_allclose(found[f"0/relu+deep.{name}.npy"], wanted, rtol=1e-4, atol=1e-6)
    records = {record["path"]: record for record in raw_records("out")}
    record = records["0/relu+deep.gradcam.0.npy"]
    assert (record["layer"], record["call"], record["output"]) == ("relu+deep", 0, "")
    values = found["0/relu+deep.gradcam.0.npy"]
    assert (record["min"], record["max"]) == (values.min(), values.max())


def test_a_layer_without_a_part_in_the_fused_map_is_left_out_and_named(shell):
    ran(shell, "own.py:HalfSilent pics/0.png -l relu -l deep --fuse refine -t 0 -o out")
    ran(shell, "own.py:HalfSilent pics/0.png -l deep -t 0 -o alone")
    assert "relu: zero-gradient, left out of the fused gradcam" in manifest("out")["warnings"]
    (fused,), (alone,) = maps("out").values(), maps("alone").values()
    np.testing.assert_allclose(fused, alone / alone.max(), rtol=1e-6)
    # Where no layer has a part there is nothing to leave out.
    ran(shell, "own.py:Silent pics/0.png -l relu -l deep --fuse mean -t 0 -o none")
    assert [record["status"] for record in raw_records("none")] == ["zero-gradient"]


def test_values_below_zero_are_kept_and_drawn_where_asked_for(shell):
    line = "own.py:Net pics -l conv -l deep -t 0 -t 1"
    ran(shell, f"{line} -o cut")
    ran(shell, f"{line} --no-relu --sheet -o out")
    cut, found = maps("cut"), maps("out")
    assert found.keys() == cut.keys()
    assert all(np.array_equal(values.clip(min=0), cut[name]) for name, values in found.items())
    assert min(values.min() for values in found.values()) < 0
    for record in raw_records("out"):
        values = found[record["path"]]
        assert (record["min"], record["max"], record["status"]) == (values.min(), values.max(), "ok")
    # Blue below zero, red above.
    name, values = min(found.items(), key=lambda pair: pair[1].min())
    ran(shell, f"{line} --no-relu --alpha 1 --format png -o drawn")
    drawn = np.asarray(Image.open(Path("drawn", name.replace(".npy", ".heat.png"))).convert("RGB")).astype(
        int
    )
    blue = (drawn[..., 2] - drawn[..., 0] > 60).any()
    assert blue
    assert len([path for path in tree("out") if path.endswith("sheet.png")]) == 3


def test_a_flip_is_the_mean_with_the_mirrored_picture_turned_back(shell):
    for path in list(Path("pics").iterdir()):
        mirror = Path("mirrored", path.name)
        mirror.parent.mkdir(exist_ok=True)
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(mirror)
    line = "-l conv -m gradcam -m layercam -t 1"
    ran(shell, f"own.py:Net pics {line} -o one")
    ran(shell, f"own.py:Net mirrored {line} -o other")
    ran(shell, f"own.py:Net pics {line} --smooth flip -o out")
    for name, values in maps("out").items():
        wanted = (maps("one")[name] + maps("other")[name][:, ::-1]) / 2
        np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-7)


def test_noise_follows_the_seed(shell):
    line = "own.py:Net pics/0.png -l conv -t 1 --smooth noise:3,0.2"
    for name, words in {"one": "", "again": "", "other": "--seed 4"}.items():
        ran(shell, f"{line} {words} -o {name}")
    assert tree("one") == tree("again")
    (one,), (other,) = (list(maps(name).values()) for name in ("one", "other"))
    assert not np.allclose(one, other, rtol=1e-3)


def test_the_contrast_is_in_the_name_the_record_and_the_values(shell):
    ran(shell, "own.py:Net pics/0.png -l relu -t 0 --contrast 1 --contrast 2 --no-relu -o out")
    ran(shell, "own.py:Net pics/0.png -l relu -t 0 -t 1 -t 2 --no-relu -o plain")
    ((name, values),) = maps("out").items()
    assert name == "0/relu.gradcam.0.vs-1-2.npy"
    plain = maps("plain")
    # FinerCAM, whose Grad-CAM is linear in the score.
    others = (plain["0/relu.gradcam.1.npy"] + plain["0/relu.gradcam.2.npy"]) / 2
    np.testing.assert_allclose(values, plain["0/relu.gradcam.0.npy"] - 0.6 * others, rtol=1e-4, atol=1e-7)
    (record,) = raw_records("out")
    assert (record["target"], record["against"]) == (0, [1, 2])


# In a recipe.

RECIPE = """
model = "own.py:Net"
images = ["pics"]
out = "out"
[featuremaps]
raw = true
[gradcam]
layer = ["relu", "deep"]
method = ["gradcam", "scorecam", "ablationcam", "saliency"]
target = ["top:2"]
top-channels = 3
smooth = "noise:2,0.1"
fuse = "mean"
score = true
score-steps = 3
sanity = true
sheet = true
vmax = "run"
baseline = "old"
min-iou = 0.0
[gradnorm]
target = "1"
"""


def test_a_recipe_has_the_numbers_of_the_commands_whatever_passes_gradcam_makes(shell, loaded):
    words = (
        "own.py:Net pics -l relu -l deep -m gradcam -m scorecam -m ablationcam -m saliency "
        "-t top:2 --top-channels 3 --smooth noise:2,0.1 --fuse mean"
    )
    ran(shell, f"{words} -o old")
    checks = "--score --score-steps 3 --sanity --sheet --vmax run --baseline old --min-iou 0"
    ran(shell, f"{words} {checks} -o alone/gradcam")
    assert shell("featuremaps own.py:Net pics --raw -o alone/featuremaps").code == 0
    assert shell("gradnorm own.py:Net pics -t 1 -o alone/gradnorm").code == 0
    shell.toml("r.toml", RECIPE)
    done = shell("run r.toml")
    assert done.code == 0, done.err
    assert_as_it_was(*loaded[-1])
    together, alone = tree("out"), tree("alone")
    assert set(together) - {"manifest.json"} == {name for name in alone if not name.endswith("manifest.json")}
    assert {f"gradcam/{name}.csv" for name in ("scores", "sanity", "compare")} < together.keys()
    for name in together:
        if name.endswith(".npy"):
            np.testing.assert_allclose(np.load(f"out/{name}"), np.load(f"alone/{name}"), rtol=1e-4, atol=1e-7)
        if name.endswith(".safetensors"):
            assert together[name] == alone[name]
    one, three = (strict_json(Path(f"{at}/gradnorm/gradnorm.json").read_text()) for at in ("out", "alone"))
    assert one["total_norm"] == pytest.approx(three["total_norm"], rel=1e-6)
    for kind, names in (("scores", SCORES), ("compare", ("iou", "spearman"))):
        found, wanted = (csv_rows(f"{at}/gradcam/{kind}.csv") for at in ("out", "alone"))
        assert [[row[name] for name in ("image", "method", "layer")] for row in found] == [
            [row[name] for name in ("image", "method", "layer")] for row in wanted
        ]
        figures = [[[float(row[name]) for name in names] for row in rows] for rows in (found, wanted)]
        np.testing.assert_allclose(*figures, atol=1e-3)


# What is said at the end.


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("-l relu -l conv -t 2 -t 1", "conv.gradcam.2"),
        ("-l relu -m layercam -m gradcam -t top:3", "relu.layercam.0"),
        ("-l relu -t 1 -t top1", "relu.gradcam.1"),
        ("-l relu -t top:1 -t 1", "relu.gradcam.0"),
        ("-l conv -l relu -m gradcam -m eigencam", "conv.eigencam"),
    ],
    ids=["layers-as-they-run", "methods-as-asked", "targets-as-asked", "best-first", "no-class-first"],
)
@pytest.mark.parametrize("how", ["", "--vmax run"], ids=["map", "run"])
def test_the_overlay_named_at_the_end_is_the_first_that_was_made(shell, words, name, how):
    Path("pics/0.png").rename("pics/last.png")
    done = ran(shell, f"own.py:Net pics/last.png pics {words} {how} -o out")
    assert f"for instance out/last/{name}.overlay.jpg\n" in done.out


def test_all_pictures_have_their_files_in_the_order_given(shell):
    numbers = count()
    for seed in (7, 8):
        picture(Path(f"more/{next(numbers)}.png"), seed, size=(30, 26))
    ran(shell, "own.py:Net more pics -l relu -o out --batch-size 2")
    paths = [image["path"] for image in manifest("out")["images"]]
    assert paths == ["more/0.png", "more/1.png", "pics/0.png", "pics/1.png", "pics/2.png"]
    assert len(maps("out")) == 5
