"""`--tensorboard`: the place where a run is shown, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.errors import UsageError

if TYPE_CHECKING:
    from hookscope.output.board import Board


def board_in(directory: str | None, out: Path) -> Board | None:
    """The board in the directory; `None` where none is asked for. Nothing is written yet.

    Raises:
        UsageError: the directory is that of the results, lies in it, or is one that an earlier run wrote; or the
            extra is missing.
        OutputError: it is a file.
    """
    from hookscope.output.board import Board
    from hookscope.output.journal import JOURNAL, MANIFEST
    from hookscope.output.tensorboard import TensorBoard

    if directory is None:
        return None
    if not directory:
        raise UsageError("--tensorboard '' names no directory", "an unset variable?")
    place, root = Path(directory).resolve(), out.resolve()
    if place == root or root in place.parents:
        # A file that no manifest lists would keep the results from ever being replaced.
        raise UsageError(
            f"--tensorboard {directory!r} is where the results go", "name a directory outside it"
        )
    if any((place / name).exists() for name in (MANIFEST, JOURNAL)):
        raise UsageError(f"--tensorboard {directory!r} holds the results of a run", "name another directory")
    return Board(TensorBoard(directory))
