"""Checkpoint files: from a path to the object inside; no code is run and no bomb unpacked.

It does not know what a model needs; `checkpoint` finds the weights in what this module reads.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from hookscope.errors import ModelError, near_misses

SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin")

MAX_PICKLE_BYTES = 32 * 2**20
MAX_PICKLE_RATIO = 50
"""A pickle above one MiB must not unpack to more than this many times its compressed size."""
MAX_UNPACKED_RATIO = 50
"""The same for all members together, above 64 MiB."""

_MIB = 2**20
_HEAD_BYTES = 512
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_UNSAFE = re.compile(
    r"GLOBAL (\S+)|unrecognized function (.+?)(?: which|$)|but got (<class .+?>)", re.MULTILINE
)
_RESAVE = "save only the tensors: torch.save(model.state_dict(), FILE), or safetensors"


def read_state_dict(path: Path) -> Any:
    """What the file holds: for most files a mapping of names to tensors on the CPU, perhaps wrapped.

    The kind is told by the content, not by the suffix. Pickles are read with `weights_only=True`.

    Raises:
        ModelError: the file is missing, empty, damaged, no checkpoint, needs code to be read, or would
            unpack to far more than it is.
    """
    path = path.expanduser()
    head, size = _head(path)
    _refuse_text(path, head, size)
    if head.startswith(_ZIP):
        _check_zip(path, size)
    elif _is_safetensors(head, size) or (path.suffix == ".safetensors" and not head.startswith(_PICKLE)):
        return _read_safetensors(path)
    return _read_torch(path)


def _head(path: Path) -> tuple[bytes, int]:
    if not path.is_file():
        raise _missing(path)
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES), path.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read the weights file {str(path)!r}: {error.strerror}") from error


def _missing(path: Path) -> ModelError:
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        hint = f"it holds {', '.join(map(repr, files[:3]))}" if files else "give the file itself"
        return ModelError(f"the weights {str(path)!r} are a directory", hint)
    if path.exists():
        return ModelError(f"the weights {str(path)!r} are no regular file")
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    return ModelError(f"there is no weights file {str(path)!r}", near_misses(path.name, siblings))


def _refuse_text(path: Path, head: bytes, size: int) -> None:
    if size == 0:
        raise ModelError(f"the weights file {str(path)!r} is empty", "copy or download it again")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{str(path)!r} is a git-lfs pointer, not the weights", "run `git lfs pull`")
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(
            f"{str(path)!r} is a web page, not a checkpoint",
            "the download gave an error page; download it again",
        )
    if _is_text(head):
        raise ModelError(f"{str(path)!r} is text, not a checkpoint", f"known files are {' '.join(SUFFIXES)}")


def _is_text(head: bytes) -> bool:
    return all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head)


def _is_safetensors(head: bytes, size: int) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def _check_zip(path: Path, size: int) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _damaged(path, error) from error
    _refuse_other_archives(path, [member.filename for member in members])
    # Every one: torch reads the first data.pkl of the archive, and zipfile by name the last.
    for member in members:
        if _member_name(member.filename) == "data.pkl":
            _check_pickle_size(path, member.file_size, member.compress_size)
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(64 * _MIB, MAX_UNPACKED_RATIO * size):
        raise _bomb(path, f"{size} bytes that would unpack to {unpacked}")
    # A file may hold two directories, of which torch and zipfile each believe another.
    _check_pickle_size(path, _pickle_bytes(path), size)


def _pickle_bytes(path: Path) -> int:
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        measure = getattr(reader, "get_record_size", None)  # not every torch has it
        return 0 if measure is None else int(measure("data.pkl"))
    except RuntimeError as error:
        raise _damaged(path, error) from error


def _check_pickle_size(path: Path, unpacked: int, packed: int) -> None:
    if unpacked > MAX_PICKLE_BYTES:
        limit = MAX_PICKLE_BYTES // _MIB
        raise _bomb(path, f"a pickle of {unpacked / _MIB:.0f} MiB; the limit is {limit} MiB")
    if unpacked > max(_MIB, MAX_PICKLE_RATIO * packed):
        ratio = unpacked // max(1, packed)
        raise _bomb(path, f"a pickle packed {ratio}:1; the limit is {MAX_PICKLE_RATIO}:1")


def _bomb(path: Path, what: str) -> ModelError:
    return ModelError(f"{str(path)!r} is refused: it holds {what}", "no checkpoint needs that; " + _RESAVE)


def _refuse_other_archives(path: Path, names: list[str]) -> None:
    inside = {_member_name(name) for name in names}
    if "constants.pkl" in inside:
        raise ModelError(
            f"{str(path)!r} is a TorchScript archive, not a checkpoint",
            "save the state_dict() of the model it was made from; hooks do not work on TorchScript",
        )
    if "archive_format" in inside:
        raise ModelError(
            f"{str(path)!r} is an exported program, not a checkpoint",
            "give it as MODEL, with the suffix .pt2",
        )
    if "data.pkl" not in inside:
        raise ModelError(f"{str(path)!r} is a zip archive without a checkpoint in it", "unpack it first")


def _member_name(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2].lower()  # torch finds DATA.PKL as well


def _read_safetensors(path: Path) -> Any:
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:  # SafetensorError, and whatever an unknown dtype leads to
        raise _damaged(path, error) from error


def _read_torch(path: Path) -> Any:
    try:
        # The open file, not the path: torch takes a path that ends in .safetensors for what it says.
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise _refused(path, error) or _damaged(path, error) from error


def _refused(path: Path, error: Exception) -> ModelError | None:
    found = _UNSAFE.search(str(error))
    if found is None:
        return None
    what = next(group for group in found.groups() if group)
    return ModelError(
        f"{str(path)!r} needs code to be read ({what}), and code in a checkpoint is never run", _RESAVE
    )


def _damaged(path: Path, error: Exception) -> ModelError:
    text = str(error).strip()
    # torch wraps the reason in advice to switch the protection off.
    reason = text.rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0][:160].split(". ")[0]
    if not text or "Weights only load failed" in reason:
        reason = "its content makes no sense"
    kind = type(error).__name__
    return ModelError(
        f"the weights file {str(path)!r} is damaged or no checkpoint ({kind}: {reason})",
        "copy or download it again",
    )
