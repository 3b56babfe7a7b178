"""The README's examples are run as they stand: its commands in a folder as it describes, its Python in one go."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torchvision

from hookscope.cli.app import main
from hookscope.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PHOTOS = ROOT / "hookscope" / "assets" / "photos"

MY_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, stride=2)

    def forward(self, x):
        return self.conv(x).relu_()

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks, self.fc = nn.ModuleList([Block(3, width), Block(width, width)]), nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))

def build(width=4):
    torch.manual_seed(0)
    return Net(width)
"""


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def shell_lines():
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("hookscope ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as the README takes it to be."""
    place = tmp_path_factory.mktemp("readme")
    shutil.copy(PHOTOS / "cat.png", place / "cat.png")
    shutil.copytree(PHOTOS, place / "photos")
    shutil.copytree(ROOT / "configs", place / "configs")
    (place / "my_model.py").write_text(MY_MODEL)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None, num_classes=12)
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in model.state_dict().items()}},
        place / "my.ckpt",
    )
    return place


@pytest.mark.parametrize("line", shell_lines())
def test_a_command_of_the_readme_works(line, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    code = main(shlex.split(line)[1:])
    assert code == 0, capsys.readouterr().err


def test_the_shown_output_is_what_is_printed(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(shlex.split("featuremaps demo cat.png -l 'features.[0-3].**' -o out --overwrite")) == 0
    shown = capsys.readouterr().out
    assert "\n".join(f"    {line}" for line in shown.splitlines()) in README


def test_the_python_of_the_readme_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    # What it reads back was written by a command above it.
    (line,) = (line for line in shell_lines() if "-o out22" in line)
    assert main([*shlex.split(line)[1:], "--overwrite"]) == 0
    namespace = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    for wanted in re.findall(r"print\(.*\)  # (.*)", README):
        assert wanted in printed


def test_the_configuration_of_the_readme_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (block,) = blocks("toml")
    Path("recipe.toml").write_text(block)
    assert main(["run", "recipe.toml", "-o", "recipe"]) == 0, capsys.readouterr().err


def test_every_command_is_described():
    headings = set(re.findall(r"^### (\w+)$", README, flags=re.MULTILINE))
    assert {command.__name__ for command in COMMANDS} - {"demo", "models"} <= headings


def test_every_make_target_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", "\n".join(blocks("sh")))):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
