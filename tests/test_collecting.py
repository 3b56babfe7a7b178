"""The garbage collector: off while the libraries come in, and left to a caller as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hookscope.cli.app import main
from hookscope.cli.collecting import as_a_guest, uncollected

PROGRAM = """
import gc, sys
seen = []
gc.callbacks.append(lambda phase, info: seen.append("torchvision" in sys.modules))
from hookscope.cli.app import main
assert main(["layers", "demo", "--dry-run", "-q"]) == 0
print(sum(seen), "torchvision" in sys.modules)
"""


@pytest.mark.parametrize("was_on", [True, False], ids=["on", "off"])
def test_it_is_off_inside_and_as_it_was_outside(was_on):
    (gc.enable if was_on else gc.disable)()
    try:
        with as_a_guest(True), uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


def test_what_came_in_is_left_out_of_later_searches_but_not_of_a_callers():
    with as_a_guest(True):
        with uncollected():
            pass
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_a_caller_froze_stays_frozen():
    gc.freeze()
    try:
        with as_a_guest(True), uncollected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_command_line_leaves_a_caller_the_collector_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["gradcam", "no-such-model", "x.png"]) == 2
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_nothing_is_searched_while_torchvision_comes_in():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    searches, loaded = done.stdout.split()
    assert loaded == "True"
    assert int(searches) < 20  # without the rule there are hundreds
