"""What CI services are told, read back by readers that we did not write."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

from hookscope.artifacts import Table
from hookscope.checks.findings import Case, Finding, Rule, Source
from hookscope.checks.formats import github, junit, legal, sarif
from hookscope.checks.sources import nearest, source_of, sources_of
from hookscope.models.user import resolved

SCHEMAS = Path(__file__).parent / "data" / "schemas"
NOW = Path.cwd()

RULES = {
    "nonfinite": Rule("nonfinite", "error", "A value is not finite", "Training is lost.", "Lower the rate."),
    "vanishing": Rule("vanishing", "warn", "Hardly any gradient", "Nothing is learnt.", "Add a norm."),
    "drift": Rule("drift", "off", "Not as it was", "", ""),
}

HOSTILE = {
    "pipe": "a|b",
    "escaped-pipe": "a\\|b",
    "backticks": "``a`b`",
    "tag": "<img src=x onerror=alert(1)>",
    "closes-details": "</details></summary><h1>x",
    "comment": "<!-- x",
    "line": "a\n\n# big\n| x | y |",
    "carriage-return": "a\r\n::error::x\r::add-mask::y",
    "link": "[a](https://evil.com)",
    "image": "![a](https://evil.com/a.png)",
    "address": "see https://evil.com or www.evil.com/a or me@evil.com",
    "mention": "@octocat @org/team",
    "issue": "#12 a/b#12",
    "emoji": ":tada:",
    "emphasis": "**a** _b_ ~~c~~ __init__",
    "list": "- a",
    "numbers": "10. a",
    "entity": "&lt;b&gt; &#64;octocat",
    "maths": "$a$ $$b$$",
    "percent": "a%0Ab%3A,c:d",
    "sarif": "[a](1) {0} {{1}}",
}  # fmt: skip
ILLEGAL = {
    "escape": "a\x1b[31mb",
    "null": "a\0b",
    "surrogate": "a\udc80b",
    "noncharacter": "a\uffffb",
    "override": "a\u202eb",
    "c1": "a\x85b",
}
ESCAPED = (r"a\x1b[31mb", r"a\x00b", r"a\udc80b", r"a\uffffb", r"a\u202eb", r"a\x85b")
ALL_NAMES = pytest.mark.parametrize("name", [*HOSTILE.values(), *ILLEGAL.values()], ids=[*HOSTILE, *ILLEGAL])


def finding(
    rule="nonfinite", severity="error", layer="conv", value=2.5, limit=1.0, message="too much", **more
):
    return Finding(rule, severity, layer, value, limit, message, **more)


def warning(**given):
    return finding(**{"rule": "vanishing", "severity": "warn", **given})


# -- JUnit


@cache
def junit_schema():
    return pytest.importorskip("xmlschema").XMLSchema(SCHEMAS / "junit-10.xsd")


def xml(cases, fail_on=("error",), **more):
    """A file that holds against the schema, as its suite."""
    data = junit.to_xml(cases, suite="gradnorm", fail_on=fail_on, **more)
    root = ET.fromstring(data)
    junit_schema().validate(root)
    (suite,) = root
    assert {name: root.get(name) for name in ("tests", "failures", "errors")} == {
        name: suite.get(name) for name in ("tests", "failures", "errors")
    }
    return suite


CASES = (
    Case("nonfinite", "conv", finding(why="Training is lost.", advice="Lower the rate.")),
    Case("vanishing", "conv", warning(message="too little")),
    Case("vanishing", "fc", skipped="never called"),
    Case("drift", ""),
)


def counts(suite):
    return [int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")]


def test_junit_tells_failed_found_skipped_and_passed_apart():
    suite = xml(CASES)
    assert counts(suite) == [4, 1, 0, 1]
    failed, found, skipped, passed = suite
    assert [(test.get("classname"), test.get("name")) for test in suite] == [
        ("conv", "nonfinite"), ("conv", "vanishing"), ("fc", "vanishing"), ("model", "drift"),
    ]  # fmt: skip
    assert failed.find("failure").attrib == {"message": "too much", "type": "error"}
    assert failed.find("failure").text.splitlines() == [
        "error: too much", "value 2.5, limit 1", "Training is lost.", "Lower the rate.",
    ]  # fmt: skip
    assert "warn: too little" in found.find("system-out").text
    assert found.find("failure") is None
    assert skipped.find("skipped").get("message") == "never called"
    assert list(passed) == []


@pytest.mark.parametrize(
    ("value", "limit", "words"),
    [
        (math.inf, 1.0, "value inf, limit 1"),
        (math.nan, 1.0, "value nan, limit 1"),
        (math.nan, math.nan, None),
    ],
    ids=["infinite", "undefined", "no-numbers"],
)
def test_junit_says_the_numbers_where_a_rule_compares_some(value, limit, words):
    (test,) = xml([Case("nonfinite", "conv", finding(value=value, limit=limit))])
    assert test.find("failure").text.splitlines()[1:] == ([words] if words else [])


@pytest.mark.parametrize(
    ("fail_on", "failures"),
    [(("error",), 1), (("warn",), 2), (("vanishing",), 1), (("drift",), 0), ((), 0)],
    ids=["error", "warn", "rule", "rule-without-findings", "nothing"],
)
def test_junit_fails_what_fails_the_run(fail_on, failures):
    assert counts(xml(CASES, fail_on))[1] == failures


def test_junit_is_read_by_another_reader():
    junitparser = pytest.importorskip("junitparser")
    read = junitparser.JUnitXml.fromstring(
        junit.to_xml(CASES, suite="gradnorm", fail_on=("error",), properties={"model": "demo", "a": "1"})
    )
    (suite,) = read
    assert (suite.name, suite.tests, suite.failures, suite.errors, suite.skipped) == ("gradnorm", 4, 1, 0, 1)
    assert {one.name: one.value for one in suite.properties()} == {"model": "demo", "a": "1"}
    assert [test.is_failure for test in suite] == [True, False, False, False]
    assert [test.is_skipped for test in suite] == [False, False, True, False]


def test_junit_without_cases_is_a_valid_file_of_none():
    assert counts(xml(())) == [0, 0, 0, 0]


def test_junit_is_the_same_each_time():
    properties = {"b": "2", "a": "1"}
    turned = dict(reversed(properties.items()))
    given = [junit.to_xml(CASES, suite="s", fail_on=(), properties=some) for some in (properties, turned)]
    assert given[0] == given[1]


@ALL_NAMES
def test_junit_keeps_foreign_text(name):
    found = finding(layer=name, message=name, value=math.nan, limit=math.inf)
    suite = xml((Case("nonfinite", name, found), Case("drift", name, skipped=name)), properties={name: name})
    properties, failed, skipped = suite
    assert failed.get("classname") == legal(name)
    assert failed.find("failure").get("message") == legal(name)
    assert skipped.find("skipped").get("message") == legal(name)
    assert properties[0].attrib == {"name": legal(name), "value": legal(name)}


@pytest.mark.parametrize(
    ("name", "expected"),
    list(zip(ILLEGAL.values(), ESCAPED, strict=True)),
    ids=ILLEGAL,
)
def test_what_is_not_legal_is_escaped(name, expected):
    assert legal(name) == expected


def test_line_ends_are_line_feeds():
    assert legal("a\r\nb\rc\nd\te") == "a\nb\nc\nd\te"


# -- SARIF


@cache
def sarif_schema():
    schema = json.loads((SCHEMAS / "sarif-2.1.0.json").read_text("utf-8"))
    return pytest.importorskip("jsonschema").Draft7Validator(schema)


def log(findings, rules=RULES, sources=None, fallback=None):
    """A file that holds against the official schema, as its only run."""
    text = sarif.to_json(findings, rules, sources=sources or {}, version="1.2.3", fallback=fallback)
    text.encode()
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    sarif_schema().validate(found)
    assert found["version"] == "2.1.0"
    (run,) = found["runs"]
    return run


SOURCES = {
    "conv": Source("nets/a b.py", 7),
    "outside": Source("/home/me/net.py", 3),
    ".": Source("net.py", 1),
}


def test_the_sarif_schema_can_refuse():
    jsonschema = pytest.importorskip("jsonschema")
    broken = json.loads(sarif.to_json([finding()], RULES, sources=SOURCES, version="1"))
    broken["runs"][0]["results"][0]["level"] = "warn"
    with pytest.raises(jsonschema.ValidationError):
        sarif_schema().validate(broken)


def test_sarif_describes_every_rule():
    driver = log([])["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("hookscope", "1.2.3")
    assert [rule["id"] for rule in driver["rules"]] == list(RULES)
    first, _, bare = driver["rules"]
    assert first["shortDescription"]["text"] == "A value is not finite"
    assert first["fullDescription"]["text"] == "Training is lost."
    assert first["help"]["text"] == "Training is lost. Lower the rate."
    assert [rule["defaultConfiguration"]["level"] for rule in driver["rules"]] == ["error", "warning", "note"]
    assert [rule["defaultConfiguration"]["enabled"] for rule in driver["rules"]] == [True, True, False]
    # Code scanning takes no empty text.
    assert all(bare[part]["text"] for part in ("shortDescription", "fullDescription", "help"))


def test_sarif_describes_a_rule_that_was_not_listed():
    run = log([finding(rule="other")])
    assert run["tool"]["driver"]["rules"][run["results"][0]["ruleIndex"]]["id"] == "other"


def test_sarif_points_at_the_class_and_names_the_layer():
    run = log([warning(layer="conv.weight"), finding(layer="conv")], sources=SOURCES)
    error, warn = run["results"]
    assert (error["ruleId"], error["level"], error["message"]["text"]) == ("nonfinite", "error", "too much")
    assert (warn["ruleId"], warn["level"], warn["ruleIndex"]) == ("vanishing", "warning", 1)
    (place,) = error["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "nets/a%20b.py"
    region = place["physicalLocation"]["region"]
    assert (region["startLine"], region["endLine"]) == (7, 7)
    assert place["logicalLocations"] == [{"fullyQualifiedName": "conv", "kind": "module"}]
    assert error["properties"] == {"value": 2.5, "limit": 1.0}
    assert warn["locations"][0]["physicalLocation"] == place["physicalLocation"]


@pytest.mark.parametrize(
    ("layer", "sources", "fallback", "expected"),
    [
        ("outside", {"outside": Source("/home/me/net.py", 3)}, Source("ci.yml", 1), "ci.yml"),
        ("outside", {"outside": Source("C:\\me\\net.py", 3)}, Source("ci.yml", 1), "ci.yml"),
        ("outside", {"outside": Source("../net.py", 3)}, None, None),
        ("outside", SOURCES, None, "net.py"),
        ("", SOURCES, None, "net.py"),
        ("", {}, Source("ci.yml", 1), "ci.yml"),
        ("fc", {}, Source("/home/me/ci.yml", 1), None),
        ("fc", {}, None, None),
        ("", {}, None, None),
        ("fc", {"fc": Source("ab:c#d?.py", 1)}, None, "ab:c#d?.py"),
        ("fc", {"fc": Source("é\udcff.py", 1)}, None, "é\udcff.py"),
    ],
    ids=[
        "outside", "windows", "above", "outside-in-ours", "model", "model-fallback", "fallback-outside", "nowhere",
        "model-nowhere", "colon", "bytes",
    ],
)  # fmt: skip
def test_sarif_names_no_path_of_the_machine(layer, sources, fallback, expected):
    (result,) = log([finding(layer=layer)], sources=sources, fallback=fallback)["results"]
    assert "/home/me" not in json.dumps(result)
    places = [place["physicalLocation"] for place in result["locations"] if "physicalLocation" in place]
    uris = [place["artifactLocation"]["uri"] for place in places]
    assert [unquote(uri, errors="surrogateescape") for uri in uris] == ([expected] if expected else [])
    for uri in uris:
        parts = urlsplit(uri)
        assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("", "", "", "")
        assert uri.isascii()


def test_sarif_fingerprints_hold_while_values_change():
    def prints(*findings):
        return [result["partialFingerprints"] for result in log(findings)["results"]]

    before, after = prints(finding(value=1.0, message="a")), prints(finding(value=math.inf, message="b"))
    assert before == after
    assert before[0]["hookscope/v1"] == "nonfinite::conv"
    several = prints(finding(), finding(), finding(layer="fc"), finding(rule="drift"))
    assert len({one["primaryLocationLineHash"] for one in several}) == 4
    assert several[0] == before[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_sarif_writes_what_is_not_finite_as_text(value):
    (result,) = log([finding(value=value, limit=value)])["results"]
    assert result["properties"] == {"value": str(value), "limit": str(value)}


def test_sarif_keeps_the_worst_and_says_so(monkeypatch):
    assert sarif.MOST_RESULTS == 25_000
    monkeypatch.setattr(sarif, "MOST_RESULTS", 3)
    findings = [warning(layer=f"w{at}") for at in range(4)] + [finding(layer="bad")]
    run = log(findings)
    names = [result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] for result in run["results"]]
    assert names == ["bad", "w0", "w1"]
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("5 findings, of which the worst 3 are listed")
    assert "toolExecutionNotifications" not in log(findings[:3])["invocations"][0]


@ALL_NAMES
def test_sarif_keeps_foreign_text(name):
    (result,) = log([finding(layer=name, message=name)], sources=SOURCES)["results"]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == legal(name)
    # Embedded links and placeholders, as SARIF has them (3.11.5 and 3.11.6), are undone to be text.
    text = result["message"]["text"]
    assert "](" not in text.replace("\\](", "")
    if "](" in name:
        text = text.replace("\\[", "[").replace("\\]", "]")
    assert text.replace("{{0}}", "{0}").replace("{{{1}}}", "{{1}}") == legal(name)


# -- GitHub: the summary


class Page(HTMLParser):
    """A summary as a browser has it: the tags, the pieces of text between them, and the cells of each table."""

    def __init__(self, markdown):
        super().__init__()
        self.tags, self.pieces, self.tables = [], [], []
        self._in_cell = False
        self.feed(rendered(markdown))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))
        self._in_cell = tag in ("td", "th") or (self._in_cell and tag == "code")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", []))
        self._in_cell = self._in_cell and tag == "code"

    def handle_comment(self, data):
        self.pieces.append("")

    def handle_data(self, data):
        self.pieces.append(data)
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def rendered(text):
    """As GitHub's kind of Markdown, with addresses made links."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    linkify = pytest.importorskip("linkify_it").LinkifyIt(options={"fuzzy_link": False})
    # As GitHub: of what has no scheme, only that with `www.`.
    markdown.linkify = linkify.add("//", None).add("www.", {"validate": re.compile(r"[^\s<>]+")})
    markdown.options["linkify"] = True
    return markdown.enable("linkify").render(text)


