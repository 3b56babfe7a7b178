"""What is loaded when, and which way imports go. The rules of the house as tests."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookscope

PACKAGE = Path(hookscope.__file__).parent
COMMANDS = ("layers", "featuremaps", "gradcam", "gradnorm", "stats", "extract", "run", "demo", "models")
HEAVY = {"torch", "torchvision", "numpy", "PIL", "matplotlib", "safetensors", "timm"}

# Each may import those before it. A package stands for all its modules.
ORDER = (
    "errors", "wording", "config", "images.geometry", "wrappers", "nested", "threads", "turns", "preserve",
    "background", "cutting", "layers", "artifacts", "layouts", "probe", "watching", "eager", "edits",
    "stopping", "attachment", "hooks", "magnitudes", "likeness", "concentration", "spectrum", "exactsum",
    "streaming", "sampling", "reductions", "statsreport", "faithfulness", "randomise", "cam.component",
    "cam.formulas", "cam.methods", "cam.fusing", "probes", "passes", "recording", "batch_axes", "continuation",
    "replay", "runner", "cam", "losses", "gradreport", "userdata", "gradpasses", "activations", "library",
    "images", "models", "loading", "render", "output", "features", "records", "checks", "monitor", "adapters",
    "tasks", "job", "filing", "run", "cli",
)  # fmt: skip

PROGRAM = """
import contextlib, io, json, sys
loaded = {}
def look(name): loaded[name] = sorted({module.partition(".")[0] for module in sys.modules} & set(HEAVY))
import hookscope
look("import")
from hookscope.cli.app import main
for words in WORDS:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(words) == 0, words
    assert said.getvalue(), words
    look(" ".join(words))
print(json.dumps(loaded))
"""


def fresh(program):
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_help_loads_a_heavy_library():
    words = [[], ["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    loaded = json.loads(fresh(f"HEAVY = {HEAVY!r}\nWORDS = {words!r}\n{PROGRAM}"))
    assert len(loaded) == 1 + len(words)
    assert {name: found for name, found in loaded.items() if found} == {}


def test_the_commands_are_these():
    from hookscope.cli import commands

    assert tuple(command.__name__ for command in commands.COMMANDS) == COMMANDS


@pytest.mark.parametrize("name", hookscope.__all__)
def test_every_public_name_resolves(name):
    assert getattr(hookscope, name) is not None
    assert name in dir(hookscope)


def test_the_public_names_are_these():
    assert {
        "load_model", "list_layers", "feature_maps", "gradcam", "gradnorm", "attached", "preserved", "Site",
        "CamMap", "GradReport", "LayerInfo", "LoadedModel",
    } <= set(hookscope.__all__)  # fmt: skip


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'gradcma'"):
        _ = hookscope.gradcma


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")


def dotted(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path):
    """Modules of the package that a file imports at run time, wherever in the file."""
    found = set()
    for node in _run_time(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("hookscope.") for name in found if name.startswith("hookscope.")}


def _run_time(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_time(child)


def rank(name):
    """The place in ORDER of the longest entry that a dotted name lies in; `None` for names of the root."""
    fits = [entry for entry in ORDER if name == entry or name.startswith(f"{entry}.")]
    return ORDER.index(max(fits, key=len)) if fits else None


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_one_way(path):
    own = rank(dotted(path))
    if path == PACKAGE / "__init__.py":
        assert imported(path) == set()
        return
    assert own is not None, f"{dotted(path)} has no place in ORDER"
    back = {name for name in imported(path) if (rank(name) or 0) > own}
    assert not back


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_what_writes_and_draws_knows_no_model(path):
    if dotted(path).split(".")[0] not in ("render", "output"):
        return
    used = imported(path)
    assert not {name for name in used if name.split(".")[0] in ("models", "hooks", "runner", "cam", "probes")}
    assert {name for name in used if name.startswith("images")} <= {"images.View", "images.geometry.View"}
    text = path.read_text("utf-8")
    assert "import torch" not in text
    assert "from torch" not in text


def calls(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_only_the_command_line_prints(path):
    if not dotted(path).startswith("cli"):
        assert not {"print", "sys.stdout.write", "sys.stderr.write"} & set(calls(path))


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_only_hooks_registers_hooks(path):
    # A training loop has hooks of its own kind: on parameters and steps, not on layers.
    if dotted(path) not in ("hooks", "monitor.hooks"):
        assert not {name for name in calls(path) if name.rpartition(".")[2].startswith("register_")}
