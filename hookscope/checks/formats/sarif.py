"""Findings as SARIF 2.1.0, in the form that GitHub's code scanning takes.

A result points at the line where the layer's class is written, and never at a path of the machine.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hookscope.checks.findings import Finding, Rule, Source
from hookscope.checks.formats import WHOLE_MODEL, cut, legal, worst_first
from hookscope.checks.sources import nearest
from hookscope.output.manifest import plain
from hookscope.output.manifest import to_json as json_text

MOST_RESULTS = 25_000
"""Code scanning refuses a run with more."""

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HOME = "https://github.com/hookscope/hookscope"
_ROOT = "%SRCROOT%"
_LONGEST = 1024  # of the descriptions of a rule, in code scanning
_LEVELS = {"error": "error", "warn": "warning"}


def to_json(
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    *,
    sources: Mapping[str, Source],
    version: str,
    fallback: Source | None = None,
) -> str:
    """A whole SARIF file.

    Args:
        findings: what did not pass; of more than `MOST_RESULTS` the worst are kept, and a notification says so.
        rules: all that was looked for, by name.
        sources: where layers are written, as `sources_of` gives it.
        version: of hookscope.
        fallback: what to point at where nothing around a layer is the user's own; without it such a result has no
            place in a file, and code scanning does not show it.
    """
    kept = worst_first(findings)[:MOST_RESULTS]
    known = _with_missing(rules, kept)
    places = {name: at for at, name in enumerate(known)}
    seen: Counter[str] = Counter()
    run = {
        "tool": {"driver": _driver(known, version)},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {_ROOT: {"description": {"text": "Where hookscope was run."}}},
        "invocations": [_invocation(len(findings), len(kept))],
        "results": [
            _result(finding, places, nearest(finding.layer, sources, fallback), seen) for finding in kept
        ],
    }
    return json_text({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _with_missing(rules: Mapping[str, Rule], findings: Sequence[Finding]) -> dict[str, Rule]:
    missing = {finding.rule: finding for finding in findings if finding.rule not in rules}
    return {
        **rules,
        **{name: Rule(name, one.severity, name, one.why, one.advice) for name, one in missing.items()},
    }


def _driver(rules: Mapping[str, Rule], version: str) -> dict[str, Any]:
    return {
        "name": "hookscope",
        "version": version,
        "informationUri": _HOME,
        "rules": [_descriptor(name, rule) for name, rule in rules.items()],
    }


def _descriptor(name: str, rule: Rule) -> dict[str, Any]:
    """Code scanning takes no empty text, so that the name stands where nothing is said."""
    said = " ".join(text for text in (rule.why, rule.advice) if text)
    return {
        "id": legal(name),
        "shortDescription": {"text": _text(rule.summary or name)},
        "fullDescription": {"text": _text(rule.why or rule.summary or name)},
        "help": {"text": legal(said or rule.summary or name)},
        "defaultConfiguration": {"enabled": rule.severity != "off", "level": _level(rule.severity)},
    }


def _level(severity: str) -> str:
    return _LEVELS.get(severity, "note")


def _result(
    finding: Finding, places: Mapping[str, int], source: Source | None, seen: Counter[str]
) -> dict[str, Any]:
    location = _location(finding.layer, source)
    return {
        "ruleId": legal(finding.rule),
        "ruleIndex": places[finding.rule],
        "level": _level(finding.severity),
        "message": {"text": _message(finding)},
        "locations": [location] if location else [],
        "partialFingerprints": _fingerprints(finding, seen),
        "properties": {"value": plain(finding.value), "limit": plain(finding.limit)},
    }


def _location(layer: str, source: Source | None) -> dict[str, Any]:
    place = {"physicalLocation": _physical(source)} if source is not None else {}
    name = legal(layer)
    return {**place, "logicalLocations": [{"fullyQualifiedName": name, "kind": "module"}]} if name else place


def _physical(source: Source) -> dict[str, Any]:
    # All four bounds, as code scanning documents; an empty region, since the width of the line is not known.
    region = {"startLine": source.line, "startColumn": 1, "endLine": source.line, "endColumn": 1}
    uri = quote(source.file.encode("utf-8", "surrogateescape"), safe="/")
    return {"artifactLocation": {"uri": uri, "uriBaseId": _ROOT}, "region": region}


def _fingerprints(finding: Finding, seen: Counter[str]) -> dict[str, str]:
    """Without values, so that an alert stays the same one; with a count where a layer breaks a rule several times.

    `primaryLocationLineHash` is the only one that code scanning uses. Left out, it is made from the source line, which
    all layers of a class share.
    """
    identity = f"{legal(finding.rule)}::{legal(finding.layer or WHOLE_MODEL)}"
    seen[identity] += 1
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return {"hookscope/v1": identity, "primaryLocationLineHash": f"{digest}:{seen[identity]}"}


def _message(finding: Finding) -> str:
    """The message as it is to be read: foreign text in it must make no link and no placeholder."""
    text = finding.message or finding.rule
    if "](" in text:
        text = text.replace("[", r"\[").replace("]", r"\]")
    return _text(re.sub(r"\{(\d+)\}", r"{{\1}}", text))


def _text(text: str) -> str:
    return cut(legal(text), _LONGEST)


def _invocation(found: int, kept: int) -> dict[str, Any]:
    words = f"{found} findings, of which the worst {kept} are listed: code scanning takes no more"
    cut_off = {"toolExecutionNotifications": [{"level": "warning", "message": {"text": words}}]}
    return {"executionSuccessful": True, **(cut_off if found > kept else {})}
