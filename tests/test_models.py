"""Loading: names, weights, wrappers, devices and all that is said about them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision import models
from torchvision.models._api import WeightsEnum

from hookscope.errors import ModelError, UsageError
from hookscope.images import decode
from hookscope.models import download, list_models, load_model, parse_model_arg, resolve_device, zoo
from hookscope.models.demo import ASSETS, WEIGHTS_FILE

DATA = Path(__file__).parent / "data" / "weights"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture
def offline(monkeypatch):
    def refuse(url, *args, **kwargs):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(download, "urlopen", refuse)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)


def answer(loaded, picture):
    with torch.no_grad():
        probabilities = loaded.module(loaded.preprocess.tensor(picture)[None]).softmax(1)[0]
    return loaded.categories[probabilities.argmax()], probabilities.max().item()


def values(loaded, *, seed=0, edge=64):
    torch.manual_seed(seed)
    with torch.no_grad():
        return loaded.module(torch.rand(2, 3, edge, edge))


# The bundled model


@pytest.fixture(scope="module")
def demo():
    return load_model("demo")


@pytest.mark.parametrize(
    ("photo", "label", "probability"), [("cat", "Egyptian cat", 0.717), ("coffee", "espresso", 0.992)]
)
def test_the_bundled_model_knows_the_bundled_photos(demo, photo, label, probability):
    path = ASSETS / "photos" / f"{photo}.png"
    assert answer(demo, decode(path, path.name)) == (label, pytest.approx(probability, abs=0.004))


def test_what_is_said_of_the_bundled_model(demo):
    assert (demo.name, demo.random_weights, demo.parameters, demo.warnings) == ("demo", False, 3_504_872, ())
    assert demo.weights.startswith("IMAGENET1K_V1")
    assert demo.input_size == (3, 224, 224)
    assert len(demo.categories) == 1000
    assert demo.preprocess.source == "MobileNet_V2_Weights.IMAGENET1K_V1"
    assert not any(part.training for part in demo.module.modules())
    assert demo.channels_last
    assert demo.module.features[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    x = demo.batch([torch.zeros(3, 8, 6)] * 2)
    assert (x.shape, x.dtype) == ((2, 3, 8, 6), torch.float32)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_file_becomes_full_precision_values(demo):
    state = demo.module.state_dict()
    for name, value in load_file(WEIGHTS_FILE).items():
        assert state[name].dtype is torch.float32
        assert torch.equal(state[name], value.float())


def test_the_bundled_model_has_no_other_weights():
    with pytest.raises(UsageError, match="no weights 'IMAGENET1K_V2'"):
        load_model("demo", weights="IMAGENET1K_V2")


# torchvision's names


def test_an_unknown_name_has_near_misses():
    with pytest.raises(UsageError, match="unknown model 'resnte50'") as caught:
        load_model("resnte50")
    assert "'resnet50'" in caught.value.hint


def test_unknown_weights_have_near_misses():
    with pytest.raises(UsageError, match="no weights 'IMAGENET1K_V9'") as caught:
        load_model("resnet50", weights="IMAGENET1K_V9")
    assert "'IMAGENET1K_V2'" in caught.value.hint


def test_a_checkpoint_is_no_model():
    with pytest.raises(UsageError, match="holds weights but no model") as caught:
        load_model("runs/best.ckpt")
    assert "--weights runs/best.ckpt" in caught.value.hint


def test_random_weights_say_so_first():
    loaded = load_model("mobilenet_v3_small", weights="none")
    assert loaded.random_weights
    assert loaded.weights == "none (random)"
    assert "RANDOM" in loaded.warnings[0]
    assert loaded.preprocess.source in loaded.warnings[1]


@pytest.mark.parametrize("weights", ["default", "IMAGENET1K_V2", "MobileNet_V2_Weights.IMAGENET1K_V2"])
def test_a_failed_download_is_one_error_with_the_ways_out(weights, cache, offline):
    with pytest.raises(ModelError, match="cannot be downloaded") as caught:
        load_model("mobilenet_v2", weights=weights)
    error = caught.value
    assert error.exit_code == 3
    assert "mobilenet_v2-7ebf99e0.pth" in error.message
    assert "no network in tests" in error.message
    assert str(cache / "mobilenet_v2-7ebf99e0.pth") in error.hint
    assert "--weights none" in error.hint
    assert "--weights PATH" in error.hint
    assert "in the cache" not in error.hint


def test_a_failed_download_names_what_is_in_the_cache(cache, offline):
    (cache / "mobilenet_v2-b0353104.pth").touch()
    with pytest.raises(ModelError) as caught:
        load_model("mobilenet_v2")
    assert "--weights IMAGENET1K_V1, which is in the cache" in caught.value.hint


def test_a_cached_file_is_loaded_without_network(cache, offline):
    torch.manual_seed(3)
    truth = models.squeezenet1_1(weights=None).eval()
    torch.save(truth.state_dict(), cache / "squeezenet1_1-b8a52dc0.pth")
    loaded = load_model("squeezenet1_1")
    assert (loaded.weights, loaded.warnings) == ("IMAGENET1K_V1", ())
    assert torch.equal(loaded.module.features[0].weight, truth.features[0].weight)
    with pytest.raises(UsageError, match="num_classes") as caught:
        load_model("squeezenet1_1", model_args={"num_classes": 7})
    assert "--weights none" in caught.value.hint


def test_code_in_a_cached_file_is_not_run(cache, offline):
    torch.save(nn.Linear(1, 1), cache / "squeezenet1_1-b8a52dc0.pth")
    with pytest.raises(ModelError, match="needs code to be read"):
        load_model("squeezenet1_1")


def test_a_model_argument_of_a_torchvision_name():
    loaded = load_model("squeezenet1_1", weights="none", model_args={"num_classes": 7})
    assert values(loaded).shape == (2, 7)
    assert loaded.categories is None


def test_an_unknown_argument_of_a_torchvision_name():
    with pytest.raises(UsageError, match="no argument 'num_clases'") as caught:
        load_model("resnet18", weights="none", model_args={"num_clases": 7})
    assert "'num_classes'" in caught.value.hint


@pytest.mark.parametrize("argument", ["weights", "pretrained", "progress"])
def test_weights_are_not_chosen_behind_the_back(argument, offline):
    with pytest.raises(UsageError, match=f"'{argument}' is no argument") as caught:
        load_model("resnet18", weights="none", model_args={argument: True})
    assert "--weights" in caught.value.hint


def test_a_file_gets_the_transforms_of_the_first_entry(tmp_path):
    path = tmp_path / "mine.pth"
    torch.save(models.squeezenet1_1(weights=None).state_dict(), path)
    loaded = load_model("squeezenet1_1", weights=str(path))
    assert loaded.weights == "mine.pth"
    assert loaded.warnings == ("preprocessing is that of SqueezeNet1_1_Weights.IMAGENET1K_V1",)
    assert loaded.categories[0] == "tench"


def test_an_official_file_gets_the_transforms_of_its_own_entry(tmp_path):
    path = tmp_path / "mobilenet_v2-7ebf99e0.pth"
    torch.save(models.mobilenet_v2(weights=None).state_dict(), path)
    loaded = load_model("mobilenet_v2", weights=str(path))
    assert loaded.preprocess.resize == 232
    assert loaded.preprocess.source == "MobileNet_V2_Weights.IMAGENET1K_V2"


@pytest.mark.parametrize(
    ("name", "builder"),
    [("squeezenet1_1", models.squeezenet1_1), ("fcn_resnet50", models.segmentation.fcn_resnet50)],
    ids=["classifier", "segmentation"],
)
def test_another_number_of_classes_rebuilds_the_model(tmp_path, name, builder):
    truth = builder(
        weights=None, num_classes=5, **({"weights_backbone": None} if "fcn" in name else {})
    ).eval()
    path = tmp_path / "five.ckpt"
    torch.save({"state_dict": {f"module.{key}": value for key, value in truth.state_dict().items()}}, path)
    loaded = load_model(name, weights=str(path))
    assert "the model was rebuilt with the checkpoint's 5 classes" in loaded.warnings
    assert loaded.categories is None
    assert all(
        torch.equal(loaded.module.state_dict()[key], value) for key, value in truth.state_dict().items()
    )


def test_classes_that_were_asked_for_are_not_overruled(tmp_path):
    path = tmp_path / "five.pth"
    torch.save(models.squeezenet1_1(weights=None, num_classes=5).state_dict(), path)
    with pytest.raises(ModelError, match=r"'five\.pth' do not fit"):
        load_model("squeezenet1_1", weights=str(path), model_args={"num_classes": 7})


@pytest.mark.parametrize("auxiliary", [True, False], ids=["aux", "no-aux"])
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_a_file_gives_the_numbers_of_the_official_structure(tmp_path, name, auxiliary):
    builder = models.get_model_builder(name)
    truth = builder(weights=None, init_weights=False, transform_input=True, aux_logits=auxiliary).eval()
    path = tmp_path / "official.pth"
    torch.save(truth.state_dict(), path)
    loaded = load_model(name, weights=str(path))
    assert loaded.module.aux_logits is auxiliary
    x = torch.rand(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(x), truth(x), atol=1e-5, rtol=1e-4)


def attributes(module):
    kinds = (int, float, str, tuple)
    return {
        name: (type(part), {key: value for key, value in vars(part).items() if isinstance(value, kinds)})
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize(
    "name",
    [
        "googlenet",
        "inception_v3",
        "vit_h_14",
        "fcn_resnet50",
        "deeplabv3_mobilenet_v3_large",
        "lraspp_mobilenet_v3_large",
        "fasterrcnn_resnet50_fpn",
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        "keypointrcnn_resnet50_fpn",
        "fcos_resnet50_fpn",
        "retinanet_resnet50_fpn_v2",
        "ssdlite320_mobilenet_v3_large",
        "mc3_18",
    ],
)
def test_a_file_gets_the_structure_that_official_weights_get(name, monkeypatch):
    """torchvision builds other modules for weights than for none: frozen norms, heads, input transforms."""
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *args, **kwargs: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *args, **kwargs: None)
    for entry in models.get_model_weights(name):
        with torch.device("meta"):
            official = zoo._build(name, {"weights": entry})
            ours, _ = zoo._shaped_for(name, official.state_dict(), zoo._structure(name, entry), {})
        if name in zoo._ZERO_EPSILON and entry.name == "COCO_V1":
            zoo._zero_epsilon(ours)
        assert attributes(ours) == attributes(official)


def test_nothing_is_downloaded_for_the_backbone(offline):
    loaded = load_model("fasterrcnn_mobilenet_v3_large_320_fpn", weights="none")
    assert loaded.preprocess.mean == ()


def test_video_models_load_but_take_no_pictures():
    loaded = load_model("mc3_18", weights="none")
    assert not loaded.channels_last
    with pytest.raises(UsageError, match="takes video clips"):
        loaded.preprocess.tensor(Image.new("RGB", (4, 4)))


# Devices, precision, labels, overrides


@pytest.mark.parametrize(("name", "kind"), [("cpu", "cpu"), ("auto", {"cpu", "cuda", "mps"})])
def test_devices(name, kind):
    assert resolve_device(name).type in kind


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "cpu:1", "", "meta"])
def test_devices_that_are_not_there(name):
    with pytest.raises(UsageError, match="device"):
        resolve_device(name)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_converts(precision, dtype):
    loaded = load_model("squeezenet1_1", weights="none", precision=precision)
    assert loaded.dtype is dtype
    assert {value.dtype for value in loaded.module.parameters()} == {dtype}
    x = loaded.batch([torch.ones(3, 8, 6)] * 2)
    assert (x.shape, x.dtype) == ((2, 3, 8, 6), dtype)


def test_an_unknown_precision():
    with pytest.raises(UsageError, match="'fp8'"):
        load_model("demo", precision="fp8")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat\ndog\n\n", ("cat", "dog")),
        ("\ufeffcat\r\ndog\r\n", ("cat", "dog")),
        (json.dumps(["cat", "dog"]), ("cat", "dog")),
        (json.dumps({"1": "dog", "0": "cat"}), ("cat", "dog")),
        (json.dumps({"0": ["n01", "cat"], "2": ["n02", "dog"]}), ("cat", "class 1", "dog")),
        (json.dumps({"dog": 1, "cat": 0}), ("cat", "dog")),
    ],
    ids=["lines", "windows", "list", "ids", "imagenet", "reversed"],
)
def test_labels(tmp_path, text, names):
    path = tmp_path / "labels.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert load_model("squeezenet1_1", weights="none", labels=path).categories == names


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"{", b'{"a": "b"}', b'{"99999999999": "b"}', b"[1, 2]", b"[]"]
)
def test_labels_that_are_none(tmp_path, content):
    path = tmp_path / "labels.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="labels file"):
        load_model("demo", labels=path)


def test_missing_labels(tmp_path):
    (tmp_path / "labels.txt").touch()
    with pytest.raises(UsageError, match="no labels file") as caught:
        load_model("demo", labels=tmp_path / "lables.txt")
    assert "'labels.txt'" in caught.value.hint


def test_overrides_set_the_size():
    loaded = load_model("squeezenet1_1", weights="none", resize=40, crop=(32, 48))
    assert loaded.input_size == (3, 32, 48)
    assert loaded.preprocess.tensor(Image.new("RGB", (50, 50))).shape == (3, 32, 48)


# Lists and arguments


def test_the_list_of_models():
    assert list_models()[0] == "demo"
    assert list_models("resnet1*") == ["resnet101", "resnet152", "resnet18"]
    with pytest.raises(UsageError, match="no model matches 'resnt50'") as caught:
        list_models("resnt50")
    assert "'resnet50'" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("n=10", "n", 10),
        ("n=-1", "n", -1),
        ("p=0.5", "p", 0.5),
        ("p=1e-3", "p", 1e-3),
        ("aux=false", "aux", False),
        ("aux=True", "aux", True),
        ('n="7"', "n", "7"),
        ("n=[8, 16]", "n", [8, 16]),
        ("act=relu", "act", "relu"),
        ("path=a=b", "path", "a=b"),
        ("day=2024-01-02", "day", "2024-01-02"),
        ("colour=5#c", "colour", "5#c"),
        ("x=1\ny = 2", "x", "1\ny = 2"),
        ("empty=", "empty", ""),
    ],
)
def test_model_arguments(text, key, value):
    parsed = parse_model_arg(text)
    assert parsed == (key, value)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize("text", ["n", "=3", "a-b=3", "1=2"])
def test_model_arguments_that_are_none(text):
    with pytest.raises(UsageError, match="model argument"):
        parse_model_arg(text)


def test_importing_the_package_loads_no_torch():
    code = "import sys, hookscope.models as m; m.parse_model_arg('a=1'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Trained weights


def digits_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def digits_vit():
    return models.VisionTransformer(32, 4, 4, 4, 64, 128, num_classes=10)


@pytest.mark.parametrize(
    ("make", "file", "channels"),
    [(digits_net, "cnn_digits_8.pth", 1), (digits_vit, "vit_digits_32.pth", 3)],
    ids=["cnn", "vit"],
)
def test_trained_digits_load(make, file, channels):
    loaded = load_model(make(), weights=str(DATA / file))
    truth = torch.load(DATA / file, weights_only=True)
    assert all(torch.equal(loaded.module.state_dict()[name], value) for name, value in truth.items())
    assert loaded.preprocess.channels == loaded.input_size[0] == channels
    assert loaded.weights == file
    assert not loaded.random_weights
