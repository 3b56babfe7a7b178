"""An earlier run's output directory, as a baseline: its manifest, and the files that this lists.

Nothing in it is trusted: a record is checked before it is used, a file is read only where it lies in the
directory and has the hash that its record gives. It must not know what the files mean, but for raw maps.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import UsageError
from hookscope.output.journal import JOURNAL, MANIFEST, is_inside
from hookscope.output.manifest import SCHEMA, plain
from hookscope.wording import one_line

_HINT = f"--baseline takes the output directory of an earlier run, or the {MANIFEST} in it"
_AGAIN = "make the baseline again"
_LONGEST = 80
_TEXTS = ("path", "kind", "part", "status", "sha256")


@dataclass(frozen=True)
class Listed:
    """A file that the baseline lists; `fields` is its whole record, in which only what stands here is checked."""

    path: str
    kind: str
    part: str
    status: str
    sha256: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Baseline:
    """An earlier run: `path` as given, `root` the directory its files lie in, `model` and `versions` as recorded."""

    path: str
    root: Path
    command: str
    model: Mapping[str, Any]
    versions: Mapping[str, Any]
    artifacts: tuple[Listed, ...]

    @classmethod
    def read(cls, path: str | Path) -> Baseline:
        """The baseline in an output directory, or beside a manifest.

        Raises:
            UsageError: there is none, its run was interrupted, or it is not what hookscope writes.
        """
        name = str(path)
        with readable(name, _HINT):
            file = _manifest_file(Path(path), name)
            data = file.read_bytes()
        found = _parsed(data, str(file))
        return cls(
            name,
            file.parent,
            found["command"],
            found["model"],
            found["versions"],
            tuple(_listed(record, at, name) for at, record in enumerate(found["artifacts"])),
        )

    def records(self, kind: str, part: str) -> tuple[Listed, ...]:
        """The files of this kind and part, in the manifest's order; at least one.

        Raises:
            UsageError: the baseline holds none.
        """
        found = tuple(record for record in self.artifacts if (record.kind, record.part) == (kind, part))
        if not found:
            raise UsageError(
                f"the baseline {self.path!r} holds no {part} values of {kind}: "
                f"'hookscope {_short(self.command)}' made it",
                f"give the output directory of a 'hookscope {kind}'",
            )
        return found

    def content(self, record: Listed) -> bytes:
        """The file's bytes, which have the hash that the record gives.

        Raises:
            UsageError: the file is missing, leads out of the directory, cannot be read, or is another by now.
        """
        place = self.root / record.path
        with readable(str(place), _HINT):
            if not place.resolve().is_relative_to(self.root.resolve()):
                raise UsageError(f"{str(place)!r} is a link out of the baseline {self.path!r}", _AGAIN)
            if not place.is_file():
                raise UsageError(f"{str(place)!r}, which the baseline lists, is not there", _AGAIN)
            data = place.read_bytes()
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise UsageError(
                f"{str(place)!r} is not the file that the baseline lists: its hash differs", _AGAIN
            )
        return data

    def raw_map(self, record: Listed) -> NDArray[np.float32]:
        """The values of a map, (h, w) float32.

        Raises:
            UsageError: as `content`, or the file holds no map.
        """
        data = self.content(record)
        try:
            # Not numpy.load, which would open archives and pickles too.
            array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except Exception as error:  # the header is parsed as Python, and may fail in any of its ways
            raise self._no_map(record, one_line(error)) from error
        if array.dtype.newbyteorder("=") != np.float32 or array.ndim != 2 or array.size == 0:
            raise self._no_map(record, f"{array.dtype}, shape {array.shape}")
        return array.astype(np.float32, copy=False)

    def differences(self, model: Mapping[str, Any], versions: Mapping[str, str]) -> tuple[str, ...]:
        """In words, what is not the same in this run, given the records that its manifest has of it."""
        said = [
            f"the baseline's {words} was {_short(self.model.get(key))}, here it is {_short(value)}"
            for key, words in (("name", "model"), ("weights", "checkpoint"))
            if (value := plain(model.get(key))) != self.model.get(key)
        ]
        if plain(model.get("preprocessing")) != self.model.get("preprocessing"):
            said.append("the baseline's pictures were prepared otherwise: see model.preprocessing")
        made = [
            f"{name} {_short(self.versions.get(name))}, here it is {_short(version)}"
            for name, version in versions.items()
            if self.versions.get(name) != version
        ]
        return (*said, *(f"the baseline was made with {words}" for words in made))

    def _no_map(self, record: Listed, reason: str) -> UsageError:
        return UsageError(f"{str(self.root / record.path)!r} holds no map of float32: {reason}", _AGAIN)


@contextmanager
def readable(name: str, hint: str) -> Iterator[None]:
    """What a path can do to the system's calls, as a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"the baseline {name!r} cannot be read: {error.strerror or error}", hint) from error
    except (ValueError, RuntimeError) as error:  # a name that is no text; a circle of links
        raise UsageError(f"the baseline {name!r} cannot be read: {one_line(error)}", hint) from error


def _manifest_file(path: Path, name: str) -> Path:
    if not path.exists():
        raise UsageError(f"the baseline {name!r} does not exist", _HINT)
    file = path / MANIFEST if path.is_dir() else path
    if file.is_file() and file.name != JOURNAL:
        return file
    if (file.parent / JOURNAL).is_file():
        raise UsageError(f"the baseline {name!r} is of a run that was interrupted", "run it to its end first")
    if path.is_dir():
        raise UsageError(f"the baseline {name!r} holds no {MANIFEST}", _HINT)
    raise UsageError(f"the baseline {name!r} is neither a file nor a directory", _HINT)


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    """A manifest whose outermost fields are what they should be."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the baseline {name!r} is no JSON: {one_line(error)}", _HINT) from error
    if not isinstance(found, dict) or "schema" not in found or "artifacts" not in found:
        raise UsageError(f"the baseline {name!r} is no manifest of hookscope", _HINT)
    if type(found["schema"]) is not int or found["schema"] != SCHEMA:
        raise UsageError(
            f"the baseline {name!r} has schema {_short(found['schema'])}, and {SCHEMA} is what can be read",
            f"{_AGAIN} with this hookscope",
        )
    for key, kind in (("command", str), ("model", dict), ("versions", dict), ("artifacts", list)):
        if not isinstance(found.get(key), kind):
            raise UsageError(f"the baseline {name!r} is broken: {key} is {_short(found.get(key))}", _AGAIN)
    return found


def _listed(record: Any, at: int, name: str) -> Listed:
    fields = record if isinstance(record, dict) else {}
    path, kind, part, status, sha256 = (fields.get(key, "") for key in _TEXTS)
    if not path or not all(isinstance(fields.get(key, ""), str) for key in _TEXTS):
        raise UsageError(f"the baseline {name!r} is broken: artifacts[{at}] is {_short(record)}", _AGAIN)
    if not is_inside(path):
        raise UsageError(f"the baseline {name!r} lists {_short(path)}, which leads out of it", _AGAIN)
    return Listed(path, kind, part, status, sha256, fields)


def _short(value: Any) -> str:
    """A value of a foreign manifest, quoted; a text alone without its quotes where it is one plain word."""
    if isinstance(value, str) and len(value) <= _LONGEST and value.isprintable() and " " not in value:
        return value
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
