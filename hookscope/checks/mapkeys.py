"""What makes two maps of one picture the same map: layer, call, output, method, and what is explained.

Keys come from a map as it was made and from the record of one in a manifest; both must give the same. Pictures
and values are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookscope.artifacts import Heat, Target
from hookscope.checks.baseline import Listed
from hookscope.errors import UsageError
from hookscope.layers import Site


@dataclass(frozen=True)
class MapKey:
    """Which map of a picture. `target`: a class, or a text for what is none; `box`: which one, of a detection."""

    site: Site
    method: str
    target: int | str | None = None
    against: tuple[int, ...] = ()
    box: str = ""

    @property
    def place(self) -> tuple[Site, str]:
        """Where and how, whatever is explained."""
        return self.site, self.method


def key_of(heat: Heat) -> MapKey:
    """The key of a map of this run."""
    target = heat.target
    if target is None:
        return MapKey(heat.site, heat.method)
    box = target.name if target.box is not None else ""
    return MapKey(heat.site, heat.method, _explained(target), tuple(target.against), box)


def key_in(record: Listed) -> tuple[str, MapKey]:
    """A baseline's picture and key of a map; keys that an older record lacks are as if nothing was asked for.

    Raises:
        UsageError: the record is not one of a map.
    """
    read = _Reader(record)
    site = Site(read.text("layer"), read.number("call"), read.text("output"))
    box = read.text("asked") if record.fields.get("box") is not None else ""
    return read.text("image"), MapKey(site, read.text("method"), read.target(), read.classes("against"), box)


def label_in(record: Listed) -> str:
    """The label that the record gives to what is explained."""
    label = record.fields.get("label")
    return label if isinstance(label, str) else ""


def explained(key: MapKey, label: str) -> str:
    """What is explained, for people: `'tabby' (281)`, `class 281`, `class 281 against 282`, `norm`."""
    if isinstance(key.target, int):
        words = f"{label!r} ({key.target})" if label else f"class {key.target}"
    else:
        words = label or str(key.target or "the whole output")
    against = f" against {', '.join(map(str, key.against))}" if key.against else ""
    box = f" in box {key.box}" if key.box else ""
    return f"{words}{against}{box}"


def _explained(target: Target) -> int | str:
    return target.name if target.index is None else target.index


class _Reader:
    """Fields of a record that must be what they are in a map's."""

    def __init__(self, record: Listed) -> None:
        self._path = record.path
        self._fields: Mapping[str, Any] = record.fields

    def text(self, key: str) -> str:
        value = self._fields.get(key, "")
        return value if isinstance(value, str) else self._refuse(key)

    def number(self, key: str) -> int:
        value = self._fields.get(key, 0)
        return value if type(value) is int else self._refuse(key)

    def target(self) -> int | str | None:
        value = self._fields.get("target")
        return value if value is None or type(value) in (int, str) else self._refuse("target")

    def classes(self, key: str) -> tuple[int, ...]:
        value = self._fields.get(key) or []
        sound = isinstance(value, list) and all(type(one) is int for one in value)
        return tuple(value) if sound else self._refuse(key)

    def _refuse(self, key: str) -> Any:
        raise UsageError(
            f"the baseline's record of {self._path!r} is broken: its {key} is no such thing",
            "make the baseline again",
        )
