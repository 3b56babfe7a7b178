"""Work beside the model's: calls made by other threads, never far behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def writing_threads() -> int:
    """One for every two processors, four at the most: more of them take the model's own threads off the cores."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


class Background:
    """Makes calls on `workers` threads; `settle` after each batch keeps it no more than two batches behind.

    Leaving the block waits for all calls, and raises what one of them raised; after an error it drops those that
    have not begun.
    """

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="hookscope-write")
        self._behind: list[Future[object]] = []
        self._now: list[Future[object]] = []

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in (*self._behind, *self._now):
                future.result()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Have the call made."""
        self._now.append(self._pool.submit(function, *args))

    def settle(self) -> None:
        """Wait for all but the latest batch; raises what one of its calls raised."""
        for future in self._behind:
            future.result()
        self._behind, self._now = self._now, []

    def drain(self) -> None:
        """Wait for all calls; raises what one of them raised."""
        self.settle()
        self.settle()
