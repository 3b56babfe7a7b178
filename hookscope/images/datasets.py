"""Labelled pictures: a directory with a folder for each class, and which class each folder means.

It looks at names alone. Where the names leave any doubt it asks, rather than measure against wrong labels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hookscope.errors import UsageError, near_misses
from hookscope.images.decoding import reason
from hookscope.images.finding import Found, Search, is_hidden
from hookscope.wording import folded


def find_dataset(directory: str, categories: Sequence[str] | None, limit: int | None = None) -> Found:
    """The pictures in a directory's class folders, each with its class index as `label`.

    A folder named like a label (case aside, `_` for a space) or a decimal class id means that class. Where no
    name says otherwise and there are as many folders as `categories`, their sorted order is the class index.
    Without categories, folders that are all decimal ids are ids, and sorted order counts for any others.

    Raises:
        UsageError: no such directory, no folders in it, or folders whose class is unknown; these are named.
    """
    folders = _class_folders(directory)
    labels = _labels(directory, folders, categories) if categories else _unnamed_labels(folders)
    search = Search(limit)
    for folder in folders:
        search.add(os.path.join(directory, folder), labels[folder])
    return search.found()


def _class_folders(directory: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except (OSError, ValueError) as error:
        hint = "--dataset takes a directory with a folder of pictures for each class"
        raise UsageError(f"cannot read dataset {directory!r}: {reason(error)}", hint) from error
    folders = [name for name in names if not is_hidden(name) and os.path.isdir(os.path.join(directory, name))]
    if not folders:
        hint = "make a folder for each class, or give the pictures without --dataset"
        raise UsageError(f"dataset {directory!r} has no class folders", hint)
    return folders


def _unnamed_labels(folders: Sequence[str]) -> dict[str, int]:
    if all(_is_id(name) for name in folders):
        return {name: int(name) for name in folders}
    return {name: place for place, name in enumerate(folders)}


def _labels(directory: str, folders: Sequence[str], categories: Sequence[str]) -> Mapping[str, int]:
    by_label = _by_label(directory, folders, categories)
    ids = {name: int(name) for name in folders if _is_id(name) and int(name) < len(categories)}
    # Digits may be labels and ids at once: one reading for all folders goes before a mixture of both.
    for known in (by_label, ids, {**ids, **by_label}):
        if len(known) == len(folders):
            return known
    known = {**ids, **by_label}
    in_order = {name: place for place, name in enumerate(folders)}
    if len(folders) == len(categories) and all(in_order[name] == label for name, label in known.items()):
        return in_order
    raise _unknown_folders(directory, [name for name in folders if name not in known], categories)


def _by_label(directory: str, folders: Sequence[str], categories: Sequence[str]) -> dict[str, int]:
    indices: dict[str, list[int]] = {}
    for index, label in enumerate(categories):
        indices.setdefault(folded(label), []).append(index)
    meant = {name: indices[folded(name)] for name in folders if folded(name) in indices}
    for name, classes in meant.items():
        if len(classes) > 1:
            listed = ", ".join(map(str, classes))
            message = f"class folder {name!r} in {directory!r} is the label of classes {listed}"
            raise UsageError(message, "name the folder by the number of the class")
    return {name: classes[0] for name, classes in meant.items()}


def _unknown_folders(directory: str, odd: Sequence[str], categories: Sequence[str]) -> UsageError:
    named = ", ".join(repr(name) for name in odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
    noun, verb = ("folder", "is") if len(odd) == 1 else ("folders", "are")
    message = f"class {noun} {named} in {directory!r} {verb} no label or id of the model"
    spelled = [label.replace(" ", "_") for label in categories]
    hint = next(filter(None, (near_misses(name, spelled) for name in odd[:3])), "")
    ways = f"a folder is named by a label, or by a class id 0 to {len(categories) - 1}"
    return UsageError(message, f"{hint} {ways}".strip())


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdecimal()
