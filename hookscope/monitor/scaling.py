"""The loss scale of automatic mixed precision, read and never changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Scaling:
    """What a `torch.amp.GradScaler` does to gradients; nothing where there is none, or it is disabled."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    @property
    def active(self) -> bool:
        """Whether losses are scaled at all."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def now(self, device: torch.device) -> Tensor:
        """The scale as (1,) on its device, copied and not waited for: 1 where nothing has been scaled yet."""
        # `get_scale()` would wait for the device; the tensor is changed in place by `update()`.
        scale = getattr(self._scaler, "_scale", None) if self.active else None
        if isinstance(scale, Tensor):
            return scale.detach().reshape(1).clone()
        return torch.ones(1, device=device)
