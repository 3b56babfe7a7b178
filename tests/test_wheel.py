"""The wheel: what is in it, and that it works where the source tree is not seen."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import assert_whole, manifest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT))
    (found,) = place.glob("hookscope-*.whl")
    return found


def _pip(*words):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_it_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hookscope").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {"hookscope/py.typed", "hookscope/assets/mobilenet_v2-fp16.safetensors"} <= package
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "hookscope/assets/NOTICE.md"}
    # The bundled weights are most of it.
    assert wheel.stat().st_size < 9 * 2**20


def test_it_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("/METADATA"))
        ).decode()
        scripts = archive.read(
            next(name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        )
    assert b"hookscope = hookscope.cli.app:main" in scripts
    assert "License-Expression: MIT" in metadata
    required = {
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and ";" not in line
    }
    assert len(required) == 8


def test_the_demo_runs_from_it(wheel, tmp_path):
    _pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hookscope", "demo", "-o", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "cat.png  Egyptian cat .72" in done.stdout
    assert_whole(tmp_path / "out")
    assert manifest(tmp_path / "out")["versions"]["hookscope"] == "0.2.0"
    # It is the installed package that ran.
    where = "import hookscope; print(hookscope.__file__)"
    seen = subprocess.run(
        [sys.executable, "-P", "-c", where],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(seen.stdout.strip()).is_relative_to(tmp_path / "site")