def cells(text, table=0):
    return Page(text).tables[table]


def test_the_summary_opens_with_the_verdict_and_the_worst():
    findings = [warning(layer="fc", limit=math.nan), finding(layer="", value=math.nan, limit=math.nan)]
    text = github.summary("gradnorm", findings, cases=CASES)
    assert text.splitlines()[:3] == [
        "## gradnorm", "", "**Failed**: 1 failure, 2 findings, 4 checks, 1 skipped",
    ]  # fmt: skip
    assert cells(text) == [
        ["layer", "rule", "severity", "value", "limit", "message"],
        ["model", "nonfinite", "error", "", "", "too much"],
        ["fc", "vanishing", "warn", "2.5", "", "too much"],
    ]


@pytest.mark.parametrize(
    ("findings", "fail_on", "verdict"),
    [
        ([], ("error",), "**Passed**: no findings"),
        ([warning()], ("error",), "**Passed**: 1 finding"),
        ([warning()], ("warn",), "**Failed**: 1 failure, 1 finding"),
        ([warning(), warning()], ("vanishing",), "**Failed**: 2 failures, 2 findings"),
    ],
    ids=["nothing", "warning", "warning-fails", "rule-fails"],
)
def test_the_verdict_is_that_of_the_run(findings, fail_on, verdict):
    assert github.summary("t", findings, fail_on=fail_on).splitlines()[2] == verdict


