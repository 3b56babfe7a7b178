"""Checkpoints: every wrapper and prefix gives the same bits; everything else is refused in words."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hookscope.errors import ModelError
from hookscope.models import checkpoint
from hookscope.models.checkpoint import PREFIXES, WRAPPERS, check, class_count, peel, read_state_dict


def net(classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, classes))


def fit(raw, expected, origin="the weights"):
    """What a file's content comes to for a model: peeled, then checked."""
    return check(peel(raw, expected), expected, origin)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def saved(tmp_path, what, name="weights.pth", **options):
    path = tmp_path / name
    torch.save(what, path, **options)
    return path


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


PREFIX_RUNS = ["", *PREFIXES, *map("".join, itertools.permutations(("module.", "model.", "_orig_mod."), 2))]


@pytest.mark.parametrize(
    "wrapper", [(), *((name,) for name in WRAPPERS), ("model", "state_dict")], ids=".".join
)
@pytest.mark.parametrize("prefix", PREFIX_RUNS)
def test_wrappers_and_prefixes_come_off(wrapper, prefix):
    state = net().state_dict()
    raw = prefixed(state, prefix)
    for key in reversed(wrapper):
        raw = {key: raw, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}
    assert same(fit(raw, net(seed=1).state_dict()), state)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".odd"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_the_kind_is_told_by_the_content(tmp_path, suffix, kind):
    state = net().state_dict()
    path = tmp_path / f"weights{suffix}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    assert same(fit(read_state_dict(path), state), state)


def test_a_prefix_that_the_model_has_itself_stays():
    model = nn.ModuleDict({"backbone": net(), "model": net(seed=1)})
    state = model.state_dict()
    assert same(fit(state, state), state)
    assert same(fit(prefixed(state, "module."), state), state)
    assert same(fit(prefixed(state, "model."), state), state)


def test_a_compiled_part_leaves_its_mark_in_the_middle():
    state = nn.ModuleDict({"a": net()}).state_dict()
    raw = {name.replace("a.", "a._orig_mod."): value for name, value in state.items()}
    assert same(fit(raw, state), state)


def test_plain_weights_before_averaged_ones():
    plain, averaged = net().state_dict(), net(seed=1).state_dict()
    raw = {"ema": averaged, "model": plain}
    peeled = peel(raw, plain)
    assert (peeled.nesting, peeled.others) == ("model", ("ema",))
    assert same(peeled.state, plain)


def test_averaged_weights_where_they_match_more():
    plain, averaged = net().state_dict(), net(seed=1).state_dict()
    del plain["3.bias"]
    assert peel({"model": plain, "ema": averaged}, averaged).nesting == "ema"


def test_two_names_that_would_become_one_do_not_overwrite_each_other():
    state = net().state_dict()
    raw = {"3.bias": torch.full((3,), 9.0), **prefixed(state, "module.")}
    with pytest.raises(ModelError, match=r"1 unexpected \(module\.3\.bias"):
        fit(raw, state)


def test_counters_may_be_missing_and_foreign_ones_are_ignored():
    state = net().state_dict()
    raw = {name: value for name, value in state.items() if "num_batches" not in name}
    raw["n_averaged"] = torch.tensor(4)
    assert same(fit(raw, state), {name: state[name] for name in raw if name in state})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_kinds_convert_on_loading(dtype):
    model, state = net(seed=1), net().to(dtype).state_dict()
    model.load_state_dict(fit(state, model.state_dict()))
    assert torch.equal(model[3].weight, state["3.weight"].float())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, dtype=torch.complex64), "3.bias complex for real"),
        (torch.zeros(3, dtype=torch.int64), "3.bias integer for real"),
        (torch.zeros(3, dtype=torch.bool), "3.bias truth for real"),
        (0.5, r"3.bias float for \(3\)"),
        ([1.0, 2.0, 3.0], r"3.bias list for \(3\)"),
    ],
    ids=["complex", "integer", "bool", "number", "list"],
)
def test_other_kinds_of_value_are_refused(value, words):
    state = net().state_dict()
    with pytest.raises(ModelError, match=words):
        fit({**state, "3.bias": value}, state)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_values_are_refused():
    test_other_kinds_of_value_are_refused(
        torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8), "3.bias quantised for real"
    )


def test_values_that_are_not_finite_are_the_models_business():
    state = net().state_dict()
    state["3.bias"] = torch.tensor([float("nan"), float("inf"), 0.0])
    assert fit(state, net().state_dict())["3.bias"].isnan().any()


def test_values_that_the_model_does_not_expect_may_be_anything():
    state = net().state_dict()
    assert same(fit({**state, "epoch": 3, 7: "seven"}, state), state)


