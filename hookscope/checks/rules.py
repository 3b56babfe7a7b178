"""How bad a rule's findings are and which limits hold where, and the cases that come of looking at every place.

Settings come from tables (a configuration's, or flags in the same form) and are checked against the rules that a gate
has. It must not know what a rule measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hookscope.checks.findings import SEVERITIES, Case, Finding, Rule
from hookscope.errors import UsageError, near_misses
from hookscope.layers import matches

_Named = TypeVar("_Named", Rule, "Limit")
_A_LIMIT = "a limit is a number of 0 or more"


@dataclass(frozen=True)
class Limit:
    """A number that a rule compares with; `None` as default: nothing is compared until it is set.

    `of_model`: it is of the whole model, and cannot be set for some layers alone. `or_else`: the limit that holds
    where this one is not set.
    """

    name: str
    summary: str
    default: float | None = None
    of_model: bool = False
    or_else: str = ""


@dataclass(frozen=True)
class Place:
    """What a rule is looked at for: a layer's call, a parameter, or the whole model (all fields empty).

    `name`: as findings call it. `layer`: the layer that it is or belongs to, which globs match too. `type`: that
    layer's class. `aliases`: other names it has.
    """

    name: str = ""
    layer: str = ""
    type: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which a glob may mean it."""
        return tuple(dict.fromkeys(name for name in (self.layer, self.name, *self.aliases) if name))

    def matches(self, pattern: str) -> bool:
        """Whether a glob means this place: by its own name, its layer's, the class, or another name it has."""
        return any(matches(pattern, name, self.type) for name in self.names)


@dataclass(frozen=True)
class Seen:
    """What a rule saw at one place: a finding where there is a `message`, else passed unless `skipped` says why not.

    `advice`: instead of the rule's, where this place calls for another.
    """

    place: Place
    value: float = math.nan
    limit: float = math.nan
    message: str = ""
    skipped: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Setting:
    """A severity or a limit that was set: for all places, or for those that a glob means. `source`: by whom."""

    pattern: str
    name: str
    value: Any
    source: str

    def holds(self, name: str, place: Place) -> bool:
        """Whether it is of this name and for this place."""
        return self.name == name and (not self.pattern or place.matches(self.pattern))


@dataclass(frozen=True)
class Settings:
    """Severities and limits of a gate. Of several that are for a place, the one that was set last holds.

    In a table plain values come before its globs, and globs in the order in which they are written; what `over`
    adds, such as flags, comes after all of it.
    """

    rules: tuple[Rule, ...]
    limits: tuple[Limit, ...]
    severities_set: tuple[Setting, ...] = ()
    limits_set: tuple[Setting, ...] = ()

    def over(
        self,
        severity: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        source: str = "",
    ) -> Settings:
        """These settings with two tables over them: `{name: value}`, and `{glob: {name: value}}` for some layers.

        Args:
            severity: by rule, `error`, `warn` or `off`.
            limits: by limit, a number of 0 or more; `inf` is one.
            source: where the tables come from, for messages.

        Raises:
            UsageError: an unknown rule or limit, or a value that is none.
        """
        severities, numbers = _read(severity, f"{source} severity"), _read(limits, f"{source} limits")
        return replace(
            self,
            severities_set=(*self.severities_set, *map(self._checked_severity, severities)),
            limits_set=(*self.limits_set, *map(self._checked_limit, numbers)),
        )

    def severity(self, rule: str, place: Place) -> str:
        """How bad a finding of the rule at this place is; `off`: it is not looked for."""
        found = _last(self.severities_set, rule, place)
        return str(found.value if found else _named(self.rules, rule).severity)

    def limit(self, name: str, place: Place) -> float | None:
        """The limit at this place; `None` where none is set and there is no default."""
        found = _last(self.limits_set, name, place)
        if found:
            return float(found.value)
        known = _named(self.limits, name)
        return self.limit(known.or_else, place) if known.or_else else known.default

    def number(self, name: str, place: Place) -> float:
        """The limit at this place, of those that have a default."""
        limit = self.limit(name, place)
        assert limit is not None, name
        return limit

    def check(self, places: Iterable[Place]) -> None:
        """Nothing, where every glob means one of these places at least.

        Raises:
            UsageError: one means none; the nearest names are in the hint.
        """
        places = tuple(places)
        for one in (*self.severities_set, *self.limits_set):
            if one.pattern and not any(place.matches(one.pattern) for place in places):
                raise _no_match(one, places)

    def described(self) -> dict[str, Any]:
        """All that holds, for a manifest: `severity` and `limits` in the form of the tables they are read from."""
        limits = {one.name: self.limit(one.name, Place()) for one in self.limits}
        severities = {rule.name: self.severity(rule.name, Place()) for rule in self.rules}
        return {
            "severity": severities | _by_glob(self.severities_set),
            "limits": {name: value for name, value in limits.items() if value is not None}
            | _by_glob(self.limits_set),
        }

    def _checked_severity(self, one: Setting) -> Setting:
        _check_name(one, "rule", [rule.name for rule in self.rules])
        if one.value not in SEVERITIES:
            raise _refused(one, "is no severity", f"one of {', '.join(SEVERITIES)}")
        return one

    def _checked_limit(self, one: Setting) -> Setting:
        _check_name(one, "limit", [limit.name for limit in self.limits])
        if isinstance(one.value, bool) or not isinstance(one.value, int | float) or math.isnan(one.value):
            raise _refused(one, "is not a number", _A_LIMIT)
        if one.value < 0:
            raise _refused(one, "is negative", _A_LIMIT)
        if one.pattern and _named(self.limits, one.name).of_model:
            raise _refused(
                one, "cannot be set for some layers", "it is of the whole model: set it without a glob"
            )
        return one


