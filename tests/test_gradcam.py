"""Class-activation maps against hand-worked cases, closed forms, autograd on the split model, and captum."""

from __future__ import annotations

import copy
import warnings

import nets
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import hookscope
from hookscope.artifacts import MapStatus
from hookscope.cam.choice import default_layer, site_infos
from hookscope.cam.methods import METHODS, Kind, gradcam, layercam, method
from hookscope.cam.outputs import logits_of, probabilities_of
from hookscope.cam.questions import Asked, Question, scores_for
from hookscope.cam.scores import objective
from hookscope.cam.targets import class_index, parse_targets
from hookscope.errors import NothingMeasured, UsageError
from hookscope.layers import Site

A = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[-1.0, 0.0], [2.0, -2.0]]]])
G = torch.tensor([[[[1.0, -1.0], [2.0, 2.0]], [[-4.0, 0.0], [1.0, -1.0]]]])


def test_gradcam_by_hand():
    # Mean gradients are 1 and -1: the map is A_0 - A_1.
    assert gradcam(A, G).tolist() == [[[2.0, 2.0], [1.0, 6.0]]]


def test_layercam_by_hand():
    # ReLU(g) is [[1, 0], [2, 2]] and [[0, 0], [1, 0]].
    assert layercam(A, G).tolist() == [[[1.0, 0.0], [8.0, 8.0]]]


class Pooled(nn.Module):
    """Global pooling and one linear layer: here Grad-CAM is CAM divided by the number of positions."""

    def __init__(self, inplace=False):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 6, 3), nn.ReLU(inplace=inplace)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))


def best_class(output):
    """The score of each picture's best class."""
    asked = Asked(size=(64, 64), positions=range(len(output)))
    return [objective(score) for score in scores_for(Question(parse_targets(["top1"], None)), output, asked)]


@pytest.mark.parametrize("inplace", [False, True])
def test_gradcam_is_cam_over_hw_with_global_pooling(inplace):
    model, x = nets.seeded(lambda: Pooled(inplace)), nets.picture(3)
    maps = hookscope.gradcam(model, x, layers="relu", targets=[2])
    activation = model.conv(x).relu()
    cam = torch.einsum("k,nkhw->nhw", model.fc.weight[2], activation) / activation[0, 0].numel()
    for found in maps:
        torch.testing.assert_close(found.raw, cam[found.image].clamp(min=0).detach())
        assert (found.layer, found.call, found.method, found.target) == ("relu", 0, "gradcam", 2)


@pytest.mark.parametrize("inplace", [False, True])
def test_an_in_place_relu_after_the_layer_does_not_rewrite_it(inplace):
    # pytorch-grad-cam pairs the rectified activation with the gradient before it, torch-cam uses both after.
    model, x = nets.seeded(lambda: Pooled(inplace)), nets.picture(1)
    (found,) = hookscope.gradcam(model, x, layers="conv", targets=[1])
    a = model.conv(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.fc(a.relu().mean((2, 3)))[0, 1], a)
    torch.testing.assert_close(found.raw, gradcam(a.detach(), g)[0].clamp(min=0))


def split_resnet(model, x, layer):
    """Activation after a stage of a ResNet, and its gradient by autograd on the rest of the model alone."""
    names = ["layer1", "layer2", "layer3", "layer4"]
    with torch.no_grad():
        y = model.maxpool(F.relu(model.bn1(model.conv1(x))))
        for name in names[: names.index(layer) + 1]:
            y = getattr(model, name)(y)
    a = y.clone().requires_grad_()
    z = a.clone()
    for name in names[names.index(layer) + 1 :]:
        z = getattr(model, name)(z)
    return a, model.fc(torch.flatten(model.avgpool(z), 1))


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None, num_classes=10).eval()


BY_GRADIENT = [name for name, known in METHODS.items() if known.kind is Kind.GRADIENT and name != "cam"]