def test_extra_state_is_passed_on():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"seen": 7}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting(2, 2)
    model.load_state_dict(fit({"model": model.state_dict()}, model.state_dict()))
    assert model.seen == 7


def test_tied_tensors_fit(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    path = saved(tmp_path, model.state_dict())
    assert same(fit(read_state_dict(path), model.state_dict()), model.state_dict())


def test_one_error_names_all_that_differs():
    state = net().state_dict()
    raw = {name: value for name, value in state.items() if not name.startswith("1.r")}
    raw |= {"head.weight": torch.zeros(2, 2), "3.weight": torch.zeros(3, 9)}
    with pytest.raises(ModelError) as caught:
        fit({"model": raw}, state, "the weights 'a.pth'")
    assert caught.value.exit_code == 3
    assert caught.value.message == (
        "the weights 'a.pth' under 'model' do not fit the model, 5 of 8 tensors do: "
        "2 missing (1.running_mean (2), 1.running_var (2)); "
        "1 unexpected (head.weight (2, 2)); "
        "1 of another shape (3.weight (3, 9) for (3, 8))"
    )
    assert caught.value.hint


def test_a_file_of_another_model_says_what_it_begins_with():
    with pytest.raises(ModelError, match="begins with 'stem'"):
        fit({"stem": torch.zeros(1)}, net().state_dict())


@pytest.mark.parametrize("raw", [torch.zeros(2), [1], 3, None], ids=["tensor", "list", "int", "none"])
def test_what_is_no_mapping_is_no_state_dict(raw):
    with pytest.raises(ModelError, match="no state dict"):
        fit(raw, net().state_dict())


def test_class_count_is_the_ratio_of_the_first_axes():
    expected = {"a.weight": torch.zeros(3, 8), "a.bias": torch.zeros(3), "boxes": torch.zeros(12, 8)}
    raw = {"a.weight": torch.zeros(5, 8), "a.bias": torch.zeros(5), "boxes": torch.zeros(20, 8)}
    assert class_count(peel(raw, expected), expected) == 5
    assert class_count(peel(raw, expected), expected, 3) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"3.weight": torch.zeros(5, 9)},
        {"3.weight": torch.zeros(5, 8), "3.bias": torch.zeros(6)},
        {"3.weight": torch.zeros(5, 8), "0.weight": torch.zeros(2, 4, 3, 3)},
        {"3.weight": torch.zeros(0, 8), "3.bias": torch.zeros(0)},
        {"3.weight": 0.5},
    ],
    ids=["equal", "other-axis", "bias-differs", "stem-differs", "none-at-all", "no-tensor"],
)
def test_class_count_is_none_where_more_differs(changes):
    expected = net().state_dict()
    assert class_count(peel({**expected, **changes}, expected), expected) is None


# Hostile files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"<?xml version='1.0'?><Error/>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "git-lfs pointer"),
        (b"Not found\n", "is text"),
        (b"\x00\x01\x02\x03" * 64, "damaged or no checkpoint"),
        (b"\x80\x02\x8a", "damaged or no checkpoint"),
        (b"PK\x03\x04" + b"\x00" * 60, "damaged or no checkpoint"),
        (
            b"\x10\x00\x00\x00\x00\x00\x00\x00{}              ",
            "damaged or no checkpoint|no state dict|do not fit",
        ),
    ],
    ids=["empty", "html", "xml", "lfs", "text", "noise", "cut-pickle", "cut-zip", "safetensors-of-nothing"],
)
def test_files_that_are_no_checkpoint(tmp_path, content, words):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        fit(read_state_dict(path), net().state_dict())
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.97])
def test_a_file_cut_short(tmp_path, suffix, part):
    path = tmp_path / f"weights{suffix}"
    state = net().state_dict()
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(ModelError, match="damaged or no checkpoint"):
        read_state_dict(path)


def test_a_missing_file_names_its_neighbours(tmp_path):
    saved(tmp_path, {}, "resnet.pth")
    with pytest.raises(ModelError, match="no weights file") as caught:
        read_state_dict(tmp_path / "resnte.pth")
    assert caught.value.hint == "did you mean 'resnet.pth'?"


