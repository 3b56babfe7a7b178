"""The command line in this process, in a folder of its own that holds small models and pictures."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from hookscope.cli.app import main

HOSTILE = Path(__file__).parent / "data" / "hostile"

MODELS = '''
import os, signal
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=3, width=4, channels=3):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(channels, width, 3)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))

class Dense(Net):
    """No classifier: a map of scores."""
    def forward(self, x): return self.relu(self.conv(x))

class Tokens(Net):
    """Neither a classifier nor a map."""
    def forward(self, x): return self.relu(self.conv(x)).flatten(2)

class Fixed(nn.Module):
    """The same for any number of pictures."""
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x): return self.conv(torch.ones(1, 3, *x.shape[2:]))

class Positions(Net):
    def __init__(self):
        super().__init__()
        self.pos = Fixed()

    def forward(self, x): return super().forward(x + self.pos(x))

class Detached(Net):
    def forward(self, x): return super().forward(x).detach()

class NotFinite(Net):
    def forward(self, x): return super().forward(x) * float("nan")

class AtPicture(nn.Module):
    """Does something when a picture is brighter than half."""
    def __init__(self, act):
        super().__init__()
        self.net, self.act = Net(), act

    def forward(self, x):
        if x.mean() > 0.5: self.act()
        return self.net(x)

def _raise(error): raise error

build = Net
def grey(): return Net(channels=1)
def parallel(): return nn.DataParallel(Net())
def compiled(): return torch.compile(Net(), backend="eager")
def broken(): raise ValueError("no such\\nplanet")
def tired(): return AtPicture(lambda: _raise(RuntimeError("too\\ntired")))
def stopped(): return AtPicture(lambda: _raise(KeyboardInterrupt()))
def signalled(): return AtPicture(lambda: os.kill(os.getpid(), signal.SIGINT))
def killed(): return AtPicture(lambda: os.kill(os.getpid(), signal.SIGKILL))
def not_a_model(): return 7
def chatty():
    print("hello from the model")
    return Talking()

class Talking(Net):
    def forward(self, x):
        print("hello from forward")
        return super().forward(x)

def hooked():
    net = Net()
    net.conv.register_forward_hook(lambda *seen: print("hello from a hook"))
    return net

def talking_loss(output, targets):
    print("hello from the loss")
    return brier(output, targets)

class TwoCases(Net):
    """Two layers whose names differ in case alone."""
    def __init__(self):
        super().__init__()
        self.Conv = nn.Conv2d(3, 4, 3)

    def forward(self, x): return super().forward(x) + self.Conv(x).mean((2, 3))[:, :3]

def brier(output, targets): return ((output.softmax(1) - nn.functional.one_hot(targets, 3)) ** 2).sum(1).mean()
number = 7
'''


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


class Shell:
    """Runs `hookscope ...` in a folder with `net.py`, `pics/` (three dark pictures) and more when asked."""

    def __init__(self, folder, capsys):
        self.folder, self._capsys = folder, capsys
        (folder / "net.py").write_text(MODELS)
        for number in range(3):
            picture(folder / f"pics/{number}.png", number)

    def __call__(self, line: str) -> Done:
        self._capsys.readouterr()
        code = main(shlex.split(line))
        return Done(code, *self._capsys.readouterr())

    def toml(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name


def picture(path: Path, seed: int, size=(24, 20), low=0, high=100) -> None:
    """A random picture, dark unless `low` and `high` say otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(low, high, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def strict_json(text: str):
    """JSON that any parser takes: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def manifest(directory) -> dict:
    return strict_json((Path(directory) / "manifest.json").read_text("utf-8"))


def tree(directory) -> dict[str, bytes]:
    """Every file below by its relative path."""
    top = Path(directory)
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def assert_whole(directory) -> None:
    """The manifest lists just what lies there, and every listed file has its hash."""
    files = tree(directory)
    listed = {record["path"]: record["sha256"] for record in manifest(directory)["artifacts"]}
    assert set(files) == {*listed, "manifest.json"}
    assert {name: hashlib.sha256(files[name]).hexdigest() for name in listed} == listed


def assert_journal(directory) -> set[str]:
    """The journal of an unfinished run lists whole files, and nothing else lies there; gives their paths."""
    files = tree(directory)
    lines = [strict_json(line) for line in files.pop(".hookscope.jsonl").decode().splitlines() if line]
    listed = {line["path"]: line["sha256"] for line in lines[1:]}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == listed
    return set(listed)