@pytest.mark.parametrize("layer", ["layer2", "layer4"])
@pytest.mark.parametrize("name", BY_GRADIENT)
def test_maps_equal_autograd_on_the_split_model(resnet, layer, name):
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    maps = hookscope.gradcam(resnet, x, layers=layer, targets=[7], methods=[name])
    a, logits = split_resnet(resnet, x, layer)
    (g,) = torch.autograd.grad(logits[:, 7].sum(), a)
    wanted = METHODS[name].compute(a.detach(), g).clamp(min=0)
    for found in maps:
        torch.testing.assert_close(found.raw, wanted[found.image])


def test_maps_equal_captums(resnet):
    from captum.attr import LayerGradCam

    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    for layer in ("layer3", "layer4"):
        maps = hookscope.gradcam(resnet, x, layers=layer, targets=[3])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = LayerGradCam(resnet, getattr(resnet, layer)).attribute(x, 3, relu_attributions=True)
        for found in maps:
            torch.testing.assert_close(found.raw, theirs[found.image, 0].detach())


def test_one_run_of_many_layers_methods_and_targets_equals_separate_runs(resnet):
    x = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    layers, targets = ["layer2", "layer3.1.conv2", "layer4"], [0, 4]
    together = hookscope.gradcam(resnet, x, layers=layers, targets=targets, methods=BY_GRADIENT)
    found = {(m.image, m.layer, m.method, m.target): m.raw for m in together}
    assert len(found) == len(together) == 3 * 3 * 2 * len(BY_GRADIENT)
    for layer in layers:
        for target in targets:
            for name in BY_GRADIENT:
                for alone in hookscope.gradcam(resnet, x, layers=layer, targets=[target], methods=[name]):
                    key = (alone.image, layer, name, target)
                    torch.testing.assert_close(found[key], alone.raw, rtol=1e-5, atol=1e-7)


def test_a_batch_equals_its_pictures_one_by_one(resnet):
    x = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    together = hookscope.gradcam(resnet, x, layers="layer3", targets=torch.tensor([1, 2, 3]))
    assert [m.target for m in together] == [1, 2, 3]
    for image, found in enumerate(together):
        (alone,) = hookscope.gradcam(resnet, x[image : image + 1], layers="layer3", targets=[image + 1])
        torch.testing.assert_close(found.raw, alone.raw, rtol=1e-4, atol=1e-6)


def test_without_targets_each_picture_explains_its_best_class(resnet):
    x = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    maps = hookscope.gradcam(resnet, x, layers="layer4")
    assert [m.target for m in maps] == resnet(x).argmax(1).tolist()


def test_a_layer_called_three_times_gives_a_map_for_each_call():
    model, x = nets.seeded(nets.ReluThrice), nets.picture(1)
    maps = hookscope.gradcam(model, x, layers="relu", targets=[0])
    assert [m.call for m in maps] == [0, 1, 2]
    a = model.a(x).relu().detach().requires_grad_()
    b = model.b(a).relu()
    (g,) = torch.autograd.grad(model.fc(model.c(b).relu().mean((2, 3)))[0, 0], a)
    torch.testing.assert_close(maps[0].raw, gradcam(a.detach(), g)[0].clamp(min=0))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("resnet18", "layer4"),
        ("densenet121", "features"),
        ("mobilenet_v3_small", "features"),
        ("swin_t", "permute"),
        ("convnext_tiny", "features"),
        ("shufflenet_v2_x0_5", "conv5"),
        ("vit_b_32", "encoder.layers.encoder_layer_11.ln_1"),
    ],
)
def test_the_default_layer_is_the_last_that_the_score_depends_on(name, layer):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    if name.startswith("vit"):
        nn.init.normal_(model.heads.head.weight)  # an untrained one is all zero
    x = torch.randn(1, 3, 224, 224)
    infos = site_infos(hookscope.list_layers(model, x))
    chosen = default_layer(model, x, infos, best_class)
    assert chosen == Site(layer)


def test_of_a_layer_called_several_times_the_last_call_is_the_default():
    model, x = nets.seeded(nets.ReluThrice), nets.picture(1)
    infos = site_infos(hookscope.list_layers(model, x))
    chosen = default_layer(model, x, infos, best_class)
    assert chosen == Site("relu", 2)


