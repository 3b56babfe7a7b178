"""When garbage is collected: not while the large libraries come in, whose objects all stay. Knows nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for meanwhile, nor later among what was made until then.

    Torch and torchvision make hundreds of thousands of objects when they are imported. To search them while
    they come, as they grow older and once more at the exit took a third of a command on one picture.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def as_a_guest(guest: bool) -> Iterator[None]:
    """For a `guest` in a program that goes on afterwards, everything is searched again at the end."""
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if guest and not frozen:
            gc.unfreeze()
