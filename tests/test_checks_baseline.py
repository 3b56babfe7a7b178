"""An earlier output directory as a baseline: what is read from it, and every way in which it is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import Shell, manifest, picture, tree

from hookscope.checks.baseline import Baseline
from hookscope.errors import ExitCode, UsageError
from hookscope.output import encode

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def record(path, data, **changes):
    given = {
        "kind": "gradcam",
        "part": "raw",
        "status": "ok",
        "image": "0.png",
        "layer": "conv",
        "method": "gradcam",
    }
    return given | {"path": path, "sha256": hashlib.sha256(data).hexdigest(), **changes}


def written(folder, *records, files=(), **changes):
    """A directory with a manifest by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in dict(files).items():
        (folder / name).write_bytes(data)
    fields = {
        "schema": 1,
        "command": "gradcam",
        "model": {},
        "versions": {"hookscope": "0"},
        "artifacts": records,
    }
    (folder / "manifest.json").write_text(json.dumps(fields | changes))
    return folder


def with_map(folder, data=None, **changes):
    data = encode.npy(VALUES) if data is None else data
    return written(folder, record("a.npy", data, **changes), files={"a.npy": data})


def refusal(path):
    with pytest.raises(UsageError) as caught:
        Baseline.read(path)
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("end", ["", "/manifest.json"], ids=["directory", "manifest"])
def test_what_the_command_line_wrote_is_read(shell, end):
    assert shell("gradcam net.py:build pics -l conv -t 1 -o out").code == 0
    baseline = Baseline.read(f"out{end}")
    assert (baseline.command, baseline.model["name"]) == ("gradcam", manifest("out")["model"]["name"])
    records = baseline.records("gradcam", "raw")
    assert [one.fields["image"] for one in records] == ["pics/0.png", "pics/1.png", "pics/2.png"]
    for one in records:
        assert one.path.endswith(".npy")
        np.testing.assert_array_equal(baseline.raw_map(one), np.load(Path("out", one.path)))


def test_any_file_is_read_of_any_command(shell):
    assert shell("gradnorm net.py:build pics -t 1 -o out").code == 0
    baseline = Baseline.read("out")
    (table,) = (one for one in baseline.records("gradnorm", "table") if one.path.endswith(".json"))
    assert json.loads(baseline.content(table)) == json.loads(Path("out/gradnorm.json").read_bytes())


def test_a_baseline_of_another_kind_is_refused(shell):
    assert shell("gradnorm net.py:build pics -t 1 -o out").code == 0
    with pytest.raises(UsageError, match=r"holds no raw values of gradcam: 'hookscope gradnorm' made it"):
        Baseline.read("out").records("gradcam", "raw")


def test_maps_of_a_run_of_several_commands_are_found(shell):
    shell.toml(
        "run.toml", 'model = "net.py:build"\nimages = ["pics"]\n[gradcam]\nlayer = ["conv"]\n[featuremaps]\n'
    )
    assert shell("run run.toml -o out").code == 0
    assert len(Baseline.read("out").records("gradcam", "raw")) == 3


def test_an_interrupted_run_is_no_baseline(shell):
    picture(shell.folder / "bright/0.png", 0, low=200, high=255)
    assert shell("gradcam net.py:stopped pics bright -l net.conv --batch-size 1 -o out").code == 130
    assert Path("out/.hookscope.jsonl").is_file()
    assert "is of a run that was interrupted" in refusal("out")
    assert "is of a run that was interrupted" in refusal("out/.hookscope.jsonl")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "'nowhere' does not exist"),
        ("empty", "'empty' holds no manifest.json"),
        ("net.py", "no JSON"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("a\0b", "'a\\x00b'"),
        ("pipe", "neither a file nor a directory"),
        ("circle", "'circle'"),
    ],
    ids=["missing", "empty", "other-file", "long", "null", "pipe", "circle"],
)
def test_what_is_no_run_is_refused(shell, path, words):
    Path("empty").mkdir()
    os.mkfifo("pipe")
    Path("circle").symlink_to("circle")
    assert words in refusal(path)


