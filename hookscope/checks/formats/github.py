"""Findings for GitHub Actions: a summary in Markdown for the page of a run, and annotations for its log.

Names of layers and messages are foreign text. In the summary they must stay text: no table cell, tag, link or mention;
in an annotation they must not end the command or begin another.
"""

# Without `from __future__ import annotations`, whose name a function here has.

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hookscope.artifacts import Table
from hookscope.checks.findings import Case, Finding, Source, failing
from hookscope.checks.formats import WHOLE_MODEL, cut, legal, worst_first
from hookscope.checks.sources import nearest
from hookscope.output.manifest import plain
from hookscope.wording import counted

_COLUMNS = ("layer", "rule", "severity", "value", "limit", "message")
_RIGHT = ("value", "limit")
_LONGEST_NAME = 200
_LONGEST_TEXT = 500
_LONGEST_ANNOTATION = 1000
_KINDS = {"error": "error", "warn": "warning"}

_MARKS = re.compile(
    r"[\\`*\[\]<>&|~$!#@{}]|:(?=\S)|(?<![^\W_])_|_(?![^\W_])|^[-+=]|^\d(?=\d*[.)](?:\s|$))|(?<=[wW]{3})\."
)
_OPENING = re.compile(r"(&#(?:35|58|64|46);)(?=[^\s&])")


