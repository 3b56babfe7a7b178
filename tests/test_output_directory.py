"""The output directory: no foreign file touched, no half file, always recognisable."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from hookscope.errors import ExitCode, OutputError
from hookscope.output import journal
from hookscope.output.directory import OutputDir
from hookscope.output.manifest import Manifest
from hookscope.output.names import safe_name

MANIFEST = Manifest("gradcam", {"hookscope": "0"})


def put(out, name, data=b"1", **record):
    """Reserve and write a file, as a caller with one file does."""
    stem, ending = os.path.splitext(name)
    (name,) = out.reserve(stem, [ending])
    return out.write(name, data, **record)


def opened(path, **options):
    return OutputDir(path, command="gradcam", **options)


def run(path, names=("a/x.png",), **options):
    out = opened(path, **options)
    out.begin()
    for name in names:
        put(out, name, name.encode(), kind="gradcam")
    out.finish(MANIFEST)
    return out


def killed(path, names=("a/x.png",)):
    """A run that ended before its manifest."""
    out = opened(path)
    out.begin()
    for name in names:
        put(out, name, b"1")


def tree(path):
    return sorted(str(item.relative_to(path)) for item in path.rglob("*") if not item.is_dir())


def test_a_run_writes_files_then_the_manifest(tmp_path):
    out = opened(tmp_path / "new" / "out")
    out.begin()
    record = put(out, "a/x.png", b"abc", kind="gradcam", min=float("nan"))
    assert record == {
        "path": "a/x.png",
        "kind": "gradcam",
        "min": "nan",
        "sha256": hashlib.sha256(b"abc").hexdigest(),
    }
    assert tree(out.path) == [".hookscope.jsonl", "a/x.png"]
    out.finish(MANIFEST)
    assert tree(out.path) == ["a/x.png", "manifest.json"]
    manifest = json.loads((out.path / "manifest.json").read_text())
    assert manifest["artifacts"] == [record]
    assert (manifest["schema"], manifest["command"]) == (1, "gradcam")


def journalled(path):
    """Names in an unfinished run's journal, below its head, in order."""
    lines = [json.loads(line) for line in (path / ".hookscope.jsonl").read_text().splitlines()]
    return [line["path"] for line in lines[1:]]


def test_the_journal_lists_finished_files_in_order(tmp_path):
    killed(tmp_path / "out", ("b.png", "a.png"))
    assert journalled(tmp_path / "out") == ["b.png", "a.png"]


def test_artifacts_are_sorted_and_keep_what_the_manifest_adds(tmp_path):
    out = opened(tmp_path / "out")
    out.begin()
    for name in ("b", "a"):
        put(out, name, b"1", kind="k")
    out.finish({"command": "x", "artifacts": [{"path": "a", "scores": {"drop": 0.5}}]})
    artifacts = json.loads((out.path / "manifest.json").read_text())["artifacts"]
    assert [record["path"] for record in artifacts] == ["a", "b"]
    assert artifacts[0]["scores"] == {"drop": 0.5}
    assert artifacts[0]["kind"] == "k"


@pytest.mark.parametrize("first", [run, killed], ids=["finished", "interrupted"])
def test_ours_is_kept_without_overwrite_and_replaced_with(tmp_path, first):
    path = tmp_path / "out"
    first(path, ("a/x.png", "b/c/y.png"))
    before = tree(path)
    with pytest.raises(OutputError, match="earlier run|interrupted run") as caught:
        opened(path).begin()
    assert "--overwrite" in caught.value.hint
    assert tree(path) == before
    opened(path, overwrite=True).check()
    assert tree(path) == before, "a check changes nothing"
    run(path, ("z.png",), overwrite=True)
    assert sorted(item.name for item in path.iterdir()) == ["manifest.json", "z.png"]


def test_the_default_place_is_replaced_without_being_asked(tmp_path):
    run(tmp_path / "out")
    run(tmp_path / "out", ("z.png",), default_place=True)
    assert tree(tmp_path / "out") == ["manifest.json", "z.png"]


@pytest.mark.parametrize("options", [{"overwrite": True}, {"default_place": True}], ids=["flag", "default"])
@pytest.mark.parametrize("first", [run, killed], ids=["finished", "interrupted"])
def test_a_foreign_file_protects_everything(tmp_path, first, options):
    path = tmp_path / "out"
    first(path)
    (path / "a" / "notes.txt").write_text("mine")
    before = tree(path)
    with pytest.raises(OutputError, match=r"a/notes\.txt"):
        opened(path, **options).begin()
    assert tree(path) == before


