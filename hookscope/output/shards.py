"""Features as files: a shard of them as safetensors or npz, and the index of the pictures in them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hookscope.output.manifest import encoded, to_json_line

if TYPE_CHECKING:
    from hookscope.artifacts import Shard
    from hookscope.output.directory import OutputDir

FORMATS = ("safetensors", "npz")
"""What a shard may be written as; also the file's ending."""

INDEX = "index.jsonl"
"""The file that says where each picture's row is."""


def prepared_shard(out: OutputDir, shard: Shard, folder: str = "") -> Callable[[], dict[str, Any]]:
    """The writing of the shard's file, to be done in any thread; gives its record."""
    ending = f".{shard.format}"
    (name,) = out.reserve(f"{folder}{shard.stem}", [ending])

    def write() -> dict[str, Any]:
        return out.write(
            name,
            _encoded(shard),
            kind=shard.kind,
            part="features",
            format=shard.format,
            status="ok",
            rows=len(shard.rows),
        )

    return write


def index(rows: Iterable[tuple[str, int | str | None, str, int]]) -> bytes:
    """The index: a line for each picture (its path, its label, its shard's stem, its row there)."""
    names = ("picture", "label", "shard", "row")
    return encoded("".join(to_json_line(dict(zip(names, row, strict=True))) for row in rows))


def _encoded(shard: Shard) -> bytes:
    if shard.format == "npz":
        buffer = io.BytesIO()
        np.savez(buffer, **{name: tensor.numpy() for name, tensor in shard.arrays.items()})  # type: ignore[arg-type]
        return buffer.getvalue()
    from safetensors.torch import save

    made: bytes = save(dict(shard.arrays), metadata={"rows": str(len(shard.rows))})
    return made