def test_a_directory_names_what_it_holds(tmp_path):
    saved(tmp_path, {}, "resnet.pth")
    with pytest.raises(ModelError, match="directory") as caught:
        read_state_dict(tmp_path)
    assert "'resnet.pth'" in caught.value.hint


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "weights.pth")
    with pytest.raises(ModelError, match="no regular file"):
        read_state_dict(tmp_path / "weights.pth")


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("what", "culprit"),
    [
        (Runs(), r"\(posix\.mkdir\)"),
        (net(), r"\(torch\.nn\.modules"),
        (pickle.Pickler, r"\(pickle\.Pickler\)"),
    ],
    ids=["code", "module", "class"],
)
def test_code_in_a_pickle_is_named_and_not_run(tmp_path, monkeypatch, legacy, what, culprit):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, {"state_dict": what}, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ModelError, match="needs code to be read " + culprit):
        read_state_dict(path)
    assert not (tmp_path / "ran").exists()


def test_torchscript_is_refused_in_words(tmp_path):
    path = tmp_path / "scripted.pt"
    with pytest.warns(Warning, match="deprecated"):
        torch.jit.save(torch.jit.trace(net().eval(), torch.zeros(1, 1, 4, 4)), path)
    with pytest.raises(ModelError, match="TorchScript archive"):
        read_state_dict(path)


def test_an_exported_program_is_sent_to_its_place(tmp_path):
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/archive_format", "pt2")
    with pytest.raises(ModelError, match="exported program") as caught:
        read_state_dict(path)
    assert "MODEL" in caught.value.hint


def test_any_other_zip_is_refused(tmp_path):
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(ModelError, match="zip archive without a checkpoint"):
        read_state_dict(path)


def archive_of(pickles, name="a/data.pkl"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for content in pickles:
            archive.writestr(name, content)
        archive.writestr("a/version", "3\n")
    return buffer.getvalue()


SMALL = pickle.dumps({}, protocol=2)
GIANT = b"\x80\x02" + b"]0" * (17 * 2**20) + b"}."


@pytest.mark.parametrize(
    ("pickles", "words"),
    [
        ([GIANT], "pickle of 34 MiB; the limit is 32 MiB"),
        ([GIANT, SMALL], "pickle of 34 MiB"),
        ([SMALL, GIANT], "pickle of 34 MiB"),
        ([b"\x80\x02" + b"]0" * 2**21 + b"}."], r"packed \d+:1; the limit is 50:1"),
    ],
    ids=["giant", "giant-first", "giant-last", "ratio"],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, pickles, words):
    path = tmp_path / "weights.pth"
    path.write_bytes(archive_of(pickles))
    with pytest.raises(ModelError, match=words):
        read_state_dict(path)


def test_a_bomb_in_capital_letters_is_found_as_torch_finds_it(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(archive_of([GIANT], "a/DATA.PKL"))
    with pytest.raises(ModelError, match="pickle of 34 MiB"):
        read_state_dict(path)


def test_a_bomb_behind_a_second_directory_is_found(tmp_path):
    """The end record points at the true directory; zipfile believes the harmless copy before the end record."""
    bomb = archive_of([GIANT])
    end = bomb.rindex(b"PK\x05\x06")
    directory = bomb[bomb.index(b"PK\x01\x02") : end]
    harmless = directory.replace(len(GIANT).to_bytes(4, "little"), (9).to_bytes(4, "little"))
    path = tmp_path / "weights.pth"
    path.write_bytes(bomb[:end] + harmless + bomb[end:])
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("a/data.pkl").file_size == 9
    with pytest.raises(ModelError, match="pickle of 34 MiB"):
        read_state_dict(path)


def test_tensors_that_unpack_to_far_more_than_the_file_are_refused(tmp_path):
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", SMALL)
        archive.writestr("a/data/0", bytes(65 * 2**20))
    with pytest.raises(ModelError, match="would unpack to"):
        read_state_dict(path)


def test_a_repacked_checkpoint_is_read(tmp_path):
    state = net().state_dict()
    source, path = saved(tmp_path, state, "plain.pth"), tmp_path / "packed.pth"
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
        for member in before.infolist():
            after.writestr(member.filename, before.read(member))
    assert same(fit(read_state_dict(path), state), state)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_dict_that_holds_itself_ends(tmp_path, legacy):
    raw = {}
    raw |= dict.fromkeys(WRAPPERS, raw)
    path = saved(tmp_path, raw, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ModelError, match="do not fit the model, 0 of 8"):
        fit(read_state_dict(path), net().state_dict())


def test_prefixes_heaped_up_are_not_tried_in_every_order(monkeypatch):
    strip, calls = checkpoint._without, []
    monkeypatch.setattr(checkpoint, "_without", lambda *args: calls.append(1) or strip(*args))
    raw = {f"{''.join(run)}x": torch.zeros(()) for run in itertools.product(PREFIXES, repeat=4)}
    with pytest.raises(ModelError, match="do not fit"):
        fit(raw, net().state_dict())
    assert len(calls) < 1000