def test_a_foreign_directory_is_only_added_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run(tmp_path, ("x.png",), overwrite=True)
    assert tree(tmp_path) == ["manifest.json", "notes.txt", "x.png"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_foreign_file_is_never_overwritten(tmp_path):
    (tmp_path / "x.png").write_text("mine")
    out = opened(tmp_path, overwrite=True)
    out.begin()
    with pytest.raises(OutputError, match="exists and was not written by this run"):
        put(out, "x.png", b"ours")
    assert (tmp_path / "x.png").read_text() == "mine"
    assert not [name for name in tree(tmp_path) if "tmp" in name]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"artifacts": []}',
        '{"versions": {"hookscope": "1"}, "artifacts": 3}',
        "[" * 100_000,
    ],
    ids=["garbage", "list", "other-tool", "no-list", "deep"],
)
def test_anothers_manifest_is_not_ours(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OutputError):
        opened(tmp_path, overwrite=True).begin()
    assert (tmp_path / "manifest.json").read_text() == text


@pytest.mark.parametrize(
    "name", ["../victim", "/etc/hostname", "a/../../victim", "C:\\x", "..\\victim", ""], ids=repr
)
def test_an_old_manifest_is_not_trusted(tmp_path, name):
    (tmp_path / "victim").write_text("alive")
    path = tmp_path / "out"
    run(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["artifacts"].append({"path": name})
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(OutputError, match="cannot be trusted"):
        opened(path, overwrite=True).begin()
    assert (tmp_path / "victim").read_text() == "alive"
    assert tree(path) == ["a/x.png", "manifest.json"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_in_place_of_a_listed_path_is_foreign(tmp_path, what):
    path, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.png").write_text("mine")
    run(path)
    (path / "a" / "x.png").unlink()
    if what == "file":
        (path / "a" / "x.png").symlink_to(elsewhere / "x.png")
    else:
        (path / "a").rmdir()
        (path / "a").symlink_to(elsewhere)
    with pytest.raises(OutputError):
        opened(path, overwrite=True).begin()
    assert (elsewhere / "x.png").read_text() == "mine"


def test_nothing_is_written_through_a_link(tmp_path):
    path, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    path.mkdir()
    elsewhere.mkdir()
    (path / "a").symlink_to(elsewhere)
    out = opened(path)
    out.begin()
    with pytest.raises(OutputError, match="link out of"):
        put(out, "a/b/x.png", b"1")
    assert not list(elsewhere.iterdir())


def test_leftovers_of_a_killed_run_are_ours(tmp_path):
    path = tmp_path / "out"
    killed(path)
    (path / "a" / ".hookscope-tmp-1-2").write_bytes(b"half")
    with open(path / ".hookscope.jsonl", "a") as file:
        file.write('\n{"path": "never-there.png", "sha')
    run(path, ("z.png",), overwrite=True)
    assert tree(path) == ["manifest.json", "z.png"]


def test_killed_between_manifest_and_journal(tmp_path):
    path = tmp_path / "out"
    killed(path)
    kept = (path / ".hookscope.jsonl").read_bytes()
    run(path, overwrite=True)
    (path / ".hookscope.jsonl").write_bytes(kept)
    opened(path, overwrite=True).check()


def test_killed_between_journal_line_and_rename(tmp_path, monkeypatch):
    out = opened(tmp_path / "out")
    out.begin()
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        put(out, "x.png", b"1")
    monkeypatch.setattr(os, "replace", replace)
    assert tree(out.path) == [".hookscope.jsonl"]
    assert journal.inspect(out.path).owner is journal.Owner.OURS


def test_a_full_disk_is_an_output_error_and_leaves_no_half_file(tmp_path, monkeypatch):
    out = opened(tmp_path / "out")
    out.begin()

    def full(*paths):
        raise OSError(28, "No space left on device", "x.png")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        put(out, "x.png", b"1")
    assert caught.value.exit_code is ExitCode.OUTPUT
    assert tree(out.path) == [".hookscope.jsonl"]
    assert out.records == ()


@pytest.mark.parametrize("below", ["", "deeper/still"], ids=["itself", "below"])
def test_the_path_is_a_file(tmp_path, below):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="is not a directory"):
        opened(tmp_path / "out" / below).check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        opened(tmp_path / "locked" / "out").check()


def test_check_makes_nothing(tmp_path):
    opened(tmp_path / "a" / "b").check()
    assert not list(tmp_path.iterdir())


def test_empty_folders_are_no_obstacle_and_stay(tmp_path):
    run(tmp_path / "out")
    (tmp_path / "out" / "mine").mkdir()
    run(tmp_path / "out", ("z.png",), overwrite=True)
    assert (tmp_path / "out" / "mine").is_dir()


def test_same_name_gets_a_number_whatever_the_case(tmp_path):
    out = opened(tmp_path / "out")
    out.begin()
    names = ["Conv.png", "conv.png", "CONV.PNG", "e\u0301", "\u00e9", "manifest.json"]
    found = [put(out, name)["path"] for name in names]
    assert found == ["Conv.png", "conv-2.png", "CONV-3.PNG", "e\u0301", "\u00e9-2", "manifest-2.json"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([("a", [".x", ".y"]), ("A", [".x", ".y"])], [("a.x", "a.y"), ("A-2.x", "A-2.y")]),
        ([("a", [".x"]), ("A", [".y", ".x"])], [("a.x",), ("A-2.y", "A-2.x")]),
        ([("a", [".x"]), ("A", [".y"])], [("a.x",), ("A.y",)]),
        ([("a.h", [".x"]), ("a", [".h.x", ".y"])], [("a.h.x",), ("a-2.h.x", "a-2.y")]),
        ([("a", [".x"]), ("a-2", [".x"]), ("A", [".x"])], [("a.x",), ("a-2.x",), ("A-3.x",)]),
        ([("d/./a", [".x"]), ("d/a", [".x"])], [("d/a.x",), ("d/a-2.x",)]),
    ],
    ids=["all-alike", "one-alike", "none-alike", "across-the-dot", "the-number-is-taken", "other-spelling"],
)
def test_files_of_one_stem_share_its_number(tmp_path, asked, given):
    out = opened(tmp_path / "out")
    assert [out.reserve(*one) for one in asked] == given


