"""A baseline of gradient figures, read: from its file, or from an output directory of `gradnorm` that holds one.

What it reads is not trusted. It writes nothing; what counts as a change is for `graddrift`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookscope.checks.documents import DocumentKind, Reader
from hookscope.checks.gradfigures import SCHEMA, Figure, Figures, GradBaseline, Measured
from hookscope.checks.measured import short

DOCUMENT = DocumentKind("gradnorm", "gradient figures", SCHEMA)

FILE = DOCUMENT.file
"""What the document is called in an output directory of `gradnorm`."""


def read(path: str | Path) -> GradBaseline:
    """The baseline in a file, in an output directory of `gradnorm`, or beside its manifest.

    Raises:
        UsageError: there is none, or it is not what hookscope writes; the hint says how to make one.
    """
    return DOCUMENT.read(path, _baseline)


def to_update(path: str | Path) -> GradBaseline | None:
    """The baseline that a run with --update-baseline is to replace; `None` where there is none yet.

    Raises:
        UsageError: the path is a directory, or a file that is no baseline: that is not overwritten.
    """
    return DOCUMENT.to_update(path, _baseline)


def _baseline(found: Mapping[str, Any], reader: Reader) -> GradBaseline:
    return GradBaseline(
        measured=reader.measured(found, Measured),
        made=reader.made(found),
        figures=Figures(
            reader.must(found, "loss", ""),
            reader.must(found, "total", ""),
            _figures(found, "parameters", reader),
            _figures(found, "layers", reader),
        ),
        path=reader.name,
    )


def _figures(found: Mapping[str, Any], key: str, reader: Reader) -> dict[str, Figure]:
    table = reader.table(found, key, "")
    made = {}
    for name in table:
        record, at = reader.table(table, name, f"{key}."), f"{key}.{short(name)}."
        made[name] = Figure(
            reader.number(record, "norm", at),
            reader.number(record, "rms", at),
            reader.text(record, "status", at),
            reader.text(record, "shape", at),
        )
    return made
