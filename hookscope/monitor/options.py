"""What a `GradientMonitor` is given, checked and put into words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hookscope.checks import gradbaseline
from hookscope.checks.gradfigures import GradBaseline
from hookscope.errors import UsageError


def check_numbers(*, every: int, history: int, window: int, warmup: int, spike: float) -> None:
    """Nothing, where all are in range.

    Raises:
        UsageError: one is not.
    """
    for name, value, least in (
        ("every", every, 1), ("history", history, 0), ("window", window, 2), ("warmup", warmup, 1),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={value!r} is out of range", f"a whole number of {least} or more")
    if not spike > 0:
        raise UsageError(f"spike={spike!r} is out of range", "a number above 0; float('inf') looks for none")


def check_norm(norm: float, *, activations: bool) -> None:
    """Nothing, where all that is watched is measured in this norm.

    Raises:
        UsageError: it is not.
    """
    if activations and norm == 1:
        raise UsageError("gradients of activations are not measured in the L1 norm", "norm=2 or norm='inf'")


def read_baseline(baseline: str | Path | GradBaseline | None) -> GradBaseline | None:
    """The baseline, read where it is a path.

    Raises:
        UsageError: there is none, or it is broken.
    """
    if baseline is None or isinstance(baseline, GradBaseline):
        return baseline
    return gradbaseline.read(baseline)


def in_words(layers: str | Iterable[str], exclude: str | Iterable[str]) -> str:
    """Which layers are chosen, as `hookscope gradnorm` says it in a baseline."""
    chosen, without = (globs if isinstance(globs, str) else ", ".join(globs) for globs in (layers, exclude))
    return f"{chosen} without {without}" if without else chosen
