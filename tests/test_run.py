"""`run`: a recipe's probes from one forward pass, with the very numbers of the commands by themselves."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from command import Shell, assert_whole, manifest, strict_json, tree

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))

RECIPE = """
model = "net.py:build"
images = ["pics"]
out = "out"
[featuremaps]
raw = true
[gradcam]
layer = ["conv", "relu"]
method = ["gradcam", "layercam"]
target = ["top1", 2]
[gradnorm]
target = "1"
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def chosen(directory, kind):
    """The layers that a probe of a run wrote about."""
    found = (record for record in manifest(directory)["artifacts"] if record["kind"] == kind)
    return {record["layer"] for record in found}


def test_one_run_has_the_numbers_of_three(shell):
    shell.toml("r.toml", RECIPE)
    assert shell("run r.toml").code == 0
    assert shell("featuremaps net.py:build pics --raw -o alone/featuremaps").code == 0
    words = "-l conv -l relu -m gradcam -m layercam -t top1 -t 2"
    assert shell(f"gradcam net.py:build pics {words} -o alone/gradcam").code == 0
    assert shell("gradnorm net.py:build pics -t 1 -o alone/gradnorm").code == 0
    together, alone = tree("out"), tree("alone")
    assert set(together) - {"manifest.json"} == {name for name in alone if not name.endswith("manifest.json")}
    assert len(together) > 30
    for name in together.keys() - {"manifest.json"}:
        if name.endswith(".npy"):
            np.testing.assert_allclose(np.load(f"out/{name}"), np.load(f"alone/{name}"), rtol=1e-5, atol=1e-9)
        if name.endswith(".safetensors"):
            assert together[name] == alone[name]
    one, three = (strict_json(Path(f"{at}/gradnorm/gradnorm.json").read_text()) for at in ("out", "alone"))
    assert one["total_norm"] == pytest.approx(three["total_norm"], rel=1e-6)
    assert one["loss"] == three["loss"]
    assert_whole("out")


