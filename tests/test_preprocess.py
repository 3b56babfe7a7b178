"""Pictures to tensors: held against torchvision's own transforms; the view against ramps of coordinates."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import models
from torchvision.transforms import functional as F

from hookscope.errors import ImageError, ModelError, UsageError
from hookscope.models.preprocess import Preprocess

PICTURES = ("ImageClassification", "SemanticSegmentation", "ObjectDetection")


def entries(kinds):
    found = {}
    for name in models.list_models():
        for entry in models.get_model_weights(name):
            preset = entry.transforms()
            if type(preset).__name__ in kinds:
                found.setdefault(repr(preset), pytest.param(entry, id=f"{type(entry).__name__}-{entry.name}"))
    return list(found.values())


def noise(width, height, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("entry", entries(PICTURES))
@pytest.mark.parametrize("size", [(61, 47), (33, 90)], ids=["wide", "tall"])
def test_tensor_is_bit_equal_to_the_weights_own_transforms(entry, size):
    picture = noise(*size)
    assert torch.equal(Preprocess.from_weights(entry).tensor(picture), entry.transforms()(picture))


@pytest.mark.parametrize("size", [(5, 8), (8, 5), (7, 7), (6, 9), (7, 10), (6, 6)])
@pytest.mark.parametrize("crop", [6, 7, 9, (5, 8)])
def test_crops_and_paddings_are_bit_equal_to_torchvision(size, crop):
    picture = noise(*size)
    ours = Preprocess(None, crop, (), ()).tensor(picture)
    theirs = F.center_crop(picture, [crop, crop] if isinstance(crop, int) else list(crop))
    assert torch.equal(ours, F.to_tensor(theirs))


@pytest.mark.parametrize("entry", entries(("VideoClassification", "OpticalFlow"))[:3])
def test_clips_and_pairs_are_refused(entry):
    with pytest.raises(UsageError, match=r"video clips|pairs of pictures"):
        Preprocess.from_weights(entry)


def test_every_preset_is_known():
    kinds = {type(e.transforms()).__name__ for n in models.list_models() for e in models.get_model_weights(n)}
    assert kinds == {*PICTURES, "VideoClassification", "OpticalFlow"}


@pytest.mark.parametrize(
    ("size", "resize", "crop"),
    [
        ((400, 300), 128, 112),
        ((300, 400), 128, 112),
        ((400, 300), (96, 160), (64, 128)),
        ((300, 200), None, 128),
        ((300, 200), 100, None),
    ],
    ids=["wide", "tall", "both-edges", "crop-only", "resize-only"],
)
def test_view_says_where_the_pixels_came_from(size, resize, crop):
    width, height = size
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, width)[None, :].round()
    ramp[..., 1] = np.linspace(0, 255, height)[:, None].round()
    preprocess = Preprocess(resize, crop, (), ())
    tensor, view = preprocess.tensor(Image.fromarray(ramp)), preprocess.view(width, height)
    assert view.original == size
    assert view.size == (tensor.shape[2], tensor.shape[1])
    left, top, right, bottom = view.box
    xs = left + (np.arange(view.size[0]) + 0.5) * (right - left) / view.size[0]
    ys = top + (np.arange(view.size[1]) + 0.5) * (bottom - top) / view.size[1]
    np.testing.assert_allclose(tensor[0].mean(0), (xs - 0.5) / (width - 1), atol=0.006)
    np.testing.assert_allclose(tensor[1].mean(1), (ys - 0.5) / (height - 1), atol=0.006)


def test_view_of_a_padded_crop_reaches_outside_the_picture():
    preprocess = Preprocess(None, 8, (), ())
    tensor, view = preprocess.tensor(Image.new("RGB", (5, 4), "white")), preprocess.view(5, 4)
    assert view.box == (-1.0, -2.0, 7.0, 6.0)
    inside = torch.zeros(8, 8)
    inside[2:6, 1:6] = 1
    assert torch.equal(tensor, inside.expand(3, 8, 8))


def test_plain_is_values_0_to_1_at_the_pictures_size():
    picture = noise(5, 3)
    plain = Preprocess.plain(3)
    assert torch.equal(plain.tensor(picture), F.to_tensor(picture))
    assert plain.view(5, 3).box == (0, 0, 5, 3)
    assert plain.source == "values 0..1 at the picture's size"


def test_one_channel_is_grey():
    picture = noise(5, 3)
    grey = Preprocess.plain(1).tensor(picture)
    assert torch.equal(grey, F.to_tensor(picture.convert("L")))


def test_other_channels_are_refused_only_when_a_picture_comes():
    preprocess = Preprocess.plain(4)
    with pytest.raises(ModelError, match="4 channels") as caught:
        preprocess.tensor(noise(2, 2))
    assert "hookscope.feature_maps(model, x, layers)" in caught.value.hint


def test_overrides_by_hand():
    preprocess = Preprocess.plain(3).with_overrides(resize=4, crop=(2, 4), mean=(0.5,), std=(0.5, 0.25, 1.0))
    tensor = preprocess.tensor(Image.new("RGB", (8, 8), "white"))
    assert tensor.shape == (3, 2, 4)
    assert tensor.amax((1, 2)).tolist() == tensor.amin((1, 2)).tolist() == [1.0, 2.0, 0.5]
    assert preprocess.source == "values 0..1 at the picture's size, changed by --resize --crop --mean --std"


def test_overrides_switch_off():
    entry = models.ResNet18_Weights.IMAGENET1K_V1
    off = Preprocess.from_weights(entry).with_overrides(resize=0, crop=0, mean=(), std=())
    picture = noise(5, 3)
    assert torch.equal(off.tensor(picture), F.to_tensor(picture))


def test_no_override_changes_nothing():
    preprocess = Preprocess.plain(3)
    assert preprocess.with_overrides() is preprocess


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"std": (0.0,)}, "--std is"),
        ({"std": (float("nan"),)}, "--std is"),
        ({"mean": (0.1, 0.2)}, "--mean has 2 values"),
        ({"resize": -3}, "--resize is -3"),
        ({"crop": (0, 4)}, "--crop is"),
    ],
    ids=["zero-std", "nan-std", "two-means", "negative", "zero-edge"],
)
def test_impossible_overrides(override, words):
    with pytest.raises(UsageError, match=words):
        Preprocess.plain(3).with_overrides(**override)


def test_a_thin_picture_is_not_enlarged_to_gigabytes():
    preprocess = Preprocess(256, 224, (), ())
    with pytest.raises(ImageError, match="1x60000"):
        preprocess.tensor(Image.new("RGB", (1, 60000)))


def test_the_picture_given_is_left_alone():
    picture = noise(4, 4)
    before = picture.tobytes()
    tensor = Preprocess.plain(3).tensor(picture)
    tensor.zero_()
    assert picture.tobytes() == before


def test_an_unknown_preset_is_no_crash_of_ours():
    weights = SimpleNamespace(transforms=lambda: SimpleNamespace(), name="X")
    with pytest.raises(ModelError, match="does not know"):
        Preprocess.from_weights(weights)
