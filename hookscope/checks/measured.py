"""How a baseline's figures came about: what must be the same for two runs to be compared, and what is worth a warning.

Every gate's baseline says so in its own fields. It reads and writes no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hookscope.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LONGEST = 80


@dataclass(frozen=True)
class Made:
    """By what they were made; another model, other weights or versions are worth a warning."""

    model: str
    weights: str
    versions: Mapping[str, str]

    def differences(self, here: Made) -> tuple[str, ...]:
        """In words, what is not the same in a run that was made like `here`, and does not forbid to compare."""
        pairs: list[tuple[str, str | None, str | None]] = [
            ("model", self.model, here.model),
            ("weights", self.weights, here.weights),
        ]
        versions = sorted({*self.versions, *here.versions})
        pairs += [(name, self.versions.get(name), here.versions.get(name)) for name in versions]
        return tuple(
            f"the baseline was made with {name} {short(old)}, here it is {short(new)}"
            for name, old, new in pairs
            if old != new
        )


def check_same(old: DataclassInstance, new: DataclassInstance, path: str, free: Collection[str] = ()) -> None:
    """Nothing, where two runs were measured alike, so that their figures can be compared.

    Args:
        old: how those of the baseline were measured.
        new: likewise here; of the same class.
        path: where the baseline was read.
        free: fields that may differ.

    Raises:
        UsageError: a field is not the same.
    """
    for field in fields(old):
        then, now = getattr(old, field.name), getattr(new, field.name)
        if then != now and field.name not in free:
            words = field.name.replace("_", " ")
            raise UsageError(
                f"the baseline {path!r} was measured otherwise: {words} {short(then)}, here {short(now)}",
                "measure as it was, or make another with --update-baseline",
            )


def rounded(value: float, digits: int) -> float:
    """The value to that many significant digits."""
    return float(f"{value:.{digits}g}")


def short(value: Any) -> str:
    """A value of a foreign document, quoted, not too long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
