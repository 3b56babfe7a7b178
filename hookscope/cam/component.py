"""The first principal component of a layer's channels, found without a whole singular value decomposition."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 160
"""Up to so many positions or channels the Gram matrix is decomposed whole: nothing is quicker."""
_BLOCK, _STEPS, _EVERY = 4, 24, 2
_RESIDUAL = 1e-9
_ROUNDING = 1e-9


def first_component(values: Tensor) -> Tensor:
    """(N, h, w) of values' dtype: A v, where A is a sample's (h w, C) matrix and v its first right singular vector.

    A is not centred. A singular vector has no sign of its own: here the map's mean is >= 0, and where that is 0 (to
    rounding) the value of largest magnitude is positive, the first of several. Where the first two singular values
    are equal the component itself is undefined, and this is one of many. A sample that is not finite gives NaN.

    Args:
        values: (N, C, h, w), any range.
    """
    finite = values.abs().amax(dim=(1, 2, 3)).isfinite()
    known = values if finite.all() else values.where(finite[:, None, None, None], 0.0)
    # Double precision: a Gram matrix squares, and in float32 components of nearly equal strength run together.
    matrix = (known.cpu() if known.device.type == "mps" else known).double().flatten(2)
    component = _signed(_projection(matrix)).to(values)
    return component.where(finite[:, None], torch.nan).view(len(values), *values.shape[2:])


def _projection(matrix: Tensor) -> Tensor:
    """(N, m): the component of each (n, m) matrix of channels by positions, of either sign."""
    channels, positions = matrix.shape[1:]
    if channels <= positions:
        return _leading(matrix).bmm(matrix).squeeze(1)
    strongest = _leading(matrix.mT)
    return strongest.mul((strongest @ matrix.mT).norm(dim=2, keepdim=True)).squeeze(1)


def _leading(matrix: Tensor) -> Tensor:
    """(N, 1, n): the first left singular vector of each (n, m) matrix, n <= m."""
    if matrix.shape[1] <= _SMALL:
        return _decomposed(matrix)
    vector, residual = _iterated(matrix)
    unsure = residual > _RESIDUAL
    if unsure.any():
        vector[unsure] = _decomposed(matrix[unsure])
    return vector


def _decomposed(matrix: Tensor) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(matrix @ matrix.mT).eigenvectors
    return vectors[:, :, -1:].mT


def _iterated(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The vector by a block Lanczos iteration, and how far each is from being one, (N,), relative to its square.

    Much quicker than a decomposition where few components stand out, as they do in trained nets.
    """
    # Blocks lie as rows: products with the tall matrix then read it in the order in which it is stored.
    block = _start(matrix)
    basis, images, returned = block[:, :0], matrix[:, :0], block[:, :0]
    vector, residual = block[:, :1], matrix.new_full((len(matrix),), torch.inf)
    for step in range(1, _STEPS + 1):
        image = block @ matrix
        basis, images = torch.cat([basis, block], dim=1), torch.cat([images, image], dim=1)
        returned = torch.cat([returned, image @ matrix.mT], dim=1)
        if step % _EVERY == 0:
            values, vectors = torch.linalg.eigh(images @ images.mT)
            square, within = values[:, -1:, None], vectors[:, :, -1:].mT
            lead = within @ basis
            error = (within @ returned - square * lead).norm(dim=(1, 2)) / square.flatten()
            # Past its answer an iteration has but rounding to go on, while others of the batch are still at work.
            better = error < residual
            vector, residual = lead.where(better[:, None, None], vector), error.where(better, residual)
            if (residual <= _RESIDUAL).all():
                break
        block = _orthogonal(returned[:, -_BLOCK:], basis)
    return vector, residual


def _start(matrix: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(_BLOCK, matrix.shape[1], generator=generator, dtype=torch.float64)
    block[0] = 1  # near the answer where the values are >= 0, as behind a ReLU
    return _orthonormal(block).to(matrix.device).expand(len(matrix), -1, -1)


def _orthogonal(block: Tensor, basis: Tensor) -> Tensor:
    """Orthonormal rows that span what of the block the basis does not; twice, as rounding leaves some."""
    for _ in range(2):
        block = _orthonormal(block - (block @ basis.mT) @ basis)
    return block


def _orthonormal(block: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(block.mT).Q
    return columns.mT


def _signed(component: Tensor) -> Tensor:
    """(N, m) vectors turned so that the sum, or, where it is 0, the first of the largest values is positive."""
    total, size = component.sum(dim=1, keepdim=True), component.abs()
    largest = (size >= (1 - _ROUNDING) * size.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    balanced = total.abs() <= _ROUNDING * size.sum(dim=1, keepdim=True)
    return component * component.gather(1, largest).where(balanced, total).sign()
