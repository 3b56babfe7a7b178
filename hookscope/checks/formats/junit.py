"""Cases as JUnit XML, for every CI service that shows tests: one test for each rule and layer.

The format knows no warnings: what was found and does not fail is a test that passed, with its words in `system-out`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from hookscope.checks.findings import Case, Finding, failing
from hookscope.checks.formats import WHOLE_MODEL, legal

_NO_TIME = "0.000"


def to_xml(
    cases: Sequence[Case], *, suite: str, fail_on: Sequence[str], properties: Mapping[str, str] | None = None
) -> bytes:
    """A whole JUnit file in UTF-8.

    Args:
        cases: what was looked at, in the order in which it is shown.
        suite: the suite's name.
        fail_on: what makes a finding a failure, as `parse_fail_on` gives it.
        properties: what was measured on, by name.
    """
    tests = [_test(case, fail_on) for case in cases]
    totals = {
        "name": legal(suite),
        "time": _NO_TIME,
        "tests": str(len(tests)),
        "failures": str(sum(test.find("failure") is not None for test in tests)),
        "errors": "0",
    }
    skipped = str(sum(test.find("skipped") is not None for test in tests))
    root = ET.Element("testsuites", totals)
    inner = ET.SubElement(root, "testsuite", totals, skipped=skipped)
    if properties:
        inner.append(_properties(properties))
    inner.extend(tests)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _properties(properties: Mapping[str, str]) -> ET.Element:
    element = ET.Element("properties")
    for name, value in sorted(properties.items()):
        ET.SubElement(element, "property", name=legal(name), value=legal(value))
    return element


def _test(case: Case, fail_on: Sequence[str]) -> ET.Element:
    test = ET.Element(
        "testcase", classname=legal(case.layer or WHOLE_MODEL), name=legal(case.rule), time=_NO_TIME
    )
    if case.finding is not None and failing([case.finding], fail_on):
        failure = ET.SubElement(
            test, "failure", message=legal(case.finding.message), type=legal(case.finding.severity)
        )
        failure.text = _words(case.finding)
    elif case.finding is not None:
        ET.SubElement(test, "system-out").text = _words(case.finding)
    elif case.skipped:
        ET.SubElement(test, "skipped", message=legal(case.skipped))
    return test


def _words(finding: Finding) -> str:
    compared = not (math.isnan(finding.value) and math.isnan(finding.limit))
    numbers = f"value {finding.value:.6g}, limit {finding.limit:.6g}" if compared else ""
    lines = (f"{finding.severity}: {finding.message}", numbers, finding.why, finding.advice)
    return legal("\n".join(line for line in lines if line))
