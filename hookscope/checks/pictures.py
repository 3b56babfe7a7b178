"""Which picture of an earlier run is which of this one, by their paths alone. It opens no picture.

The same path is the same picture. Another directory, or another machine, gives other paths: then it is the one
with the same file name that shares the most folders above it, where just one does and no other picture of this
run has a claim to it that is as good. Pictures of different file names are never taken for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

from hookscope.wording import listed


class Pairing:
    """Pairs this run's pictures with the baseline's as they come; what `settled` gives is final."""

    def __init__(self, earlier: Iterable[str]) -> None:
        self._earlier = frozenset(earlier)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in sorted(self._earlier):
            self._by_name[PurePosixPath(path).name].append(path)
        self._partners: dict[str, str | None] = {}

    def partner(self, path: str) -> str | None:
        """The baseline's path of a picture of this run, as far as can be told before the run is over."""
        if path not in self._partners:
            self._partners[path] = path if path in self._earlier else self._likest(path)
        return self._partners[path]

    def settled(self) -> dict[str, str]:
        """The baseline's path by this run's, without pictures that compete for one; the same path always wins."""
        claims: dict[str, list[str]] = defaultdict(list)
        for path, partner in self._partners.items():
            if partner is not None:
                claims[partner].append(path)
        winners = {_winner(paths, partner): partner for partner, paths in claims.items()}
        return {path: winners[path] for path in self._partners if path in winners}

    def why(self, path: str) -> str:
        """Why a picture of this run has no partner, in words."""
        partner = self.partner(path)
        if partner is not None:
            return f"other pictures of this run could be the baseline's {partner!r} too"
        alike = self._by_name.get(PurePosixPath(path).name, [])
        return (
            f"it could be any of the baseline's {listed(alike)}"
            if alike
            else "the baseline has no such picture"
        )

    def _likest(self, path: str) -> str | None:
        candidates = self._by_name.get(PurePosixPath(path).name, [])
        shared = [_shared_end(path, candidate) for candidate in candidates]
        if not shared or shared.count(max(shared)) > 1:
            return None
        return candidates[shared.index(max(shared))]


def _winner(paths: list[str], partner: str) -> str | None:
    """The picture that is the partner; `None` where several have the same claim."""
    if partner in paths:
        return partner
    shared = [_shared_end(path, partner) for path in paths]
    return paths[shared.index(max(shared))] if shared.count(max(shared)) == 1 else None


def _shared_end(one: str, other: str) -> int:
    """How many parts two paths have in common, counted from the file name up."""
    pairs = zip(reversed(PurePosixPath(one).parts), reversed(PurePosixPath(other).parts), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(_depth(one), _depth(other)))


def _depth(path: str) -> int:
    return len(PurePosixPath(path).parts)
