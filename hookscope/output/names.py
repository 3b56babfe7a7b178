"""File names that every file system takes, from layer, label and picture names. Knows no directory."""

from __future__ import annotations

import hashlib
import re
import unicodedata

_REFUSED = frozenset('<>:"/\\|?*')
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\.|$)", re.IGNORECASE)
_HASH_LETTERS = 8


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


def _letter(letter: str) -> str:
    # C*: control, lone surrogates, and format, which can turn the reading direction; Zl, Zp: line ends.
    odd = unicodedata.category(letter)
    return "_" if letter in _REFUSED or odd[0] == "C" or odd in ("Zl", "Zp") else letter


def _shortened(name: str, text: str, limit: int) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LETTERS]
    kept = name.encode()[: limit - _HASH_LETTERS - 1].decode(errors="ignore")
    return f"{kept}-{digest}"
