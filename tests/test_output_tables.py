"""Manifest JSON and tables: plain, exact, and safe whatever a layer or a file is called."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pytest

from hookscope.artifacts import MapStatus, Table
from hookscope.errors import UsageError
from hookscope.layers import Site
from hookscope.output import tables
from hookscope.output.manifest import Manifest, encoded, to_json


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def strict(text):
    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Pair:
    left: float
    right: tuple[int, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32("inf"), "inf"),
        (np.float32(0.1), 0.10000000149011612),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.5, np.nan]]), [[1.5, "nan"]]),
        (MapStatus.BLANK, "blank"),
        (PurePosixPath("a/b"), "a/b"),
        (Pair(float("inf"), (1, 2)), {"left": "inf", "right": [1, 2]}),
        (Site("a", 1), {"layer": "a", "call": 1, "output": ""}),
        ({1: {"b", "a"}}, {"1": ["a", "b"]}),
        ("漢", "漢"),
    ],
    ids=repr,
)
def test_plain_forms(value, expected):
    assert strict(to_json({"value": value})) == {"value": expected}


def test_json_is_sorted_indented_and_ends_in_a_newline():
    assert to_json({"b": 1, "a": "é"}) == '{\n  "a": "é",\n  "b": 1\n}\n'


def test_what_has_no_plain_form_is_a_bug():
    with pytest.raises(TypeError, match="object has no plain form"):
        to_json(object())


def test_a_file_name_that_is_not_utf8_survives():
    assert json.loads(encoded(to_json({"path": "\udcff"})).decode()) == {"path": "\udcff"}


def test_manifest_has_the_documented_fields():
    manifest = strict(to_json(Manifest("stats", {"hookscope": "1"}, warnings=["w"])))
    assert sorted(manifest) == [
        "artifacts",
        "command",
        "findings",
        "images",
        "layers",
        "model",
        "options",
        "patterns",
        "schema",
        "versions",
        "warnings",
    ]
    assert manifest["schema"] == 1


def table(*rows, columns=("layer", "norm"), **changes):
    return Table("gradnorm", changes.pop("title", "Gradient norms"), columns, rows, **changes)


def cells(made):
    return list(csv.reader(io.StringIO(tables.to_csv(made))))[1:]


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", "\tx", "\rx"], ids=repr)
def test_csv_text_does_not_run_as_a_formula(name):
    assert cells(table((name, 1.0))) == [["'" + name, "1.0"]]
    assert cells(table(([name, "y"], 1.0)))[0][0].startswith("'")


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (-1.5, "-1.5"),
        (-3, "-3"),
        (float("-inf"), "-inf"),
        (np.float32("-inf"), "-inf"),
        (np.float32(0.1), "0.10000000149011612"),
        (0.1, "0.1"),
        (None, ""),
        (True, "true"),
        ((64, 7, 7), "64x7x7"),
        (MapStatus.OK, "ok"),
    ],
    ids=repr,
)
def test_csv_values(value, cell):
    assert cells(table(("a", value))) == [["a", cell]]


def test_csv_quotes_and_line_ends():
    made = tables.to_csv(table(('a,"b"\nc', 1)))
    assert made == 'layer,norm\n"a,""b""\nc",1\n'


@pytest.mark.parametrize("value", [1 / 3, 1e-300, 123456789.123456789, 5e-324])
def test_numbers_round_trip(value):
    assert float(cells(table(("a", value)))[0][1]) == value
    assert strict(tables.to_json_table(table(("a", value))))["rows"] == [{"layer": "a", "norm": value}]


def test_markdown_is_the_golden_table():
    made = tables.to_markdown(table(("conv1", 1 / 3), ("fc", None), ("bn", float("nan")), notes=("fp32",)))
    assert made == (
        "## Gradient norms\n\n| layer | norm |\n| --- | ---: |\n"
        "| conv1 | 0.3333 |\n| fc |  |\n| bn | nan |\n\n- fp32\n"
    )


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("a|b", r"a\|b"),
        ("a\nb\r\nc", "a b c"),
        ("`x`", r"\`x\`"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("a\\|b", r"a\\\|b"),
        ("running_mean", "running_mean"),
        ("__init__", r"\_\_init\_\_"),
        ("[x](y)", r"\[x\](y)"),
        ("\x1b[31m", r"\[31m"),
    ],
    ids=repr,
)
def test_markdown_names_cannot_break_the_table(name, cell):
    assert f"\n| {cell} | 1 |\n" in tables.to_markdown(table((name, 1)))


def test_markdown_counts_stay_whole():
    assert "| 25557032 |" in tables.to_markdown(table(("all", 25557032)))


def test_json_table_keeps_everything():
    made = strict(tables.table(table(("a", np.float64("inf")), notes=("n",)), "json"))
    assert made == {
        "kind": "gradnorm",
        "title": "Gradient norms",
        "columns": ["layer", "norm"],
        "rows": [{"layer": "a", "norm": "inf"}],
        "notes": ["n"],
    }


def test_a_table_with_data_of_its_own_is_written_as_that():
    assert strict(tables.table(table(("a", 1.0), data={"k": (1,)}), "json")) == {"k": [1]}


def test_unknown_format():
    with pytest.raises(UsageError, match="'cvs'") as caught:
        tables.table(table(), "cvs")
    assert caught.value.hint == "did you mean 'csv'?"
