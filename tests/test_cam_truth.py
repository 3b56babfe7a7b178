"""`hookscope.gradcam` as a whole, hooks included, against plain torch on nets of four kinds; and what always holds."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import nets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from camtruth import (
    METHODS,
    ON_INPUT,
    SAMPLES,
    SUBJECTS,
    Convolutional,
    Subject,
    close,
    of_classes,
    pictures,
    rectified,
    strongest,
    truth,
)
from torch import nn

import hookscope
from hookscope.artifacts import MapStatus
from hookscope.cam import methods as registry
from hookscope.cam.rounds import noisy
from hookscope.errors import ModelError, UsageError

POOLED = Subject(lambda: Convolutional(True), "act_c")
"""The only layer here that `cam` can be made of."""

ANYWHERE = [name for name in METHODS if name != "cam"]


def found(model, x, name, layer, classes, **options):
    """(N, h, w) of one method, layer and class a picture."""
    maps = hookscope.gradcam(
        model, x, layers=layer, methods=name, targets=torch.as_tensor(classes), samples=SAMPLES, **options
    )
    assert [each.image for each in maps] == [*range(len(x))]
    return torch.stack([each.raw for each in maps])


def everything(model, x, layers, names, targets, **options):
    """The raw map of every (method, picture, layer, target) of one run."""
    options = {"samples": SAMPLES, "relu": False} | options
    maps = hookscope.gradcam(model, x, layers=layers, methods=names, targets=targets, **options)
    made = {(each.method, each.image, each.layer, each.target): each.raw for each in maps}
    assert len(made) == len(maps)
    return made


def alike(some, all_of_them, share=1e-5):
    """Every map of one run as it is in another; those of Grad-CAM++ may be less exact, see below."""
    for key, one in some.items():
        allowed = 1e-4 if "++" in key[0] else share
        torch.testing.assert_close(
            one,
            all_of_them[key],
            rtol=0,
            atol=allowed * float(one.abs().max()) + 1e-7,
            msg=f"{key}: {{}}".format,
        )


def test_every_method_has_its_truth():
    assert set(METHODS) == set(registry.METHODS)


# Every method, on every kind of net.


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("name", ANYWHERE)
def test_a_map_is_what_plain_torch_makes_of_the_net(name, kind):
    subject = SUBJECTS[kind]
    model, x = subject.model(), pictures()
    classes = strongest(model, x).tolist()
    expected = truth(name, subject, model, x, of_classes(classes))
    signed = found(model, x, name, subject.layer, classes, relu=False)
    if (name, kind) == ("hirescam", "vit block"):
        # Only a layer norm reads the patches after this layer, and does not see their scale: g and A are orthogonal.
        assert expected.abs().max() < 1e-5
        assert signed.abs().max() < 1e-5
        return
    # Sums over signed channels come near to 0 under the fraction of Grad-CAM++, which then magnifies rounding.
    share = 2e-4 if name == "smoothgradcam++" and kind == "vit norm" else 1e-5
    assert close(signed, expected, share)
    assert torch.equal(found(model, x, name, subject.layer, classes), rectified(name, signed))


@pytest.mark.parametrize("inplace", [False, True], ids=["nothing in place", "in place"])
def test_cam_is_the_classifiers_row(inplace):
    subject = Subject(lambda: Convolutional(inplace), "act_c")
    model, x = subject.model(), pictures()
    expected = torch.einsum(
        "nk,nkhw->nhw", model.fc.weight[[1, 3]], model.act_c(model.c(model.act_b(model.bn(
            model.b(model.pool(model.act_a(model.a(x)))))))),
    ).detach()  # fmt: skip
    assert close(found(model, x, "cam", "act_c", [1, 3], relu=False), expected)
    assert close(truth("cam", subject, model, x, of_classes([1, 3])), expected)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("vgg11", "features"),
        ("mobilenet_v3_small", "features"),
        ("densenet121", "features"),
        ("convnext_tiny", "features"),
        ("resnet18", "layer3"),
        ("squeezenet1_1", "features"),
    ],
)
def test_cam_is_refused_where_the_layer_is_not_pooled_into_one_linear_layer(name, layer):
    torch.manual_seed(0)
    options = {"init_weights": False} if name.startswith("vgg") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=4, **options).eval()
    with pytest.raises(UsageError, match=f"cam cannot be made of {layer}"):
        hookscope.gradcam(
            model, torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)), layers=layer,
            targets=[1], methods="cam",
        )  # fmt: skip


def test_cam_is_made_of_a_resnet_and_gives_each_positions_share_in_the_score():
    torch.manual_seed(0)
    model, x = torchvision.models.resnet18(weights=None, num_classes=4).eval(), pictures(size=64)
    maps = found(model, x, "cam", "layer4", [1, 2], relu=False)
    logits = model(x).detach()
    # Their mean and the bias are the logit.
    shares = maps.mean((1, 2)) + model.fc.bias.detach()[[1, 2]]
    torch.testing.assert_close(shares, logits[[0, 1], [1, 2]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["in place after the layer", "nothing in place"])
def test_the_shares_of_fullgrad_add_up_to_the_logit_of_a_relu_net(kind, monkeypatch):
    model, x = SUBJECTS[kind].model(), pictures()
    seen, whole = [], registry.METHODS["fullgrad"]

    def spy(terms, size):
        seen.extend(terms)
        return whole.compute(terms, size)

    monkeypatch.setitem(registry.METHODS, "fullgrad", replace(whole, compute=spy))
    found(model, x, "fullgrad", (), [0, 3])
    assert len(seen) == 1 + 4  # the input, three convolutions and the batch norm
    # What has no place on the picture, the classifier's bias, is all that is missing.
    total = sum(term.double().flatten(1).sum(1) for term in seen) + model.fc.bias.detach()[[0, 3]]
    torch.testing.assert_close(total.float(), model(x).detach()[[0, 1], [0, 3]], rtol=1e-4, atol=1e-5)


# What may be combined with any method.


@pytest.mark.parametrize("kind", ["in place after the layer", "vit norm", "swin"])
@pytest.mark.parametrize("name", [name for name in ANYWHERE if name != "eigencam"])
def test_contrast_takes_off_six_tenths_of_the_others_mean(name, kind):
    subject = SUBJECTS[kind]
    model, x = subject.model(), pictures()
    classes, others = [0, 3], (1, 2, 4)
    expected = truth(name, subject, model, x, of_classes(classes, others))
    maps = found(model, x, name, subject.layer, classes, relu=False, contrast=others)
    # A share of a difference, which may be near 0, is less exact than one of a logit.
    assert close(maps, expected, 2e-4 if name in ("ablationcam", "smoothgradcam++", "gradcam++") else 1e-5)
    assert not close(maps, truth(name, subject, model, x, of_classes(classes)), 1e-4)


def test_contrast_goes_through_cams_own_weights():
    model, x = POOLED.model(), pictures()
    expected = truth("cam", POOLED, model, x, of_classes([0, 3], (1, 2)))
    assert close(found(model, x, "cam", "act_c", [0, 3], relu=False, contrast=(1, 2)), expected)


@pytest.mark.parametrize("name", METHODS)
def test_flipping_averages_what_is_shown_of_the_picture_and_its_mirror_image(name):
    model, x = POOLED.model(), pictures()
    score = of_classes([1, 3])
    straight = rectified(name, truth(name, POOLED, model, x, score))
    mirrored = rectified(name, truth(name, POOLED, model, x.flip(3), score)).flip(2)
    maps = found(model, x, name, "act_c", [1, 3], smooth="flip")
    assert close(maps, (straight + mirrored) / 2)
    assert not close(maps, straight, 1e-2)


@pytest.mark.parametrize(
    # Noise on noise: what is drawn inside is another's affair.
    "name",
    [name for name in METHODS if name not in ("smoothgrad", "smoothgradcam++")],
)
def test_noise_averages_what_is_shown_of_noisy_pictures(name):
    model, x = POOLED.model(), pictures()
    score = of_classes([1, 3])
    rounds = [rectified(name, truth(name, POOLED, model, each, score)) for each in noisy(x, 2, 0.3, 6)]
    maps = found(model, x, name, "act_c", [1, 3], smooth="noise:2,0.3", seed=5)
    assert close(maps, torch.stack(rounds).mean(0))


def scaled(one):
    return one / one.max()


def ranged(one):
    return (one - one.min()) / (one.max() - one.min())


@pytest.mark.parametrize("name", ["gradcam", "layercam", "eigencam", "ablationcam", "scorecam"])
@pytest.mark.parametrize(
    ("how", "alike", "joined"),
    [
        ("mean", scaled, lambda maps: maps.mean(0)),
        ("max", scaled, lambda maps: maps.amax(0)),
        ("refine", ranged, lambda maps: maps.prod(0)),
    ],
    ids=["mean", "max", "refine"],
)
def test_fusing_joins_the_layers_maps(name, how, alike, joined):
    layers = ["act_a", "bn", "act_c"]  # 32, 16 and 8 positions a side
    model, x = SUBJECTS["in place after the layer"].model(), pictures()
    single = [
        truth(name, Subject(lambda: None, layer), model, x, of_classes([1, 3])).float() for layer in layers
    ]
    maps = hookscope.gradcam(
        model, x, layers=layers, methods=name, targets=torch.tensor([1, 3]), fuse=how, samples=SAMPLES
    )
    assert [each.layer for each in maps] == ["act_a+bn+act_c"] * 2
    for each in maps:
        same = [
            F.interpolate(alike(one[each.image].clamp(min=0))[None, None], size=(32, 32), mode="bilinear")[
                0, 0
            ]
            for one in single
        ]
        assert close(each.raw, joined(torch.stack(same)), 2e-5)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_top_channels_are_those_that_vary_most(kind):
    subject = SUBJECTS[kind]
    model, x = subject.model(), pictures()
    expected = truth("scorecam", subject, model, x, of_classes([1, 3]), top=3)
    maps = found(model, x, "scorecam", subject.layer, [1, 3], relu=False, top_channels=3)
    assert close(maps, expected)
    assert not close(maps, truth("scorecam", subject, model, x, of_classes([1, 3])), 1e-2)


# How many at once, and in what company, makes no difference.


COMPANY = {
    "cnn": ("in place after the layer", ["act_a", "bn", "act_b"], ANYWHERE),
    "cam": ("in place after the layer", ["act_c"], METHODS),
    "vit": ("vit norm", [f"encoder.layers.encoder_layer_{i}.ln_1" for i in (1, 2)], ANYWHERE),
    "swin": ("swin", ["features.1.0", "features.3.0", "permute"], ANYWHERE),
}


@pytest.mark.parametrize(("kind", "layers", "names"), COMPANY.values(), ids=COMPANY)
def test_three_pictures_are_three_runs_of_one(kind, layers, names):
    model, x = SUBJECTS[kind].model(), pictures(3)
    classes = strongest(model, x)
    together = everything(model, x, layers[-1], names, classes)
    alone = [everything(model, x[i : i + 1], layers[-1], names, classes[i : i + 1]) for i in range(3)]
    renamed = {(name, i, *rest): one for i in range(3) for (name, _, *rest), one in alone[i].items()}
    assert renamed.keys() == together.keys()
    alike(renamed, together)


@pytest.mark.parametrize(("kind", "layers", "names"), COMPANY.values(), ids=COMPANY)
def test_one_run_of_everything_equals_separate_runs(kind, layers, names):
    model, x, targets = SUBJECTS[kind].model(), pictures(2), [0, 3]
    together = everything(model, x, layers, names, targets)
    separate = [
        *(everything(model, x, layers, [name], targets) for name in names),
        *(everything(model, x, [layer], names, targets) for layer in layers),
        *(everything(model, x, layers, names, [target]) for target in targets),
        *(everything(model, x, [layers[0]], [name], [targets[1]]) for name in names),
    ]
    for each in separate:
        alike(each, together)
    assert {key for each in separate[: len(names)] for key in each} == together.keys()


@pytest.mark.parametrize("kind", ["in place after the layer", "vit norm", "swin"])
@pytest.mark.parametrize("name", ["ablationcam", "scorecam"])
def test_how_many_perturbed_pictures_run_at_once_makes_no_difference(name, kind, monkeypatch):
    subject = SUBJECTS[kind]
    model, x = subject.model(), pictures(1)
    classes = strongest(model, x).tolist()
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    maps = {}
    for mib in (1e-6, 0.5, 1024):
        monkeypatch.setattr("hookscope.cam.perturbed.MEMORY_MIB", mib)
        sizes.clear()
        maps[mib] = found(model, x, name, subject.layer, classes, relu=False)
        maps[mib, "most"] = max(sizes[-2:])
    assert maps[1e-6, "most"] == 1 < maps[0.5, "most"] <= maps[1024, "most"]
    assert close(maps[1e-6], maps[1024])
    assert close(maps[0.5], maps[1024])


# Around it.


@pytest.mark.parametrize(("kind", "layers", "names"), COMPANY.values(), ids=COMPANY)
def test_frozen_parameters_and_modes_without_gradients_make_no_difference(kind, layers, names):
    model, x = SUBJECTS[kind].model(), pictures()
    classes = strongest(model, x)

    def run(x=x):
        return everything(model, x, layers[-1], names, classes)

    plain = run()
    for around in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with around():
            again = run(x.clone())
        assert all(torch.equal(again[key], one) for key, one in plain.items())
    model.train()
    again = run()
    assert all(torch.equal(again[key], one) for key, one in plain.items())
    model.requires_grad_(False)
    alike(run(), plain, 2e-6)


class Awkward(nn.Module):
    """Two convolutions to one map of a class and its negative."""

    def __init__(self, weight=1.0, head=1.0):
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(1, 4, 1), nn.ReLU(inplace=True), nn.Linear(4, 2)
        nn.init.constant_(self.conv.weight, weight)
        nn.init.zeros_(self.conv.bias)
        nn.init.constant_(self.fc.weight, head)
        self.fc.weight.data[1] *= -1
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(
    "name",
    # Of a flat channel Score-CAM has no mask, and of terms that are all alike FullGrad has no share: both are 0.
    [name for name in METHODS if name not in ("scorecam", "fullgrad")],
)
def test_a_uniform_positive_map_is_not_blank(name):
    (one,) = hookscope.gradcam(Awkward(), torch.ones(1, 1, 4, 4), layers="relu", targets=[0], methods=name)
    assert one.status == MapStatus.OK
    assert one.raw.min() > 0
    torch.testing.assert_close(one.raw, torch.full_like(one.raw, float(one.raw[0, 0])), rtol=1e-5, atol=0)


def _dead(model):
    nn.init.constant_(model.conv.bias.data[:3], -100)


def _flat(model):
    nn.init.zeros_(model.conv.weight)
    nn.init.constant_(model.conv.bias, 0.1)


def _flat_large(model):
    nn.init.zeros_(model.conv.weight)
    nn.init.constant_(model.conv.bias, 65504.0)


def _without_bias(model):
    model.conv.bias = model.fc.bias = None


AWKWARD = {
    "dead channels": (_dead, 1.0),
    "all channels dead": (lambda model: nn.init.constant_(model.conv.bias, -100), 1.0),
    "flat": (_flat, 1.0),
    "flat at the end of half precision": (_flat_large, 1.0),
    "nothing but negative": (lambda model: None, -1.0),
    "a head of zeros": (lambda model: None, 0.0),
    "no bias": (_without_bias, 1.0),
    "a score of zero": (lambda model: nn.init.zeros_(model.conv.weight), 1.0),
    "tiny": (lambda model: nn.init.constant_(model.conv.weight, 1e-20), 1.0),
    "large": (lambda model: nn.init.constant_(model.conv.weight, 1e8), 1.0),
}


@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize("layer", ["conv", "relu"])
def test_a_finite_model_has_finite_maps(layer, case):
    spoil, head = AWKWARD[case]
    model, x = nets.seeded(lambda: Awkward(head=head)), pictures(2, colours=1, size=8)
    spoil(model)
    names = METHODS if layer == "relu" else ANYWHERE
    for options in ({}, {"relu": False}, {"smooth": "flip"}):
        maps = hookscope.gradcam(model, x, layers=layer, targets=[0, 1], methods=names, samples=2, **options)
        assert {each.method for each in maps} == set(names)
        for each in maps:
            assert each.raw.isfinite().all(), each.method
            assert np.isfinite([each.minimum, each.maximum]).all()
            assert each.status in (
                MapStatus.OK, MapStatus.BLANK, MapStatus.NEGATIVE_ONLY, MapStatus.ZERO_GRADIENT,
            )  # fmt: skip


@pytest.mark.parametrize("name", ["gradcam", "smoothgradcam++", "gradcam++", "hirescam"])
def test_a_gradient_that_cannot_be_seen_gives_an_undefined_map_by_every_method(name):
    class Transposed(nn.Module):
        def forward(self, x):
            return x.transpose(2, 3)

    class Rewritten(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.same, self.fc = nn.Conv2d(3, 4, 3), Transposed(), nn.Linear(4, 5)

        def forward(self, x):
            y = self.same(self.conv(x))
            y.relu_()
            return self.fc(y.mean((2, 3)))

    (one,) = hookscope.gradcam(
        nets.seeded(Rewritten), nets.picture(1), layers="same", targets=[0], methods=name
    )
    assert one.status == MapStatus.UNDEFINED
    assert one.raw.isnan().all()


def test_maps_of_a_flat_layer_in_half_precision_are_finite():
    model = nets.seeded(Awkward)
    _flat(model)
    maps = hookscope.gradcam(
        model.half(), pictures(2, colours=1).half(), layers="relu", targets=[0, 1], methods=METHODS, samples=2
    )
    assert {each.method for each in maps} == set(METHODS)
    for each in maps:
        assert each.raw.dtype == torch.float32
        assert each.raw.isfinite().all(), each.method


# A share of a score that is rounded to eight bits cannot be more exact than that, and a channel's share is small.
BUT_SHARES = [name for name in ANYWHERE if name != "ablationcam"]
# Where a unit is turned on or off by rounding, or pooling picks another, a gradient at the input is another one.
# Sums over channels of either sign come near to 0, which is divided by; and large logits, as that ViT's, are rounded
# by more than a softmax over them bears.
OF_SIGNED_CHANNELS = [
    name for name in BUT_SHARES if ">= 0" not in registry.METHODS[name].needs and name != "scorecam"
]
AT_THE_LAYER = ["cam", *(name for name in BUT_SHARES if name not in ON_INPUT)]


@pytest.mark.parametrize(
    ("kind", "layer", "names"),
    [
        ("in place after the layer", "act_c", AT_THE_LAYER),
        ("vit norm", "encoder.layers.encoder_layer_2.ln_1", OF_SIGNED_CHANNELS),
        ("swin", "permute", ANYWHERE),
    ],
    ids=["cnn", "vit", "swin"],
)
def test_bf16_is_near_float32_by_every_method(kind, layer, names):
    model, x = SUBJECTS[kind].model(), pictures(1)
    classes = strongest(model, x)
    exact = everything(model, x, layer, names, classes)
    rough = everything(copy.deepcopy(model).bfloat16(), x.bfloat16(), layer, names, classes)
    assert rough.keys() == exact.keys()
    for key, one in exact.items():
        assert rough[key].dtype == torch.float32
        assert not torch.equal(rough[key], one)
        assert close(rough[key], one, 5e-2), key


# The model is left as it was found.


class Counting(Convolutional):
    """Dropout that would draw, a batch norm that would learn, a buffer that counts; raises in a chosen call."""

    def __init__(self):
        super().__init__(True)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.left, self.error = -1, None

    def forward(self, x):
        self.calls += 1
        torch.rand(1)
        self.left -= 1
        output = super().forward(self.drop(x))
        if self.left == 0:
            raise self.error
        return output


def state(model):
    """Everything of a model that an inspection must not change."""
    hooks = (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    )  # fmt: skip
    return {
        "values": {name: value.numpy().tobytes() for name, value in model.state_dict().items()},
        "training": {name: module.training for name, module in model.named_modules()},
        "requires_grad": {name: value.requires_grad for name, value in model.named_parameters()},
        "identity": {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())},
        "grad": {name: (id(p.grad), p.grad.numpy().tobytes()) for name, p in model.named_parameters()},
        "hooks": {name: [len(getattr(m, h)) for h in hooks] for name, m in model.named_modules()},
        "forwards": [name for name, module in model.named_modules() if "forward" in module.__dict__],
        "random": torch.get_rng_state().numpy().tobytes(),
        "others": (random.getstate(), np.random.get_state()[1].tobytes()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "gradients": torch.is_grad_enabled(),
    }


def inspected():
    """A model in training, half of it frozen, with gradients of its own and a hook of somebody else."""
    model = nets.seeded(Counting).train()
    model.bn.eval()
    model.a.weight.requires_grad = False
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    model.bn.register_forward_hook(lambda *_: None)
    return model


OPTIONS = {
    "plain": {},
    "flip": {"smooth": "flip"},
    "noise": {"smooth": "noise:2,0.1"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_left_as_it_was_found(name, option):
    model, x = inspected(), pictures(2)
    kept = x.clone()
    before = state(model)
    hookscope.gradcam(model, x, layers="act_c", targets=[1], methods=name, samples=2, **OPTIONS[option])
    assert state(model) == before
    assert before["forwards"] == []
    assert torch.equal(x, kept)
    assert x.grad is None


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_left_as_it_was_found_when_a_pass_raises(name, error, monkeypatch):
    monkeypatch.setattr("hookscope.cam.perturbed.MEMORY_MIB", 0.2)  # several batches of perturbed pictures
    model, x = inspected(), pictures(1)
    model.left = 10**6

    def run():
        return hookscope.gradcam(model, x, layers="act_c", targets=[1], methods=name, samples=4)

    wanted = run()
    passes = 10**6 - model.left
    assert passes >= (1 if registry.METHODS[name].kind in ("gradient", "activation") else 2)
    model.error = error
    before = state(model)
    raised = ModelError if isinstance(error, RuntimeError) else type(error)
    survived = 0
    for number in {1, 2, passes // 2, passes} - {0}:
        if number > passes:
            continue
        model.left = number
        try:
            again = run()
        except raised:
            pass
        else:
            # A batch that raises is made up for by whole passes, or one by one: only the one above was to fail.
            assert name in ("ablationcam", "scorecam")
            assert isinstance(error, RuntimeError)
            assert close(again[0].raw, wanted[0].raw)
            survived += 1
        model.left = -1
        assert state(model) == before
    assert survived < 4
