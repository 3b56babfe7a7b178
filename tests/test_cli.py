"""Every command from its words to its files: what is printed, written and recorded."""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from command import HOSTILE, Shell, assert_journal, assert_whole, manifest, picture, strict_json, tree

import hookscope
from hookscope.cli import talk
from hookscope.cli.app import app, main
from hookscope.models import list_models
from hookscope.output.directory import OutputDir
from hookscope.render import grid

KEYS = {
    "artifacts", "command", "findings", "images", "layers", "model", "options", "patterns", "schema", "versions",
    "warnings",
}  # fmt: skip


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def heats(stem):
    return {f"{stem}.heat.png", f"{stem}.npy", f"{stem}.overlay.jpg"}


NORMS = {
    "gradnorm.csv", "gradnorm.json", "gradnorm.md", "gradnorm.png", "gradnorm-ratio.png", "gradnorm.junit.xml",
    "gradnorm.sarif", "gradnorm-baseline.json",
}  # fmt: skip

SUCCESSES = {
    "featuremaps": ("featuremaps net.py:build pics/0.png", {"0/conv.png"}, "1 file in out"),
    "featuremaps-all": (
        "featuremaps net.py:build pics/0.png -l '**' -x fc --overlay --raw --channels top:2",
        {
            "0/conv.png", "0/conv.safetensors", "0/relu.png", "0/relu.safetensors",
            *heats("0/conv.mean-activation"), *heats("0/relu.mean-activation"),
        },
        "10 files in out",
    ),
    "gradcam": ("gradcam net.py:build pics/0.png -t 1", heats("0/relu.gradcam.1"), "layer relu (the last one"),
    "gradcam-many": (
        "gradcam net.py:build pics/0.png -l conv -l relu -m gradcam -m layercam -t 0 -t 2 --format png",
        {
            f"0/{layer}.{method}.{target}.{end}"
            for layer in ("conv", "relu") for method in ("gradcam", "layercam") for target in (0, 2)
            for end in ("heat.png", "npy", "overlay.png")
        },
        "24 files in out",
    ),
    "gradcam-not-there": ("gradcam net.py:build pics/0.png -x relu -t 1", heats("0/conv.gradcam.1"), "layer conv"),
    "gradnorm": ("gradnorm net.py:build pics", NORMS, "total gradient norm 0."),
    "gradnorm-own-loss": ("gradnorm net.py:build pics -t 1 --loss net.py:brier", NORMS, "loss net.py:brier 0."),
    "torchvision": (
        "gradcam resnet18 pics/0.png --weights none --resize 64 --crop 64 -l layer4 -t tabby",
        heats("0/layer4.gradcam.281-tabby"),
        "3 files in out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "files", "said"), SUCCESSES.values(), ids=SUCCESSES)
def test_a_command_writes_its_files_and_a_whole_manifest(shell, line, files, said):
    done = shell(f"{line} -o out")
    assert done.code == 0, done.err
    assert "error" not in done.err
    assert said in done.out
    assert set(tree("out")) == files | {"manifest.json"}
    assert_whole("out")
    assert set(manifest("out")) == KEYS
    assert manifest("out")["command"] == line.split()[0]


def test_the_manifest_has_sorted_keys_and_says_what_the_run_was(shell):
    assert shell("gradcam net.py:build pics -l 'c*' -t 1 -o out").code == 0
    text = Path("out/manifest.json").read_text()
    record = strict_json(text)
    assert text == json.dumps(record, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    assert record["schema"] == 1
    assert set(record["versions"]) == {"hookscope", "torch", "torchvision"}
    assert record["model"]["name"] == "net.py:build"
    assert record["model"]["parameters"] == 127
    assert record["model"]["random_weights"] is False
    assert record["patterns"] == {"c*": ["conv"]}
    assert record["options"]["target"] == ["1"]
    assert [image["path"] for image in record["images"]] == ["pics/0.png", "pics/1.png", "pics/2.png"]
    assert all(len(image["top"]) == 3 and image["error"] is None for image in record["images"])
    assert record["layers"] == [
        {
            "call": 0, "layer": "conv", "layout": "NCHW", "output": "", "shape": [1, 4, 18, 22], "status": "ok",
            "type": "Conv2d",
        }
    ]  # fmt: skip
    raw = next(found for found in record["artifacts"] if found["part"] == "raw")
    values = np.load(Path("out") / raw["path"])
    assert (raw["min"], raw["max"]) == (values.min(), values.max())
    assert values.shape == (18, 22)
    assert values.dtype == np.float32


@pytest.mark.parametrize("other", ["", "--workers 0", "--workers 4"], ids=["again", "alone", "many-threads"])
def test_the_same_run_gives_the_same_bytes(shell, other):
    line = "featuremaps net.py:build pics --overlay --raw -o"
    assert shell(f"{line} one --workers 1").code == 0
    assert shell(f"{line} two {other}").code == 0
    assert tree("one") == tree("two")
    assert len(tree("one")) == 1 + 3 * 5


def test_numbers_do_not_depend_on_the_batch_size(shell):
    assert shell("gradcam net.py:build pics -o one --batch-size 1").code == 0
    assert shell("gradcam net.py:build pics -o three --batch-size 3").code == 0
    arrays = [name for name in tree("one") if name.endswith(".npy")]
    assert len(arrays) == 3
    for name in arrays:
        np.testing.assert_allclose(np.load(f"one/{name}"), np.load(f"three/{name}"), rtol=1e-4, atol=1e-8)


def test_norms_are_averaged_over_batches_of_any_size(shell):
    assert shell("gradnorm net.py:build pics -t 1 -o one --batch-size 1").code == 0
    assert shell("gradnorm net.py:build pics -t 1 -o three --batch-size 3").code == 0
    one, three = (strict_json(Path(f"{out}/gradnorm.json").read_text()) for out in ("one", "three"))
    assert one["total_norm"] == pytest.approx(three["total_norm"], rel=1e-5)
    assert (one["batches"], three["batches"]) == (3, 1)


JSON_LINES = {
    "featuremaps": "featuremaps net.py:build pics",
    "gradcam": "gradcam net.py:build pics",
    "gradnorm": "gradnorm net.py:build pics",
    "chatty-model": "gradcam net.py:chatty pics",
    "chatty-hook": "featuremaps net.py:hooked pics",
    "chatty-loss": "gradnorm net.py:build pics --loss net.py:talking_loss",
    "not-finite": "gradcam net.py:NotFinite pics -l conv -t 0",
    "bad-picture": "gradcam net.py:build pics missing.png",
    "quiet": "gradcam net.py:build pics -q",
    "verbose": "gradcam net.py:build pics -v",
}


@pytest.mark.parametrize("line", JSON_LINES.values(), ids=JSON_LINES)
def test_json_is_the_manifest_and_nothing_else(shell, line):
    done = shell(f"{line} --json -o out")
    assert done.code == (4 if "missing" in line else 0)
    assert done.out == Path("out/manifest.json").read_text()
    strict_json(done.out)


CHATTY = {
    "model": ("gradcam net.py:chatty pics", ["hello from the model", "hello from forward"]),
    "hook": ("featuremaps net.py:hooked pics", ["hello from a hook"]),
    "loss": ("gradnorm net.py:build pics --loss net.py:talking_loss", ["hello from the loss"]),
    "layers": ("layers net.py:chatty pics/0.png", ["hello from the model", "hello from forward"]),
    "dry-run": ("gradcam net.py:chatty pics --dry-run", ["hello from the model"]),
}


@pytest.mark.parametrize(("line", "said"), CHATTY.values(), ids=CHATTY)
@pytest.mark.parametrize("how", ["", "--json"], ids=["words", "json"])
def test_what_the_users_own_code_prints_is_no_result(shell, line, said, how):
    done = shell(f"{line} {how}")
    assert done.code == 0
    assert done.out
    assert "hello" not in done.out
    assert all(words in done.err for words in said)


def test_files_of_names_that_differ_in_case_do_not_depend_on_the_threads(shell, monkeypatch):
    """The first layer's grid is held back until a file of the second is written."""
    written, write, draw = threading.Event(), OutputDir.write, grid.draw

    def writing(out, name, data, **record):
        found = write(out, name, data, **record)
        if record["layer"] == "Conv":
            written.set()
        return found

    def drawing(tiles, **options):
        if tiles.site.layer == "conv":
            written.wait(2)
        return draw(tiles, **options)

    monkeypatch.setattr(OutputDir, "write", writing)
    monkeypatch.setattr(grid, "draw", drawing)
    monkeypatch.setattr("hookscope.run.default_workers", lambda: 2)
    assert shell("featuremaps net.py:TwoCases pics/0.png --overlay --raw -q -o out").code == 0
    ends = (".png", ".safetensors")
    found = {layer: set() for layer in ("conv", "Conv")}
    for record in manifest("out")["artifacts"]:
        found[record["layer"]].add(record["path"])
    assert found == {
        "conv": {*(f"0/conv{end}" for end in ends), *heats("0/conv.mean-activation")},
        "Conv": {*(f"0/Conv-2{end}" for end in ends), *heats("0/Conv.mean-activation-2")},
    }


def test_numbers_that_are_not_finite_are_words_in_the_manifest(shell):
    assert shell("gradcam net.py:NotFinite pics/0.png -l conv -t 0 -o out").code == 0
    record = manifest("out")
    assert record["images"][0]["top"][0]["score"] == "nan"
    assert {found["status"] for found in record["artifacts"]} == {"non-finite"}
    assert record["layers"][0]["status"] == "non-finite"


def test_quiet_says_nothing_and_verbose_names_every_file(shell):
    quiet = shell("gradcam net.py:build pics -q -o out")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    verbose = shell("gradcam net.py:build pics -v -o out --overwrite")
    assert {line for line in verbose.out.splitlines() if line.startswith("out/")} == {
        f"out/{name}" for name in tree("out") if name != "manifest.json"
    }
    assert shell("layers net.py:build -q").out == ""


def test_a_dry_run_resolves_and_writes_nothing(shell):
    done = shell("gradcam net.py:tired pics -l 'net.*' -x net.fc --dry-run -o out")
    assert done.code == 0
    assert "net.*: net.conv, net.relu, net.fc" in done.out
    assert "3 pictures, 2 layers, to out; nothing was run" in done.out
    assert not Path("out").exists()
    as_json = shell("gradcam net.py:tired pics -l 'net.*' --dry-run --json -o out")
    assert [image["status"] for image in strict_json(as_json.out)["images"]] == ["pending"] * 3


def test_layers_prints_a_table_from_a_picture_or_a_size(shell):
    done = shell("layers net.py:build pics/0.png")
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["layer", "type", "calls", "output", "layout", "parameters", "status"]
    assert rows[1:] == [
        [".", "Net", "1", "1x3", "NC", "127"],
        ["conv", "Conv2d", "1", "1x4x18x22", "NCHW", "112"],
        ["relu", "ReLU", "1", "1x4x18x22", "NCHW", "0"],
        ["fc", "Linear", "1", "1x3", "NC", "15"],
    ]
    sized = shell("layers net.py:build --input-size 8x10 -l conv")
    assert [line.split()[3] for line in sized.out.splitlines()] == ["output", "1x4x6x8"]
    unrun = shell("layers net.py:tired --dry-run -l net.conv")
    assert unrun.out.splitlines()[1].split() == ["net.conv", "Conv2d", "112"]


def test_layers_as_json(shell):
    record = strict_json(shell("layers net.py:build --input-size 3x8x8 -l 'type:*d' --json").out)
    assert set(record) == KEYS
    assert record["command"] == "layers"
    assert record["patterns"] == {"type:*d": ["conv"]}
    expected = {
        "model": "net.py:build", "image": None, "input_size": "3x8x8", "layer": ["type:*d"], "exclude": [],
        "weights": "default", "precision": "fp32", "device": "auto", "seed": 0, "resize": None, "mean": None,
    }  # fmt: skip
    assert expected.items() <= record["options"].items()
    assert "workers" not in record["options"]
    assert [(row["layer"], row["calls"], row["shape"], row["parameters"]) for row in record["layers"]] == [
        ("conv", 1, [1, 4, 6, 6], 112)
    ]


def test_models_lists_names_that_a_glob_matches(shell):
    assert shell("models 'resnet1*'").out.splitlines() == list_models("resnet1*")
    assert strict_json(shell("models 'resnet1*' --json").out) == list_models("resnet1*")
    assert "demo" in shell("models").out.splitlines()


def test_the_demo_knows_the_cat(shell):
    done = shell("demo --json")
    assert done.code == 0
    record = manifest("hookscope-out/demo")
    assert done.out == Path("hookscope-out/demo/manifest.json").read_text()
    assert [image["path"] for image in record["images"]] == ["cat.png"]
    best = record["images"][0]["top"][0]
    assert best["label"] == "Egyptian cat"
    assert best["probability"] == pytest.approx(0.717, abs=0.005)
    assert {found["kind"] for found in record["artifacts"]} == {"featuremaps", "gradcam", "gradnorm"}
    assert record["warnings"] == []
    assert_whole("hookscope-out/demo")


def test_the_demo_shows_the_cat_first(shell):
    done = shell("demo")
    assert done.code == 0
    assert "features.gradcam.285-Egyptian-cat.overlay.jpg" in done.out
    assert "for instance hookscope-out/demo/gradcam/cat/" in done.out


def test_the_demo_model_needs_no_pictures_of_yours(shell):
    done = shell("gradcam demo -t 'egyptian_cat' -o out")
    assert done.code == 0
    assert "cat.png  Egyptian cat .72" in done.out
    assert "coffee.png  espresso" in done.out


# Pictures


def test_bad_pictures_are_recorded_and_the_others_written(shell):
    good = {path.name for path in HOSTILE.iterdir() if path.suffix != ".md"}
    bad = {
        "broken.png", "broken_data_stream.png", "decompression_bomb.gif", "png_decompression_dos.png",
        "seek_too_large.tif", "truncated_image.png", "truncated_jpeg.jpg", "unimplemented_dxgi_format.dds",
        "zero_width.gif",
    }  # fmt: skip
    done = shell(f"featuremaps net.py:build {HOSTILE} -o out --resize 32x32")
    assert done.code == 4
    images = {Path(image["path"]).name: image for image in manifest("out")["images"]}
    assert {name for name, image in images.items() if image["status"] == "error"} == bad
    assert set(images) == good - {"test-ole-file.doc"}
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(bad)
    assert all(image["error"] in done.err for image in images.values() if image["error"])
    assert "Traceback" not in done.err
    assert_whole("out")


def test_pictures_of_one_name_stay_apart(shell):
    for folder in ("a", "b"):
        picture(Path(folder) / "x.png", ord(folder))
    assert shell("gradcam net.py:build a b -o out").code == 0
    arrays = {name: np.load(f"out/{name}") for name in tree("out") if name.endswith(".npy")}
    assert len(arrays) == 2
    first, second = arrays.values()
    assert not np.array_equal(first, second)
    images = {found["image"] for found in manifest("out")["artifacts"]}
    assert images == {"a/x.png", "b/x.png"}


def test_pictures_of_many_sizes_keep_their_order(shell):
    sizes = [(24, 20), (30, 16), (30, 16), (24, 20)]
    for number, size in enumerate(sizes):
        picture(Path(f"mixed/{number}.png"), number, size)
    assert shell("gradcam net.py:build mixed -l conv -o out").code == 0
    assert [image["path"] for image in manifest("out")["images"]] == [f"mixed/{n}.png" for n in range(4)]
    shapes = [np.load(next(Path("out").glob(f"{n}/*.npy"))).shape for n in range(4)]
    assert shapes == [(height - 2, width - 2) for width, height in sizes]


def test_limit_takes_the_first(shell):
    assert shell("featuremaps net.py:build pics --limit 2 -o out").code == 0
    assert [image["path"] for image in manifest("out")["images"]] == ["pics/0.png", "pics/1.png"]


def test_a_dataset_gives_the_labels(shell):
    for label in range(3):
        picture(Path(f"data/{label}/{label}.png"), label)
    done = shell("gradnorm net.py:build --dataset data -o out")
    assert done.code == 0
    assert "labels: the folders of the data set" in done.out
    sums = []
    for label in range(3):
        assert shell(f"gradnorm net.py:build data/{label} -t {label} -o single{label}").code == 0
        sums.append(strict_json(Path(f"single{label}/gradnorm.json").read_text())["loss"]["value"])
    together = strict_json(Path("out/gradnorm.json").read_text())
    assert together["loss"]["value"] == pytest.approx(sum(sums) / 3, rel=1e-5)


def test_a_one_channel_model_gets_grey(shell):
    done = shell("featuremaps net.py:grey pics/0.png -o out")
    assert done.code == 0
    assert manifest("out")["model"]["preprocessing"]["channels"] == 1


# Models


@pytest.mark.parametrize(
    ("keys", "classes", "said"),
    [
        (lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}}, 3, ""),
        (lambda state: {"epoch": 3, "model": {f"_orig_mod.{key}": v for key, v in state.items()}}, 3, ""),
        (lambda state: state, 5, "5 classes"),
    ],
    ids=["data-parallel", "compiled", "other-classes"],
)
def test_a_checkpoint_is_peeled_and_its_classes_counted(shell, keys, classes, said):
    own = {
        "conv.weight": torch.zeros(4, 3, 3, 3), "conv.bias": torch.zeros(4),
        "fc.weight": torch.zeros(classes, 4), "fc.bias": torch.arange(classes).float(),
    }  # fmt: skip
    torch.save(keys(own), "my.ckpt")
    done = shell("featuremaps net.py:build pics/0.png --weights my.ckpt -o out")
    assert done.code == 0, done.err
    assert said in done.err
    record = manifest("out")
    assert record["model"]["weights"] == "my.ckpt"
    assert [top["score"] for top in record["images"][0]["top"]] == [
        float(n) for n in reversed(range(classes))
    ]


@pytest.mark.parametrize(
    ("model", "wrapper"), [("parallel", "DataParallel"), ("compiled", "OptimizedModule")], ids=str
)
def test_a_wrapper_is_taken_off_and_this_is_said(shell, model, wrapper):
    assert shell("gradcam net.py:build pics -l conv -o plain").code == 0
    done = shell(f"gradcam net.py:{model} pics -l conv -o out")
    assert done.code == 0, done.err
    assert f"warning: the {wrapper} around the model was taken off" in done.err
    arrays = [name for name in tree("plain") if name.endswith(".npy")]
    assert all(np.array_equal(np.load(f"plain/{name}"), np.load(f"out/{name}")) for name in arrays)


def test_arguments_reach_the_callable(shell):
    assert shell("featuremaps net.py:build pics/0.png --model-arg width=2 -o out").code == 0
    assert manifest("out")["layers"][0]["shape"] == [1, 2, 18, 22]


def test_random_weights_are_said_loudly_and_come_from_the_seed(shell):
    line = "featuremaps squeezenet1_1 pics/0.png --weights none --resize 64 --crop 64 -l features.0 --raw"
    done = shell(f"{line} -o one")
    assert "RANDOM" in done.err
    assert manifest("one")["model"]["random_weights"] is True
    assert shell(f"{line} -o same").code == 0
    assert shell(f"{line} -o other --seed 1").code == 0
    one, same, other = (tree(place)["0/features.0.safetensors"] for place in ("one", "same", "other"))
    assert one == same
    assert one != other


# Output


def test_an_earlier_run_is_replaced_only_when_asked(shell):
    assert shell("gradcam net.py:build pics -o out").code == 0
    before = tree("out")
    assert shell("gradcam net.py:build pics/0.png -o out").code == 6
    assert tree("out") == before
    assert shell("gradcam net.py:build pics/0.png -o out --overwrite").code == 0
    assert_whole("out")
    assert len(tree("out")) == 4


def test_the_default_place_is_replaced_without_being_asked(shell):
    for pictures in ("pics", "pics/0.png"):
        assert shell(f"gradcam net.py:build {pictures}").code == 0
    assert_whole("hookscope-out/gradcam")
    assert len(tree("hookscope-out/gradcam")) == 4


def test_what_others_put_there_is_kept(shell):
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert shell("gradcam net.py:build pics/0.png -o out --overwrite").code == 0
    assert Path("out/notes.txt").read_text() == "mine"
    assert len(tree("out")) == 5
    again = shell("gradcam net.py:build pics/0.png -o out --overwrite")
    assert again.code == 6
    assert "notes.txt" in again.err
    assert Path("out/notes.txt").read_text() == "mine"


def test_a_run_that_broke_leaves_a_journal_of_whole_files(shell):
    picture(Path("pics/9.png"), 9, low=200, high=255)
    done = shell("gradcam net.py:tired pics -l net.conv --batch-size 1 -o out")
    assert done.code == 3
    listed = assert_journal("out")
    assert {name.split("/")[0] for name in listed} >= {"0", "1"}
    assert shell("gradcam net.py:build pics -o out").code == 6
    assert shell("gradcam net.py:build pics -o out --overwrite").code == 0
    assert_whole("out")


# What is printed


def test_nothing_is_coloured_and_no_bar_drawn_where_there_is_no_terminal(shell):
    shutil.copytree("pics", "more")
    for line in ("gradcam net.py:build pics more missing.png", "layers net.py:build", "gradcam nope x"):
        done = shell(line)
        assert "\033" not in done.out + done.err


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)], ids=["terminal", "NO_COLOR"])
def test_errors_are_coloured_for_a_terminal_that_takes_it(shell, monkeypatch, no_color, coloured):
    screen = _Terminal()
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("sys.stderr", screen)
    assert main(["gradcam", "nope", "pics"]) == 2
    assert ("\033[1;31merror" in screen.getvalue()) is coloured
    assert "unknown model 'nope'" in screen.getvalue()


