"""What loading a model gives: the module and all that is known of it. Plain data; it loads nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.models.preprocess import Preprocess

DEFAULT_EDGE_PX = 224


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be looked into.

    `module`: in eval mode, on its device. `preprocess`: how a picture becomes its input. `categories`: class
    names, `None` where unknown. `name`: as asked for. `weights`: what was loaded, in words. `parameters`:
    how many. `input_size`: (C, H, W) to run it on without a picture. `warnings`: sentences for people.
    """

    module: nn.Module
    preprocess: Preprocess
    categories: tuple[str, ...] | None
    name: str
    weights: str
    random_weights: bool = False
    parameters: int = 0
    channels_last: bool = False
    input_size: tuple[int, int, int] = (3, DEFAULT_EDGE_PX, DEFAULT_EDGE_PX)
    warnings: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """What the input's dtype must be: that of the first floating parameter or buffer, else float32."""
        values = (*self.module.parameters(), *self.module.buffers())
        return next((value.dtype for value in values if value.is_floating_point()), torch.float32)

    def batch(self, tensors: Sequence[Tensor]) -> Tensor:
        """The prepared pictures, each (C, H, W), as the module takes them: (N, C, H, W) on its device."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.stack(list(tensors)).to(self.device, self.dtype, memory_format=layout)

    @property
    def device(self) -> torch.device:
        """Where the first parameter or buffer lies, else the CPU."""
        values = (*self.module.parameters(), *self.module.buffers())
        return next((value.device for value in values), torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Source:
    """What one kind of MODEL came to, before it is moved and told of.

    `ours`: nobody else holds the module, so it may be changed. `channels_last`: whether it may be laid out
    so. `preprocess`: `None` where nothing is known, then `input_size` may still be.
    """

    module: nn.Module
    name: str
    weights: str
    ours: bool = True
    random_weights: bool = False
    channels_last: bool = False
    preprocess: Preprocess | None = None
    input_size: tuple[int, int, int] | None = None
    categories: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()


Progress = Callable[[str, int, int | None], None]
"""Told what is being loaded, and how many MiB of how many have come; `None` where that is not known."""


@dataclass(frozen=True)
class Request:
    """What was asked for beside the name.

    `weights`: as typed. `arguments`: for whoever builds the model. `progress`: hears how a download goes.
    """

    weights: str = "default"
    arguments: dict[str, object] = field(default_factory=dict)
    progress: Progress | None = None


def parameter_count(module: nn.Module) -> int:
    """How many numbers the parameters hold; what a lazy layer has not made yet counts none."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def first_channels(module: nn.Module) -> int:
    """Channels of the picture a model takes, as its first convolution says; 3 where there is none.

    Where the first in module order takes neither 1 nor 3, another that takes 3 is believed: module order is
    the order of definition, not of calls.
    """
    channels = [
        part.in_channels for part in module.modules() if isinstance(part, nn.Conv2d) and part.in_channels
    ]
    if not channels:
        return 3
    return channels[0] if channels[0] in (1, 3) or 3 not in channels else 3
