"""How an exception of somebody else's is quoted in one of ours: in one line, and not without end."""

from __future__ import annotations

_LONGEST = 300


def one_line(error: BaseException) -> str:
    """The exception's text with its line breaks taken out; its class where it has none."""
    text = " ".join(str(error).split())
    return (text[: _LONGEST - 3] + "..." if len(text) > _LONGEST else text) or type(error).__name__