class _Clock:
    """A timer that strikes when it is told to."""

    def __init__(self, seconds, function):
        self.seconds, self.strike, self.daemon = seconds, function, False

    def start(self):
        started.append(self)

    def cancel(self):
        started.remove(self) if self in started else None


started: list[_Clock] = []


def watched(monkeypatch):
    """A terminal for stderr, and clocks that the test strikes; in the test itself, as pytest puts its own there."""
    started.clear()
    made = _Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(talk.threading, "Timer", _Clock)
    return made


def test_a_bar_appears_after_a_second_and_is_wiped_at_the_end(monkeypatch):
    screen = watched(monkeypatch)
    with talk.ProgressBar(quiet=False) as bar:
        (clock,) = started
        assert clock.seconds == 1
        assert clock.daemon
        bar.update("pictures", 0, 8)
        assert screen.getvalue() == ""
        clock.strike()
        assert "pictures" in screen.getvalue()
        bar.update("pictures", 8, 8)
    assert screen.getvalue().endswith(("\033[2K", "\033[1A\033[2K"))
    assert "8/8" in screen.getvalue()
    assert not started


def test_a_run_that_ends_sooner_draws_nothing_however_late_the_clock(monkeypatch):
    screen = watched(monkeypatch)
    with talk.ProgressBar(quiet=False) as bar:
        (clock,) = started
        bar.update("pictures", 1, 8)
    clock.strike()
    assert not started
    assert screen.getvalue() == ""


