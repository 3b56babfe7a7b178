"""Colour tables: their names, without loading numpy, and their 256 colours, equal to matplotlib's.

Owns the tables shipped in the package. It must not import matplotlib, nor know what is coloured.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from hookscope.errors import UsageError, near_misses

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NAMES = ("viridis", "magma", "inferno", "turbo", "jet", "gray", "coolwarm", "RdBu_r")
_COLOURS = 256


def names() -> tuple[str, ...]:
    """The colour tables there are, as `--cmap` takes them."""
    return _NAMES


def check(name: str) -> str:
    """The name itself, when there is such a table.

    Raises:
        UsageError: there is none; the nearest names are in the hint.
    """
    if name not in _NAMES:
        hint = near_misses(name, _NAMES) or f"choose from {', '.join(_NAMES)}"
        raise UsageError(f"no colour table is called {name!r}", hint)
    return name


@cache
def table(name: str) -> NDArray[np.uint8]:
    """The table's colours: (256, 3) uint8, read-only, low to high.

    Raises:
        UsageError: there is no such table.
    """
    import numpy as np

    colours = np.frombuffer(_shipped()[check(name)], np.uint8).reshape(_COLOURS, 3)
    colours.flags.writeable = False
    return colours


@lru_cache(maxsize=1)
def _shipped() -> dict[str, bytes]:
    text = (resources.files("hookscope") / "assets" / "colormaps.txt").read_text("ascii")
    found: dict[str, bytes] = {}
    name = ""
    for line in text.splitlines():
        if line in _NAMES:
            name = line
        elif not line.startswith("#"):
            found[name] = found.get(name, b"") + bytes.fromhex(line)
    return found
