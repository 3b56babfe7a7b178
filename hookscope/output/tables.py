"""A table as CSV for spreadsheets, Markdown for people, JSON for scripts.

Names of layers and files are foreign text: they must neither break a table nor run as a formula.
It must not open files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hookscope.artifacts import Table
from hookscope.errors import UsageError, near_misses
from hookscope.output.manifest import plain, to_json, to_json_line

FORMATS = ("csv", "md", "json")
"""What a table may be written as; also the file's ending."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NEEDS_QUOTES = re.compile(r'[",\r\n]')
_MARKS = re.compile(r"([\\|`*\[\]~$]|(?<![^\W_])_|_(?![^\W_]))")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def table(table: Table, kind: str) -> str:
    """The table as text in one of `FORMATS`.

    Raises:
        UsageError: there is no such format.
    """
    writers = {"csv": to_csv, "md": to_markdown, "json": to_json_table}
    if kind not in writers:
        hint = near_misses(kind, FORMATS) or f"choose from {', '.join(FORMATS)}"
        raise UsageError(f"no table format is called {kind!r}", hint)
    return writers[kind](table)


def to_csv(table: Table) -> str:
    """RFC 4180 with line feeds; numbers in full, a `'` before text that a spreadsheet would run."""
    lines = (",".join(map(_csv_cell, row)) for row in (table.columns, *table.rows))
    return "".join(f"{line}\n" for line in lines)


def to_markdown(table: Table) -> str:
    """The title, the rows, the notes; numbers with four significant digits and to the right."""
    rows = [[_markdown_cell(value) for value in row] for row in table.rows]
    numeric = [_is_numeric(row[at] for row in table.rows) for at in range(len(table.columns))]
    rules = ["---:" if right else "---" for right in numeric]
    lines = [f"## {_escaped(table.title)}", ""] if table.title else []
    lines += [_bar(map(_escaped, table.columns)), _bar(rules), *map(_bar, rows)]
    lines += ["", *(f"- {_escaped(note)}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def to_json_table(table: Table) -> str:
    """The table's own `data` where it has any; else an object with `kind`, `title`, `columns`, `rows`, `notes`."""
    if table.data:
        return to_json(table.data)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return to_json(
        {
            "kind": table.kind,
            "title": table.title,
            "columns": table.columns,
            "rows": rows,
            "notes": table.notes,
        }
    )


def _csv_cell(value: Any) -> str:
    value = _value(value)
    if value is None or isinstance(value, int | float):
        return _words(value)
    words = _words(value)
    words = f"'{words}" if words.startswith(_FORMULA) else words
    # Not the csv module: with a line feed as line end it leaves a lone carriage return unquoted.
    doubled = words.replace('"', '""')
    return f'"{doubled}"' if _NEEDS_QUOTES.search(words) else words


def _markdown_cell(value: Any) -> str:
    value = _value(value)
    return f"{value:.4g}" if isinstance(value, float) else _escaped(_words(value))


def _value(value: Any) -> Any:
    """The plain value, with floats left as they are, finite or not."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return float(value) if isinstance(value, float) else plain(value)


def _words(value: Any) -> str:
    """A plain value for a cell: a number in full, a shape as `64x7x7`, a list with commas, `None` empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return _listed(value)
    return to_json_line(value).strip() if isinstance(value, dict) else str(value)


def _listed(values: list[Any]) -> str:
    shape = all(type(value) is int for value in values)
    return ("x" if shape else ", ").join(map(_words, values))


def _escaped(text: str) -> str:
    """The text on one line, with nothing that Markdown, HTML or a terminal would act on."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return _MARKS.sub(r"\\\1", " ".join(printable.split())).translate(_HTML)


def _bar(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_numeric(values: Iterable[Any]) -> bool:
    return any(type(_value(value)) in (int, float) for value in values)
