"""GradientMonitor on two processes, DDP and FSDP2, against one process that sees the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import monitor_ranks
import pytest
import torch
import torch.nn.functional as F

import hookscope

WORLD = 2
PROGRAM = Path(monitor_ranks.__file__)


def ranks(case, folder):
    """What the monitor of each of two gloo processes saw."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD),
        str(PROGRAM), case, str(folder),
    ]  # fmt: skip
    paths = [str(Path(hookscope.__file__).parent.parent), str(PROGRAM.parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def alone(**options):
    """The same training in this process, the whole batch at once."""
    model = monitor_ranks.net()
    return monitor_ranks.train(model, monitor_ranks.optimised(model), 0, 1, **options)


def close(one, other, rel=1e-5):
    """Whether two nested values are equal, numbers nearly."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key], rel) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(a, b, rel) for a, b in zip(one, other, strict=True))
    return (
        one == other
        if one is None or isinstance(one, str)
        else one == pytest.approx(other, rel=rel, abs=1e-7)
    )


CASES = {
    "ddp": {"update_ratio": True, "activations": True},
    "ddp-view": {},
    "ddp-unused": {"extra": monitor_ranks.some_extra, "activations": True},
    "ddp-no-sync": {"micro": 2, "activations": True},
    "fsdp": {"update_ratio": True, "activations": True},
    "fsdp-L1": {"norm": 1},
    "fsdp-inf": {"norm": "inf", "update_ratio": True},
    "fsdp-micro": {"micro": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_see_what_one_does(case, tmp_path):
    found, expected = ranks(case, tmp_path), alone(**CASES[case])
    assert found[0] == found[1], "the figures of two ranks differ"
    assert found[0].pop("ranks") == (WORLD if CASES[case].get("activations") else 1)
    expected.pop("ranks")
    assert close(found[0]["steps"], expected["steps"])
    assert close(found[0]["activations"], expected["activations"], rel=1e-4)
    assert close(found[0], expected, rel=1e-4)


@pytest.mark.slow
def test_every_backward_is_a_step_where_no_optimiser_is_known(tmp_path):
    found = ranks("ddp-no-optimizer", tmp_path)
    assert found[0] == found[1]
    model = monitor_ranks.net()
    x, y = monitor_ranks.batch(0)
    gradients = torch.autograd.grad(F.mse_loss(model(x, True), y), model.parameters())
    first = found[0]["steps"][0]["parameters"]
    assert [row[0] for row in first.values()] == pytest.approx([float(g.norm()) for g in gradients], rel=1e-5)
    assert len(found[0]["steps"]) == monitor_ranks.STEPS


@pytest.mark.slow
def test_what_is_not_finite_on_one_process_is_known_to_all(tmp_path):
    found = ranks("fsdp-broken", tmp_path)
    assert found == [{"status": "non-finite", "non_finite": 1, "point": "at-step"}] * WORLD
