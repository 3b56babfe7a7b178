"""From files to batches: pictures are read, decoded and prepared ahead of the model, never all at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from hookscope.errors import HookscopeError
from hookscope.images import ImageFailure, ImageRef, View, decode
from hookscope.models.preprocess import Preprocess


@dataclass(frozen=True)
class Item:
    """One picture ready for the model: `tensor` (C, H, W) float32; the original where it is still needed."""

    ref: ImageRef
    view: View
    tensor: Tensor
    picture: Image.Image | None


@dataclass(frozen=True)
class Batch:
    """Pictures of one size, in order, and the failures met since the last batch.

    `block`: which `size` places of the run they are from.
    """

    items: tuple[Item, ...]
    failures: tuple[tuple[ImageRef, ImageFailure], ...]
    block: int = 0


def default_workers() -> int:
    """Threads for decoding where the user does not say: as many as there are processors, four at the most."""
    return max(1, min(4, os.cpu_count() or 1))


def batches(
    refs: Iterable[ImageRef], preprocess: Preprocess, *, size: int, workers: int, keep_pictures: bool
) -> Iterator[Batch]:
    """Batches of up to `size` pictures of one tensor shape, in order; one may hold failures alone.

    Places 0 to `size` - 1 are the first block, and so on, whatever cannot be read: a batch never reaches over two of
    them, so which pictures are run together depends on no other picture's being readable. At most one batch is decoded
    ahead, so memory does not grow with the number of pictures.
    """
    items: list[Item] = []
    failures: list[tuple[ImageRef, ImageFailure]] = []
    read = _reader(preprocess, keep_pictures=keep_pictures)
    block = 0
    for place, loaded in enumerate(_ahead(read, refs, ahead=size, workers=workers)):
        ends = place // size != block
        is_other = items and not isinstance(loaded, tuple) and items[0].tensor.shape != loaded.tensor.shape
        if (ends or is_other) and (items or failures):
            yield Batch(tuple(items), tuple(failures), block)
            items, failures = [], []
        block = place // size
        if isinstance(loaded, tuple):
            failures.append(loaded)
        else:
            items.append(loaded)
    if items or failures:
        yield Batch(tuple(items), tuple(failures), block)


Outcome = Item | tuple[ImageRef, ImageFailure]


def _reader(preprocess: Preprocess, *, keep_pictures: bool) -> Callable[[ImageRef], Outcome]:
    def read(ref: ImageRef) -> Outcome:
        try:
            picture = decode(ref.file, ref.path)
            view = preprocess.view(picture.width, picture.height)
            return Item(ref, view, preprocess.tensor(picture), picture if keep_pictures else None)
        except HookscopeError as error:
            if error.exit_code != 4:
                raise
            return ref, ImageFailure(ref.path, error.message)

    return read


def _ahead(
    read: Callable[[ImageRef], Outcome], refs: Iterable[ImageRef], *, ahead: int, workers: int
) -> Iterator[Outcome]:
    """`map(read, refs)` in order, at most `ahead` of them done or under way at any time."""
    if workers == 0:
        yield from map(read, refs)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="hookscope-decode")
    under_way: deque[Future[Outcome]] = deque()
    try:
        for ref in refs:
            under_way.append(pool.submit(read, ref))
            if len(under_way) >= ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
