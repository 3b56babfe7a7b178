"""The rest of a model after a site, as the methods that perturb see it: values in, the model's output out.

Knows no model: it is given a way to replay, a way to make whole passes, and goes from the one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookscope.batch_axes import Axis
from hookscope.errors import UsageError
from hookscope.layers import Site
from hookscope.wording import one_line

Rest = Callable[[int, Tensor, bool], Any]
"""Told how many copies, the values at the site, and whether the model may write to them."""


class ReplayFailed(Exception):
    """The call must be made again, with new values."""


class Continuation:
    """The rest of the model after a site, for one picture.

    `value`: (1, ...) what the layer returned there, a copy. `replayed`: whether the layers before it are spared;
    if not, `note` says why whole passes are made instead.
    """

    def __init__(self, site: Site, value: Tensor, axis: Axis, whole: Rest) -> None:
        self.site = site
        self.value = value
        self.note = ""
        self._axis = axis
        self._whole = whole
        self._replay: Rest | None = None

    @property
    def replayed(self) -> bool:
        """Whether the layers before the site are spared."""
        return self._replay is not None

    def __call__(self, values: Tensor, *, given_away: bool = False) -> Any:
        """The model's output for M copies of the picture, each with values of its own at the site.

        Args:
            values: (M, ...) in the layer's own layout; where it keeps its pictures along another axis, along that.
            given_away: the model may write to `values`, which then need not be copied.

        Returns:
            What the model returns, without a graph, a copy.

        Raises:
            UsageError: the shape is not that of the site.
            ModelError: the model raised.
            ReplayFailed: the layers before the site cannot be spared after all, and `values` that were given away may
                be written to: give them once more.
        """
        copies = self._copies(values)
        if self._replay is not None:
            try:
                return self._replay(copies, values, given_away)
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:
                self.give_up(one_line(error))
                if given_away:
                    raise ReplayFailed from error
        return self._whole(copies, values, given_away)

    def replay_by(self, replay: Rest) -> None:
        """Spare the layers before the site from now on."""
        self._replay = replay

    def give_up(self, reason: str) -> None:
        """Make whole passes from now on."""
        self._replay = None
        self.note = f"whole passes are made for {self.site}: {reason}"

    def _copies(self, values: Tensor) -> int:
        axis, wanted = self._axis, list(self.value.shape)
        copies = 1
        if axis.index is not None and values.dim() == len(wanted) and axis.rows:
            copies = values.shape[axis.index] // axis.rows
            wanted[axis.index] = copies * axis.rows
        if not copies or list(values.shape) != wanted:
            raise UsageError(
                f"values of shape {tuple(values.shape)} cannot be put at {self.site}, "
                f"whose own are of shape {tuple(self.value.shape)}",
                "give values of that shape for each copy of the picture",
            )
        return copies
