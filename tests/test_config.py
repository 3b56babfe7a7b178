"""Configuration files: which one wins, what they may say, and how they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Shell, manifest

from hookscope.config import Config, project_config, read_config
from hookscope.errors import UsageError

FLAGS = {"gradcam": ["layer", "target", "batch-size"], "gradnorm": ["layer", "max-norm"]}


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.fixture
def options(shell):
    """The options that a `gradcam` run resolved to, with these words more."""

    def resolved(words=""):
        done = shell(f"gradcam net.py:build pics/0.png --overwrite -o out {words}")
        assert done.code == 0, done.err
        return manifest("out")["options"]

    return resolved


@pytest.mark.parametrize(
    ("values", "command", "expected"),
    [
        ({"layer": ["a"]}, "gradcam", {"layer": ["a"]}),
        ({"max-norm": 1.0}, "gradcam", {}),
        ({"batch_size": 2}, "gradcam", {"batch-size": 2}),
        ({"layer": ["a"], "gradcam": {"layer": ["b"]}}, "gradcam", {"layer": ["b"]}),
        ({"layer": ["a"], "gradcam": {"layer": ["b"]}}, "gradnorm", {"layer": ["a"]}),
    ],
    ids=["plain", "another-command's", "underscore", "own-table", "another-table"],
)
def test_values_for_a_command(values, command, expected):
    assert Config("c.toml", values).defaults(command, FLAGS) == expected


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"lyer": 1}, "unknown key 'lyer' in c.toml", "did you mean 'layer'?"),
        ({"zzz": 1}, "unknown key 'zzz' in c.toml", "known: batch-size, layer, max-norm, target"),
        ({"gradcma": {}}, "unknown table 'gradcma' in c.toml", "did you mean 'gradcam'"),
        ({"gradcam": {"max-norm": 1}}, "unknown key 'gradcam.max-norm' in c.toml", ""),
        ({"gradnorm": {"mx-norm": 1}}, "unknown key 'gradnorm.mx-norm' in c.toml", ""),
    ],
    ids=["near", "far", "table", "key-of-another-table", "other-tables-are-checked-too"],
)
def test_unknown_keys_are_refused(values, message, hint):
    with pytest.raises(UsageError) as caught:
        Config("c.toml", values).defaults("gradcam", FLAGS)
    assert caught.value.message == message
    assert hint in caught.value.hint


def test_an_unknown_key_names_the_nearest_even_in_a_table():
    with pytest.raises(UsageError) as caught:
        Config("c.toml", {"gradcam": {"layr": 1}}).defaults("gradcam", FLAGS)
    assert "'layer'" in caught.value.hint


def test_the_project_is_the_nearest_above_that_has_a_table(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.hookscope]\nlimit = 1")
    (tmp_path / "a/pyproject.toml").write_text("[project]\nname = 'x'")
    found = project_config(inner)
    assert found is not None
    assert found.values == {"limit": 1}
    assert str(tmp_path / "pyproject.toml") in found.source
    (inner / "pyproject.toml").write_text("[tool.hookscope]\nlimit = 2")
    nearer = project_config(inner)
    assert nearer is not None
    assert nearer.values == {"limit": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = [", "is not valid TOML"),
        (b'a = "\xff"', "is not valid TOML"),
        (None, "cannot read configuration"),
    ],
    ids=["syntax", "not-utf8", "missing"],
)
def test_a_file_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_config(str(path))


def test_later_sources_win(shell, options):
    assert options()["seed"] == 0
    shell.toml("pyproject.toml", "[tool.hookscope]\nseed = 1\n")
    assert options()["seed"] == 1
    shell.toml("pyproject.toml", "[tool.hookscope]\nseed = 1\n[tool.hookscope.gradcam]\nseed = 2\n")
    assert options()["seed"] == 2
    shell.toml("c.toml", "seed = 3\n")
    assert options("--config c.toml")["seed"] == 3
    shell.toml("c.toml", "seed = 3\n[gradcam]\nseed = 4\n")
    assert options("--config c.toml")["seed"] == 4
    assert options("--config c.toml --seed 0")["seed"] == 0


def test_a_project_above_counts(shell, options, monkeypatch):
    shell.toml("pyproject.toml", "[tool.hookscope]\nbatch-size = 3\n")
    Path("deep/er").mkdir(parents=True)
    for name in ("net.py", "pics"):
        Path("deep/er", name).symlink_to(Path(name).resolve())
    monkeypatch.chdir("deep/er")
    assert options()["batch_size"] == 3


def test_a_list_replaces_a_list(shell, options):
    shell.toml("pyproject.toml", '[tool.hookscope.gradcam]\nlayer = ["conv", "relu"]\n')
    assert options()["layer"] == ["conv", "relu"]
    shell.toml("c.toml", 'layer = ["relu"]\n')
    assert options("--config c.toml")["layer"] == ["relu"]
    assert options("--config c.toml -l conv")["layer"] == ["conv"]


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ('layer = "conv"', "layer", ["conv"]),
        ("target = [0, 2]", "target", ["0", "2"]),
        ("target = 1", "target", ["1"]),
        ("mean = [0.5, 0.5, 0.5]", "mean", "0.5,0.5,0.5"),
        ("resize = 32", "resize", "32"),
        ('resize = "32x40"', "resize", "32x40"),
        ("alpha = 1", "alpha", 1.0),
        ("batch_size = 2", "batch_size", 2),
        ("max-norm = 3.0", "target", ["top1"]),
    ],
    ids=str,
)
def test_values_are_those_of_the_command_line(shell, options, text, option, value):
    shell.toml("c.toml", text)
    assert options("--config c.toml")[option] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('batch-size = "many"', "'--batch-size'"),
        ("batch-size = 2.5", "'--batch-size'"),
        ("batch-size = true", "'batch-size' in c.toml is True"),
        ("limit = [1, 2]", "'--limit'"),
        ("alpha = 2.0", "'--alpha'"),
        ('overwrite = "no"', "'overwrite' in c.toml is 'no'"),
        ("overwrite = 1", "'overwrite' in c.toml is 1"),
        ("overwrite = [true]", "'overwrite' in c.toml is [True]"),
        ("layer = [true]", "'layer' in c.toml is [True]"),
        ("layer = [['a']]", "'layer' in c.toml is [['a']]"),
        ("weights = 1979-05-27", "'weights' in c.toml is datetime.date(1979, 5, 27)"),
        ("layer = {a = 1}", "unknown table 'layer' in c.toml"),
        ('config = "other.toml"', "unknown key 'config' in c.toml"),
        ('l = "conv"', "unknown key 'l' in c.toml"),
        ("limti = 1", "unknown key 'limti' in c.toml"),
        ("[gradcam]\ntaget = 1", "unknown key 'gradcam.taget' in c.toml"),
    ],
    ids=str,
)
def test_wrong_values_are_usage_errors(shell, text, said):
    shell.toml("c.toml", text)
    done = shell("gradcam net.py:build pics -o out --config c.toml")
    assert done.code == 2
    assert said in done.err.splitlines()[0]
    assert len(done.err.splitlines()) <= 2
    assert not Path("out").exists()


def test_switches_and_places_come_from_files_too(shell):
    shell.toml("c.toml", 'json = true\nout = "here"\nlimit = 1\n')
    done = shell("gradcam net.py:build pics --config c.toml")
    assert done.out == Path("here/manifest.json").read_text()
    assert len(manifest("here")["images"]) == 1
