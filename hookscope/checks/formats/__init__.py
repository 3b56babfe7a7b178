"""What a gate found, in the formats that CI services read: plain data in, text or bytes out.

What the formats share stands here. None of them opens a file or looks at the environment.
"""

from __future__ import annotations

from collections.abc import Iterable

from hookscope.checks.findings import SEVERITIES, Finding

WHOLE_MODEL = "model"
"""What stands for a layer where a rule is about the whole model."""

_CUT = "…"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then the rest; within these as they came."""
    return sorted(findings, key=_severity)


def legal(text: str) -> str:
    """The text without what readers refuse or obey: control characters and lone surrogates as escapes (`\\x1b`).

    Line feeds and tabs stay; every other line end becomes a line feed.
    """
    joined = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else _escape(letter) for letter in joined
    )


def cut(text: str, most: int) -> str:
    """The text, or as much of it as fits into `most` characters, with an ellipsis."""
    return text if len(text) <= most else text[: most - len(_CUT)] + _CUT


def _severity(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else len(SEVERITIES)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
