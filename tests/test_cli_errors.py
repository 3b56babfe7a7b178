"""Every way a command can fail: its exit code, its one or two lines, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Shell, assert_journal, assert_whole, manifest, picture, tree

from hookscope.errors import ExitCode, worst


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    torch.save({"conv.weight": torch.zeros(9, 3, 3, 3), "odd": torch.zeros(2)}, "odd.pth")
    Path("empty").mkdir()
    Path("no.toml").write_text("= nothing")
    return shell


def cam(rest):
    return f"gradcam net.py:build {rest} -o out"


FAILURES = {
    "no-command-of-that-name": ("gradcma demo", 2, "no such command 'gradcma'", "hookscope --help"),
    "no-flag-of-that-name": (cam("pics --lyer conv"), 2, "--lyer", "hookscope gradcam --help"),
    "no-model": ("gradcam", 2, "missing argument 'MODEL'", "hookscope gradcam --help"),
    "a-number-that-is-none": (cam("pics --batch-size x"), 2, "'--batch-size'", "hookscope gradcam --help"),
    "a-number-too-small": (cam("pics --batch-size 0"), 2, "'--batch-size'", "hookscope gradcam --help"),
    "no-pictures": (cam(""), 2, "no pictures are given", "--dataset DIR"),
    "pictures-and-dataset": (cam("pics --dataset pics"), 2, "both pictures and --dataset", "one of them"),
    "dataset-of-no-classes": (cam("--dataset pics"), 2, "'pics' has no class folders", "folder for each class"),
    "unknown-model": ("gradcam resnet19 pics -o out", 2, "unknown model 'resnet19'", "'resnet18'"),
    "unknown-callable": ("gradcam net.py:biuld pics -o out", 2, "'biuld'", "'build'"),
    "unknown-argument": (cam("pics --model-arg widht=1"), 2, "'widht'", "'width'"),
    "unknown-file": ("gradcam nett.py:build pics -o out", 2, "no file 'nett.py'", "'net.py'"),
    "unknown-layer": (cam("pics -l cnov"), 2, "no layer matches 'cnov'", "'conv'"),
    "excluded-all": (cam("pics -l conv -x 'c*'"), 2, "no layer is left", "narrow --exclude"),
    "not-spatial": (cam("pics -l fc"), 2, "layer 'fc' has no spatial output", "'relu'"),
    "unknown-method": (cam("pics -m gradcam+++"), 2, "'gradcam+++'", "'gradcam++'"),
    "unknown-target": (cam("pics -t cat"), 2, "'cat' is a name", "--labels FILE"),
    "no-such-class": (cam("pics -t 3"), 2, "class 3 is out of range", "0 to 2"),
    "unknown-label": ("gradcam demo -t Egyptian_cta -o out", 2, "'Egyptian_cta'", "'Egyptian cat'"),
    "unknown-colours": (cam("pics --cmap virdis"), 2, "--cmap 'virdis' is unknown", "'viridis'"),
    "unknown-view": (cam("pics --view both"), 2, "--view 'both' is unknown", "original, input"),
    "unknown-format": (cam("pics --format gif"), 2, "--format 'gif' is unknown", ""),
    "no-size": (cam("pics --resize big"), 2, "--resize 'big' is not a size", "HEIGHTxWIDTH"),
    "no-numbers": (cam("pics --mean 0.5,x,0.5"), 2, "--mean '0.5,x,0.5' is not a list of numbers", "such as"),
    "not-a-number": (cam("pics --mean nan,0,0"), 2, "--mean 'nan,0,0' is not a list of numbers", "such as"),
    "unknown-loss": ("gradnorm net.py:build pics --loss l2", 2, "'l2'", "cross_entropy"),
    "loss-is-no-callable": ("gradnorm net.py:build pics --loss net.py:number", 2, "is no callable", "output"),
    "limit-is-no-number": ("gradnorm net.py:build pics --max-norm nan", 2, "--max-norm nan", ""),
    "no-classifier": ("gradcam net.py:Tokens pics -o out", 2, "no class scores", "--target norm"),
    "huge-crop": (cam("pics --crop 100000000"), 2, "--crop '100000000' is too large", "32768 pixels"),
    "no-place": ("gradcam net.py:build pics -o ''", 2, "--out '' names no directory", "unset"),
    "size-and-picture": ("layers net.py:build pics/0.png --input-size 8x8", 2, "both a picture", "one of them"),
    "no-input-size": ("layers net.py:build --input-size 8y8 --dry-run", 2, "--input-size '8y8'", "HEIGHTxWIDTH"),
    "no-such-configuration": (cam("pics --config c.toml"), 2, "cannot read configuration 'c.toml'", ""),
    "no-toml": (cam("pics --config no.toml"), 2, "'no.toml' is not valid TOML", ""),
    "no-model-of-that-kind": ("models 'zzz*'", 2, "no model matches 'zzz*'", ""),
    "callable-raises": ("gradcam net.py:broken pics -o out", 3, "ValueError: no such planet", "by itself"),
    "callable-makes-no-model": ("gradcam net.py:not_a_model pics -o out", 3, "made a int", "return the module"),
    "checkpoint-does-not-fit": (cam("pics --weights odd.pth"), 3, "(9, 3, 3, 3)", ""),
    "no-such-checkpoint": (cam("pics --weights od.pth"), 3, "no weights file 'od.pth'", "'odd.pth'"),
    "forward-raises": ("layers net.py:build --input-size 2x2", 3, "the model raised RuntimeError", "the size right?"),
    "missing-picture": (cam("missing.png"), 4, "cannot read picture 'missing.png'", None),
    "directory-of-none": (cam("empty"), 4, "no pictures in directory 'empty'", None),
    "pattern-of-none": (cam("'*.jpeg'"), 4, "no picture matches '*.jpeg'", None),
    "layers-of-missing-picture": ("layers net.py:build missing.png", 4, "'missing.png'", None),
    "nothing-to-explain": ("gradcam net.py:Detached pics -o out", 5, "gradient is zero at every spatial", "name a"),
    "place-is-a-file": ("gradcam net.py:build pics -o net.py", 6, "'net.py' is not a directory", "-o"),
    "place-is-below-a-file": ("gradcam net.py:build pics -o net.py/out", 6, "net.py' is not a directory", "-o"),
    "interrupted-before-a-file": ("gradcam net.py:stopped bright.png -o out", 130, "interrupted", ""),
    "interrupted": (
        "gradcam net.py:stopped pics bright.png --batch-size 1 -l net.conv -o out", 130, "interrupted",
        "hint: what was finished is kept in out and listed in its .hookscope.jsonl",
    ),
    "interrupted-listing": ("layers net.py:stopped bright.png", 130, "interrupted", ""),
}  # fmt: skip


@pytest.mark.parametrize(("line", "code", "message", "hint"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_two_lines_on_stderr_and_a_code(shell, line, code, message, hint):
    picture(Path("bright.png"), 0, low=200, high=255)
    done = shell(line)
    assert done.code == code, done
    lines = [text for text in done.err.splitlines() if not text.startswith("warning: ")]
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) <= 2
    if hint is not None:
        assert done.out == ""
        assert hint in (lines[1:] or [""])[0]
        assert all(text.startswith("hint: ") for text in lines[1:])
    assert (".hookscope.jsonl" in done.err) is Path("out/.hookscope.jsonl").exists()


DRY = [
    "unknown-layer",
    "unknown-target",
    "unknown-label",
    "unknown-method",
    "missing-picture",
    "place-is-a-file",
]


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_fails_as_the_run_would(shell, name):
    line, code, message, _ = FAILURES[name]
    done = shell(f"{line} --dry-run")
    assert done.code == code
    assert message in done.err
    assert not Path("out").exists()


def test_a_gate_that_does_not_hold_is_a_finding(shell):
    done = shell("gradnorm net.py:build pics --max-norm 1e-6 -o out --json")
    assert done.code == 1
    assert "error: total gradient norm 0." in done.err
    assert "is above 1e-06" in done.err
    assert_whole("out")
    assert shell("gradnorm net.py:build pics --max-norm 1e6 -o out --overwrite").code == 0


def test_gradients_that_never_were_are_nothing_measured(shell):
    done = shell("gradnorm net.py:Detached pics -o out")
    assert done.code == 5
    assert "no gradient at any parameter or layer" in done.err


PRECEDENCE = {
    "check-over-pictures": ("gradnorm net.py:build pics missing.png --max-norm 0 -o out", 1),
    "nothing-measured-over-pictures": ("gradnorm net.py:Detached pics missing.png -o out", 5),
    "model-over-pictures": ("gradcam net.py:tired bright.png missing.png -o out", 3),
    "output-over-model": ("gradcam net.py:broken pics -o net.py", 6),
    "usage-over-pictures": (cam("missing.png pics -l nope"), 2),
    "interrupt-over-pictures": ("gradcam net.py:stopped missing.png bright.png -o out", 130),
}


@pytest.mark.parametrize(("line", "code"), PRECEDENCE.values(), ids=PRECEDENCE)
def test_the_worst_of_several_is_the_code(shell, line, code):
    picture(Path("bright.png"), 0, low=200, high=255)
    assert shell(line).code == code


def test_the_order_of_codes():
    order = [130, 70, 6, 3, 2, 5, 1, 4, 0]
    for place in range(len(order)):
        assert worst([ExitCode(code) for code in reversed(order[place:])]) == order[place]
    assert worst([]) == 0


@pytest.mark.parametrize("error", [RuntimeError("odd\nthing"), EOFError("odd thing")], ids=["any", "eof"])
def test_a_bug_is_said_to_be_one(shell, monkeypatch, error):
    def fails(job):
        raise error

    monkeypatch.setattr("hookscope.run.execute", fails)
    done = shell(cam("pics"))
    assert done.code == 70
    assert done.err.splitlines()[-2:] == [
        f"error: unexpected {type(error).__name__}: odd thing",
        "hint: this is a bug in hookscope: --debug shows where",
    ]
    assert "Traceback" in shell(cam("pics --debug")).err


def test_debug_shows_where_the_model_raised(shell):
    done = shell("gradcam net.py:broken pics -o out --debug")
    assert done.code == 3
    assert "in broken" in done.err
    assert "error: 'net.py:broken' raised ValueError" in done.err


def test_a_file_in_the_way_is_kept(shell):
    Path("out/0").mkdir(parents=True)
    Path("out/0/conv.png").write_text("mine")
    done = shell("featuremaps net.py:build pics -o out")
    assert done.code == 6
    assert "exists and was not written by this run" in done.err
    assert Path("out/0/conv.png").read_text() == "mine"


def hookscope(*words, **options):
    root = Path(__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "hookscope", *words],
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"},
        text=True,
        # A job in the background is started with interrupts ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.mark.parametrize(("model", "code"), [("signalled", 130), ("killed", -9)], ids=["SIGINT", "SIGKILL"])
def test_a_signal_leaves_what_can_be_replaced(shell, model, code):
    picture(Path("pics/9.png"), 9, low=200, high=255)
    words = f"gradcam net.py:{model} pics -l net.conv -t 0 --batch-size 1 -o out"
    with hookscope(*words.split(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, said = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in said
    assert {"0", "1"} <= {name.split("/")[0] for name in _listed(code)}
    assert shell("gradcam net.py:build pics -o out").code == 6
    assert shell("gradcam net.py:build pics -o out --overwrite").code == 0
    assert_whole("out")


def _listed(code):
    if code == 130:
        return assert_journal("out")  # not a temporary file is left
    return set(tree("out"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("models 'resnet1*' >&-", 0),
        ("models 'resnet1*' --json >&-", 0),
        ("layers net.py:chatty --input-size 8x8 2>&-", 0),
        ("gradcam nope 2>&-", 2),
    ],
)
def test_a_closed_stream_is_as_good_as_one_that_nobody_reads(shell, words, code):
    done = subprocess.run(
        f"{sys.executable} -m hookscope {words}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode == code
    assert done.stderr == ""


def test_a_print_that_nobody_reads_does_not_end_the_model(shell):
    words = "gradcam net.py:chatty pics --batch-size 1 -q -o out"
    with subprocess.Popen(
        [sys.executable, "-m", "hookscope", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    ) as process:
        process.stdout.close()
    assert process.returncode == 0
    assert_whole("out")


@pytest.mark.parametrize(
    ("words", "code"),
    [("models", 0), ("gradcam --help", 0), ("gradnorm net.py:build pics --max-norm 0 --json", 1)],
    ids=["lines", "help", "json-of-a-failed-gate"],
)
def test_a_reader_that_leaves_changes_no_code(shell, words, code):
    with hookscope(*words.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == code
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


@pytest.mark.parametrize(
    ("words", "stream", "code"),
    [
        (["models", "resnet18"], "stdout", 6),
        (["--help"], "stdout", 6),
        (["gradcam", "net.py:build", "missing.png", "-o", "out"], "stderr", 4),
    ],
    ids=["results", "help", "complaints"],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_results_not_the_truth_of_the_exit_code(shell, words, stream, code):
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | {stream: full}
        process = hookscope(*words, **streams)
        said = process.communicate()[1] or ""
    assert process.returncode == code
    assert "Traceback" not in said


def test_layers_that_give_no_map_are_nothing_measured(shell):
    done = shell("gradcam net.py:Positions pics -l pos -o out")
    assert done.code == 5
    assert "error: no map could be made" in done.err
    assert "hint: `hookscope layers MODEL IMAGE`" in done.err
    assert [record["status"] for record in manifest("out")["images"]] == ["ok"] * 3
