"""Globs over dotted names, exactly as documented, and what is known of a layer."""

from __future__ import annotations

import nets
import pytest
import torch
import torchvision
from torch import nn

from hookscope import list_layers
from hookscope.errors import UsageError
from hookscope.layers import Site, Status, matches, select
from hookscope.layouts import is_spatial


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layer4", "layer4", True),
        ("layer4", "layer4.0", False),
        ("layer*", "layer4", True),
        ("layer*", "layer4.0", False),
        ("layer4.*", "layer4.0", True),
        ("layer4.*", "layer4.0.conv1", False),
        ("layer4.**", "layer4", True),
        ("layer4.**", "layer4.0.conv1", True),
        ("layer4.**", "layer40", False),
        ("**", "layer4.0.conv1", True),
        ("**.conv1", "conv1", True),
        ("**.conv1", "layer4.0.conv1", True),
        ("layer?.**.conv[12]", "layer3.0.conv2", True),
        ("layer?.**.conv[12]", "layer3.0.conv3", False),
        ("features.[0-3].**", "features.3.conv.0.1", True),
        ("features.[0-3].**", "features.13", False),
        ("**.0.**.conv1", "layer1.0.conv1", True),
        ("**.**", "a", True),
        ("**", ".", False),
        ("*", ".", False),
        (".", ".", True),
        (".", "conv1", False),
        ("Layer4", "layer4", False),
        ("conv[!1]", "conv2", True),
        ("conv[!1]", "conv1", False),
        ("", "conv1", False),
    ],
)
def test_globs_are_matched_segment_by_segment(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_the_longest_pattern_is_matched_in_linear_time():
    assert not matches(".".join(["**", "a"] * 40), ".".join(["a"] * 200 + ["b"]))


def test_types_choose_by_class_name_case_counts():
    model = torchvision.models.resnet18(weights=None)
    assert select(model, "type:Conv2d").names[0] == "conv1"
    assert len(select(model, "type:*Norm*").names) == 20
    with pytest.raises(UsageError, match="no layer matches 'type:conv2d'") as caught:
        select(model, "type:conv2d")
    assert "type:Conv2d" in caught.value.hint


def test_selections_unite_subtract_and_keep_model_order():
    model = torchvision.models.resnet18(weights=None)
    selection = select(model, ["layer2.0.bn1", "layer1.*.conv?"], ["**.conv2"])
    assert selection.names == ("layer1.0.conv1", "layer1.1.conv1", "layer2.0.bn1")
    assert selection.patterns["layer1.*.conv?"] == (
        "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2",
    )  # fmt: skip


def test_near_misses_are_named():
    model = torchvision.models.resnet18(weights=None)
    with pytest.raises(UsageError) as caught:
        select(model, "layer4.0.conv3")
    assert caught.value.message == "no layer matches 'layer4.0.conv3'"
    assert "'layer4.0.conv1'" in caught.value.hint


def test_a_shared_module_matches_under_any_name_and_is_given_once_under_the_first():
    model = nets.Tied()
    assert select(model, "second").names == ("first",)
    assert select(model, ["first", "second"]).names == ("first",)
    info = {layer.name: layer for layer in list_layers(model, nets.picture(1))}
    assert info["first"].aliases == ("second",)
    assert info["first"].calls == 2
    assert "second" not in info


def test_excluding_everything_is_said():
    with pytest.raises(UsageError, match=r"no layer is left: '\*\*' excludes"):
        select(nets.Tied(), "stem", "**")


def test_sites_print_as_people_write_them():
    assert [str(site) for site in (Site("a.b"), Site("a", 1), Site("a", 0, "out"), Site("a", 2, "0"))] == [
        "a.b", "a@1", "a:out", "a@2:0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("resnet18", {"layer4": ("NCHW", (7, 7, 0)), "fc": ("NC", None)}),
        (
            "vit_b_32",
            {
                "conv_proj": ("NCHW", (7, 7, 0)),
                "encoder.layers.encoder_layer_3": ("NTC", (7, 7, 1)),
                "encoder.layers.encoder_layer_3.mlp.0": ("NTC", (7, 7, 1)),
                "heads": ("NC", None),
            },
        ),
        (
            "swin_t",
            {
                "features.0.0": ("NCHW", (56, 56, 0)),
                "features.0": ("NHWC", (56, 56, 0)),
                "features.3.0": ("NHWC", (28, 28, 0)),
                "features.3.0.mlp.0": ("NHWC", (28, 28, 0)),
                "norm": ("NHWC", (7, 7, 0)),
                "permute": ("NCHW", (7, 7, 0)),
            },
        ),
        (
            "convnext_tiny",
            {
                "features.0": ("NCHW", (56, 56, 0)),
                "features.1.0.block.0": ("NCHW", (56, 56, 0)),
                "features.1.0.block.1": ("NHWC", (56, 56, 0)),
                "features.1.0.block.3": ("NHWC", (56, 56, 0)),
                "features.1.0.block.6": ("NCHW", (56, 56, 0)),
            },
        ),
        (
            "maxvit_t",
            {
                "blocks.0": ("NCHW", (56, 56, 0)),
                "blocks.0.layers.0.layers.window_attention.attn_layer.0": ("NPTC", None),
                "blocks.0.layers.0.layers.window_attention.partition_op": ("", None),
            },
        ),
    ],
)
def test_layouts_are_recognised_and_never_taken_for_nchw(name, wanted):
    model = torchvision.models.get_model(name, weights=None)
    info = {layer.name: layer for layer in list_layers(model, torch.zeros(1, 3, 224, 224))}
    found = {key: (info[key].layout, info[key].outputs[0].grid) for key in wanted}
    assert found == wanted


