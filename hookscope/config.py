"""Configuration files: the flags of the command line written down in TOML, turned into flag defaults.

Defaults < `[tool.hookscope]` of a `pyproject.toml` here or above < `--config` file < flags.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError, near_misses


@dataclass(frozen=True)
class Config:
    """A TOML file's keys and tables, and where they come from (for messages)."""

    source: str
    values: Mapping[str, Any]

    def defaults(self, command: str, flags: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        """Values for one command: the top-level keys it has, then those of its own table.

        `flags`: the flags of every command, by its name, without the leading dashes. A top-level key may belong
        to another command; an unknown one is an error.

        Raises:
            UsageError: a key is no flag of any command, or of the command whose table it stands in.
        """
        own = set(flags.get(command, ()))
        anywhere = {flag for names in flags.values() for flag in names}
        plain = {_flag(key): value for key, value in self.values.items() if not isinstance(value, dict)}
        self._check(plain, anywhere, "")
        tables = {key: value for key, value in self.values.items() if isinstance(value, dict)}
        for name, table in tables.items():
            if name not in flags:
                raise self._unknown(name, flags, "table ")
            self._check(map(_flag, table), set(flags[name]), f"{name}.")
        merged = plain | {_flag(key): value for key, value in tables.get(command, {}).items()}
        return {key: value for key, value in merged.items() if key in own}

    def _check(self, keys: Iterable[str], known: set[str], prefix: str) -> None:
        for key in keys:
            if key not in known:
                raise self._unknown(key, known, "key ", prefix)

    def _unknown(self, key: str, known: Iterable[str], what: str, prefix: str = "") -> UsageError:
        hint = near_misses(key, known) or f"known: {', '.join(sorted(known))}"
        return UsageError(f"unknown {what}{prefix + key!r} in {self.source}", hint)


def read_config(path: str) -> Config:
    """The file's contents.

    Raises:
        UsageError: it cannot be read or is no TOML.
    """
    return Config(path, _toml(Path(path), path))


def project_config(start: Path) -> Config | None:
    """`[tool.hookscope]` of the nearest `pyproject.toml` in `start` or above that has it.

    Raises:
        UsageError: the nearest `pyproject.toml` is no TOML.
    """
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            table = _toml(path, str(path)).get("tool", {}).get("hookscope")
            if isinstance(table, dict):
                return Config(f"{path} [tool.hookscope]", table)
    return None


def _toml(path: Path, shown: str) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise UsageError(f"configuration {shown!r} is not a regular file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read configuration {shown!r}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"configuration {shown!r} is not valid TOML: {error}") from error


def _flag(key: str) -> str:
    return key.replace("_", "-")
