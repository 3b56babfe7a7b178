"""Small words that many say: counts with their noun, and the exceptions of others quoted in one line."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 300


def one_line(error: BaseException) -> str:
    """The exception's text with its line breaks taken out; its class where it has none."""
    text = " ".join(str(error).split())
    return (text[: _LONGEST - 3] + "..." if len(text) > _LONGEST else text) or type(error).__name__


def counted(count: int, noun: str) -> str:
    """`1 picture`, `2 pictures`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as `--channels` takes them: `0-15,40`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def folded(name: str) -> str:
    """The spelling by which class names are compared: case, `_` for a space, and runs of spaces do not count."""
    return " ".join(name.replace("_", " ").casefold().split())
