"""`hookscope extract` from the shell, and what `open_features` reads of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Shell, assert_whole, manifest, tree
from PIL import Image

import hookscope
from hookscope.errors import UsageError


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = Shell(tmp_path, capsys)
    rng = np.random.default_rng(0)
    Path("many").mkdir()
    for number in range(11):
        pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"many/{number:02d}.png")
    return made


def expected(layer, paths, **how):
    """The same features from Python, picture by picture."""
    loaded = hookscope.load_model("net.py:build")
    made = []
    for path in paths:
        x = loaded.batch([loaded.preprocess.tensor(Image.open(path).convert("RGB"))])
        (found,) = hookscope.extract(loaded.module, x, layer, **how)
        made.append(next(iter(found.values())).numpy())
    return np.concatenate(made)


def test_every_picture_has_a_row_of_what_the_layer_returned(shell):
    done = shell("extract net.py:build many -l conv -l fc --batch-size 2 --shard-size 4 -o out")
    assert done.code == 0, done.err
    assert set(tree("out")) == {
        "index.jsonl", "manifest.json", *(f"shard-{number:05d}.safetensors" for number in range(3))
    }  # fmt: skip
    assert_whole("out")
    assert "11 pictures in 3 shards" in done.out
    features = hookscope.open_features("out")
    assert list(features) == ["conv", "fc"]
    paths = [f"many/{number:02d}.png" for number in range(11)]
    assert list(features.pictures) == paths
    assert [entry.row for entry in features.index] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    conv, fc = features["conv"], features["fc"]
    assert (conv.shape, conv.dtype) == ((11, 4, 18, 22), "float32")
    assert np.allclose(conv[:], expected("conv", paths), atol=1e-6)
    assert np.allclose(fc[:], expected("fc", paths), atol=1e-6)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_rows_are_read_by_number_slice_list_and_mask(shell, kind):
    line = f"extract net.py:build many -l conv --reduce avg --batch-size 3 --shard-size 3 --features-format {kind}"
    assert shell(f"{line} -o out").code == 0
    rows = hookscope.open_features("out")["conv"]
    whole = rows[:]
    assert whole.shape == (11, 4)
    assert len(rows) == 11
    for key in (
        slice(2, 8),
        slice(None, None, 4),
        slice(8, 1, -3),
        [5, 0, 0, 10],
        [],
        np.arange(11) % 3 == 0,
    ):
        assert np.array_equal(
            rows[key], whole[key if not isinstance(key, list) else np.array(key, dtype=int)]
        )
    assert np.array_equal(rows[-1], whole[-1])
    assert np.array_equal(np.asarray(rows), whole)
    assert np.array_equal(np.stack(list(rows)), whole)
    with pytest.raises(IndexError):
        rows[11]


def test_both_formats_hold_the_same(shell):
    for kind in ("safetensors", "npz"):
        assert shell(f"extract net.py:build many -l '**' --features-format {kind} -o {kind}").code == 0
    one, other = (hookscope.open_features(kind) for kind in ("safetensors", "npz"))
    assert list(one) == list(other)
    assert all(np.array_equal(one[name][:], other[name][:]) for name in one)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_stored_as_it_is(shell, dtype):
    assert shell("extract net.py:build many -l conv -o whole").code == 0
    assert shell(f"extract net.py:build many -l conv --dtype {dtype} -o half").code == 0
    whole, half = (hookscope.open_features(out)["conv"] for out in ("whole", "half"))
    assert half.dtype == dtype
    rounded = torch.from_numpy(whole[:]).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(half[:].astype(np.float32), rounded)


def test_how_many_pictures_a_batch_has_changes_only_the_last_digits(shell):
    assert shell("extract net.py:build many -l conv --batch-size 1 --shard-size 4 -o one").code == 0
    assert shell("extract net.py:build many -l conv --batch-size 4 --shard-size 4 -o four").code == 0
    one, four = (hookscope.open_features(out) for out in ("one", "four"))
    assert one.index == four.index
    assert np.allclose(one["conv"][:], four["conv"][:], atol=1e-6)


def test_a_run_repeated_gives_the_same_bytes(shell):
    for out in ("a", "b"):
        assert shell(f"extract net.py:build many -l conv --shard-size 4 --batch-size 4 -o {out}").code == 0
    assert tree("a") == tree("b")


def test_pictures_of_several_sizes_part_a_shard(shell):
    for number in (3, 4, 9):
        Image.new("RGB", (30, 30), (number * 20, 9, 90)).save(f"many/{number:02d}.png")
    assert shell("extract net.py:build many -l conv --batch-size 8 --shard-size 8 -o out").code == 0
    assert {"shard-00000.safetensors", "shard-00000-1.safetensors", "shard-00000-2.safetensors"} <= set(
        tree("out")
    )
    features = hookscope.open_features("out")
    paths = [f"many/{number:02d}.png" for number in range(11)]
    assert list(features.pictures) == paths
    for at, path in enumerate(paths):
        assert np.allclose(features["conv"][at], expected("conv", [path])[0], atol=1e-6)
    with pytest.raises(UsageError, match="2 shapes"):
        _ = features["conv"].shape
    assert shell("extract net.py:build many -l conv --reduce avg -o pooled").code == 0
    assert hookscope.open_features("pooled")["conv"].shape == (11, 4)


def test_an_unreadable_picture_is_left_out_and_the_rest_goes_on(shell):
    Path("many/05.png").write_bytes(b"no picture")
    done = shell("extract net.py:build many -l fc --batch-size 4 -o out")
    assert done.code == 4
    features = hookscope.open_features("out")
    paths = [f"many/{number:02d}.png" for number in range(11) if number != 5]
    assert list(features.pictures) == paths
    assert np.allclose(features["fc"][:], expected("fc", paths), atol=1e-6)


def test_labels_are_those_of_the_data_set(shell):
    for number in range(4):
        target = Path(f"data/{number % 2}")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"many/{number:02d}.png", target)
    assert shell("extract net.py:build --dataset data -l fc -o out").code == 0
    assert hookscope.open_features("out").labels == (0, 0, 1, 1)


def test_the_shards_are_small_enough_without_a_flag(shell):
    assert shell("extract net.py:build many -l fc --batch-size 1 -o out").code == 0
    assert len({entry.shard for entry in hookscope.open_features("out").index}) == 6


def test_what_overflows_is_counted(shell):
    Path("huge.py").write_text("from net import *\n")
    Path("big.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Big(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.conv = nn.Conv2d(3, 2, 1)\n"
        "        nn.init.constant_(self.conv.weight, 1e6)\n"
        "    def forward(self, x):\n        return self.conv(x).mean((2, 3))\n"
    )
    done = shell("extract big.py:Big many -l conv --reduce avg --dtype float16 -o out")
    assert done.code == 0
    assert "did not fit" in " ".join(manifest("out")["warnings"])


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("", 2, "-l GLOB"),
        ("-l 'nosuch*'", 2, "nosuch"),
        ("-l conv --reduce mean", 2, "mean"),
        ("-l conv --dtype float8", 2, "float8"),
        ("-l conv --max-size 0", 2, "'0'"),
        ("-l conv --features-format csv", 2, "csv"),
        ("-l conv --features-format npz --dtype bfloat16", 2, "bfloat16"),
        ("-l conv --reduce cls", 5, "class token"),
    ],
)
def test_what_cannot_be_is_said(shell, flags, code, said):
    done = shell(f"extract net.py:build many {flags} -o out")
    assert done.code == code
    assert said in done.err


class TestOpening:
    @pytest.fixture
    def out(self, shell):
        assert shell("extract net.py:build many -l fc -o out").code == 0
        return Path("out")

    def test_no_directory(self, shell):
        with pytest.raises(UsageError, match="no directory"):
            hookscope.open_features("nosuch")

    def test_an_unfinished_run(self, out):
        (out / "manifest.json").unlink()
        with pytest.raises(UsageError, match="not finished|no manifest"):
            hookscope.open_features(out)

    def test_another_command_s_directory(self, shell):
        assert shell("featuremaps net.py:build many/00.png -o maps").code == 0
        with pytest.raises(UsageError, match="no features"):
            hookscope.open_features("maps")

    def test_a_shard_that_is_missing(self, out):
        next(out.glob("*.safetensors")).unlink()
        with pytest.raises(UsageError, match="missing"):
            hookscope.open_features(out)

    def test_a_shard_that_is_cut_off(self, out):
        file = next(out.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(UsageError, match="cannot be read"):
            hookscope.open_features(out)

    def test_an_index_that_is_none(self, out):
        (out / "index.jsonl").write_text(json.dumps({"picture": "x"}) + "\n")
        with pytest.raises(UsageError, match="line 1"):
            hookscope.open_features(out)

    def test_no_such_layer(self, out):
        with pytest.raises(KeyError, match="fc"):
            _ = hookscope.open_features(out)["conv"]
