"""The flags of commands that take batches of the user's own instead of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

DATA = "Data"
"""The panel of `--help` that they stand in."""


@dataclass(frozen=True)
class DataFlags:
    """Where batches come from, and how many."""

    data: Annotated[
        str | None,
        typer.Option(
            metavar="file.py:callable",
            rich_help_panel=DATA,
            help="Batches of (input, target) instead of pictures.",
        ),
    ] = None
    batches: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=DATA, help="At most N batches.")
    ] = None