BAD_TEXT = {
    "empty": "",
    "not-json": "{",
    "not-utf-8": b"\xff\xfe\xff",
    "deep": "[" * 100_000,
    "huge-number": '{"schema": ' + "9" * 5000 + "}",
    "list": "[]",
    "text": '"manifest"',
    "null": "null",
    "no-fields": "{}",
    "other-json": '{"name": "package", "version": 1}',
}


@pytest.mark.parametrize("text", BAD_TEXT.values(), ids=BAD_TEXT)
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert str(tmp_path) in refusal(tmp_path)


BAD_FIELDS = {
    "newer": ({"schema": 2}, "has schema 2, and 1 is what can be read"),
    "schema-true": ({"schema": True}, "has schema True"),
    "schema-text": ({"schema": "1"}, "has schema 1"),
    "schema-huge": ({"schema": 10**4000}, "has schema 1000"),
    "command-list": ({"command": []}, "command is []"),
    "model-list": ({"model": [1]}, "model is [1]"),
    "versions-null": ({"versions": None}, "versions is None"),
    "artifacts-object": ({"artifacts": {"path": "a.npy"}}, "artifacts is {"),
    "artifacts-text": ({"artifacts": "a.npy"}, "artifacts is a.npy"),
    "artefact-null": ({"artifacts": [None]}, "artifacts[0] is None"),
    "artefact-nested": ({"artifacts": [[[[]]]]}, "artifacts[0] is [[[]]]"),
    "no-path": ({"artifacts": [{"kind": "gradcam"}]}, "artifacts[0] is {"),
    "path-number": ({"artifacts": [{"path": 7}]}, "artifacts[0] is {"),
    "kind-list": ({"artifacts": [{"path": "a", "kind": []}]}, "artifacts[0] is {"),
    "hash-number": ({"artifacts": [{"path": "a", "sha256": 1e300}]}, "artifacts[0] is {"),
    "status-object": ({"artifacts": [{"path": "a", "status": {}}]}, "artifacts[0] is {"),
}


@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_broken_manifest_is_refused(tmp_path, fields, words):
    message = refusal(written(tmp_path, **fields))
    assert words in message
    assert len(message) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    "path", ["../a.npy", "/etc/passwd", "x/../../a.npy", "C:\\a.npy", "..\\a.npy", "a\0b"]
)
def test_a_path_out_of_the_directory_is_refused(tmp_path, path):
    (tmp_path / "a.npy").write_bytes(encode.npy(VALUES))
    message = refusal(written(tmp_path / "out", {"path": path}))
    assert "leads out of it" in message


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    folder = with_map(tmp_path / "out")
    (folder / "a.npy").rename(tmp_path / "a.npy")
    (folder / "a.npy").symlink_to(tmp_path / "a.npy")
    baseline = Baseline.read(folder)
    with pytest.raises(UsageError, match="is a link out of the baseline"):
        baseline.raw_map(*baseline.records("gradcam", "raw"))


