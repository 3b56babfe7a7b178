"""Where a monitor's records go: read back by JSON, csv and TensorBoard's own reader."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from torch import nn

import hookscope
from hookscope.errors import OutputError, UsageError
from hookscope.layers import Site
from hookscope.monitor import sinks
from hookscope.monitor.files import COLUMNS, CsvSink, JsonlSink
from hookscope.monitor.records import ActivationFigures, Event, Kind, ParamFigures, StepRecord
from hookscope.monitor.sinks import CallbackSink, LogWarning, Sink, opened
from hookscope.monitor.tensorboard import TensorBoardSink


def read(directory):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    kinds = ("scalars", "images", "histograms", "tensors")
    return accumulator.EventAccumulator(str(directory), size_guidance=dict.fromkeys(kinds, 0)).Reload()


def points(found, tag):
    return [(event.step, event.value) for event in found.Scalars(tag)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def record(step=0, value=1.0, **more):
    figures = ParamFigures(value, 2.0, value / 2, None, int(not math.isfinite(value)), value, "ok", 4)
    activation = ActivationFigures(value, 0.0, 1.0, value, value, 8)
    return StepRecord(
        step, value, {"a.weight": figures}, {"a": figures}, {Site("a", 1, "out"): activation}, **more
    )


def event(step=0):
    return Event(Kind.SPIKE, step, "a.weight", "a", 9.0, 3.0, "=1+1, a spike\nof 9")


def train(steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookscope.GradientMonitor(model, optimizer, history=steps, **options) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
    return monitor


MADE = {
    "jsonl": lambda path: JsonlSink(path / "x.jsonl"),
    "csv": lambda path: CsvSink(path / "x.csv"),
    "tensorboard": lambda path: TensorBoardSink(path / "runs"),
    "callback": lambda path: CallbackSink(print, print),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_every_sink_is_one(tmp_path, make):
    assert isinstance(make(tmp_path), Sink)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e300, 0.0], ids=str)
def test_no_value_is_refused(tmp_path, make, value):
    sink = make(tmp_path)
    sink.record(record(0, value))
    sink.event(event())
    sink.close()


def test_jsonl_holds_every_record_in_full(tmp_path):
    monitor = train(log=tmp_path / "deep" / "x.jsonl", activations=True, max_norm=1e-9)
    start, *rest = lines(tmp_path / "deep" / "x.jsonl")
    assert start == {"line": "start", "schema": 1}
    steps = [line for line in rest if line["line"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line, kept in zip(steps, monitor.history, strict=True):
        assert line["total_norm"] == kept.total_norm
        assert list(line["parameters"]) == sorted(kept.parameters)
        assert line["parameters"]["0.weight"]["rms"] == kept.parameters["0.weight"].rms
        assert line["activations"]["2"]["norm"] == kept.activations[Site("2")].norm
    told = [line for line in rest if line["line"] == "event"]
    assert [(line["step"], line["kind"]) for line in told] == [(one.step, one.kind) for one in monitor.events]
    assert told


def test_jsonl_says_what_is_not_finite(tmp_path):
    sink = JsonlSink(tmp_path / "x.jsonl")
    sink.record(record(0, math.nan))
    assert lines(tmp_path / "x.jsonl")[1]["total_norm"] == "nan"
    assert lines(tmp_path / "x.jsonl")[1]["activations"]["a@1:out"]["maximum"] == "nan"


def test_csv_has_a_row_for_each_place(tmp_path):
    sink = CsvSink(tmp_path / "x.csv")
    sink.record(record(7, 3.0, skipped=True))
    sink.event(event(7))
    found = rows(tmp_path / "x.csv")
    assert tuple(found[0]) == COLUMNS
    assert [(row["step"], row["place"], row["name"]) for row in found] == [
        ("7", "total", ""),
        ("7", "parameter", "a.weight"),
        ("7", "layer", "a"),
        ("7", "activation", "a@1:out"),
        ("7", "event", "a.weight"),
    ]
    assert [row["norm"] for row in found] == ["3.0", "3.0", "3.0", "3.0", "9.0"]
    assert (found[0]["status"], found[1]["update_ratio"], found[1]["count"]) == ("skipped", "", "4")
    assert found[4]["message"] == "'=1+1, a spike\nof 9"  # no spreadsheet runs it


def test_csv_without_parameters(tmp_path):
    CsvSink(tmp_path / "x.csv", parameters=False).record(record())
    assert [row["place"] for row in rows(tmp_path / "x.csv")] == ["total", "layer", "activation"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_an_earlier_log_is_continued(tmp_path, name):
    for _ in range(2):
        train(1, log=tmp_path / name)
    if name == "x.jsonl":
        kinds = [line["line"] for line in lines(tmp_path / name) if line["line"] != "event"]
        assert kinds == ["start", "step"] * 2
    else:
        assert sum(row["place"] == "total" for row in rows(tmp_path / name)) == 2


@pytest.mark.parametrize("make", [JsonlSink, CsvSink], ids=["jsonl", "csv"])
def test_a_line_torn_by_a_kill_spoils_only_itself(tmp_path, make):
    make(tmp_path / "x").record(record(0))
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-9])
    make(tmp_path / "x").record(record(1))
    last = (tmp_path / "x").read_text().splitlines()[-1]
    if make is JsonlSink:
        assert json.loads(last)["step"] == 1
    else:
        assert last.startswith("1,activation,a@1:out,1.0")


def test_a_csv_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "x.csv").write_text("mine\n1\n")
    with pytest.raises(OutputError, match="begins with 'mine'"):
        CsvSink(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "mine\n1\n"


@pytest.mark.parametrize("make", [JsonlSink, CsvSink, TensorBoardSink], ids=["jsonl", "csv", "tensorboard"])
def test_a_place_that_cannot_be_is_said(tmp_path, make):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="file"):
        make(tmp_path / "file" / "x").record(record())
    if make is not TensorBoardSink:
        with pytest.raises(OutputError, match="cannot write"):
            make(tmp_path / "folder")


def test_tensorboard_has_the_monitors_own_figures(tmp_path):
    monitor = train(
        log=TensorBoardSink(tmp_path, parameters=True), activations=True, update_ratio=True, max_norm=1e-9
    )
    found = read(tmp_path)
    float32 = lambda values: [(step, pytest.approx(value, rel=1e-6)) for step, value in enumerate(values)]  # noqa: E731
    history = monitor.history
    assert points(found, "gradients/total-norm") == float32(one.total_norm for one in history)
    assert points(found, "gradient-norm/2") == float32(one.layers["2"].norm for one in history)
    assert points(found, "gradient-norm/2.weight") == float32(
        one.parameters["2.weight"].norm for one in history
    )
    assert points(found, "weight-norm/0.bias") == float32(
        one.parameters["0.bias"].weight_norm for one in history
    )
    assert points(found, "gradient-to-weight/0") == float32(one.layers["0"].ratio for one in history)
    assert points(found, "update-ratio/0") == float32(one.layers["0"].update_ratio for one in history)
    assert points(found, "activation-gradient/1") == float32(
        one.activations[Site("1")].norm for one in history
    )
    assert "max-norm" in found.Tensors("events/max-norm")[0].tensor_proto.string_val[0].decode()


def test_what_was_not_measured_has_no_point(tmp_path):
    frozen = ParamFigures(None, 1.0, status="frozen")
    sink = TensorBoardSink(tmp_path, first_step=100)
    sink.record(StepRecord(3, None, {"a.weight": frozen}, {"a": frozen}))
    sink.close()
    found = read(tmp_path)
    assert set(found.Tags()["scalars"]) == {"weight-norm/a", "gradients/non-finite", "gradients/skipped"}
    assert points(found, "weight-norm/a") == [(103, 1.0)]


def test_a_directory_gets_records_and_events(tmp_path):
    pytest.importorskip("tensorboard")
    train(2, log=str(tmp_path / "runs"))
    assert [line["line"] for line in lines(tmp_path / "runs" / sinks.RECORDS)] == ["start", "step", "step"]
    assert [step for step, _ in points(read(tmp_path / "runs"), "gradients/total-norm")] == [0, 1]


def test_a_directory_does_without_tensorboard(tmp_path, monkeypatch):
    from hookscope.output import tensorboard

    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    train(1, log=tmp_path / "runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [sinks.RECORDS]
    with pytest.raises(UsageError, match="not installed"):
        TensorBoardSink(tmp_path)


def test_only_the_first_of_several_processes_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(sinks.dist, "get_rank", lambda: 1)
    assert opened(tmp_path / "runs") == ()
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(sinks.dist, "get_rank", lambda: 0)
    assert len(opened(tmp_path / "runs")) >= 1


@pytest.mark.parametrize("log", [3, "", [3], object()], ids=["number", "empty", "numbers", "object"])
def test_what_is_no_sink_is_said(log):
    with pytest.raises(UsageError, match="log="):
        opened(log)


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path):
    class Full:
        calls = 0

        def record(self, record):
            self.calls += 1
            raise OutputError("cannot write 'x': No space left on device")

        event = record

        def close(self):
            self.calls += 100

    sink = Full()
    with pytest.warns(LogWarning, match="No space left") as said:
        monitor = train(3, log=sink)
    assert len(said) == 1
    assert (monitor.steps, sink.calls) == (3, 101)


def test_what_a_callback_raises_stops_the_training():
    def stop(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(3, log=CallbackSink(stop))


def test_a_callback_hears_records_and_events():
    heard = []
    monitor = train(2, log=[CallbackSink(heard.append), CallbackSink(on_event=heard.append)], max_norm=1e-9)
    assert [one for one in heard if isinstance(one, StepRecord)] == list(monitor.history)
    assert [one for one in heard if isinstance(one, Event)] == list(monitor.events)


def test_training_is_bit_equal_with_a_log(tmp_path):
    plain, logged = train(4).model, train(4, log=tmp_path).model
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), logged.parameters(), strict=True))