def test_an_untrained_vit_has_no_default_layer_and_says_why():
    torch.manual_seed(0)
    model = torchvision.models.vit_b_32(weights=None).eval()
    x = torch.randn(1, 3, 224, 224)
    infos = site_infos(hookscope.list_layers(model, x))
    with pytest.raises(NothingMeasured, match="gradient is zero at every spatial layer"):
        default_layer(model, x, infos, best_class)


def test_the_last_vit_block_is_zero_gradient_by_construction():
    torch.manual_seed(0)
    model = torchvision.models.vit_b_32(weights=None, num_classes=4).eval()
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(1, 3, 224, 224)
    last, before = hookscope.gradcam(
        model, x, layers=["encoder.layers.encoder_layer_10", "encoder.layers.encoder_layer_11"], targets=[0]
    )
    statuses = {m.layer[-2:]: (m.status, tuple(m.raw.shape)) for m in (last, before)}
    assert statuses == {"10": (MapStatus.OK, (7, 7)), "11": (MapStatus.ZERO_GRADIENT, (7, 7))}


@pytest.mark.parametrize(
    ("weight", "status", "largest"),
    [
        (1.0, "ok", 0.25),
        (-1.0, "negative-only", 0.0),
        (0.0, "zero-gradient", 0.0),
        (float("nan"), "non-finite", None),
    ],
)
def test_statuses_say_what_a_map_is_worth(weight, status, largest):
    class Uniform(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.weight = nn.Conv2d(1, 1, 1, bias=False), nn.Parameter(torch.tensor(weight))
            nn.init.ones_(self.same.weight)

        def forward(self, x):
            y = self.same(x).mean((1, 2, 3)) * self.weight
            return torch.stack([y, -y], 1)

    (found,) = hookscope.gradcam(Uniform(), torch.ones(1, 1, 2, 2), layers="same", targets=[0])
    assert found.status == status
    if largest is not None:
        # A uniform positive map is not blank: nothing is subtracted.
        assert found.raw.tolist() == [[largest] * 2] * 2


def test_a_negative_only_map_keeps_its_signed_range(resnet):
    class Negative(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Conv2d(1, 1, 1, bias=False)
            nn.init.ones_(self.same.weight)

        def forward(self, x):
            y = self.same(x).mean((1, 2, 3))
            return torch.stack([-y, y], 1)

    x = torch.tensor([[[[1.0, 2.0]]]])
    (found,) = hookscope.gradcam(Negative(), x, layers="same", targets=[0])
    assert (found.status, found.minimum, found.maximum) == ("negative-only", -1.0, -0.5)
    assert found.raw.tolist() == [[0.0, 0.0]]


def test_a_gradient_that_cannot_be_seen_gives_an_undefined_map_not_a_zero_one():
    class Rewritten(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.same, self.fc = nn.Conv2d(3, 4, 3), _Transposed(), nn.Linear(4, 5)

        def forward(self, x):
            y = self.same(self.conv(x))
            y.relu_()
            return self.fc(y.mean((2, 3)))

    (found,) = hookscope.gradcam(nets.seeded(Rewritten), nets.picture(1), layers="same", targets=[0])
    assert found.status == MapStatus.UNDEFINED
    assert found.raw.isnan().all()


class _Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(2, 3)


@pytest.mark.parametrize("layer", ["inner", "inner.conv"])
def test_a_container_with_several_outputs_has_the_map_of_the_whole_graph(layer):
    model, x = nets.seeded(lambda: nets.NestedOutput("tuple")), nets.picture(1)
    a = model.inner.conv(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.fc((a.relu() + a * 3).mean((2, 3)))[0, 1], a)
    found = hookscope.gradcam(model, x, layers=layer, targets=[1])[0]
    torch.testing.assert_close(found.raw, gradcam(a.detach(), g)[0].clamp(min=0))
    assert found.output == ("0" if layer == "inner" else "")


def test_a_layer_whose_first_axis_is_not_the_batch_gives_no_map():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pos, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(1, 4, 1), nn.Linear(4, 5)

        def forward(self, x):
            return self.fc((self.conv(x) * self.pos(torch.ones(1, 1, *x.shape[2:]))).mean((2, 3)))

    maps = hookscope.gradcam(nets.seeded(Positions), nets.picture(2), layers="type:Conv2d", targets=[0])
    assert {found.layer for found in maps} == {"conv"}


def test_a_layer_without_a_spatial_output_is_a_usage_error_that_names_others(resnet):
    x = torch.randn(1, 3, 64, 64)
    with pytest.raises(UsageError, match=r"layer 'fc' has no spatial output: fc returns \(1, 10\)") as caught:
        hookscope.gradcam(resnet, x, layers="fc", targets=[0])
    assert "'layer4" in caught.value.hint


def test_a_never_called_layer_is_a_usage_error():
    with pytest.raises(UsageError, match="layer 'spare' is never called"):
        hookscope.gradcam(nets.seeded(nets.NeverCalled), nets.picture(1), layers="spare", targets=[0])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([99], "class 99 is out of range"),
        (torch.tensor([0]), "1 target for 2 pictures"),
        (torch.ones(2), "targets of"),
    ],
    ids=["range", "count", "float"],
)
def test_bad_targets_are_usage_errors(resnet, targets, message):
    with pytest.raises(UsageError, match=message):
        hookscope.gradcam(resnet, torch.randn(2, 3, 64, 64), layers="layer4", targets=targets)


def test_unknown_methods_name_the_nearest():
    with pytest.raises(UsageError) as caught:
        method("grad-cam")
    assert caught.value.hint == "did you mean 'gradcam', 'xgradcam', 'gradcam++'?"


def test_bf16_is_near_float32(resnet):
    # Deep enough that what is left is the method's rounding, not that of an untrained net's middle.
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    exact = hookscope.gradcam(resnet, x, layers="layer4", targets=[1])
    rough = hookscope.gradcam(copy.deepcopy(resnet).bfloat16(), x.bfloat16(), layers="layer4", targets=[1])
    for a, b in zip(exact, rough, strict=True):
        assert b.raw.dtype == torch.float32
        assert (a.raw - b.raw).abs().max() <= 5e-2 * a.raw.max()


def test_target_words():
    names = ["cat", "Egyptian cat", "crane", "crane"]
    assert [spec.name for spec in parse_targets(["top:3", "top1", "7", "egyptian_CAT"], names)] == [
        "top1", "top2", "top3", "7", "1",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="names 2 classes: 2, 3"):
        class_index("crane", names)
    with pytest.raises(UsageError) as caught:
        parse_targets(["Egyptian cta"], names)
    assert "'Egyptian cat'" in caught.value.hint
    for bad in ("top:0", "top:x", "top:99999999999999999999"):
        with pytest.raises(UsageError, match="is not top:K"):
            parse_targets([bad], names)
    with pytest.raises(UsageError, match="is out of range"):
        parse_targets(["99999999999999999999"], names)
    with pytest.raises(UsageError, match="class names are unknown"):
        parse_targets(["cat"], None)


def test_equal_scores_give_the_lower_class():
    (spec,) = parse_targets(["top1"], None)
    assert spec.classes(torch.zeros(2, 5)).tolist() == [0, 0]


def test_a_single_score_is_two_classes():
    one = torch.tensor([[2.0], [-1.0]])
    assert logits_of(one).tolist() == [[-2.0, 2.0], [1.0, -1.0]]
    assert logits_of(one[:, 0]).tolist() == [[-2.0, 2.0], [1.0, -1.0]]
    torch.testing.assert_close(probabilities_of(one)[:, 1], one[:, 0].double().sigmoid())


def test_outputs_that_are_no_class_scores_are_refused_with_their_shapes():
    with pytest.raises(UsageError, match=r"no class scores \(N, classes\): out \(1, 5, 4, 4\)"):
        logits_of({"out": torch.zeros(1, 5, 4, 4)})
    with pytest.raises(UsageError, match="several tensors"):
        logits_of((torch.zeros(1, 5), torch.zeros(1, 5)))
    assert logits_of({"logits": torch.zeros(1, 5), "hidden": torch.zeros(1, 2, 3)}).shape == (1, 5)
