"""`--data`: from `file.py:callable` to batches. What they must look like is for `userdata` to say."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import Dataset

from hookscope.errors import HookscopeError, UsageError
from hookscope.models.user import resolved
from hookscope.userdata import DataBatch, checked, raised


def batches_of(spec: str, *, limit: int | None = None) -> Iterator[DataBatch]:
    """The batches that `file.py:NAME` or `package.module:NAME` gives: an iterable, or a function that makes one.

    Args:
        spec: as typed.
        limit: no more than that many are asked for.

    Raises:
        UsageError: no such thing, or no batches of (input, target); its code raised, with its own message.
        ModelError: the file raised while it was imported.
        NothingMeasured: there was not one batch.
    """
    with _found(spec) as found:
        yield from checked(_made(found, spec), spec, limit=limit)


def check_data(spec: str) -> None:
    """Nothing, where the name is of something that may give batches; it is neither called nor iterated.

    Raises:
        UsageError: no such thing, or it can be neither.
        ModelError: the file raised while it was imported.
    """
    with _found(spec) as found:
        if not (_is_iterable(found) or callable(found)):
            next(checked(found, spec))
        _check_call(found, spec)


def _found(spec: str) -> AbstractContextManager[Any]:
    if ":" not in spec:
        raise UsageError(f"the data {spec!r} names no callable", "write file.py:NAME or package.module:NAME")
    return resolved(spec)


def _check_call(found: Any, spec: str) -> None:
    if _is_iterable(found) or not callable(found):
        return
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"the data {spec!r} cannot be called without arguments: {error}", "give it defaults"
        ) from error
    except ValueError:
        pass  # a callable of C has no signature to look at


def _made(found: Any, spec: str) -> Any:
    """What is to be iterated: the object itself, or what it returns when called."""
    if _is_iterable(found) or not callable(found):
        return found
    _check_call(found, spec)
    try:
        return found()
    except HookscopeError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"the data {spec!r} {raised(error)}", "--debug shows where") from error


def _is_iterable(found: Any) -> bool:
    return not isinstance(found, type) and (hasattr(found, "__iter__") or isinstance(found, Dataset))
