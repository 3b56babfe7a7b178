"""From raw, signed maps to what is shown: averaged over rounds, rectified, fused over layers, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hookscope.artifacts import MapStatus
from hookscope.cam.fusing import fused
from hookscope.cam.plan import Made
from hookscope.layers import OutputInfo, Site
from hookscope.probes.cam import Key, Raw


@dataclass(frozen=True)
class Stack:
    """The maps of a batch over all rounds: `kept` (N, h, w) as they are shown, `signed` before their ReLU."""

    kept: Tensor
    signed: Tensor
    flat: tuple[bool, ...]
    defined: bool


def judged(stack: Stack, image: int, *, signed: bool) -> tuple[float, float, MapStatus]:
    """Least and greatest value, and what the map means.

    The range is that of the values kept; of a map with nothing above zero it is the signed one, which says more.
    """
    if not stack.defined:
        return np.nan, np.nan, MapStatus.UNDEFINED
    kept, before = stack.kept[image], stack.signed[image]
    finite = before[before.isfinite()]
    low, high = (float(value) for value in finite.aminmax()) if finite.numel() else (np.nan, np.nan)
    least = low if signed else max(low, 0.0)
    if finite.numel() < before.numel():
        return least, high if signed else max(high, 0.0), MapStatus.NON_FINITE
    if stack.flat[image]:
        return 0.0, 0.0, MapStatus.ZERO_GRADIENT
    if low == high == 0:
        return 0.0, 0.0, MapStatus.BLANK
    if high <= 0 and not signed:
        return low, high, MapStatus.NEGATIVE_ONLY
    return (low, high, MapStatus.OK) if signed else (float(kept.min()), float(kept.max()), MapStatus.OK)


def averaged(rounds: Sequence[Mapping[Key, Raw]], rectified: Mapping[str, bool]) -> dict[Key, Stack]:
    """The mean over the rounds of every map, after its ReLU where it has one."""
    found = {}
    for key in rounds[0]:
        raws = [one[key] for one in rounds if key in one]
        signed = torch.stack([raw.values for raw in raws])
        kept = signed.clamp(min=0) if rectified[key.method] else signed
        flat = tuple(all(row) for row in zip(*(raw.flat for raw in raws), strict=True))
        found[key] = Stack(kept.mean(dim=0), signed.mean(dim=0), flat, all(raw.defined for raw in raws))
    return found


def one_of_many(members: Sequence[Made], how: str) -> Made:
    first = members[0]
    broken = [made.status for made in members if made.status in (MapStatus.UNDEFINED, MapStatus.NON_FINITE)]
    values = fused([torch.from_numpy(made.values) for made in members], how)
    site = Site("+".join(str(made.site) for made in members))
    if broken:
        return replace(first, site=site, values=values.numpy(), status=broken[0])
    low, high = float(values.min()), float(values.max())
    flat = {made.status for made in members}
    status = MapStatus.OK if high > 0 else flat.pop() if len(flat) == 1 else MapStatus.BLANK
    return replace(first, site=site, values=values.numpy(), minimum=low, maximum=high, status=status)


def channels_of(info: OutputInfo) -> int:
    return info.shape[1] if info.layout == "NCHW" else info.shape[-1]