def test_before_anything_is_known_the_bar_says_loading(monkeypatch):
    screen = watched(monkeypatch)
    with talk.ProgressBar(quiet=False):
        started[0].strike()
    assert "loading" in screen.getvalue()
    assert "pictures" not in screen.getvalue()


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "no-terminal"])
def test_no_bar_where_nobody_looks(monkeypatch, quiet):
    watched(monkeypatch)
    if not quiet:
        monkeypatch.setattr("sys.stderr", io.StringIO())
    with talk.ProgressBar(quiet=quiet) as bar:
        bar.update("pictures", 1, 8)
        assert not started


@pytest.mark.parametrize(
    "line",
    [
        "gradcam net.py:build pics/0.png -o out",
        "layers net.py:build",
        "gradcam net.py:build pics -o out --json",
    ],
    ids=["one-picture", "layers", "json"],
)
def test_every_command_that_runs_a_model_has_a_bar(shell, monkeypatch, line):
    screen = watched(monkeypatch)
    monkeypatch.setattr(_Clock, "start", lambda clock: clock.strike())
    assert main(line.split()) == 0
    assert "loading" in screen.getvalue()
    assert ("pictures" in screen.getvalue()) is ("layers" not in line)


def test_text_that_the_terminal_cannot_show_is_escaped(shell, monkeypatch):
    Path("labels.txt").write_text("Kätzchen\nK\u001b[31m\nc\n", "utf-8")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    assert main(["gradcam", "net.py:build", "pics", "--labels", "labels.txt", "-o", "out"]) == 0
    said = narrow.buffer.getvalue().decode("ascii")
    assert "K\\xe4tzchen" in said
    assert "\033" not in said


@pytest.mark.parametrize("command", ["", *(command.callback.__name__ for command in app.registered_commands)])
def test_help_is_printed_on_stdout(shell, command):
    done = shell(f"{command} --help")
    assert (done.code, done.err) == (0, "")
    assert "Usage: hookscope" in done.out


def test_every_flag_that_anything_names_exists():
    named: dict[str, str] = {}
    for path in Path(hookscope.__file__).parent.rglob("*.py"):
        named |= dict.fromkeys(re.findall(r"(?<![-\w])--[a-z][a-z-]*", path.read_text("utf-8")), path.name)
    commands = typer.main.get_command(app)
    known = {"--help", "--version"} | {
        flag
        for command in commands.commands.values()
        for option in command.params
        for flag in (*option.opts, *option.secondary_opts)
    }
    assert len(named) > 20
    assert {flag: file for flag, file in named.items() if flag not in known} == {}


def test_the_version_is_printed(shell):
    assert shell("--version").out == f"hookscope {hookscope.__version__}\n"
