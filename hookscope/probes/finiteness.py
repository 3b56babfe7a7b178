"""Where in a pass something first was not finite: which layer, going forward or back, and what made it so.

Told of tensors by a probe, it keeps no more than it needs to name one layer in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hookscope.layers import Site

FORWARD, BACKWARD = "forward", "backward"

CAUSES = {
    "parameter": "a parameter or buffer of its own is not finite",
    "received": "what it received was not finite already, though every layer before it returned finite values: "
    "the model's input, or an operation between layers",
    "layer": "it made them itself, or an operation inside it that is no layer did",
    "after": "an operation between this layer and the next made it so",
    "loss": "the gradient came from the loss like that",
}
"""What made something not finite, by name, in words."""


@dataclass(frozen=True)
class FirstNonFinite:
    """The first layer at which something was not finite, in the first batch that had such a thing.

    Forward, `site` is the first output, in the order in which calls ended, with an entry that is not finite; `cause`
    is `parameter` (of the layer's own, by name in `parameters`), `received` or `layer`. Backward, the gradients are
    followed in the order in which they came, from the loss on: `cause` is `loss` where none before was finite;
    `layer` where `site` got a finite gradient at its output and left one that is not at its input; `after` where
    the gradient at the output of `site` is not finite, and no layer received that output. `others`: layers to which
    the same applies, such as those around it, and those that share the input. `batch` counts from 0; `non_finite`
    entries of `count`.
    """

    direction: str
    site: Site
    cause: str
    batch: int
    non_finite: int
    count: int
    parameters: tuple[str, ...] = ()
    others: tuple[Site, ...] = ()

    @property
    def why(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause]