def test_why_and_advice_stand_once_for_each_rule():
    findings = [
        warning(why="Slow."),
        finding(why="Lost.", advice="Try."),
        finding(layer="b", why="Lost."),
        finding(),
    ]
    text = github.summary("t", findings)
    assert text.count("Lost.") == 1
    assert text.index("**nonfinite**: Lost. Try.") < text.index("**vanishing**: Slow.")
    assert "<details>" not in github.summary("t", [finding()])


TABLE = Table(
    "gradnorm", "Norms", ("layer", "shape", "norm", "none", "odd"),
    (("conv", (64, 7, 7), 0.123456, None, True), ("fc", (), math.inf, None, "a|b")), ("a note",),
)  # fmt: skip


def test_tables_are_folded_away():
    text = github.summary("t", [], tables=[TABLE, TABLE])
    assert text.count("<details><summary>Norms</summary>") == text.count("</details>") == 2
    assert cells(text, 1) == [
        ["layer", "shape", "norm", "none", "odd"],
        ["conv", "64x7x7", "0.1235", "", "true"],
        ["fc", "", "inf", "", "a|b"],
    ]


@ALL_NAMES
def test_foreign_text_stays_text_in_the_summary(name):
    hostile = finding(rule=name, layer=name, message=name, why=name)
    harmless = finding(rule="x", layer="x", message="x", why="x")
    pages = [
        github.summary(
            text, [found], tables=[Table("k", text, (text,), ((text,),), (text,))], fail_on=("error",)
        )
        for text, found in ((name, hostile), ("x", harmless))
    ]
    seen = " ".join(legal(name).split())
    page, plain = map(Page, pages)
    # No cell, tag, link, picture or emphasis more than of a name that is a letter.
    assert page.tags == plain.tags
    assert page.tables[0][1] == [seen, seen, "error", "2.5", "1", seen]
    assert page.tables[1] == [[seen], [seen]]
    assert "".join(page.pieces).count(seen) == "".join(plain.pieces).count("x")