def summary(
    title: str,
    findings: Sequence[Finding],
    *,
    tables: Sequence[Table] = (),
    cases: Sequence[Case] = (),
    fail_on: Sequence[str] = ("error",),
    limit_bytes: int = 1_000_000,
    most_rows: int = 100,
) -> str:
    """Markdown to append to `$GITHUB_STEP_SUMMARY`, of at most `limit_bytes` in UTF-8.

    The verdict, the findings with the worst first, why each rule matters and what to try, then the tables; what has no
    room, or comes after `most_rows` rows, is counted.

    Args:
        title: the heading.
        findings: what did not pass.
        tables: what was measured.
        cases: all that was looked at, for the verdict's counts.
        fail_on: what makes a finding a failure, as `parse_fail_on` gives it.
        limit_bytes: GitHub shows nothing at all of a step that writes more than 1 MiB.
        most_rows: of each table.
    """
    head = f"## {_text(title, _LONGEST_NAME)}\n\n{_verdict(findings, cases, fail_on)}\n\n"
    page = head if _size(head) <= limit_bytes else ""
    advice = _advice(findings, (limit_bytes - _size(page)) // 4)
    columns = [(name, name in _RIGHT) for name in _COLUMNS]
    rows = [_row(finding) for finding in worst_first(findings)[:most_rows]]
    left = limit_bytes - _size(page) - _size(advice)
    page += _grid(columns, rows, counted_as=(len(findings), "finding"), room=left) + advice
    for table in tables:
        page += _folded(table, limit_bytes - _size(page), most_rows)
    return page


def annotations(findings: Sequence[Finding], sources: Mapping[str, Source], *, most: int = 10) -> list[str]:
    """Commands for the log, a line each: errors, then warnings, at most `most` of either; then how many are left.

    GitHub shows no more than ten of a kind for a step. A layer whose class lies outside the working directory is named
    without a file.
    """
    shown: list[str] = []
    for severity, kind in _KINDS.items():
        fitting = [finding for finding in findings if finding.severity == severity]
        shown += [_annotation(kind, finding, sources) for finding in fitting[:most]]
    left = len(findings) - len(shown)
    return [*shown, f"::notice title=hookscope::{_more(left, 'finding')} in the summary"] if left else shown


def _annotation(kind: str, finding: Finding, sources: Mapping[str, Source]) -> str:
    source = nearest(finding.layer, sources)
    place = f"file={_property(source.file)},line={source.line}," if source is not None else ""
    title = cut(f"{finding.rule}: {finding.layer or WHOLE_MODEL}", _LONGEST_NAME)
    words = "\n".join(text for text in (finding.message, finding.advice) if text)
    return f"::{kind} {place}title={_property(title)}::{_data(cut(words, _LONGEST_ANNOTATION))}"


def _data(text: str) -> str:
    return legal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _verdict(findings: Sequence[Finding], cases: Sequence[Case], fail_on: Sequence[str]) -> str:
    failed = len(failing(findings, fail_on))
    skipped = sum(case.finding is None and bool(case.skipped) for case in cases)
    looked = counted(len(cases), "check") if cases else ""
    counts = [counted(failed, "failure") if failed else "", looked, f"{skipped} skipped" if skipped else ""]
    counts.insert(1, counted(len(findings), "finding") if findings else "no findings")
    return f"**{'Failed' if failed else 'Passed'}**: {', '.join(filter(None, counts))}"


def _row(finding: Finding) -> list[str]:
    return [
        f"<code>{_text(finding.layer or WHOLE_MODEL, _LONGEST_NAME)}</code>",
        _text(finding.rule, _LONGEST_NAME),
        _text(finding.severity, _LONGEST_NAME),
        "" if math.isnan(finding.value) and math.isnan(finding.limit) else _cell(finding.value),
        "" if math.isnan(finding.limit) else _cell(finding.limit),
        _text(finding.message),
    ]


def _advice(findings: Sequence[Finding], room: int) -> str:
    """Why each rule matters and what to try, once; empty where nothing is said or it has no room."""
    by_rule: dict[str, Finding] = {}
    for finding in worst_first(findings):
        if finding.why or finding.advice:
            by_rule.setdefault(finding.rule, finding)
    said = [
        f"- **{_text(rule, _LONGEST_NAME)}**: {_text(' '.join(filter(None, (one.why, one.advice))))}\n"
        for rule, one in by_rule.items()
    ]
    opening, closing = _fold("Why it matters, and what to try")
    kept = _fitting(said, room - _size(opening + closing))
    return f"{opening}{''.join(kept)}{closing}" if kept else ""


def _folded(table: Table, room: int, most: int) -> str:
    opening, closing = _fold(_text(table.title or table.kind, _LONGEST_NAME))
    numeric = [any(type(row[at]) in (int, float) for row in table.rows) for at in range(len(table.columns))]
    columns = list(zip(table.columns, numeric, strict=True))
    notes = "".join(f"- {_text(note)}\n" for note in table.notes)
    rows = [[_cell(value) for value in row] for row in table.rows[:most]]
    left = room - _size(opening + notes + closing)
    grid = _grid(columns, rows, counted_as=(len(table.rows), "row"), room=left)
    return f"{opening}{grid}{notes}{closing}" if grid else ""


def _fold(title: str) -> tuple[str, str]:
    """What opens and closes a part that is folded away; the blank lines make Markdown of what is inside."""
    return f"<details><summary>{title}</summary>\n\n", "\n</details>\n\n"


def _grid(
    columns: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[str]],
    counted_as: tuple[int, str],
    room: int,
) -> str:
    """A table of as many rows as there is room for, then how many of all are left; empty without rows or room."""
    count, noun = counted_as
    head = _bar(_text(name, _LONGEST_NAME) for name, _ in columns)
    head += _bar("---:" if right else "---" for _, right in columns)
    kept = _fitting(map(_bar, rows), room - _size(f"{head}{_rest(count, noun)}\n"))
    return f"{head}{''.join(kept)}{_rest(count - len(kept), noun)}\n" if kept else ""


def _rest(count: int, noun: str) -> str:
    return f"\nand {_more(count, noun)}\n" if count else ""


def _fitting(lines: Iterable[str], room: int) -> list[str]:
    kept = []
    for line in lines:
        room -= _size(line)
        if room < 0:
            break
        kept.append(line)
    return kept


def _more(count: int, noun: str) -> str:
    return f"{count} more {noun if count == 1 else f'{noun}s'}"


def _bar(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(value: Any) -> str:
    """A value of a table: four significant digits, a shape as `64x7x7`, `None` empty."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    value = plain(value)
    if isinstance(value, list):
        return ("x" if all(type(item) is int for item in value) else ", ").join(map(_cell, value))
    return str(value).lower() if isinstance(value, bool) else _text(str(value))


def _text(text: str, most: int = _LONGEST_TEXT) -> str:
    """The text on one line, with nothing that Markdown, HTML or GitHub would act on.

    By character references, which hold inside HTML too, where Markdown's backslashes do not. GitHub makes links of
    mentions, issues, addresses and emoji after it has resolved these: an empty comment keeps the words apart.
    """
    line = cut(" ".join(legal(text).split()), most)
    return _OPENING.sub(r"\1<!-- -->", _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", line))


def _size(text: str) -> int:
    return len(text.encode("utf-8"))
