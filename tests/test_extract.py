"""Features from Python, against torchvision's `create_feature_extractor` where that is right."""

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.models.feature_extraction import create_feature_extractor

import hookscope
from hookscope.errors import NothingMeasured, UsageError


def pictures(count=3, size=64):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    made = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    with torch.no_grad():
        made.class_token.normal_()
    return made


def taken(model, x, layers, **how):
    (found,) = hookscope.extract(model, x, layers, **how)
    return {str(site): tensor for site, tensor in found.items()}


LAYERS = ["layer1.0.relu", "layer2", "layer3.1.bn2", "avgpool"]


def test_features_are_those_of_torchvisions_extractor(resnet):
    x = pictures()
    peer = create_feature_extractor(resnet, ["layer2", "layer4.0.conv1", "avgpool"])
    with torch.no_grad():
        expected = {name: value.clone() for name, value in peer(x).items()}
    found = taken(resnet, x, list(expected))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_a_later_op_overwrites_is_kept_as_it_was(resnet):
    # The batch norm's output is written to in place by the ReLU: what is kept without a copy is the ReLU's.
    (found,) = hookscope.extract(resnet, pictures(), "bn1")
    with torch.no_grad():
        expected = resnet.bn1(resnet.conv1(pictures()))
    assert torch.equal(next(iter(found.values())), expected)
    assert (expected < 0).any()


def test_the_norms_of_a_vision_transformer_are_their_own_output(vit):
    # torchvision's extractor gives what `ln_2` returned for `ln_1`, and knows no `ln_2`: no peer here.
    x = pictures(2, 32)
    found = taken(vit, x, "encoder.layers.*.ln_1")
    kept = {}
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: kept.update({name: o.clone()}))
        for name, module in vit.named_modules()
        if name.endswith("ln_1")
    ]
    second = []
    handles.append(vit.encoder.layers[0].ln_2.register_forward_hook(lambda m, i, o: second.append(o.clone())))
    with torch.no_grad():
        vit(x)
    for handle in handles:
        handle.remove()
    layer = "encoder.layers.encoder_layer_0.ln_1"
    with torch.no_grad():
        peer = create_feature_extractor(vit, [layer])(x)[layer]
    assert torch.allclose(peer, second[0], atol=1e-6)
    assert not torch.allclose(peer, kept[layer], atol=1e-2)
    assert found.keys() == kept.keys()
    assert all(torch.allclose(found[name], kept[name], atol=1e-6) for name in kept)


def test_the_pass_stops_after_the_last_chosen_layer(resnet):
    ran = []
    handles = [
        module.register_forward_pre_hook(lambda m, i, name=name: ran.append(name))
        for name, module in resnet.named_modules()
    ]
    found = hookscope.extract(resnet, [pictures(), pictures()], "layer2")
    next(found)
    ran.clear()
    next(found)
    for handle in handles:
        handle.remove()
    assert "layer2.1.bn2" in ran
    assert not [name for name in ran if name.startswith(("layer3", "layer4", "fc"))]


class TestReductions:
    def test_mean_and_maximum_over_the_positions(self, resnet):
        whole = taken(resnet, pictures(), "layer3")["layer3"]
        assert torch.equal(taken(resnet, pictures(), "layer3", reduce="avg")["layer3"], whole.mean((2, 3)))
        assert torch.equal(taken(resnet, pictures(), "layer3", reduce="max")["layer3"], whole.amax((2, 3)))

    def test_flat(self, resnet):
        whole = taken(resnet, pictures(), "layer3")["layer3"]
        assert torch.equal(taken(resnet, pictures(), "layer3", reduce="flatten")["layer3"], whole.flatten(1))

    def test_tokens_have_their_class_token_apart(self, vit):
        layer = "encoder.layers.encoder_layer_1"
        x = pictures(2, 32)
        whole = taken(vit, x, layer)[layer]
        assert whole.shape == (2, 17, 16)
        assert torch.equal(taken(vit, x, layer, reduce="cls")[layer], whole[:, 0])
        mean = taken(vit, x, layer, reduce="avg")[layer]
        assert torch.allclose(mean, whole[:, 1:].mean(1), atol=1e-6)
        assert not torch.allclose(mean, whole.mean(1), atol=1e-2)
        assert torch.equal(taken(vit, x, layer, reduce="max")[layer], whole[:, 1:].amax(1))

    def test_large_maps_are_averaged_down(self, resnet):
        whole = taken(resnet, pictures(), "layer1")["layer1"]
        found = taken(resnet, pictures(), ["layer1", "layer4"], max_size=(4, 5))
        assert torch.equal(found["layer1"], F.adaptive_avg_pool2d(whole, (4, 5)))
        assert found["layer4"].shape[2:] == (2, 2)

    def test_tokens_are_averaged_down_on_their_grid(self, vit):
        layer = "encoder.layers.encoder_layer_0"
        x = pictures(2, 32)
        whole = taken(vit, x, layer)[layer]
        found = taken(vit, x, layer, max_size=(2, 2))[layer]
        maps = F.adaptive_avg_pool2d(whole[:, 1:].transpose(1, 2).reshape(2, 16, 4, 4), 2)
        assert torch.equal(found, torch.cat([whole[:, :1], maps.flatten(2).transpose(1, 2)], 1))

    def test_a_type_of_one_s_own(self, resnet):
        whole = taken(resnet, pictures(), "layer3")["layer3"]
        found = taken(resnet, pictures(), "layer3", dtype=torch.float16)["layer3"]
        assert found.dtype == torch.float16
        assert torch.equal(found, whole.half())

    def test_the_mean_of_half_precision_does_not_overflow(self):
        model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False)).half()
        with torch.no_grad():
            model[0].weight.fill_(1)
        x = torch.full((1, 1, 100, 100), 1000.0, dtype=torch.float16)
        assert taken(model, x, "0", reduce="avg")["0"].item() == 1000

    def test_no_class_token_is_nothing_measured(self, resnet):
        with pytest.raises(NothingMeasured, match="class token"):
            taken(resnet, pictures(), "layer3", reduce="cls")

    def test_an_unknown_reduction_is_a_usage_error(self, resnet):
        with pytest.raises(UsageError, match="mean"):
            taken(resnet, pictures(), "layer3", reduce="mean")


def test_between_two_batches_the_model_is_as_it_was(resnet):
    model = torchvision.models.resnet18(weights=None).train()
    found = hookscope.extract(model, [pictures(2), pictures(2)], "layer1")
    next(found)
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert model(pictures(2)).shape == (2, 1000)
    next(found)


def test_a_layer_called_twice_has_features_of_each_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.same(torch.relu(self.same(x)))

    model = Twice().eval()
    found = taken(model, pictures(2, 8), "same")
    with torch.no_grad():
        first = model.same(pictures(2, 8))
        assert torch.equal(found["same"], first)
        assert torch.equal(found["same@1"], model.same(torch.relu(first)))


def test_batches_keep_their_own_number_of_rows(resnet):
    sizes = [
        len(one)
        for batch in hookscope.extract(resnet, pictures(5).split(2), "avgpool")
        for one in batch.values()
    ]
    assert sizes == [2, 2, 1]
    assert isinstance(next(iter(hookscope.extract(resnet, pictures(1), "fc"))), dict)
    assert np.isfinite(taken(resnet, pictures(1), "fc")["fc"].numpy()).all()