@pytest.mark.parametrize("name", ["@octocat", "a/b#12", ":tada:", "#1"])
def test_what_github_links_later_is_kept_apart(name):
    """GitHub looks at the text between tags after the Markdown is done: no such piece may hold a whole reference."""
    page = Page(github.summary(name, [finding(rule=name, layer=name, message=name, why=name)]))
    assert "".join(page.pieces).count(name) == 6
    assert not [piece for piece in page.pieces if name in piece]


def test_the_parser_makes_links_where_it_can():
    assert [tag for tag, _ in Page(HOSTILE["address"]).tags].count("a") == 3


@pytest.mark.parametrize("limit", [0, 40, 300, 2_000, 20_000])
def test_the_summary_stays_under_its_limit(limit):
    findings = [finding(layer=f"лой{at}.日本", why="Lost." * 50, advice=f"{at}") for at in range(500)]
    text = github.summary(
        "t", findings, tables=[Table("k", "Norms", ("a",), tuple((f"é{at}",) for at in range(5_000)))],
        limit_bytes=limit, most_rows=10_000,
    )  # fmt: skip
    assert len(text.encode()) <= limit
    assert text.count("<details>") == text.count("</details>")
    if limit >= 2_000:
        shown = len(cells(text)) - 1
        assert 0 < shown < 501
        assert limit == 20_000 or f"and {500 - shown} more findings" in text