def test_a_token_grid_that_is_not_square_comes_from_the_patch_layer():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.block = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 8)
            self.register_buffer("extra", torch.zeros(1, 5, 8))

        def forward(self, x):
            tokens = self.patch(x).flatten(2).transpose(1, 2)
            return self.block(torch.cat([self.extra.expand(len(x), -1, -1), tokens], 1))

    info = {layer.name: layer for layer in list_layers(Patches(), torch.zeros(1, 3, 12, 20))}
    assert info["block"].outputs[0].grid == (3, 5, 5)
    assert is_spatial(info["block"].outputs[0])


@pytest.mark.parametrize(
    ("layers", "size", "wanted"),
    [
        ([nn.Conv2d(3, 256, 8, 8), nn.Flatten(2)], 56, {"0": "NCHW", "1": "NCL"}),
        ([nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm([16, 16, 16])], 16, {"0": "NCHW", "1": "NCHW"}),
        (
            [nn.Conv2d(3, 64, 3, padding=1), nn.LayerNorm([64, 16, 16]), nn.ReLU()],
            16,
            {"1": "NCHW", "2": "NCHW"},
        ),
        ([nn.Conv2d(3, 8, 4, 4), nn.Flatten(1), nn.Unflatten(1, (2, 16))], 8, {"1": "NC", "2": ""}),
    ],
    ids=["flattened", "norm-over-all-axes", "norm-then-relu", "unknown-axes"],
)
def test_channels_are_not_taken_for_positions(layers, size, wanted):
    info = {layer.name: layer for layer in list_layers(nn.Sequential(*layers), torch.zeros(1, 3, size, size))}
    assert {name: info[name].layout for name in wanted} == wanted


def test_learned_queries_are_no_grid():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 16, 16), nn.LayerNorm(8)
            self.queries = nn.Parameter(torch.randn(1, 100, 8))

        def forward(self, x):
            return self.norm(self.queries + self.conv(x).mean((2, 3))[:, None])

    info = {layer.name: layer for layer in list_layers(Queries(), torch.zeros(1, 3, 64, 64))}
    assert (info["norm"].layout, info["norm"].outputs[0].grid) == ("NTC", None)


def test_without_an_input_only_what_is_static_is_known():
    info = list_layers(nets.NeverCalled())
    assert {(layer.calls, layer.shape, layer.status) for layer in info} == {(None, None, None)}
    assert {layer.name: layer.parameters for layer in info}["conv"] == 3 * 4 * 9 + 4


def test_calls_and_statuses_are_counted():
    info = {layer.name: layer for layer in list_layers(nets.ReluThrice(), nets.picture(1))}
    assert info["relu"].calls == 3
    assert info["."].type == "ReluThrice"
    spare = {layer.name: layer for layer in list_layers(nets.NeverCalled(), nets.picture(1))}["spare"]
    assert (spare.calls, spare.status) == (0, Status.NOT_CALLED)


def test_a_lazy_module_is_listed_after_its_first_pass():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    info = {layer.name: layer for layer in list_layers(model, nets.picture(1))}
    assert info["0"].shape == (1, 4, 10, 10)
