"""Leaving a forward pass of which nobody needs the rest: which sites are waited for, and the signal that leaves it.

Knows no hook and no probe, and never decides what may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from hookscope.layers import Site


class Stop(BaseException):
    """Leaves a forward pass; not an `Exception`, because models catch those."""


class Awaited:
    """The sites that a pass must have returned before it may be left; of none at all it runs to its end.

    `over`: all of them were returned, and what the model still does is nobody's concern.
    """

    def __init__(self, sites: Iterable[Site] = ()) -> None:
        self.over = False
        self._missing = set(sites)

    def returned(self, sites: Iterable[Site]) -> None:
        """Some layer has returned these, and everybody was told.

        Raises:
            Stop: they were the last ones.
        """
        if not self._missing:
            return
        self._missing.difference_update(sites)
        if not self._missing:
            self.over = True
            raise Stop