def test_the_default_limit_is_below_that_of_github():
    findings = [finding(layer="&" * 200, message="&" * 500) for _ in range(400)]
    text = github.summary("t", findings, most_rows=400)
    assert 900_000 < len(text.encode()) <= 1_000_000 < 1024**2


def test_rows_are_few_and_the_rest_is_counted():
    text = github.summary("t", [finding()] * 12, most_rows=5)
    assert len(cells(text)) == 6
    assert "and 7 more findings" in text
    assert "more" not in github.summary("t", [finding()] * 5, most_rows=5)


# -- GitHub: annotations


def command(line):
    """A workflow command as the documentation has it: `::name key=value,key=value::data`."""
    assert line.isprintable()
    empty, head, data = line.split("::", 2)
    assert empty == ""
    name, _, properties = head.partition(" ")
    pairs = dict(pair.split("=", 1) for pair in properties.split(","))
    decoded = {key: undone(value, ("%3A", ":"), ("%2C", ",")) for key, value in pairs.items()}
    return name, decoded, undone(data)


def undone(text, *more):
    for code, letter in (*more, ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(code, letter)
    return text


def test_annotations_point_at_lines_and_errors_come_first():
    findings = [warning(layer="fc"), finding(layer="conv", advice="Try.")]
    first, second = map(command, github.annotations(findings, SOURCES))
    assert first == (
        "error", {"file": "nets/a b.py", "line": "7", "title": "nonfinite: conv"}, "too much\nTry.",
    )  # fmt: skip
    assert second == ("warning", {"file": "net.py", "line": "1", "title": "vanishing: fc"}, "too much")


def test_an_annotation_without_a_place_has_no_file():
    (line,) = github.annotations([finding(layer="")], {".": Source("/home/me/net.py", 3)})
    assert command(line) == ("error", {"title": "nonfinite: model"}, "too much")


def test_annotations_are_few():
    findings = [warning()] * 5 + [finding()] * 4
    kinds = [command(line)[0] for line in github.annotations(findings, {}, most=4)]
    assert kinds == ["error"] * 4 + ["warning"] * 4 + ["notice"]
    *_, notice = github.annotations(findings, {}, most=2)
    assert command(notice)[2] == "5 more findings in the summary"
    assert github.annotations([], {}) == []


@ALL_NAMES
def test_an_annotation_is_one_command_whatever_the_text(name):
    (line,) = github.annotations(
        [finding(layer=name, message=name)], {name: Source(f"a,b:c%{legal(name)}", 1)}
    )
    kind, properties, data = command(line)
    assert (kind, data) == ("error", legal(name))
    assert properties["title"] == f"nonfinite: {legal(name)}"
    assert set(properties) <= {"file", "line", "title"}
    line.encode()


# -- Where classes are written


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    @torch.no_grad()
    def forward(self, x):
        return self.conv(x)


class Bare(nn.Sequential):
    pass


class Derived(Block):
    pass


def local():
    class Inner(nn.Module):
        def forward(self, x):
            return x

    return Inner()


HERE = Path(__file__).resolve()


@pytest.mark.parametrize("make", [Block, Bare, Derived, local], ids=["methods", "bare", "derived", "local"])
def test_a_class_is_found_where_inspect_finds_it(make):
    module = make()
    lines, start = inspect.getsourcelines(type(module))
    assert lines[0].lstrip().startswith("class ")
    assert source_of(module, HERE.parent) == Source(HERE.name, start)


def test_a_class_outside_the_directory_keeps_its_whole_path(tmp_path):
    assert source_of(Block(), tmp_path).file == HERE.as_posix()


@pytest.mark.parametrize(
    "module", [nn.Conv2d(1, 1, 1), nn.Sequential(), nn.ReLU(), torch.fx.symbolic_trace(nn.ReLU())],
    ids=["conv", "sequential", "relu", "traced"],
)  # fmt: skip
def test_a_class_of_a_library_has_no_source(module):
    assert source_of(module, NOW) is None


def test_an_installed_package_inside_the_directory_is_not_the_users(tmp_path, monkeypatch):
    folder = tmp_path / ".venv" / "lib" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "their_net.py").write_text(PARTS.format(kind="Module"))
    monkeypatch.syspath_prepend(str(folder))
    assert source_of(importlib.import_module("their_net").Part(), tmp_path) is None


