"""Features that `hookscope extract` wrote, read back lazily: a picture's row is read when it is asked for.

Knows the files of such a directory, and no model.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from hookscope.errors import UsageError
from hookscope.output.shards import FORMATS, INDEX

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """Where one picture is: its path, label, shard (without an ending) and row in it."""

    picture: str
    label: int | str | None
    shard: str
    row: int


class Features(Mapping[str, "LayerFeatures"]):
    """The features of a directory by layer; made by `open_features`.

    `index`: one entry for each picture, in the order of the rows of every layer.
    """

    def __init__(self, path: Path, index: Sequence[Entry], files: Mapping[str, Path]) -> None:
        self.path = path
        self.index = tuple(index)
        self._shards = [_opened(files[stem]) for stem in dict.fromkeys(entry.shard for entry in index)]

    @property
    def pictures(self) -> tuple[str, ...]:
        """Their paths."""
        return tuple(entry.picture for entry in self.index)

    @property
    def labels(self) -> tuple[int | str | None, ...]:
        """Their labels; `None` where there are none."""
        return tuple(entry.label for entry in self.index)

    def __getitem__(self, layer: str) -> LayerFeatures:
        if layer not in self._names:
            raise KeyError(f"no features of {layer!r}; there are {', '.join(self._names)}")
        return LayerFeatures(layer, self._shards, self.path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(sorted({name for shard in self._shards for name in shard.shapes}))


class LayerFeatures:
    """One layer's features, (pictures, ...), like an array: an int, a slice or a list of ints reads these rows.

    What is read is a numpy array of its own; bfloat16, which numpy has not, as float32, exactly.
    """

    def __init__(self, name: str, shards: Sequence[_Shard], path: Path) -> None:
        self.name = name
        self._path = path
        self._shards = [shard for shard in shards if name in shard.shapes]
        if len(self._shards) != len(shards):
            raise UsageError(
                f"{name!r} has features of some pictures of {path} only", "extract it again on its own"
            )
        ends = np.cumsum([shard.shapes[name][0] for shard in self._shards])
        self._starts = [0, *ends.tolist()]

    @property
    def shape(self) -> tuple[int, ...]:
        """(pictures, ...).

        Raises:
            UsageError: pictures of several sizes gave features of several shapes.
        """
        shapes = dict.fromkeys(shard.shapes[self.name][1:] for shard in self._shards)
        if len(shapes) > 1:
            raise UsageError(
                f"{self.name!r} has rows of {len(shapes)} shapes: {', '.join(map(str, shapes))}",
                "read single rows, or extract with --reduce avg or --resize",
            )
        return (len(self), *next(iter(shapes), ()))

    @property
    def dtype(self) -> str:
        """What is stored: `float32`, `float16`, `bfloat16`, ..."""
        return self._shards[0].dtypes[self.name]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, rows: int | slice | Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        if isinstance(rows, slice):
            return self._stacked(range(len(self))[rows])
        if isinstance(rows, (int, np.integer)):
            only: NDArray[Any] = self._run(self._checked(int(rows)), 1)[0]
            return only
        asked = np.asarray(rows)
        if asked.dtype == bool:
            if asked.shape != (len(self),):
                raise IndexError(f"a mask of shape {asked.shape} for {len(self)} rows")
            asked = np.flatnonzero(asked)
        return self._stacked([self._checked(int(row)) for row in asked])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def _checked(self, row: int) -> int:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return row % len(self)

    def _stacked(self, rows: Sequence[int]) -> NDArray[Any]:
        """The rows in one array, runs of neighbours in a shard read at once."""
        shape = self.shape[1:]
        if not rows:
            return np.empty((0, *shape), dtype=self._run(0, 1).dtype if len(self) else np.float32)
        parts, start = [], 0
        for at in range(1, len(rows) + 1):
            if at == len(rows) or rows[at] != rows[at - 1] + 1 or rows[at] in self._starts:
                parts.append(self._run(rows[start], at - start))
                start = at
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _run(self, first: int, count: int) -> NDArray[Any]:
        shard = bisect_right(self._starts, first) - 1
        own = first - self._starts[shard]
        return self._shards[shard].read(self.name, own, own + count)


def open_features(path: str | Path) -> Features:
    """The features that `hookscope extract` wrote into a directory, by layer; nothing is read before it is asked for.

    Raises:
        UsageError: the directory holds none, the run was not finished, or a file is missing.
    """
    path = Path(path)
    manifest = _manifest(path)
    index = list(_entries(path))
    files = {}
    for record in manifest.get("artifacts", ()):
        if record.get("part") == "features":
            file = path / str(record["path"])
            files[file.stem] = file
    missing = [str(file) for file in files.values() if not file.is_file()]
    missing += [entry.shard for entry in index if entry.shard not in files]
    if missing:
        raise UsageError(f"{missing[0]} of the features in {path} is missing", "extract them again")
    return Features(path, index, files)


def _manifest(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        raise UsageError(f"there is no directory {str(path)!r}", "where `hookscope extract -o` wrote")
    try:
        found = json.loads((path / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        hint = "a run that was not finished? start it again"
        raise UsageError(f"{path} has no {MANIFEST}, so no whole features", hint) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / MANIFEST} cannot be read: {error}", "extract them again") from None
    if not isinstance(found, dict) or not (path / INDEX).is_file():
        raise UsageError(f"{path} holds no features", "`hookscope extract -o` makes such a directory")
    return found


def _entries(path: Path) -> Iterator[Entry]:
    for number, line in enumerate((path / INDEX).read_text("utf-8").splitlines(), start=1):
        try:
            found = json.loads(line)
            yield Entry(str(found["picture"]), found["label"], str(found["shard"]), int(found["row"]))
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"line {number} of {path / INDEX} is no entry", "extract them again") from None


class _Shard:
    """One file: shapes and types by name, and rows when they are asked for."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of an array."""
        raise NotImplementedError


class _Safetensors(_Shard):
    def __init__(self, file: Path) -> None:
        self._file = file
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            self.shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            self.dtypes = {name: _TYPES.get(one.get_dtype(), one.get_dtype()) for name, one in slices.items()}

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        if self.dtypes[name] == "bfloat16":
            with safe_open(self._file, framework="pt") as opened:
                widened: NDArray[Any] = opened.get_slice(name)[start:stop].float().numpy()
                return widened
        with safe_open(self._file, framework="np") as opened:
            rows: NDArray[Any] = opened.get_slice(name)[start:stop]
            return rows


_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class _Npz(_Shard):
    def __init__(self, file: Path) -> None:
        self._file = file
        with np.load(file, allow_pickle=False) as opened:
            found = {name: opened[name] for name in opened.files}
        self.shapes = {name: array.shape for name, array in found.items()}
        self.dtypes = {name: str(array.dtype) for name, array in found.items()}

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        with np.load(self._file, allow_pickle=False) as opened:
            rows: NDArray[Any] = opened[name][start:stop]
            return rows


def _opened(file: Path) -> _Shard:
    assert file.suffix.removeprefix(".") in FORMATS, file
    try:
        return _Npz(file) if file.suffix == ".npz" else _Safetensors(file)
    except Exception as error:
        raise UsageError(f"{file} cannot be read: {error}", "extract it again") from error