Look = Callable[[Settings], Iterable[Seen]]
"""What looks at every place that a rule concerns, by the limits that hold there."""


def run(looks: Mapping[str, Look], settings: Settings) -> tuple[Case, ...]:
    """A case for each rule and place, in the order of the settings' rules and of what each look gives.

    A rule without a look is left out, and so is a place where it is `off`.
    """
    return tuple(
        _case(rule, seen, severity)
        for rule in settings.rules
        if rule.name in looks and _is_on(rule, settings)
        for seen in looks[rule.name](settings)
        if (severity := settings.severity(rule.name, seen.place)) != "off"
    )


def assignments(words: Iterable[str], flag: str) -> dict[str, Any]:
    """`NAME=VALUE` and `GLOB:NAME=VALUE`, as flags give them, as the table that `Settings.over` takes.

    A value that reads as a number is one.

    Raises:
        UsageError: a word has no `=`, or nothing on either side of it.
    """
    table: dict[str, Any] = {}
    for word in words:
        # From the right, as a glob may hold both marks.
        left, equals, value = (part.strip() for part in word.rpartition("="))
        pattern, _, name = left.rpartition(":")
        if not equals or not name or not value:
            hint = "NAME=VALUE, or GLOB:NAME=VALUE for some layers"
            raise UsageError(f"{flag} {word!r} is no assignment", hint)
        (table.setdefault(pattern, {}) if pattern else table)[name] = _number(value)
    return table


def findings(cases: Iterable[Case]) -> tuple[Finding, ...]:
    """The findings among the cases: errors first, else in the order of the cases."""
    found = [case.finding for case in cases if case.finding is not None]
    return tuple(sorted(found, key=lambda one: SEVERITIES.index(one.severity)))


def _case(rule: Rule, seen: Seen, severity: str) -> Case:
    name, advice = seen.place.name, seen.advice or rule.advice
    if not seen.message:
        return Case(rule.name, name, skipped=seen.skipped)
    finding = Finding(rule.name, severity, name, seen.value, seen.limit, seen.message, rule.why, advice)
    return Case(rule.name, name, finding)


def _is_on(rule: Rule, settings: Settings) -> bool:
    """Whether it may be looked for anywhere: what is off everywhere costs nothing."""
    said = [one.value for one in settings.severities_set if one.name == rule.name and one.pattern]
    return any(severity != "off" for severity in (settings.severity(rule.name, Place()), *said))


def _read(table: Mapping[str, Any] | None, source: str) -> Iterator[Setting]:
    given, source = table or {}, source.strip()
    for key, value in given.items():
        if not isinstance(value, Mapping):
            yield Setting("", key.replace("_", "-"), value, source)
    for pattern, inner in given.items():
        if isinstance(inner, Mapping):
            for key, value in inner.items():
                yield Setting(pattern, key.replace("_", "-"), value, f"{source} of {pattern!r}")


def _last(settings: Sequence[Setting], name: str, place: Place) -> Setting | None:
    return next((one for one in reversed(settings) if one.holds(name, place)), None)


def _named(known: Sequence[_Named], name: str) -> _Named:
    return next(one for one in known if one.name == name)


def _by_glob(settings: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for one in settings:
        if one.pattern:
            tables.setdefault(one.pattern, {})[one.name] = one.value
    return tables


def _check_name(one: Setting, what: str, known: Sequence[str]) -> None:
    if one.name not in known:
        hint = near_misses(one.name, known) or f"known: {', '.join(known)}"
        raise UsageError(f"unknown {what} {one.name!r} in {one.source}", hint)


def _refused(one: Setting, why: str, hint: str) -> UsageError:
    return UsageError(f"{one.name} = {one.value!r} in {one.source} {why}", hint)


def _no_match(one: Setting, places: Sequence[Place]) -> UsageError:
    if one.pattern.startswith("type:"):
        known = sorted({f"type:{place.type}" for place in places})
    else:
        known = [name for place in places for name in place.names]
    hint = near_misses(one.pattern, known) or "`hookscope layers MODEL` lists the names"
    return UsageError(f"no layer and no parameter matches {one.pattern!r} in {one.source}", hint)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