def test_one_run_calls_the_model_once_a_batch(shell, tmp_path):
    (tmp_path / "counting.py").write_text(
        "import net\n"
        "class Counting(net.Net):\n"
        "    def forward(self, x):\n"
        "        with open('calls.txt', 'a') as file: file.write(f'{len(x)}\\n')\n"
        "        return super().forward(x)\n"
    )
    shell.toml("r.toml", RECIPE.replace("net.py:build", "counting.py:Counting"))
    assert shell("run r.toml --batch-size 2").code == 0
    looks, *batches = Path("calls.txt").read_text().split()
    assert looks == "1"  # one look at the layers, with a single picture
    assert batches == ["2", "1"]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('images = "pics"\n[gradcam]', "r.toml names no model", 'model = "demo"'),
        ('model = "demo"', "r.toml has no table for a probe", "[gradcam]"),
        ('model = "demo"\n[gradcma]', "unknown table 'gradcma' in r.toml", "'gradcam'"),
        ('model = "demo"\n[layers]', "unknown table 'layers' in r.toml", "known: featuremaps, gradcam"),
        ('model = "demo"\nlimti = 1\n[gradcam]', "unknown key 'limti' in r.toml", "'limit'"),
        ('model = "demo"\n[gradcam]\nmetod = "x"', "unknown key 'gradcam.metod' in r.toml", "'method'"),
        ('model = "demo"\n[gradcam]\nbatch-size = 1', "unknown key 'batch-size' in r.toml [gradcam]", "known: "),
        ('model = "demo"\n[gradcam]\nmethod = "gradcams"', "unknown method 'gradcams'", "gradcam"),
        ('model = "demo"\n[featuremaps]\nraw = 1', "'raw' in r.toml is 1", "true or false"),
        ('model = "demo"\nimages = [1]\n[gradcam]', "'images' in r.toml is not a list of paths", "images = ["),
        ('model = "net.py:build"\n[gradcam]', "no pictures are given", "--dataset DIR"),
        ('model = "net.py:build"\nimages = "pics"\n[gradcam]\nlayer = "fc"', "no spatial output", "'relu'"),
    ],
    ids=[
        "no-model", "no-probe", "unknown-table", "table-of-no-probe", "unknown-key", "unknown-key-in-table",
        "shared-key-in-table", "unknown-method", "wrong-type", "wrong-images", "no-pictures", "not-spatial",
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_followed(shell, text, message, hint):
    shell.toml("r.toml", text)
    done = shell("run r.toml -o out")
    assert done.code == 2
    error, *more = (line for line in done.err.splitlines() if not line.startswith("warning: "))
    assert message in error
    assert hint in more[0]


def test_a_recipe_that_is_not_there(shell):
    done = shell("run r.toml")
    assert done.code == 2
    assert "cannot read configuration 'r.toml'" in done.err


HEAD = 'model = "net.py:build"\nimages = "pics"\nlimit = 1\nout = "out"\n'


@pytest.mark.parametrize(
    ("recipe", "words", "layers"),
    [
        ("[featuremaps]", "", {"conv"}),
        ('layer = "relu"\n[featuremaps]', "", {"relu"}),
        ('layer = "relu"\n[featuremaps]\nlayer = "conv"', "", {"conv"}),
        ('layer = ["relu", "conv"]\n[featuremaps]\nexclude = "conv"', "", {"relu"}),
        ('layer = "relu"\n[featuremaps]\nlayer = "conv"', "-l relu", {"relu"}),
        ('layer = "relu"\n[featuremaps]', "--config c.toml", {"conv"}),
        ('[featuremaps]\nlayer = "relu"', "--config c.toml", {"conv"}),
        ('[featuremaps]\nlayer = "relu"', "--config c.toml -l '[cr]*'", {"conv", "relu"}),
    ],
    ids=[
        "default", "whole-file", "own-table", "own-exclude", "flag", "config-over-file", "config-over-table",
        "flag-over-all",
    ],
)  # fmt: skip
def test_whose_layers_a_probe_gets(shell, recipe, words, layers):
    shell.toml("r.toml", HEAD + recipe)
    shell.toml("c.toml", '[featuremaps]\nlayer = "conv"')
    done = shell(f"run r.toml {words}")
    assert done.code == 0, done.err
    assert chosen("out", "featuremaps") == layers


def test_a_probe_alone_needs_no_folder(shell):
    shell.toml("r.toml", HEAD + "[gradnorm]")
    assert shell("run r.toml").code == 0
    assert set(tree("out")) == {
        "gradnorm-baseline.json", "gradnorm-ratio.png", "gradnorm.csv", "gradnorm.json", "gradnorm.junit.xml",
        "gradnorm.md", "gradnorm.png", "gradnorm.sarif", "manifest.json",
    }  # fmt: skip


def test_project_settings_are_below_the_recipe(shell):
    shell.toml(
        "pyproject.toml",
        '[tool.hookscope]\nseed = 5\nlimit = 2\n[tool.hookscope.gradcam]\nmethod = "layercam"',
    )
    shell.toml("r.toml", HEAD + "[gradcam]\n")
    assert shell("run r.toml").code == 0
    record = manifest("out")
    assert (record["options"]["seed"], record["options"]["limit"]) == (5, 1)
    assert {found["method"] for found in record["artifacts"]} == {"layercam"}


def test_the_demo_is_the_same_in_any_project(shell):
    shell.toml("pyproject.toml", '[tool.hookscope]\nlayer = "blocks.*"\nexclude = "head"\nbatch-size = 2')
    done = shell("demo --dry-run")
    assert done.code == 0, done.err
    assert "features.0: features.0" in done.out


def test_flags_go_over_the_recipe(shell):
    shell.toml("r.toml", HEAD + "[gradcam]\n")
    assert shell("run r.toml --limit 2 -o there").code == 0
    assert len(manifest("there")["images"]) == 2
    assert manifest("there")["command"] == "run"
    assert not Path("out").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_runs(shell, path):
    is_recipe = "model" in tomllib.loads(path.read_text())
    # What names no model is for --config of the command that its name opens with.
    words = f"run {path}" if is_recipe else f"{path.name.partition('-')[0]} demo --config {path}"
    done = shell(f"{words} -o out --limit 1")
    assert done.code == 0, done.err
    assert_whole("out")


def test_there_are_examples():
    assert CONFIGS
