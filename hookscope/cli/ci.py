"""What a gate tells the CI service that it runs under: annotations in the log, and a page of its summary.

Reads the environment; the words are `checks.formats`'.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hookscope.cli import talk

if TYPE_CHECKING:
    from hookscope.artifacts import Table
    from hookscope.tasks import Gate


def tell(gate: Gate, tables: Sequence[Table], *, results_on_stdout: bool) -> None:
    """Annotations where `GITHUB_ACTIONS` is set, Markdown to the file that `GITHUB_STEP_SUMMARY` names.

    `results_on_stdout`: stdout holds JSON, so that annotations go to stderr.

    Raises:
        OutputError: the summary cannot be written.
    """
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _annotate(gate, sys.stderr if results_on_stdout else sys.stdout)
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        from hookscope.checks.formats import github
        from hookscope.output.directory import append_text

        text = github.summary(
            gate.title, gate.findings, tables=tables, cases=gate.cases, fail_on=gate.fail_on
        )
        append_text(Path(page), text)


def _annotate(gate: Gate, stream: TextIO) -> None:
    from hookscope.checks.formats import github

    for line in github.annotations(gate.findings, gate.sources):
        talk.put_line(stream, line)
