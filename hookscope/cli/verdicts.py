"""Findings as a person is told of them on stderr: the worst first, few, and the advice of a rule once.

All of them are in the files of the run; what is not said here is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hookscope.checks.formats import worst_first
from hookscope.cli import talk
from hookscope.wording import counted

if TYPE_CHECKING:
    from hookscope.checks.findings import Finding

MOST = 10
"""So many findings are told."""


def tell(findings: Iterable[Finding], failing: Iterable[Finding], *, quiet: bool, whole: str) -> None:
    """What did not pass, on stderr.

    Args:
        findings: all of them.
        failing: those of them that fail the run, which come first and are errors whatever their severity.
        quiet: say errors only.
        whole: the file that has all of them.
    """
    fails = set(failing)
    errors = [one for one in worst_first(findings) if one in fails or one.severity == "error"]
    errors.sort(key=lambda one: one not in fails)
    bad = set(errors)
    others = [] if quiet else [one for one in worst_first(findings) if one not in bad]
    shown = [*errors, *others][:MOST]
    last = {one.advice: at for at, one in enumerate(shown)}
    for at, one in enumerate(shown):
        talk.complain(
            "error" if one in bad else "warning", one.message, one.advice if last[one.advice] == at else ""
        )
    _tell_rest([*errors, *others][MOST:], "error" if len(errors) > MOST else "warning", whole)


def _tell_rest(left: Sequence[Finding], kind: str, whole: str) -> None:
    if left:
        rules = ", ".join(f"{count} {rule}" for rule, count in Counter(one.rule for one in left).items())
        talk.complain(kind, f"and {counted(len(left), 'more finding')}: {rules}", f"all are in {whole}")
