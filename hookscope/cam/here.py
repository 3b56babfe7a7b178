"""What further passes are about, and how they are made. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.cam.scores import Score
from hookscope.errors import UsageError
from hookscope.layers import OutputInfo, Site
from hookscope.runner import Runner


@dataclass(frozen=True)
class Passes:
    """How the further passes are made.

    `samples`, `noise`: how many noisy pictures, and the noise's standard deviation as a share of the picture's range
    of values (SmoothGrad: Smilkov et al. 2017). `top_channels`: how many channels Score-CAM tries, all where `None`.
    `seed`: of the noise, which is the same for every picture. `tell`: hears which method has made how many passes
    more. `note`: hears what a reader of the maps should know.
    """

    samples: int = 16
    noise: float = 0.15
    top_channels: int | None = None
    seed: int = 0
    tell: Callable[[str, int], None] = lambda what, done: None
    note: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"samples {self.samples!r} are none", "1 or more noisy pictures")
        if not 0 <= self.noise < float("inf"):
            raise UsageError(f"noise {self.noise!r} is no deviation", "a share of 0 or more, such as 0.15")
        if self.top_channels is not None and self.top_channels < 1:
            raise UsageError(f"top channels {self.top_channels!r} are none", "1 or more")


@dataclass(frozen=True)
class Here:
    """A batch, its scores, and the activations that its own pass left.

    `x`: (N, C, H, W). `output`: the model's answer to it. `activations`: (N, C, h, w) float32 by site.
    """

    runner: Runner
    x: Tensor
    output: Any
    scores: Sequence[Score]
    activations: Mapping[Site, Tensor]
    infos: Mapping[Site, OutputInfo]
    biases: Mapping[str, Tensor]
