"""Feature maps: copies of the channels worth showing, taken the moment the layer returns them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hookscope.artifacts import Heat, MapStatus, Tiles
from hookscope.errors import UsageError
from hookscope.hooks import Needs, Probe
from hookscope.layers import OutputInfo, Site
from hookscope.layouts import to_nchw
from hookscope.wording import ranges

DEFAULT_MAX_CHANNELS = 64

Infos = Callable[[Site], OutputInfo | None]


@dataclass(frozen=True)
class Channels:
    """Which channels of a layer to show; `Channels.parse` reads the command line's words for it.

    `kind` is `all`, `top` (the `count` of largest variance over positions), `random` (`count`, drawn with
    `seed`) or `list` (those of `indices` that there are, at most `count` of them by variance where it is not 0).
    """

    kind: str = "all"
    count: int = 0
    indices: tuple[int, ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, text: str | None, max_channels: int | None = None, seed: int = 0) -> Channels:
        """`all`, `top:K`, `random:K` or `0-15,40`; nothing means up to `max_channels` (64) by variance.

        Raises:
            UsageError: the text is none of these.
        """
        if text is None or (text == "all" and max_channels):
            return cls("top", count=max_channels or DEFAULT_MAX_CHANNELS)
        if text == "all":
            return cls()
        kind, _, number = text.partition(":")
        if kind in ("top", "random") and number.isdecimal() and int(number) > 0:
            count = min(int(number), max_channels or int(number))
            return cls(kind, count=count, seed=seed)
        indices = _parsed_list(text)
        return cls("list", count=max_channels or 0, indices=indices)

    def choose(self, maps: Tensor) -> tuple[Tensor, str]:
        """Indices into (C, h, w) maps in ascending order, and what they are in words."""
        total = maps.shape[0]
        if self.kind == "list":
            kept = torch.tensor([index for index in self.indices if index < total], dtype=torch.long)
            if self.count and len(kept) > self.count:
                kept = kept[_by_variance(maps[kept], self.count)]
            return kept, f"{ranges(kept.tolist()) or 'none'} of {total}"
        if self.kind == "all" or self.count >= total:
            return torch.arange(total), f"all {total}"
        if self.kind == "random":
            order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed))
            return order[: self.count].sort().values, f"{self.count} of {total} at random"
        if maps[0].numel() == 1:
            # One position does not vary: what stands out is what is large.
            order = torch.sort(maps.float().flatten().abs(), descending=True, stable=True).indices
            return order[: self.count].cpu().sort().values, f"{self.count} of {total} by magnitude"
        return _by_variance(maps, self.count), f"{self.count} of {total} by variance"


class FeatureMapsProbe(Probe):
    """For every picture and site: the chosen channels as the layer returned them, and the mean over all.

    Args:
        layers: names of the layers to show.
        infos: what is known of a site (`None`: nothing, and it is left out).
        channels: which channels to keep.
        overlay: also keep the mean activation over all channels.
    """

    needs = Needs(outputs=True)
    objectives = frozenset[str]()

    def __init__(
        self, layers: frozenset[str], infos: Infos, channels: Channels, *, overlay: bool = False
    ) -> None:
        self.layers = layers
        self.unmapped: set[Site] = set()
        self.without: set[Site] = set()
        self._infos = infos
        self._channels = channels
        self._overlay = overlay
        self._pictures = 0
        self._kept: list[Tiles | Heat] = []

    def begin(self, pictures: int) -> None:
        self._pictures = pictures
        self._kept.clear()

    def on_output(self, site: Site, tensor: Tensor) -> None:
        info = self._infos(site)
        if info is None or not info.layout or tensor.is_complex() or tensor.shape[0] != self._pictures:
            self.unmapped.add(site)
            return
        maps = to_nchw(tensor, info.layout, info.grid)
        for image in range(self._pictures):
            tiles = self._tiles(image, site, info, maps[image], tuple(tensor.shape[1:]))
            if tiles.channels:
                self._kept.append(tiles)
            if self._overlay and info.grid is not None:
                self._kept.append(_mean_heat(image, site, maps[image]))

    def artifacts(self) -> Iterator[Tiles | Heat]:
        """What was kept of the latest batch, in the order in which the layers ended."""
        yield from self._kept
        self._kept = []

    def _tiles(self, image: int, site: Site, info: OutputInfo, maps: Tensor, shape: tuple[int, ...]) -> Tiles:
        chosen, selection = self._channels.choose(maps)
        if not len(chosen):
            self.without.add(site)
        values = maps[chosen.to(maps.device)].to("cpu", torch.float32, copy=True).numpy()
        low, high = _finite_range(maps)
        finite = bool(np.isfinite([low, high]).all()) and _all_finite(maps)
        return Tiles(
            image=image,
            site=site,
            type="",
            shape=shape,
            layout=info.layout.removeprefix("N"),
            channels=tuple(chosen.tolist()),
            total_channels=maps.shape[0],
            selection=selection,
            values=np.ascontiguousarray(values),
            minimum=low,
            maximum=high,
            status=_tiles_status(low, high, finite=finite),
        )


def _tiles_status(low: float, high: float, *, finite: bool) -> MapStatus:
    if not finite:
        return MapStatus.NON_FINITE
    return MapStatus.BLANK if low == high == 0 else MapStatus.OK


def _mean_heat(image: int, site: Site, maps: Tensor) -> Heat:
    mean = maps.float().mean(dim=0).to("cpu", copy=True)
    low, high = _finite_range(mean)
    status = _tiles_status(low, high, finite=_all_finite(mean))
    if status is MapStatus.OK and high <= 0:
        status = MapStatus.NEGATIVE_ONLY
    return Heat("featuremaps", image, site, "mean-activation", mean.numpy(), low, high, status)


def _all_finite(tensor: Tensor) -> bool:
    # A sum is finite only if every term is, and costs a fraction of isfinite(); it may overflow, hence the rest.
    return bool(tensor.float().sum().isfinite()) or bool(torch.isfinite(tensor).all())


def _finite_range(tensor: Tensor) -> tuple[float, float]:
    values = tensor.float()
    low, high = values.aminmax() if values.numel() else (torch.tensor(torch.nan),) * 2
    if not (low.isfinite() and high.isfinite()):
        values = values[values.isfinite()]
        if not values.numel():
            return float("nan"), float("nan")
        low, high = values.aminmax()
    return float(low), float(high)


def _parsed_list(text: str) -> tuple[int, ...]:
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 1_000_000:
            raise UsageError(
                f"--channels {text!r} is not a choice of channels", "all, top:K, random:K or 0-15,40"
            )
        indices.extend(range(first, last + 1))
    return tuple(dict.fromkeys(indices))


def _by_variance(maps: Tensor, count: int) -> Tensor:
    """Indices of the `count` channels of (C, h, w) maps that vary most over positions, in ascending order."""
    variance = maps.float().flatten(1).var(dim=1, correction=0).nan_to_num(nan=torch.inf)
    chosen = torch.sort(variance, descending=True, stable=True).indices[:count]
    return chosen.cpu().sort().values
