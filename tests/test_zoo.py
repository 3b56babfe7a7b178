"""At every site of torchvision's models, hookscope sees the values and gradients that plain autograd gives.

`comparison` says what is compared with what; `python tests/zoo.py` does the same for every classifier at full size.
"""

from __future__ import annotations

from functools import partial
from math import inf, nan

import comparison
import pytest
import torch
from comparison import ParameterGaps, built, examine, gap, naive_raises, naive_rewritten, worst_gap
from torchvision import models
from torchvision.models import detection, segmentation
from truth import Recorder, reference

from hookscope.layers import Site

# Partitions of 2 in place of 7, so that a small picture will do.
SMALL_MAXVIT = partial(
    lambda weights, **options: models.MaxVit(**options),
    input_size=(32, 32),
    stem_channels=8,
    partition_size=2,
    block_channels=[16, 16],
    block_layers=[1, 2],
    head_dim=8,
    stochastic_depth_prob=0.2,
)
SMALL_VIT = partial(
    lambda weights, **options: models.VisionTransformer(**options),
    image_size=32,
    patch_size=16,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    mlp_dim=32,
)


def small_ssd(weights, **options):
    model = detection.ssdlite320_mobilenet_v3_large(weights=weights, **options)
    # It resizes what it is given: 320 is more memory than the rest of the zoo needs.
    model.transform.fixed_size = (64, 64)
    return model


WITHOUT_BACKBONE_WEIGHTS = {"weights_backbone": None}
# A threshold of zero: random weights are sure of nothing, and without a box there is no gradient.
SMALL_DETECTOR = {**WITHOUT_BACKBONE_WEIGHTS, "min_size": 64, "max_size": 64, "box_score_thresh": 0.0}

# Name -> builder, side of the picture in pixels, options.
ZOO = {
    "alexnet": (models.alexnet, 63, {}),
    "convnext_tiny": (models.convnext_tiny, 32, {}),
    "deeplabv3_mobilenet_v3_large": (segmentation.deeplabv3_mobilenet_v3_large, 32, WITHOUT_BACKBONE_WEIGHTS),
    "densenet121": (models.densenet121, 32, {}),
    "efficientnet_b0": (models.efficientnet_b0, 32, {}),
    "efficientnet_v2_s": (models.efficientnet_v2_s, 32, {}),
    "fasterrcnn_mobilenet_v3": (detection.fasterrcnn_mobilenet_v3_large_320_fpn, 64, SMALL_DETECTOR),
    "fcn_resnet50": (segmentation.fcn_resnet50, 32, WITHOUT_BACKBONE_WEIGHTS),
    "googlenet": (models.googlenet, 32, {"init_weights": False}),
    "inception_v3": (models.inception_v3, 75, {"init_weights": False}),
    "lraspp_mobilenet_v3_large": (segmentation.lraspp_mobilenet_v3_large, 32, WITHOUT_BACKBONE_WEIGHTS),
    "maxvit": (SMALL_MAXVIT, 32, {}),
    "mnasnet0_5": (models.mnasnet0_5, 32, {}),
    "mobilenet_v2": (models.mobilenet_v2, 32, {}),
    "mobilenet_v3_small": (models.mobilenet_v3_small, 32, {}),
    "regnet_x_400mf": (models.regnet_x_400mf, 32, {}),
    "regnet_y_400mf": (models.regnet_y_400mf, 32, {}),
    "resnet18": (models.resnet18, 32, {}),
    "resnext50_32x4d": (models.resnext50_32x4d, 32, {}),
    "shufflenet_v2_x0_5": (models.shufflenet_v2_x0_5, 32, {}),
    "squeezenet1_1": (models.squeezenet1_1, 32, {}),
    "ssdlite_mobilenet_v3": (small_ssd, 64, WITHOUT_BACKBONE_WEIGHTS),
    "swin_t": (models.swin_t, 32, {}),
    "swin_v2_t": (models.swin_v2_t, 32, {}),
    "vgg11_bn": (models.vgg11_bn, 32, {}),
    "vit_b_32": (models.vit_b_32, 64, {"image_size": 64}),
    "wide_resnet50_2": (models.wide_resnet50_2, 32, {}),
}


def made(name):
    make, size, options = ZOO[name]
    return ready(make, size, **options)


def ready(make, size, **options):
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    return built(make, x, **options), x


@pytest.mark.parametrize("name", ZOO)
def test_every_value_and_gradient_is_the_models_own(name):
    assert examine(*made(name)).problems == ()


def test_the_zoo_counts_every_call_once():
    # 68 modules, the root included, and in each of 8 blocks the ReLU is called a second time.
    found = examine(*made("resnet18"))
    assert (found.sites, found.gradients) == (76, 76)
    # The naive recipe: 9 first batch norms are rewritten by a ReLU, 8 second ones by the sum.
    assert (found.leaves, found.rewritten, found.raises) == (60, 17, True)


def test_the_naive_recipe_holds_where_nothing_is_in_place():
    model, x = ready(SMALL_VIT, 32)
    values, _ = reference(model, x)
    assert naive_rewritten(model, x, values)[1] == 0
    assert not naive_raises(model, x)


class Aliasing(Recorder):
    """What `output.detach()` keeps: the live tensor."""

    def on_output(self, site, tensor):
        self.outputs[site] = tensor


class Forgetful(Recorder):
    """Misses the last call of every ReLU."""

    def on_gradient(self, site, tensor, objective):
        if not (site.layer.endswith("relu") and site.call):
            super().on_gradient(site, tensor, objective)


class Rectifying(Recorder):
    """Gradients of another backward rule."""

    def on_gradient(self, site, tensor, objective):
        super().on_gradient(site, tensor.relu(), objective)


@pytest.mark.parametrize(
    ("recorder", "problem"),
    [(Aliasing, "activation off"), (Forgetful, "not the twin's sites"), (Rectifying, "gradient off")],
    ids=["kept-alive", "call-missed", "other-gradient"],
)
def test_what_is_wrong_is_found(monkeypatch, recorder, problem):
    monkeypatch.setattr(comparison, "Recorder", recorder)
    assert any(told.startswith(problem) for told in examine(*made("resnet18")).problems)


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("seen", "wanted", "expected"),
    [
        (ONES, ONES.clone(), 0.0),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]), 0.25),
        (None, None, 0.0),
        (None, ONES, inf),
        (ONES, torch.zeros(2), inf),
        (ONES, torch.ones(1), inf),
        (ONES, ONES.double(), inf),
        (torch.tensor([1.0, nan]), ONES, inf),
    ],
    ids=["equal", "a-quarter", "both-missing", "missing", "true-is-zero", "shape", "dtype", "nan"],
)
def test_a_gap_is_relative_to_the_largest_true_value(seen, wanted, expected):
    assert gap(seen, wanted) == expected


def test_a_site_on_one_side_only_is_an_infinite_gap():
    assert worst_gap({Site("a"): ONES}, {Site("a"): ONES, Site("b"): ONES}) == inf
    assert worst_gap({Site("a"): ONES, Site("b"): ONES}, {Site("a"): ONES}) == inf


def test_a_parameter_that_was_not_told_is_an_infinite_gap():
    gaps = ParameterGaps({"a": ONES, "b": None})
    gaps.on_param_gradient("a", ONES, "score")
    assert gaps.worst == inf
    gaps.on_param_gradient("b", None, "score")
    assert gaps.worst == 0
