"""Rows of `make bench` for GradientMonitor: what a resnet18 training step costs with it, as a ratio to without.

Processor time, not time on the clock: the limits are a few hundredths, and other programs come and go.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torchvision

if TYPE_CHECKING:
    from bench import Line

ROUNDS = 9


class Training:
    """One step after the other of the same training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torchvision.models.resnet18(weights=None).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.x = torch.randn(16, 3, 224, 224)
        self.y = torch.randint(0, 1000, (16,))

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def watched(self, **options: Any) -> float:
        """Seconds of a step with a monitor; starting it is not the step's."""
        import hookscope

        with hookscope.GradientMonitor(self.model, self.optimizer, **options):
            return seconds(self.step)

    def unmeasured(self) -> float:
        """Seconds of a step that is not measured, of a monitor that measures every 50th."""
        import hookscope

        monitor = hookscope.GradientMonitor(self.model, self.optimizer, every=50)
        monitor.steps = 1
        with monitor:
            return seconds(self.step)


def seconds(function: Callable[[], object]) -> float:
    """Processor time of one call, of all threads."""
    start = time.process_time()
    function()
    return time.process_time() - start


def ratios(training: Training, others: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Each kind of step against the bare one beside it: the median over rounds, who is first taking turns."""
    training.step()
    pairs: dict[str, list[float]] = {name: [] for name in others}
    for number in range(ROUNDS):
        for name, other in others.items():
            if number % 2:
                bare, watched = seconds(training.step), other()
            else:
                watched, bare = other(), seconds(training.step)
            pairs[name].append(watched / bare)
    return {name: statistics.median(found) for name, found in pairs.items()}


def monitor_row() -> list[Line]:
    from bench import Line

    training = Training()
    found = ratios(
        training,
        {
            "parameters": training.watched,
            "activations": lambda: training.watched(activations=True),
            "unmeasured": training.unmeasured,
        },
    )
    seldom = (found["parameters"] + 49 * found["unmeasured"]) / 50
    return [
        Line("step with parameter norms / bare step", found["parameters"], 1.05, True, "resnet18, batch 16"),
        Line("step with activation gradients / bare step", found["activations"], 1.15, True),
        Line("every=50, mean over its steps / bare step", seldom, 1.01, True),
    ]


MEMORY = """
import sys, torch, torchvision, warnings, contextlib
warnings.filterwarnings("ignore")
sys.path.insert(0, sys.argv[2])
import hookscope, hookscope.monitor.monitor
from bench_monitor import Training
training = Training()
options = {"none": None, "parameters": {}, "activations": {"activations": True}}[sys.argv[1]]
with contextlib.nullcontext() if options is None else hookscope.GradientMonitor(
    training.model, training.optimizer, **options
):
    for _ in range(3):
        training.step()
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(line.split()[1]) / 1024)
"""


def memory_row() -> list[Line]:
    from pathlib import Path

    from bench import Line

    def peak(who: str) -> float:
        command = [sys.executable, "-c", MEMORY, who, str(Path(__file__).parent)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    bare = statistics.median(peak("none") for _ in range(3))
    return [
        Line(f"peak memory with {words} / without a monitor", peak(who) / bare, 1.02, True, f"{bare:.0f} MiB")
        for who, words in (("parameters", "parameter norms"), ("activations", "activation gradients"))
    ]


ROWS: dict[str, Callable[[], list[Line]]] = {"monitor": monitor_row, "monitor-memory": memory_row}
