"""The error tree. Each class owns its exit code; nothing here prints or exits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command returns to the shell."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    MODEL = 3
    IMAGES = 4
    NOTHING_MEASURED = 5
    OUTPUT = 6
    BUG = 70
    INTERRUPTED = 130


_PRECEDENCE = (
    ExitCode.INTERRUPTED,
    ExitCode.BUG,
    ExitCode.OUTPUT,
    ExitCode.MODEL,
    ExitCode.USAGE,
    ExitCode.NOTHING_MEASURED,
    ExitCode.CHECK_FAILED,
    ExitCode.IMAGES,
    ExitCode.OK,
)


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The one code to return where several hold."""
    return min(codes, key=_PRECEDENCE.index, default=ExitCode.OK)


class HookscopeError(Exception):
    """What happened (`message`, with the value) and what to do about it (`hint`, may be empty)."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(HookscopeError):
    """A flag, a configuration key, a name or a layer pattern that cannot be served."""

    exit_code = ExitCode.USAGE


class ModelError(HookscopeError):
    """The model, its weights file included, cannot be loaded or run."""

    exit_code = ExitCode.MODEL


class ImageError(HookscopeError):
    """A picture cannot be read."""

    exit_code = ExitCode.IMAGES


class NothingMeasured(HookscopeError):
    """The run was possible but gave no number at all."""

    exit_code = ExitCode.NOTHING_MEASURED


class OutputError(HookscopeError):
    """The output directory or a file in it cannot be written."""

    exit_code = ExitCode.OUTPUT


def near_misses(name: str, known: Iterable[str], count: int = 3) -> str:
    """`did you mean 'a', 'b'?`, or an empty string when nothing is near."""
    candidates = list(dict.fromkeys(known))
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)
    names = [repr(by_lower[key]) for key in close]
    return f"did you mean {', '.join(names)}?" if names else ""


def check_choice(flag: str, value: str, known: Iterable[str]) -> str:
    """The value, where it is one of those known.

    Raises:
        UsageError: it is not; the nearest, or all of them, are in the hint.
    """
    known = list(known)
    if value not in known:
        raise UsageError(
            f"{flag} {value!r} is unknown", near_misses(value, known) or f"one of {', '.join(known)}"
        )
    return value