def test_a_moved_or_linked_directory_is_read(tmp_path):
    with_map(tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    baseline = Baseline.read(tmp_path / "link")
    np.testing.assert_array_equal(baseline.raw_map(*baseline.records("gradcam", "raw")), VALUES)


def spoilt(folder, how):
    file = folder / "a.npy"
    match how:
        case "missing":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "circle":
            file.unlink()
            file.symlink_to("a.npy")
        case "changed":
            file.write_bytes(encode.npy(VALUES + 1))
        case "cut":
            file.write_bytes(file.read_bytes()[:-4])


@pytest.mark.parametrize("how", ["missing", "folder", "pipe", "circle", "changed", "cut"])
def test_a_file_that_is_not_what_was_written_is_refused(tmp_path, how):
    folder = with_map(tmp_path)
    baseline = Baseline.read(folder)
    spoilt(folder, how)
    with pytest.raises(UsageError, match=r"a\.npy"):
        baseline.raw_map(*baseline.records("gradcam", "raw"))


def header(text):
    """A file of numpy's with this header and nothing behind it."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


BAD_ARRAYS = {
    "empty": b"",
    "text": b"hello",
    "double": encode.npy(VALUES.astype(np.float64)),
    "three-axes": encode.npy(VALUES[None]),
    "no-values": encode.npy(VALUES[:0]),
    "scalar": encode.npy(np.float32(1)),
    "objects": header("{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }\n"),
    "huge": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000000), }\n"),
    "negative": header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3), }\n"),
    "code": header("__import__('os').system('true')\n"),
    "deep": header("(" * 9000),
    "unfinished": header("{'descr': '''\n"),
    "short": encode.npy(VALUES)[:-4],
    "zip": b"PK\x03\x04" + bytes(40),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("data", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_a_file_that_is_no_map_is_refused(tmp_path, data):
    baseline = Baseline.read(with_map(tmp_path, data))
    with pytest.raises(UsageError, match=r"a\.npy' holds no map of float32"):
        baseline.raw_map(*baseline.records("gradcam", "raw"))


def test_a_map_of_a_machine_of_the_other_byte_order_is_read(tmp_path):
    baseline = Baseline.read(with_map(tmp_path, encode.npy(VALUES.astype(">f4"))))
    found = baseline.raw_map(*baseline.records("gradcam", "raw"))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, VALUES)


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    written(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", denied)  # the superuser may read whatever the mode says
    assert "cannot be read: Permission denied" in refusal(tmp_path)


@pytest.mark.parametrize("out", ["out", "./out/", "pics/../out", "link"])
def test_a_run_must_not_replace_its_baseline(shell, out):
    with_map(Path("out"))
    Path("link").symlink_to("out")
    kept = tree("out")
    done = shell(f"gradcam net.py:build pics --baseline out/manifest.json -o {out} --overwrite")
    assert (done.code, "is where this run writes" in done.err) == (2, True)
    assert tree("out") == kept


def test_what_differs_in_the_run_is_told(shell):
    import torch

    assert shell("gradcam net.py:build pics -l conv -o same").code == 0
    here = manifest("same")
    baseline = Baseline.read("same")
    assert baseline.differences(here["model"], here["versions"]) == ()
    torch.save(_net().state_dict(), "other.pt")
    assert shell("gradcam net.py:build pics -l conv -o other --weights other.pt --resize 16").code == 0
    there = manifest("other")
    said = baseline.differences(there["model"], there["versions"] | {"torch": "9.9"})
    assert [line.split(",")[0] for line in said] == [
        f"the baseline's checkpoint was {here['model']['weights']!r}",
        "the baseline's pictures were prepared otherwise: see model.preprocessing",
        f"the baseline was made with torch {here['versions']['torch']}",
    ]


def _net():
    from torch import nn

    net = nn.Module()
    net.conv, net.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)
    return net


def test_nonsense_in_the_model_record_is_told_as_a_difference(tmp_path):
    baseline = Baseline.read(
        written(tmp_path, model={"name": [[1]], "weights": {"a": 10**4000}}, versions={"torch": []})
    )
    said = baseline.differences({"name": "demo", "weights": "none"}, {"torch": "2.0"})
    assert said[0] == "the baseline's model was [[1]], here it is demo"
    assert said[2] == "the baseline was made with torch [], here it is 2.0"
    assert max(map(len, said)) < 200


def test_a_baseline_is_not_changed(shell):
    assert shell("gradcam net.py:build pics -l conv -o out").code == 0
    shutil.copytree("out", "copy")
    baseline = Baseline.read("out")
    baseline.raw_map(baseline.records("gradcam", "raw")[0])
    assert {p.name: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == {
        p.name: p.read_bytes() for p in Path("copy").rglob("*") if p.is_file()
    }
