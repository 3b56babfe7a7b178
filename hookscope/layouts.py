"""Which axis of a layer's output is what: recognised from the kind of module and the shapes around it.

Guesses nothing from a layer's name. Where no layout is certain it is `""`, never NCHW by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.layers import OutputInfo, Site

Shape = tuple[int, ...]
Grid = tuple[int, int, int]

_MAX_PREFIX = 16
_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.Upsample,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
)
_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.Embedding)
_BY_RANK_FIRST = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


@dataclass(frozen=True)
class Record:
    """One tensor that passed: `same_as` is the site before it that returned the very same tensor."""

    site: Site
    shape: Shape
    dtype: str
    same_as: Site | None = None


class Layouts:
    """What each output is, learnt while it passes: `add` every record in the order in which calls end.

    Args:
        modules: every module by its first name.
        input_shape: the pictures' (N, C, H, W): a grid must have their aspect to count as spatial.
    """

    def __init__(self, modules: Mapping[str, nn.Module], input_shape: Shape) -> None:
        self.outputs: dict[Site, OutputInfo] = {}
        self._modules = modules
        self._input_shape = input_shape

    def add(self, record: Record) -> None:
        """Take one more output; what was added before decides where its own kind of module does not."""
        layout = _layout(record, self._modules[record.site.layer], self.outputs, self._input_shape)
        self.outputs[record.site] = OutputInfo(
            site=record.site,
            shape=record.shape,
            dtype=record.dtype,
            layout=layout,
            grid=_grid(record, layout, self.outputs, self._input_shape),
            same_as=record.same_as,
            order=len(self.outputs),
        )

    def get(self, site: Site) -> OutputInfo | None:
        """What is known of a site."""
        return self.outputs.get(site)

    def clear(self) -> None:
        """Forget the pass; another is to begin."""
        self.outputs.clear()


def received_layout(
    module: nn.Module, shape: Shape, known: Mapping[Site, OutputInfo], input_shape: Shape
) -> str:
    """The layout of what a layer receives, where it is no layer's output: as its class reads it.

    Else that of the latest output of such a shape, whatever the number of pictures; `""` where there is none.
    """
    own = _by_class(module, shape, input_shape)
    if own is not None:
        return own
    same = (info.layout for info in reversed([*known.values()]) if info.shape[1:] == shape[1:])
    return next(filter(None, same), "")


def is_spatial(info: OutputInfo) -> bool:
    """Whether the output has more than one position on the picture."""
    positions = info.grid[0] * info.grid[1] if info.grid is not None else 0
    return positions > 1 and not info.dtype.startswith("complex")


def with_grid(outputs: Mapping[Site, OutputInfo], size: tuple[int, int]) -> dict[Site, OutputInfo]:
    """The outputs with tokens laid out in rows and columns of that size, what comes before them taken for a prefix.

    Raises:
        UsageError: no layer returns as many tokens.
    """
    height, width = size
    found, fitted = dict(outputs), False
    for site, info in outputs.items():
        prefix = info.shape[1] - height * width if info.layout == "NTC" else -1
        if 0 <= prefix <= _MAX_PREFIX:
            found[site], fitted = replace(info, grid=(height, width, prefix)), True
    if not fitted:
        counts = sorted({info.shape[1] for info in outputs.values() if info.layout == "NTC"})
        tokens = (
            f"layers return {', '.join(map(str, counts))} tokens" if counts else "no layer returns tokens"
        )
        raise UsageError(f"--grid {height}x{width} fits no layer", tokens)
    return found


def to_nchw(tensor: Tensor, layout: str, grid: Grid | None = None) -> Tensor:
    """The same values as (N, C, h, w): no copy where a view will do.

    Tokens with a grid lose their prefix and take its height and width; without one they are one row. A flat
    (N, C) becomes (N, C, 1, 1). An unknown layout of three or more axes is read as (N, C, ...).
    """
    if layout == "NHWC":
        return tensor.permute(0, 3, 1, 2)
    if layout == "NPTC":
        return tensor.permute(0, 3, 1, 2)
    if layout == "NTC":
        height, width, prefix = grid or (1, tensor.shape[1], 0)
        patches = tensor[:, prefix : prefix + height * width]
        return torch.unflatten(patches.transpose(1, 2), 2, (height, width))
    if tensor.dim() < 4:
        return tensor.reshape(*tensor.shape[:2], 1, -1) if tensor.dim() > 1 else tensor.reshape(-1, 1, 1, 1)
    return tensor if tensor.dim() == 4 else tensor.flatten(3)


def _layout(record: Record, module: nn.Module, known: Mapping[Site, OutputInfo], input_shape: Shape) -> str:
    shape = record.shape
    if not shape or shape[0] != input_shape[0]:
        return ""
    if record.same_as is not None and record.same_as in known:
        return known[record.same_as].layout
    own = _by_class(module, shape, input_shape)
    if own is not None:
        return own
    permuted = _permuted(module, shape, known)
    return permuted or _inherited(record, known) or _by_shape(shape, known, input_shape)


def _by_class(module: nn.Module, shape: Shape, input_shape: Shape) -> str | None:
    """The layout of what a layer of that class reads and gives; `None` where the class says nothing."""
    if isinstance(module, _FIRST) or type(module).__name__.endswith("2d"):
        return _BY_RANK_FIRST.get(len(shape), "")
    if isinstance(module, _LAST) and not _norms_several_axes(module):
        return _channels_last(shape, input_shape) if getattr(module, "batch_first", True) else ""
    return None


def _channels_last(shape: Shape, input_shape: Shape) -> str:
    if len(shape) == 4:
        return "NHWC" if _has_aspect(shape[1], shape[2], input_shape) else "NPTC"
    return {2: "NC", 3: "NTC"}.get(len(shape), "")


def _permuted(module: nn.Module, shape: Shape, known: Mapping[Site, OutputInfo]) -> str:
    """A permuting module (torchvision's `Permute` has `dims`) moves the letters of what came before."""
    dims = getattr(module, "dims", None)
    if not isinstance(dims, (list, tuple)) or sorted(dims) != list(range(len(shape))):
        return ""
    before = tuple(shape[dims.index(axis)] for axis in range(len(shape)))
    source = next(
        (info.layout for info in reversed([*known.values()]) if info.shape == before and info.layout), ""
    )
    return "".join(source[axis] for axis in dims) if len(source) == len(shape) else ""


def _inherited(record: Record, known: Mapping[Site, OutputInfo]) -> str:
    """What a container or an element-wise layer returned has the layout of the latest such shape, its own first."""
    below = f"{record.site.layer}."
    same = [info for info in known.values() if info.shape == record.shape and info.layout]
    own = (info for info in reversed(same) if info.site.layer.startswith(below))
    return next((info.layout for info in chain(own, reversed(same))), "")


def _norms_several_axes(module: nn.Module) -> bool:
    """A `LayerNorm([C, H, W])` says nothing of which axis is the channel's."""
    return len(getattr(module, "normalized_shape", ())) > 1


def _by_shape(shape: Shape, known: Mapping[Site, OutputInfo], input_shape: Shape) -> str:
    """For a module of an unknown kind: only what an earlier picture-like output, flattened, or a grid explains."""
    if len(shape) == 4:
        if _likely_grid(shape[2:], known, input_shape):
            return "NCHW"
        return "NHWC" if _likely_grid(shape[1:3], known, input_shape) else ""
    if len(shape) == 3:
        if any(_is_flattened(shape, grid) for grid in _grids(known)):
            return "NCL"
        return "NTC" if any(_is_tokens(shape, grid) for grid in _grids(known)) else ""
    return {2: "NC"}.get(len(shape), "")


def _grids(known: Mapping[Site, OutputInfo]) -> list[Shape]:
    """(channels, height, width) of the picture-like outputs so far."""
    return [
        (info.shape[1 if info.layout == "NCHW" else 3], *info.grid[:2])
        for info in known.values()
        if info.layout in ("NCHW", "NHWC") and is_spatial(info) and info.grid is not None
    ]


def _is_flattened(shape: Shape, grid: Shape) -> bool:
    return shape[1:] == (grid[0], grid[1] * grid[2])


def _is_tokens(shape: Shape, grid: Shape) -> bool:
    return shape[2] == grid[0] and 0 <= shape[1] - grid[1] * grid[2] <= _MAX_PREFIX


def _likely_grid(size: Shape, known: Mapping[Site, OutputInfo], input_shape: Shape) -> bool:
    """Whether a layer before had this grid, or the picture gives it at a whole stride."""
    if len(input_shape) != 4 or not _has_aspect(size[0], size[1], input_shape):
        return False
    if any(info.grid is not None and info.grid[:2] == size for info in known.values()):
        return True
    stride = max(1, round(input_shape[2] / max(1, size[0])))
    return all(
        side in (full // stride, -(-full // stride)) for side, full in zip(size, input_shape[2:], strict=True)
    )


def _has_aspect(height: int, width: int, input_shape: Shape) -> bool:
    """Whether a grid could be the picture at a lower resolution: within one cell of its aspect."""
    if len(input_shape) != 4:
        return False
    return abs(height * input_shape[3] - width * input_shape[2]) <= max(input_shape[2:])


def _grid(record: Record, layout: str, known: Mapping[Site, OutputInfo], input_shape: Shape) -> Grid | None:
    shape = record.shape
    if layout == "NCHW":
        return (shape[2], shape[3], 0)
    if layout == "NHWC":
        return (shape[1], shape[2], 0)
    return _token_grid(shape, known, input_shape) if layout == "NTC" else None


def _token_grid(shape: Shape, known: Mapping[Site, OutputInfo], input_shape: Shape) -> Grid | None:
    """The grid that tokens were made from: that of the patch layer of as many channels, the fewest tokens before it.

    Tokens of other widths, as inside an MLP, have the grid of those before them that are as many. Where nothing
    picture-like came before, the picture itself was cut into patches.
    """
    grids = _grids(known)
    found = [grid for grid in grids if _is_tokens(shape, grid)]
    if found:
        _, height, width = max(found, key=lambda grid: grid[1] * grid[2])
        return (height, width, shape[1] - height * width)
    alike = (info.grid for info in known.values() if info.layout == "NTC" and info.shape[1] == shape[1])
    inherited = next((grid for grid in alike if grid is not None), None)
    return inherited or (_patch_grid(shape[1], input_shape) if not grids else None)


def _patch_grid(tokens: int, input_shape: Shape) -> Grid | None:
    """The grid of the square patches that the picture can be cut into, the fewest tokens before them."""
    if len(input_shape) != 4:
        return None
    height, width = input_shape[2:]
    for side in range(2, min(height, width) + 1):
        if height % side == 0 and width % side == 0:
            count = (height // side) * (width // side)
            if 1 < count <= tokens <= count + _MAX_PREFIX:
                return (height // side, width // side, tokens - count)
    return None
