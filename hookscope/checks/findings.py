"""A check that did not pass, in the form that every gate shares. It knows no rule and no format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A check that did not pass: which rule, where, the value, its limit, and what that means.

    `value`, `limit`: `nan` where the rule compares no numbers.
    """

    rule: str
    severity: str
    layer: str
    value: float
    limit: float
    message: str
