"""What several processes know together: norms of sharded parameters, and activations' moments.

All collectives of the monitor are here. None of them is called by a hook of a layer or a parameter, and every process
makes the same ones: nothing that differs between processes decides whether they are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookscope.monitor.measuring import Sizes

_Known = TypeVar("_Known")


def local(tensor: Tensor | None) -> Tensor | None:
    """This process's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if tensor is not None and is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, as parameters under FSDP2 are."""
    # By name: importing it where nothing is sharded takes long.
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "device_mesh")


def made_whole(found: Sequence[Sizes], parameters: Sequence[Tensor]) -> None:
    """Sizes of parts become those of the whole tensors, in place: one sum (and maximum) for all, for each mesh.

    Every process must call it with the same parameters; nothing is sent where none is sharded.
    """
    for groups, positions in _by_groups(parameters):
        for group in groups:
            _reduced(found, positions, group)


def data_parallel_group(model: nn.Module, parameters: Iterable[Tensor]) -> Any | None:
    """The processes that average this model's gradients, `None` where there is but one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    wrapper: Any = model
    while wrapper is not None:
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            return wrapper.process_group
        wrapper = getattr(wrapper, "_orig_mod", None)
    sharded: Any = next((one for one in parameters if is_sharded(one)), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else torch.distributed.group.WORLD


def ranks_in(group: Any | None) -> int:
    """How many processes; 1 for none."""
    return 1 if group is None else torch.distributed.get_world_size(group)


def gathered(known: _Known, group: Any | None) -> list[_Known]:
    """What each process knows, in the order of ranks; a collective."""
    if group is None:
        return [known]
    found: list[Any] = [None] * ranks_in(group)
    torch.distributed.all_gather_object(found, known, group=group)
    return found


def _by_groups(parameters: Sequence[Tensor]) -> list[tuple[list[Any], list[int]]]:
    """Positions of sharded parameters, with the groups of processes that hold their parts."""
    found: dict[tuple[Any, ...], tuple[list[Any], list[int]]] = {}
    for at, parameter in enumerate(parameters):
        if not is_sharded(parameter):
            continue
        sharded: Any = parameter
        axes = tuple(axis for axis, one in enumerate(sharded.placements) if not one.is_replicate())
        if axes:
            mesh = sharded.device_mesh
            key = (mesh, axes)
            if key not in found:
                found[key] = ([mesh.get_group(axis) for axis in axes], [])
            found[key][1].append(at)
    return list(found.values())


def _reduced(found: Sequence[Sizes], positions: Sequence[int], group: Any) -> None:
    tables = [_table(one) for one in found]
    columns = torch.tensor(list(positions), device=tables[0].device)
    summed = torch.cat([_summands(one, table, columns) for one, table in zip(found, tables, strict=True)])
    torch.distributed.all_reduce(summed, group=group)
    top = torch.cat([table[-1:, columns] for table in tables])
    if math.inf in found[0].orders:
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
    rows = iter(summed)
    for line, (one, table) in enumerate(zip(found, tables, strict=True)):
        for row, order in enumerate(one.orders):
            power = next(rows)
            table[row, columns] = top[line] if order == math.inf else power ** (1 / order)
        broken = next(rows)
        one.parts = [(list(range(len(one.counts))), table)]
        if table.device.type == "cpu":
            counts = zip(positions, broken.tolist(), strict=True)
            one.non_finite |= {at: int(count) for at, count in counts if count}


def _table(found: Sizes) -> Tensor:
    """(orders, tensors): the norms that this process measured, 0 where it has no part."""
    device = found.parts[0][1].device if found.parts else torch.device("cpu")
    table = torch.zeros(len(found.orders), len(found.counts), dtype=torch.float64, device=device)
    for places, norms in found.parts:
        table[:, torch.tensor(places, device=device)] = norms
    return table


def _summands(found: Sizes, table: Tensor, columns: Tensor) -> Tensor:
    """What adds up over processes: norms to the power of their order, and entries that are not finite."""
    powers = [
        row if order == math.inf else row**order for row, order in zip(table, found.orders, strict=True)
    ]
    broken = torch.tensor([float(found.non_finite.get(at, 0)) for at in range(len(found.counts))])
    return torch.stack([*powers, broken.to(table)])[:, columns]
