"""From raw, signed maps to what is shown: averaged over rounds, rectified, fused over layers, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
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


Verdict = tuple[float, float, MapStatus]
"""Least and greatest value, and what the map means."""


def judged(stack: Stack, *, signed: bool) -> list[Verdict]:
    """The verdict on every picture's map.

    The range is that of the values kept; of a map with nothing above zero it is the signed one, which says more.
    """
    before, kept = stack.signed.flatten(1).numpy(), stack.kept.flatten(1).numpy()
    finite = np.isfinite(before)
    low, high = (end.tolist() for end in (_least(before, finite), -_least(-before, finite)))
    ends = zip(kept.min(axis=1).tolist(), kept.max(axis=1).tolist(), strict=True)
    whole = finite.all(axis=1).tolist()
    return [
        _verdict(stack.defined, flat, (low[i], high[i]), of_kept if whole[i] else None, signed=signed)
        for i, (flat, of_kept) in enumerate(zip(stack.flat, ends, strict=True))
    ]


def _verdict(
    defined: bool, flat: bool, before: tuple[float, float], kept: tuple[float, float] | None, *, signed: bool
) -> Verdict:
    """`kept`: least and greatest value, `None` where some are not finite."""
    low, high = before
    if not defined:
        return np.nan, np.nan, MapStatus.UNDEFINED
    if kept is None:
        return (
            (low, high, MapStatus.NON_FINITE)
            if signed
            else (max(low, 0.0), max(high, 0.0), MapStatus.NON_FINITE)
        )
    if flat:
        return 0.0, 0.0, MapStatus.ZERO_GRADIENT
    if kept[0] == kept[1] == 0 and (signed or low == 0):
        return 0.0, 0.0, MapStatus.BLANK
    if kept[1] <= 0 and not signed:
        return low, high, MapStatus.NEGATIVE_ONLY
    return *kept, MapStatus.OK


def _least(values: NDArray[np.float32], finite: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The least finite value of each row; not a number where none is."""
    least = np.min(values, axis=1, where=finite, initial=np.inf)
    return np.where(finite.any(axis=1), least, np.nan).astype(np.float32)


def averaged(rounds: Sequence[Mapping[Key, Raw]], rectified: Mapping[str, bool]) -> dict[Key, Stack]:
    """The mean over the rounds of every map, after its ReLU where it has one."""
    found = {}
    for key in rounds[0]:
        raws = [one[key] for one in rounds if key in one]
        if len(raws) == 1:
            values = raws[0].values
            kept = values.clamp(min=0) if rectified[key.method] else values
            found[key] = Stack(kept, values, raws[0].flat, raws[0].defined)
            continue
        signed = torch.stack([raw.values for raw in raws])
        kept = signed.clamp(min=0) if rectified[key.method] else signed
        flat = tuple(all(row) for row in zip(*(raw.flat for raw in raws), strict=True))
        found[key] = Stack(kept.mean(dim=0), signed.mean(dim=0), flat, all(raw.defined for raw in raws))
    return found


def one_of_many(members: Sequence[Made], how: str) -> Made:
    """One map of the maps of several layers, at a site of all their names; `before` is the fused map itself."""
    fused_values = fused([torch.from_numpy(made.values) for made in members], how).numpy()
    site = Site("+".join(str(made.site) for made in members))
    first = replace(members[0], site=site, values=fused_values, before=fused_values)
    said = [made.status for made in members]
    broken = [status for status in (MapStatus.UNDEFINED, MapStatus.NON_FINITE) if status in said]
    if broken:
        return replace(first, minimum=np.nan, maximum=np.nan, status=broken[0])
    low, high = float(fused_values.min()), float(fused_values.max())
    if high > 0:
        return replace(first, minimum=low, maximum=high, status=MapStatus.OK)
    if MapStatus.NEGATIVE_ONLY in said:
        low, high = min(made.minimum for made in members), max(made.maximum for made in members)
        return replace(first, minimum=low, maximum=high, status=MapStatus.NEGATIVE_ONLY)
    return replace(
        first, minimum=0.0, maximum=0.0, status=said[0] if len(set(said)) == 1 else MapStatus.BLANK
    )


def channels_of(info: OutputInfo) -> int:
    """How many channels a spatial output has."""
    return info.shape[1] if info.layout == "NCHW" else info.shape[-1]