def test_a_name_is_written_once_and_only_after_it_was_reserved(tmp_path):
    out = opened(tmp_path / "out")
    out.begin()
    with pytest.raises(RuntimeError, match="reserve"):
        out.write("x.png", b"1")
    put(out, "x.png")
    with pytest.raises(RuntimeError, match="reserve"):
        out.write("x.png", b"2")
    assert (out.path / "x.png").read_bytes() == b"1"


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "", "a\\..\\..\\x", ".hookscope-tmp-1"], ids=repr
)
def test_a_name_cannot_leave_the_directory(tmp_path, name):
    out = opened(tmp_path / "out")
    out.begin()
    with pytest.raises(OutputError, match="no name for a file"):
        put(out, name, b"1")


def test_threads(tmp_path):
    out = opened(tmp_path / "out")
    out.begin()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(put, out, f"{i % 4}/same.png", str(i).encode()) for i in range(200)]
        records = [job.result() for job in jobs]
    assert len({record["path"] for record in records}) == 200
    assert sorted(journalled(out.path)) == sorted(record["path"] for record in records)
    for number, record in enumerate(records):
        assert (out.path / record["path"]).read_bytes() == str(number).encode()
    out.finish(MANIFEST)
    assert journal.inspect(out.path).owner is journal.Owner.OURS


def test_a_run_is_unfinished_from_its_journal_to_its_manifest(tmp_path):
    out = opened(tmp_path / "out")
    assert not out.unfinished
    out.begin()
    assert out.unfinished
    out.finish(MANIFEST)
    assert not out.unfinished


def test_same_run_same_bytes(tmp_path):
    for name in ("one", "two"):
        run(tmp_path / name, ("b.png", "a.png"))
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (
        tmp_path / "two" / "manifest.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("layer4.2.conv3", "layer4.2.conv3"),
        (".", "root"),
        ("layer@1:out", "layer@1_out"),
        ("a/b\\c", "a_b_c"),
        ("..", "__"),
        (".hidden", "_hidden"),
        ("tail. ", "tail._"),
        ('<>:"|?*', "_______"),
        ("a\nb\x00c\u202ed", "a_b_c_d"),
        ("con", "_con"),
        ("NUL.txt", "_NUL.txt"),
        ("conv", "conv"),
        ("e\u0301", "\u00e9"),
        ("\udcff", "_"),
        ("", "_"),
    ],
    ids=repr,
)
def test_safe_name(text, name):
    assert safe_name(text) == name


@pytest.mark.parametrize("letter", ["a", "é", "漢"])
def test_safe_name_is_short_in_bytes_and_stays_distinct(letter):
    one, two = safe_name(letter * 300), safe_name(letter * 301)
    assert max(len(one.encode()), len(two.encode())) <= 120
    assert one != two
    assert one.startswith(letter * 30)
