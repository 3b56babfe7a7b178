"""`python tests/zoo.py [GLOB]`: every torchvision classifier at full size, held against plain autograd.

Owns the processes and the table; what is compared is in `comparison`. Each model gets a process of its own, so
that memory returns, and random weights, so that no network is needed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from fnmatch import fnmatchcase

import torch
import torchvision
from comparison import Found, built, examine

OPTIONS = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}
SIZES_PX = {"inception_v3": 299}
DEFAULT_SIZE_PX = 224


def main() -> int:
    """0 where every chosen model holds, else 1; 2 where the glob chooses none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("glob", nargs="?", default="*", help="which of torchvision's classifiers")
    parser.add_argument("--alone", action="store_true", help="GLOB is one name: examine it here, print JSON")
    options = parser.parse_args()
    if options.alone:
        _alone(options.glob)
        return 0
    available = torchvision.models.list_models(module=torchvision.models)
    names = [name for name in available if fnmatchcase(name, options.glob)]
    if not names:
        parser.error(f"no classifier of torchvision matches {options.glob!r}")
    print(_HEAD)
    results = []
    for name in names:
        results.append(_in_its_own_process(name))
        print(_line(name, *results[-1]), flush=True)
    print(_summary(results))
    return int(any(problem for _, _, problem in results))


def _alone(name: str) -> None:
    """One model in this process: what it showed, as a line of JSON."""
    begun = time.perf_counter()
    size = SIZES_PX.get(name, DEFAULT_SIZE_PX)
    x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    found = examine(built(torchvision.models.get_model_builder(name), x, **OPTIONS.get(name, {})), x)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"found": asdict(found), "seconds": time.perf_counter() - begun, "peak_mib": peak_mib}))


def _in_its_own_process(name: str) -> tuple[Found | None, dict, str]:
    command = [sys.executable, __file__, "--alone", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    told = json.loads(done.stdout.splitlines()[-1])
    found = Found(**told["found"])
    return found, told, "; ".join(found.problems)


_HEAD = (
    f"{'model':22}{'sites':>6}{'activation':>12}{'gradient':>10}{'parameter':>11}{'split':>9}{'cut':>9}{'graphless':>11}"
    f"{'rewritten':>12}{'raises':>8}{'s':>7}{'MiB':>7}"
)


def _line(name: str, found: Found | None, told: dict, problem: str) -> str:
    verdict = f"FAIL: {problem}" if problem else "ok"
    if found is None:
        return f"{name:22}{verdict}"
    return (
        f"{name:22}{found.sites:6}{found.activation:12.1e}{found.gradient:10.1e}{found.parameter:11.1e}"
        f"{found.split:9.1e}{found.cut:9.1e}{found.graphless:11.1e}{f'{found.rewritten}/{found.leaves}':>12}"
        f"{'yes' if found.raises else 'no':>8}{told['seconds']:7.1f}{told['peak_mib']:7}  {verdict}"
    )


def _summary(results: list[tuple[Found | None, dict, str]]) -> str:
    found = [one for one, _, _ in results if one is not None]
    failed = sum(bool(problem) for _, _, problem in results)
    return (
        f"{len(results)} models, {failed} failed, {sum(one.sites for one in found)} sites; "
        f"the naive recipe keeps wrong values in {sum(one.rewritten > 0 for one in found)} "
        f"({sum(one.rewritten for one in found)} of {sum(one.leaves for one in found)} leaf outputs) "
        f"and raises in {sum(one.raises for one in found)}; "
        f"{sum(told.get('seconds', 0) for _, told, _ in results):.0f} s, "
        f"peak {max((told.get('peak_mib', 0) for _, told, _ in results), default=0)} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
