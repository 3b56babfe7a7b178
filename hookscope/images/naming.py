"""How a picture is called in what a run writes: its path for people, its key for folders.

Pure text: it knows nothing of what the files hold and does not look at them. The same names always give the
same answers.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

_MAX_CHARACTERS = 100
_MAX_BYTES = 200  # most file systems stop at 255 bytes, which 100 letters of some scripts exceed
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])", re.IGNORECASE)  # Windows devices


def shown_paths(typed: Sequence[str]) -> list[str]:
    """Each path as typed, absolute ones relative to their common parent; always with `/`."""
    absolute = [os.path.abspath(path) for path in typed if os.path.isabs(path)]
    parent = os.path.commonpath([os.path.dirname(path) for path in absolute]) if absolute else ""
    return [_printable(_relative(path, parent) if os.path.isabs(path) else path) for path in typed]


def folder_keys(shown: Sequence[str]) -> list[str]:
    """One folder name for each path, unique whatever the file system makes of case.

    The stem where it is unique, else the path joined by `-`, else that with the extension, else a number.
    """
    forms = [_forms(path) for path in shown]
    level = [0] * len(forms)
    while crowded := _movable(forms, level):
        for place in crowded:
            level[place] += 1
    return _numbered([form[at] for form, at in zip(forms, level, strict=True)])


def _relative(path: str, parent: str) -> str:
    return os.path.relpath(os.path.abspath(path), parent)


def _printable(path: str) -> str:
    # A name that is no UTF-8 reaches Python with lone surrogates, which no manifest could be written with.
    return path.replace(os.sep, "/").encode("utf-8", "replace").decode("utf-8")


def _forms(path: str) -> tuple[str, str, str]:
    """The keys a path may have, the shortest first."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")] or [""]
    stem, extension = os.path.splitext(parts[-1])
    whole = "-".join([*parts[:-1], stem])
    return _safe(stem), _safe(whole), _safe(f"{whole}-{extension[1:]}" if extension else whole)


def _movable(forms: Sequence[tuple[str, ...]], level: Sequence[int]) -> list[int]:
    """Places whose key is also another's and which have a longer form left."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, (form, at) in enumerate(zip(forms, level, strict=True)):
        places[form[at].casefold()].append(place)
    crowded = [place for group in places.values() if len(group) > 1 for place in group]
    return [place for place in crowded if level[place] + 1 < len(forms[place])]


def _numbered(keys: Sequence[str]) -> list[str]:
    """The keys with `-2`, `-3`, ... behind those that came before; no number makes a key that another has."""
    wanted = {key.casefold() for key in keys}
    used: set[str] = set()
    unique = []
    for key in keys:
        name, number = key, 1
        while name.casefold() in used or (number > 1 and name.casefold() in wanted):
            number += 1
            name = _short(key, room=len(str(number)) + 1) + f"-{number}"
        used.add(name.casefold())
        unique.append(name)
    return unique


def _safe(text: str) -> str:
    """The text as a folder name: letters, marks and digits of any language, `-` and `_`; never empty."""
    # Dots go too: `a.b` would lose its end where a suffix is replaced, and `con.x` is still a Windows device.
    kept = "".join(mark if _allowed(mark) else "_" for mark in unicodedata.normalize("NFC", text))
    name = _short(kept) or "picture"
    return f"_{name}" if _RESERVED.fullmatch(name) else name


def _allowed(mark: str) -> bool:
    return mark in "-_" or unicodedata.category(mark)[0] in "LMN"


def _short(name: str, room: int = 0) -> str:
    """The end of the name, where long names differ, with `room` characters to spare."""
    end = name[-(_MAX_CHARACTERS - room) :].encode()[-(_MAX_BYTES - room) :]
    return end.decode("utf-8", "ignore")
