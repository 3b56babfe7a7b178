"""How strongly the loss depends on each place of a picture at a layer: the mean absolute gradient over channels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.layouts import is_spatial, to_nchw
from hookscope.probes.featuremaps import Infos


class GradMapsProbe(Probe):
    """Keeps, of the latest batch, (N, h, w) float32 for every spatial site: mean over channels of |gradient|.

    The loss is a mean over the batch; times the number of pictures, each map is of its picture's own loss.

    Args:
        layers: names of the layers.
        infos: what is known of a site; one that is not spatial is left out.
        objective: whose gradient.
    """

    needs = Needs(gradients=True)

    def __init__(self, layers: frozenset[str], infos: Infos, objective: str = "loss") -> None:
        self.layers = layers
        self.objectives = frozenset({objective})
        self._infos = infos
        self._pictures = 0
        self._maps: dict[Site, NDArray[np.float32]] = {}

    def begin(self, pictures: int) -> None:
        self._pictures = pictures
        self._maps = {}

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        info = self._infos(site)
        if info is not None and is_spatial(info) and tensor.shape[0] == self._pictures:
            sizes = to_nchw(tensor, info.layout, info.grid).float().abs().mean(dim=1)
            self._maps[site] = (sizes * self._pictures).cpu().numpy()

    def maps(self) -> Iterator[tuple[int, Site, NDArray[np.float32]]]:
        """Picture, site and map: by picture, then in the order in which the gradients came."""
        for picture in range(self._pictures):
            for site, values in self._maps.items():
                yield picture, site, values[picture]
