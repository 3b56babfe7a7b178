"""TensorBoard's files, read back by TensorBoard's own reader."""

from __future__ import annotations

import io
import math
import threading

import numpy as np
import pytest
from PIL import Image

from hookscope.errors import ExitCode, OutputError, UsageError
from hookscope.output import tensorboard
from hookscope.output.crc import crc32c, masked
from hookscope.output.tensorboard import BINS, LARGEST, TensorBoard

pytest.importorskip("tensorboard", reason="the extra `tensorboard`")

HOSTILE = [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e39, 1e300, 0.0, 1e-45, 5e-324]


def read(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "images", "histograms", "tensors")
    return EventAccumulator(str(directory), size_guidance=dict.fromkeys(kinds, 0)).Reload()  # 0: keep all


def migrated(directory):
    """The events as TensorBoard's server has them: old forms turned into tensors."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [event for path in sorted(directory.iterdir()) for event in EventFileLoader(str(path)).Load()]


def picture(kind="PNG", mode="RGB", size=(5, 3)):
    buffer = io.BytesIO()
    Image.new(mode, size, 7).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def test_the_checksum_is_that_of_the_rfc():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, 1500, 70000])
def test_the_checksum_is_tensorboards(size):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    data = np.random.default_rng(size).bytes(size)
    assert masked(data) == masked_crc32c(data)


def test_scalars_come_back_under_their_tags_and_steps(tmp_path):
    with TensorBoard(tmp_path / "new" / "runs") as board:
        board.scalar("loss", 0.5, 3)
        board.scalars({"loss": 0.25, "norm/total": 2}, 4)
    found = read(tmp_path / "new" / "runs")
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
    assert [(event.step, event.value) for event in found.Scalars("norm/total")] == [(4, 2.0)]


@pytest.mark.parametrize("value", HOSTILE, ids=str)
def test_no_number_is_refused(tmp_path, value):
    with TensorBoard(tmp_path) as board:
        board.scalar("x", value)
        assert board.non_finite == (not math.isfinite(value))
        assert board.clipped == (value in (1e39, 1e300))
    (event,) = read(tmp_path).Scalars("x")
    kept = min(max(value, -LARGEST), LARGEST) if math.isfinite(value) else value
    np.testing.assert_equal(np.float32(event.value), np.float32(kept))


def test_a_whole_number_beyond_all_floats_is_clipped(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.scalar("x", -(10**400))
        assert (board.clipped, board.non_finite) == (1, 0)
    assert read(tmp_path).Scalars("x")[0].value == pytest.approx(-LARGEST)


def test_a_histogram_has_numpys_counts_and_exact_sums(tmp_path):
    values = np.random.default_rng(0).normal(3, 2, (7, 11, 13))
    with TensorBoard(tmp_path) as board:
        board.histogram("h", values, 9)
    (event,) = read(tmp_path).Histograms("h")
    kept, counts = event.histogram_value, np.histogram(values, BINS)[0]
    assert event.step == 9
    assert kept.bucket == counts.tolist()
    assert (kept.min, kept.max, kept.num) == (values.min(), values.max(), values.size)
    assert kept.sum == pytest.approx(values.sum())
    assert kept.sum_squares == pytest.approx((values**2).sum())


# torch.utils.tensorboard's SummaryWriter.add_histogram raises on several of these: "The histogram is empty, please
# file a bug report".
@pytest.mark.parametrize(
    ("values", "finite"),
    [
        (HOSTILE, 7),
        ([math.nan], 0),
        ([math.inf, -math.inf], 0),
        ([], 0),
        ([1e30], 1),
        ([-1e300, 1e300], 2),
        ([5.0, 5.0, 5.0], 3),
        ([0.0], 1),
        ([5e-324, 1e-323], 2),
        ([True, False, True], 3),
        ([2**62, -(2**62)], 2),
        (np.float16([65504, np.inf]), 1),
        (np.float32([-3e38, 3e38, 1]), 3),
        (np.float32([1, 1 + 2e-7, 1 + 4e-7]), 3),
        (np.float32([1e-45, 1e-40, np.nan]), 2),
        (np.full((3, 2), 1e38), 6),
        (np.complex64([1 + 1j, np.nan]), 1),
    ],
    ids=[
        "all",
        "nan",
        "infinities",
        "none",
        "1e30",
        "1e300",
        "one-value",
        "zero",
        "denormal",
        "bool",
        "int",
        "half",
        "float32-ends",
        "neighbours",
        "float32-denormal",
        "large-sums",
        "complex",
    ],
)
def test_no_histogram_is_refused(tmp_path, values, finite):
    with TensorBoard(tmp_path) as board:
        board.histogram("h", values, 2)
        board.scalar("after", 1)
        assert board.non_finite == np.size(values) - finite
    found = read(tmp_path)
    assert ("h" in found.Tags()["histograms"]) == (finite > 0)
    if finite:
        kept = found.Histograms("h")[0].histogram_value
        assert sum(kept.bucket) == kept.num == finite
        assert np.isfinite([kept.min, kept.max, kept.sum, kept.sum_squares]).all()
        assert max(abs(kept.min), abs(kept.max)) <= LARGEST
    lost = np.size(values) - finite
    assert ("h/non-finite" in found.Tags()["scalars"]) == (lost > 0)
    assert not lost or found.Scalars("h/non-finite")[0].value == lost
    assert len(migrated(tmp_path)) >= 2  # the server's own reading of old forms does not fail either


def test_the_server_sees_all_of_a_histogram(tmp_path):
    from tensorboard.util.tensor_util import make_ndarray

    values = np.arange(100.0)
    with TensorBoard(tmp_path) as board:
        board.histogram("h", values)
    (event,) = [event for event in migrated(tmp_path) if event.HasField("summary")]
    bins = make_ndarray(event.summary.value[0].tensor)
    assert bins[:, 2].sum() == 100
    assert (bins[0, 0], bins[-1, 1]) == (0, 99)


def test_counts_with_open_ends_come_back_closed(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.counted("h", [0, 4, 0, 6, 0], [-math.inf, -1, 0, 1, math.inf, math.inf], 1, non_finite=2)
        board.counted("empty", [0, 0], [0, 1, 2])
        assert board.non_finite == 2
    found = read(tmp_path)
    kept = found.Histograms("h")[0].histogram_value
    assert (kept.min, kept.max) == (-1, 2)
    assert (kept.bucket_limit, kept.bucket) == ([0, 1, 2], [4, 0, 6])
    assert (kept.num, kept.sum) == (10, 4 * -0.5 + 6 * 1.5)
    assert found.Tags()["histograms"] == ["h"]
    assert found.Scalars("h/non-finite")[0].value == 2


@pytest.mark.parametrize("edges", [[0, 1], [0, math.nan, 1]], ids=["too-few", "nan"])
def test_edges_that_do_not_fit_are_a_callers_bug(tmp_path, edges):
    with TensorBoard(tmp_path) as board, pytest.raises(ValueError, match="do not lie between"):
        board.counted("h", [1, 2], edges)


@pytest.mark.parametrize(
    ("kind", "mode", "space"),
    [
        ("PNG", "RGB", 3),
        ("PNG", "P", 3),
        ("PNG", "L", 1),
        ("PNG", "RGBA", 4),
        ("JPEG", "RGB", 3),
        ("WEBP", "RGB", 3),
    ],
)
def test_pictures_come_back_as_they_were(tmp_path, kind, mode, space):
    data = picture(kind, mode)
    with TensorBoard(tmp_path) as board:
        board.picture("a/b", data, 5)
    (event,) = read(tmp_path).Images("a/b")
    assert (event.step, event.width, event.height) == (5, 5, 3)
    if kind == "WEBP":  # TensorBoard's server does not know it
        with (
            Image.open(io.BytesIO(event.encoded_image_string)) as seen,
            Image.open(io.BytesIO(data)) as given,
        ):
            assert seen.format == "PNG"
            assert seen.convert("RGB").tobytes() == given.convert("RGB").tobytes()
    else:
        assert event.encoded_image_string == data
    (kept,) = tensorboard_images(tmp_path)
    assert kept.colorspace == space


def tensorboard_images(directory):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = [event for path in directory.iterdir() for event in LegacyEventFileLoader(str(path)).Load()]
    return [value.image for event in events for value in event.summary.value if value.HasField("image")]


def test_text_comes_back(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.text("note", "**größer** \udcff", 1)
    (event,) = read(tmp_path).Tensors("note")
    assert event.tensor_proto.string_val[0].decode() == "**größer** \\udcff"


@pytest.mark.parametrize(
    ("tag", "kept"), [("a\udcffb", "a\\udcffb"), ("", "."), ("größe/ü", "größe/ü")], ids=repr
)
def test_any_tag_is_taken(tmp_path, tag, kept):
    with TensorBoard(tmp_path) as board:
        board.scalar(tag, 1)
    assert read(tmp_path).Tags()["scalars"] == [kept]


def test_all_is_on_disk_before_the_file_is_closed(tmp_path):
    board = TensorBoard(tmp_path)
    board.scalar("x", 1)
    assert read(tmp_path).Scalars("x")[0].value == 1
    board.close()


def test_many_threads_write_one_whole_file(tmp_path):
    with TensorBoard(tmp_path) as board:
        threads = [
            threading.Thread(
                target=lambda own=own: [board.scalar(f"t{own}", step, step) for step in range(50)]
            )
            for own in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read(tmp_path)
    assert [[event.step for event in found.Scalars(f"t{own}")] for own in range(4)] == [list(range(50))] * 4
    assert len(list(tmp_path.iterdir())) == 1


def test_two_writers_share_a_directory(tmp_path):
    for step in range(2):
        with TensorBoard(tmp_path) as board:
            board.scalar("x", step, step)
    assert len(list(tmp_path.iterdir())) == 2
    assert [event.step for event in read(tmp_path).Scalars("x")] == [0, 1]


def test_nothing_is_made_before_there_is_something_to_write(tmp_path):
    with TensorBoard(tmp_path / "runs") as board:
        board.scalars({})
        board.histogram("h", [])
    assert not (tmp_path / "runs").exists()


def test_a_file_in_the_place_is_said(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(OutputError, match="is not a directory"):
        TensorBoard(tmp_path / "runs")
    with (
        TensorBoard(tmp_path / "runs" / "below") as board,
        pytest.raises(OutputError, match="cannot write") as caught,
    ):
        board.scalar("x", 1)
    assert caught.value.exit_code == ExitCode.OUTPUT


def test_what_is_closed_takes_no_more(tmp_path):
    board = TensorBoard(tmp_path)
    board.close()
    board.close()
    with pytest.raises(RuntimeError, match="closed|close"):
        board.scalar("x", 1)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_hint_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed") as caught:
        TensorBoard(tmp_path)
    assert "pip install 'hookscope[tensorboard]'" in caught.value.hint
