"""The flags of `extract`, and the task that they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope.cli.drawing import drawing_of
from hookscope.errors import UsageError, check_choice

if TYPE_CHECKING:
    from hookscope.cli.session import Shared
    from hookscope.job import Drawing
    from hookscope.tasks import Task

_SOURCE = "source"


@dataclass(frozen=True)
class ExtractFlags:
    """What `extract` adds."""

    reduce: Annotated[
        str,
        typer.Option(
            metavar="none|avg|max|flatten|cls",
            help="Over positions: all, mean, maximum; all in a row; the class token.",
        ),
    ] = "none"
    max_size: Annotated[
        str | None, typer.Option(metavar="N|HxW", help="Larger maps are averaged down to this size.")
    ] = None
    dtype: Annotated[str, typer.Option(metavar="source|float32|float16|bfloat16", help="What is stored.")] = (
        _SOURCE
    )
    shard_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Pictures in a file, rounded up to whole batches."),
    ] = None
    features_format: Annotated[str, typer.Option(metavar="safetensors|npz", help="Of the files.")] = (
        "safetensors"
    )

    @property
    def baseline(self) -> None:
        """Nothing is compared with."""

    @property
    def data(self) -> None:
        """Features are pictures'."""

    @property
    def batches(self) -> None:
        """All of them."""

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.output.shards import FORMATS
        from hookscope.probes.extract import DTYPES, REDUCTIONS, Features
        from hookscope.tasks.extract import ExtractOptions, ExtractTask

        check_choice("--reduce", self.reduce, REDUCTIONS)
        check_choice("--dtype", self.dtype, (_SOURCE, *DTYPES))
        check_choice("--features-format", self.features_format, FORMATS)
        options = ExtractOptions(
            layer=tuple(shared.layers.layer),
            exclude=tuple(shared.layers.exclude),
            features=Features(self.reduce, _size(self.max_size), DTYPES.get(self.dtype)),
            shard_size=self.shard_size,
            format=self.features_format,
            batch_size=shared.run.batch_size,
        )
        return ExtractTask(options)

    def drawing(self) -> Drawing:
        """Nothing is drawn."""
        return drawing_of("viridis", 0.6, "original", None, overlay=False)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--max-size {text!r} is no size", "such as 7 or 7x9, height by width")
    return int(parts[0]), int(parts[-1])
