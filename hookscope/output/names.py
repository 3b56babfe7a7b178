"""File names that every file system takes, from layer, label and picture names. Knows no directory."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookscope.artifacts import Heat, Pair, Target

_REFUSED = frozenset('<>:"/\\|?*')
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\.|$)", re.IGNORECASE)
_HASH_LETTERS = 8
_LONGEST_MAP = 220  # bytes: endings and a number still fit into the 255 of most file systems


def safe_name(text: str, limit: int = 120) -> str:
    """The text as one segment of a path, at most `limit` bytes long; the root layer `.` is `root`.

    Letters that some system refuses become `_`; what is too long ends in a hash of the whole.
    """
    if text == ".":
        return "root"
    name = "".join(map(_letter, unicodedata.normalize("NFC", text)))
    name = re.sub(r"^[. ]", "_", name)
    name = re.sub(r"[. ]$", "_", name)
    if _DEVICES.match(name):
        name = f"_{name}"
    if len(name.encode()) > limit:
        name = _shortened(name, text, limit)
    return name or "_"


def slug(text: str, limit: int = 40) -> str:
    """A label for the middle of a file name: `Egyptian cat` is `Egyptian-cat`."""
    return safe_name("-".join(text.split()), limit)


def map_name(drawn: Heat | Pair) -> str:
    """What a map is called, whatever is made of it: `layer4.gradcam.285-Egyptian-cat`."""
    targets = [] if drawn.target is None else _target_names(drawn.target)
    parts = [safe_name(str(drawn.site)), slug(drawn.method), *targets]
    return safe_name(".".join(parts), _LONGEST_MAP)


def _letter(letter: str) -> str:
    # C*: control, lone surrogates, and format, which can turn the reading direction; Zl, Zp: line ends.
    odd = unicodedata.category(letter)
    return "_" if letter in _REFUSED or odd[0] == "C" or odd in ("Zl", "Zp") else letter


def _shortened(name: str, text: str, limit: int) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LETTERS]
    kept = name.encode()[: limit - _HASH_LETTERS - 1].decode(errors="ignore")
    return f"{kept}-{digest}"


def _target_names(target: Target) -> list[str]:
    """`285-Egyptian-cat`, then `vs-281-282` where there is any; `box1-17-cat`; `norm`."""
    if target.index is None:
        named = slug(target.name)
    else:
        which = f"{slug(target.name, 16)}-" if target.box is not None else ""
        label = f"-{slug(target.label)}" if target.label else ""
        named = f"{which}{target.index}{label}"
    return [named, *([slug(f"vs-{'-'.join(map(str, target.against))}")] if target.against else [])]
