"""`hookscope stats` from the shell: its files, their figures, its gate."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Shell, assert_whole, manifest, tree
from PIL import Image

import hookscope

FILES = {
    "stats.json", "stats.csv", "stats.md", "stats.png", "stats-histograms.png", "stats-baseline.json",
    "stats.junit.xml", "stats.sarif", "manifest.json",
}  # fmt: skip

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, bias=-100.0):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(12, 3)
        with torch.no_grad():
            self.norm.bias[4] = bias

    def forward(self, x):
        return self.fc(self.relu(self.norm(self.conv(x))).mean((2, 3)))

def build(bias=-100.0, scale=1.0):
    net = Net(bias)
    with torch.no_grad():
        net.conv.weight.mul_(scale)
    return net.eval()

def broken():
    net = Net()
    with torch.no_grad():
        net.fc.weight[0, 0] = float("nan")
    return net.eval()

def batches():
    torch.manual_seed(1)
    for _ in range(3):
        yield torch.randn(4, 3, 16, 16), torch.zeros(4)
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(NET)
    Path("pics").mkdir()
    rng = np.random.default_rng(0)
    for number in range(5):
        pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"pics/{number}.png")
    return Shell(tmp_path, capsys)


def document(out="out"):
    return json.loads(Path(out, "stats.json").read_text())


def places(out="out"):
    return {record["place"]: record for record in document(out)["places"]}


def test_it_writes_its_files_and_a_whole_manifest(shell):
    done = shell("stats own.py:build pics -o out")
    assert done.code == 0, done.err
    assert set(tree("out")) == FILES
    assert_whole("out")
    assert "6 tensors at 8 places, over 5 pictures" in done.out
    assert "not enough data: 5 of 100 pictures" in done.out
    assert {found["kind"] for found in manifest("out")["artifacts"]} == {"stats"}


def test_the_figures_are_those_of_the_library(shell):
    assert shell("stats own.py:build pics -o out --batch-size 2").code == 0
    from hookscope.images import find
    from hookscope.loading import batches

    loaded = hookscope.load_model("own.py:build")
    found = batches(find(["pics"], None).refs, loaded.preprocess, size=2, workers=0, keep_pictures=False)
    report = hookscope.stats(
        loaded.module, [loaded.batch([item.tensor for item in one.items]) for one in found]
    )
    records = places()
    assert [row.place for row in report.rows] == [record["place"] for record in document()["places"]]
    for row in report.rows:
        record = records[row.place]
        if row.same_as is not None:
            assert record["same_as"] in records
            assert "mean" not in record
            continue
        own = row.distribution
        assert (record["mean"], record["std"]) == (own.mean, own.std)
        assert (record["count"], record["zeros"]) == (own.count, own.zeros)
        assert record["channels"]["alive"] == own.channels.alive.tolist()
        assert record["quantiles"]["0.5"] == own.histogram.quantile(0.5)
        assert sum(record["histogram"]["counts"]) == own.histogram.sampled


def test_the_csv_has_a_row_for_every_place(shell):
    assert shell("stats own.py:build pics -o out").code == 0
    rows = list(csv.DictReader(Path("out/stats.csv").read_text().splitlines()))
    assert [row["layer"] for row in rows] == [record["layer"] for record in document()["places"]]
    relu = next(row for row in rows if row["layer"] == "relu" and row["side"] == "output")
    assert float(relu["mean"]) == pytest.approx(places()["relu"]["mean"], rel=1e-5)
    assert relu["channels"] == "12"


def test_a_dead_unit_is_named_when_there_is_data_enough(shell):
    done = shell("stats own.py:build pics -o out --limits samples=5 --fail-on dead")
    assert done.code == 1
    assert places()["relu"]["dead"] == [4]
    assert "1 dead" in done.out
    finding = next(found for found in manifest("out")["findings"] if found["rule"] == "dead")
    assert finding["layer"] == "relu"
    assert "1 of 12 units" in finding["message"]


def test_a_unit_that_fires_is_not_dead(shell):
    assert (
        shell("stats own.py:build pics --model-arg bias=0.0 -o out --limits samples=5 --fail-on dead").code
        == 0
    )
    assert places()["relu"]["dead"] == []


def test_before_there_is_data_enough_no_unit_is_called_dead(shell):
    assert shell("stats own.py:build pics -o out --fail-on dead").code == 0
    record = places()["relu"]
    assert "dead" not in record
    assert record["not_enough_data"] == "not enough data: 5 of 100 pictures"
    assert record["channels"]["alive"][4] == 0


def test_what_is_not_finite_fails_and_names_the_layer(shell):
    done = shell("stats own.py:broken pics -o out")
    assert done.code == 1
    assert document()["first_non_finite"]["site"]["layer"] == "fc"
    assert document()["first_non_finite"]["parameters"] == ["fc.weight"]
    assert places()["fc"]["non_finite"] == 5


def test_drift_from_a_baseline_fails(shell):
    assert shell("stats own.py:build pics --baseline base.json --update-baseline -o one").code == 0
    same = shell("stats own.py:build pics --baseline base.json -o two")
    assert same.code == 0, same.err
    # The convolution's output is twice as wide; after the norm, in eval mode, all that follows is too.
    done = shell("stats own.py:build pics --model-arg scale=3.0 --baseline base.json -o three")
    assert done.code == 1
    drifted = {found["layer"] for found in manifest("three")["findings"] if found["rule"] == "drift"}
    assert "conv" in drifted


def test_batches_of_one_s_own(shell):
    done = shell("stats own.py:build --data own.py:batches -o out")
    assert done.code == 0, done.err
    assert document()["pictures"] == 12
    assert document()["batches"] == 3
    assert shell("stats own.py:build --data own.py:batches --batches 1 -o less").code == 0
    assert document("less")["pictures"] == 4


def test_layers_are_chosen_by_globs(shell):
    assert shell("stats own.py:build pics -l 'type:ReLU' -o out").code == 0
    assert [record["layer"] for record in document()["places"]] == ["relu", "relu"]


def test_without_histograms_and_with_a_spectrum(shell):
    assert shell("stats own.py:build pics --no-histogram --spectrum -o out").code == 0
    assert "stats-histograms.png" not in tree("out")
    record = places()["conv"]
    assert "quantiles" not in record
    spectrum = record["spectrum"]
    assert len(spectrum["eigenvalues"]) == 12
    assert 1 <= spectrum["effective_rank"] <= 12
    # Five rows of twelve channels say nothing of twelve directions.
    assert places()["fc:0<"]["spectrum"]["effective_rank"] is None
    assert "fewer rows than channels" in places()["fc:0<"]["spectrum"]["missing"]


def test_batch_size_changes_nothing_but_the_last_digits(shell):
    assert shell("stats own.py:build pics --batch-size 1 -o one").code == 0
    assert shell("stats own.py:build pics --batch-size 5 -o five").code == 0
    for name, one in places("one").items():
        five = places("five")[name]
        if "mean" in one:
            assert one["mean"] == pytest.approx(five["mean"], rel=1e-6, abs=1e-6 * one["std"])
            assert one["std"] == pytest.approx(five["std"], rel=1e-6)
            assert one["channels"]["alive"] == five["channels"]["alive"]
            assert one["sampled"] == five["sampled"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--threshold nan", "--threshold nan"),
        ("--limits nosuch=1", "nosuch"),
        ("--fail-on nosuch", "nosuch"),
        ("-l 'nosuch*'", "nosuch"),
        ("--baseline nosuch.json", "nosuch.json"),
        ("--sample 0", "--sample"),
    ],
)
def test_a_flag_that_cannot_be_is_a_usage_error(shell, flags, said):
    done = shell(f"stats own.py:build pics {flags} -o out")
    assert done.code == 2
    assert said in done.err
    assert not Path("out").exists()


def test_an_unreadable_picture_does_not_stop_the_rest(shell):
    Path("pics/2.png").write_bytes(b"no picture")
    done = shell("stats own.py:build pics -o out")
    assert done.code == 4
    assert document()["pictures"] == 4


def test_it_runs_with_other_probes_from_one_pass(shell):
    Path("both.toml").write_text('model = "own.py:build"\nimages = ["pics"]\n[gradnorm]\n[stats]\n')
    done = shell("run both.toml -o out")
    assert done.code == 0, done.err
    alone = shell("stats own.py:build pics -o alone")
    assert alone.code == 0
    together = json.loads(Path("out/stats/stats.json").read_text())
    for one, other in zip(together["places"], document("alone")["places"], strict=True):
        assert one["place"] == other["place"]
        assert one.get("zeros") == other.get("zeros")
        if "mean" in one:
            assert one["mean"] == pytest.approx(other["mean"], abs=1e-6 * one["std"])


def test_the_model_is_not_changed_by_the_measuring(shell):
    loaded = hookscope.load_model("own.py:build")
    before = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    hookscope.stats(loaded.module, torch.randn(2, 3, 16, 16), spectrum=True)
    assert all(torch.equal(before[name], value) for name, value in loaded.module.state_dict().items())