def test_a_layer_of_a_library_stands_for_what_is_around_it():
    model = nn.Sequential(nn.Sequential(Block(), nn.ReLU()), Block())
    line = inspect.getsourcelines(Block)[1]
    own = Source(HERE.name, line)
    assert sources_of(model, HERE.parent) == dict.fromkeys(("0.0", "0.0.conv", "1", "1.conv"), own)


def test_a_parametrised_class_is_still_the_users():
    module = Block()
    before = source_of(module, NOW)
    module.scale = nn.Parameter(torch.ones(1))
    nn.utils.parametrize.register_parametrization(module, "scale", nn.Identity())
    assert type(module) is not Block
    assert source_of(module, NOW) == before


NET = """\
from torch import nn
from parts import Part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
"""
PARTS = """\
from torch import nn


class Part(nn.{kind}):
    def forward(self, x):
        return x


class Part(nn.{kind}):
    def __init__(self):
        super().__init__()
"""


def test_classes_of_files_loaded_by_path_and_of_modules_beside_them(tmp_path):
    """Two models, each beside a `parts.py` of its own, which is forgotten once the model is made."""
    found = []
    for name, kind in (("a", "Module"), ("b", "ReLU")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "net.py").write_text(NET)
        (folder / "parts.py").write_text("\n" * (name == "b") + PARTS.format(kind=kind))
        with resolved(f"{folder}/net.py:Net") as make:
            found.append(make())
    assert "parts" not in sys.modules
    assert [sources_of(model, tmp_path) for model in found] == [
        {".": Source("a/net.py", 5), "part": Source("a/parts.py", 9)},
        {".": Source("b/net.py", 5), "part": Source("b/parts.py", 10)},
    ]


