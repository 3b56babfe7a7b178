"""Run by `torchrun` for test_monitor_parallel: trains as told and writes what this rank's monitor saw as JSON.

monitor_ranks.py CASE FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hookscope

ROWS, STEPS = 8, 4


class Net(nn.Module):
    """Layers of odd sizes, that do not divide by the number of processes, and one that some steps leave out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)
        self.maybe = nn.Linear(3, 3)

    def forward(self, x, extra=False):
        y = self.c(torch.tanh(self.b(torch.relu(self.a(x)))))
        return y + self.maybe(y) if extra else y


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def net():
    torch.manual_seed(0)
    return Net()


def train(model, optimizer, rank, world, *, micro=1, extra=lambda step: True, **options):
    """Each process takes its share of the batch, in so many micro-batches."""
    with hookscope.GradientMonitor(model, optimizer, history=99, **options) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = (part.chunk(world)[rank] for part in batch(step))
            parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
            for at, (a, b) in enumerate(parts):
                quiet = hasattr(model, "no_sync") and at < micro - 1
                if quiet:
                    with model.no_sync():
                        (F.mse_loss(model(a, extra(step)), b) / micro).backward()
                else:
                    (F.mse_loss(model(a, extra(step)), b) / micro).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        report = monitor.report()
    return seen(monitor, report)


def seen(monitor, report):
    """All figures as plain values."""
    steps = [
        {
            "total": record.total_norm,
            "parameters": {
                name: [row.norm, row.weight_norm, row.update_ratio, row.rms, row.count, row.status]
                for name, row in record.parameters.items()
            },
            "layers": {name: row.norm for name, row in record.layers.items()},
            "point": record.point,
        }
        for record in monitor.history
    ]
    activations = {
        str(site): [row.norm, row.mean, row.deviation, row.maximum, row.count]
        for site, row in report.activations.items()
    }
    total = report.total
    return {
        "steps": steps,
        "activations": activations,
        "statistics": [total.mean, total.deviation, total.median],
        "ranks": report.ranks,
        "events": [[event.kind, event.step, event.name] for event in report.events],
    }


def optimised(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(rank, world, **how):
    model = DistributedDataParallel(net(), **how)
    return model, optimised(model)


def sharded(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), init_device_mesh("cpu", (world,))
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimised(model)


def no_extra(step):
    return False


def some_extra(step):
    return step % 2 == 0


CASES = {
    "ddp": lambda r, w: train(*ddp(r, w), r, w, update_ratio=True, activations=True),
    "ddp-view": lambda r, w: train(*ddp(r, w, gradient_as_bucket_view=True), r, w),
    "ddp-unused": lambda r, w: train(
        *ddp(r, w, find_unused_parameters=True), r, w, extra=some_extra, activations=True
    ),
    "ddp-no-sync": lambda r, w: train(*ddp(r, w), r, w, micro=2, activations=True),
    "ddp-no-optimizer": lambda r, w: train_bare(r, w),
    "fsdp": lambda r, w: train(*sharded(r, w), r, w, update_ratio=True, activations=True),
    "fsdp-L1": lambda r, w: train(*sharded(r, w), r, w, norm=1),
    "fsdp-inf": lambda r, w: train(*sharded(r, w), r, w, norm="inf", update_ratio=True),
    "fsdp-micro": lambda r, w: train(*sharded(r, w), r, w, micro=2),
    "fsdp-broken": lambda r, w: broken(r, w),
}


def train_bare(rank, world):
    model, _ = ddp(rank, world)
    with hookscope.GradientMonitor(model, history=99) as monitor:
        for step in range(STEPS):
            model.zero_grad()
            x, y = (part.chunk(world)[rank] for part in batch(step))
            F.mse_loss(model(x, True), y).backward()
    return seen(monitor, monitor.report())


def broken(rank, world):
    """One entry of the gradient is not finite, on one process alone."""
    model, optimizer = sharded(rank, world)
    with hookscope.GradientMonitor(model, optimizer, history=99) as monitor:
        x, y = (part.chunk(world)[rank] for part in batch(0))
        F.mse_loss(model(x, True), y).backward()
        if rank == 1:
            model.a.weight.grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        first = monitor.last.parameters["a.weight"]
    assert first.non_finite == 0  # read before it was broken
    with hookscope.GradientMonitor(model, optimizer, history=99) as monitor:
        optimizer.step()
        row = monitor.last.parameters["a.weight"]
    return {"status": row.status, "non_finite": row.non_finite, "point": monitor.last.point}


def main(case, folder):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = CASES[case](rank, world)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
