"""Colour tables: the same colours as matplotlib's, and names without loading numpy."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pytest

from hookscope.errors import UsageError
from hookscope.render import colour


@pytest.mark.parametrize("name", colour.names())
def test_table_equals_matplotlib(name):
    expected = matplotlib.colormaps[name](np.arange(256), bytes=True)[:, :3]
    assert colour.table(name).dtype == np.uint8
    np.testing.assert_array_equal(colour.table(name), expected)


def test_table_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        colour.table("viridis")[0] = 0


def test_unknown_name_gives_the_nearest():
    with pytest.raises(UsageError, match="no colour table is called 'viridus'") as caught:
        colour.table("viridus")
    assert caught.value.hint == "did you mean 'viridis'?"


def test_unlike_any_name_lists_all():
    with pytest.raises(UsageError) as caught:
        colour.check("zzz")
    assert all(name in caught.value.hint for name in colour.names())


def test_names_load_no_numpy():
    code = "import sys; from hookscope.render import colour; print(colour.names()[0], 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["viridis", "False"]