BORROWED = """\
from torch import nn
from lenders import Net as Other

if nn is not None:
    class Net(nn.Module):
        forward = Other.forward
        def extra(self): ...
else:
    class Net(nn.Module):
        pass
"""
LENDERS = """\
import torch
from torch import nn


class Net(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x


def make():
    return Net()
"""


def test_methods_of_others_and_a_second_class_of_the_name_do_not_mislead(tmp_path):
    (tmp_path / "net.py").write_text(BORROWED)
    (tmp_path / "lenders.py").write_text(LENDERS)
    with resolved(f"{tmp_path}/net.py:Net") as make:
        assert source_of(make(), tmp_path) == Source("net.py", 5)


def test_a_decorated_method_leads_to_its_class(tmp_path):
    (tmp_path / "net.py").write_text("from lenders import make")
    (tmp_path / "lenders.py").write_text(LENDERS)
    with resolved(f"{tmp_path}/net.py:make") as make:
        module = make()
    assert type(module).__module__ not in sys.modules
    assert source_of(module, tmp_path) == Source("lenders.py", 5)


def test_a_class_without_a_file_has_no_source():
    space = {"nn": nn, "__name__": "nowhere"}
    exec("class Net(nn.Module):\n    def forward(self, x):\n        return x", space)
    assert source_of(space["Net"](), NOW) is None


def test_links_are_followed(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "net.py").write_text("from torch import nn\nclass Net(nn.Module):\n    def forward(self): ...\n")
    (tmp_path / "net.py").symlink_to(real / "net.py")
    with resolved(f"{tmp_path}/net.py:Net") as make:
        assert source_of(make(), tmp_path) == Source("real/net.py", 2)


@pytest.mark.parametrize(
    ("layer", "line"), [("a.b", 2), ("a.b.weight", 2), ("a.c", 1), ("", 1), ("d", 1)],
    ids=["own", "parameter", "around", "model", "root"],
)  # fmt: skip
def test_the_nearest_source(layer, line):
    assert nearest(layer, {".": Source("n.py", 1), "a.b": Source("n.py", 2)}).line == line
