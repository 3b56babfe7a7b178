"""Rows of `make bench` for what passes over data: statistics of every leaf layer of resnet50, inputs and outputs.

Each is against the bare forward passes over the same batches; whole calls of the library, the look at the first
picture and the making of the report included.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bench import Line

BATCHES = 2
FORMATS = {"channels last": True, "contiguous": False}


def leaves(model: torch.nn.Module) -> list[str]:
    """Names of the layers that have none inside."""
    return [name for name, module in model.named_modules() if not list(module.children())]


def against_bare(limit: float, words: str, *, histogram: bool) -> list[Line]:
    import bench

    import hookscope

    lines = []
    for form, last in FORMATS.items():
        model, x = bench.resnet50(channels_last=last), bench.pictures(16, channels_last=last)
        layers = leaves(model)

        def bare(model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
            for _ in range(BATCHES):
                bench.bare(model, x)

        def ours(model: torch.nn.Module = model, x: torch.Tensor = x, layers: list[str] = layers) -> None:
            hookscope.stats(model, [x] * BATCHES, layers=layers, histogram=histogram)

        (found,) = bench.compared(3, bare, ours)
        per_image = f"{found.seconds / BATCHES / 16e-3:.1f} ms an image"
        lines.append(bench.Line(f"{words} / bare forward, {form}", found.ratio, limit, True, per_image))
    return lines


MEMORY = """
import sys, torch
sys.path.insert(0, sys.argv[4])
import bench, bench_activations, hookscope.library
who, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = bench.resnet50(channels_last=True)
x = torch.randn(16, 3, size, size).to(memory_format=torch.channels_last)
def batches():
    for start in range(0, count, 16):
        yield x[: min(16, count - start)].clone()
if who == "bare":
    for batch in batches():
        bench.bare(model, batch)
else:
    hookscope.library.stats(model, batches(), layers=bench_activations.leaves(model))
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(line.split()[1]) / 1024)
"""


def memory_row() -> list[Line]:
    from bench import Line, numbers

    def peak(who: str, count: int, size: int) -> float:
        here = str(Path(__file__).parent)
        return numbers([sys.executable, "-c", MEMORY, who, str(count), str(size), here])[0]

    def median(who: str) -> float:
        return statistics.median(peak(who, 48, 224) for _ in range(3))

    bare, ours = median("bare"), median("stats")
    few, many = (peak("stats", count, 96) for count in (100, 1000))
    return [
        Line("MiB of stats over bare forward", ours - bare, 96, True, f"{ours:.0f} against {bare:.0f} MiB"),
        Line("peak of 1,000 pictures / of 100", many / few, 1.02, True, f"{many:.0f} against {few:.0f} MiB"),
    ]


ROWS: dict[str, Callable[[], list[Line]]] = {
    "stats": lambda: against_bare(2.2, "moments, extremes, alive", histogram=False),
    "stats-hist": lambda: against_bare(2.6, "and histograms", histogram=True),
    "stats-memory": memory_row,
}
