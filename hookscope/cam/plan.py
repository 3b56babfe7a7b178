"""How maps are to be made, and what one is when it is made. Plain data; nothing is computed here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hookscope.artifacts import MapStatus, Target
from hookscope.cam.here import Passes
from hookscope.cam.methods import Method
from hookscope.cam.questions import Question
from hookscope.errors import UsageError
from hookscope.layers import Site


@dataclass(frozen=True)
class Smooth:
    """Averaging maps over changed pictures: `count` with noise of `deviation` times the range, or the mirrored one."""

    count: int = 0
    deviation: float = 0.0

    @property
    def flip(self) -> bool:
        return self.count == 0

    @classmethod
    def parse(cls, text: str) -> Smooth:
        """`flip`, or `noise:N,SD`.

        Raises:
            UsageError: it is neither.
        """
        if text == "flip":
            return cls()
        kind, _, numbers = text.partition(":")
        count, _, deviation = numbers.partition(",")
        if kind == "noise" and count.isdecimal() and int(count) > 0:
            try:
                found = float(deviation)
            except ValueError:
                found = float("nan")
            if 0 < found < float("inf"):
                return cls(int(count), found)
        raise UsageError(f"--smooth {text!r} is not understood", "flip, or noise:N,SD such as noise:8,0.1")


@dataclass(frozen=True)
class Plan:
    """How maps are made: by which methods, of what, and what is done with them."""

    methods: tuple[Method, ...]
    question: Question
    smooth: Smooth | None = None
    fuse: str | None = None
    relu: bool = True
    passes: Passes = field(default_factory=Passes)

    def __post_init__(self) -> None:
        if self.fuse is not None and not self.relu:
            raise UsageError(
                "fusing takes what is above zero, and without ReLU the rest is kept", "one of them"
            )

    @property
    def needs_layers(self) -> bool:
        """Whether any method makes maps of layers."""
        return not all(method.on_input for method in self.methods)


@dataclass(frozen=True)
class Made:
    """One map: `values` (h, w) float32 at its site's resolution.

    `before`: the same before its ReLU. `signed`: values below zero were kept. `minimum`, `maximum`: of the finite
    values; of a `negative-only` map, before its ReLU. `target`: `None` where it is of none.
    """

    image: int
    site: Site
    method: str
    values: NDArray[np.float32]
    before: NDArray[np.float32]
    minimum: float
    maximum: float
    status: MapStatus
    target: Target | None
    signed: bool = False
