"""`hookscope.gradcam` against other libraries: equal where they are right, and where not, which of us is the formula.

What they compute is taken before they normalise it, except where that cannot be had. They are given copies of the
model: some leave gradients, hooks or layers of their own behind.
"""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from camtruth import (
    SUBJECTS,
    Convolutional,
    Subject,
    close,
    of_classes,
    pictures,
    split,
    strongest,
    truth,
)
from nets import seeded
from torch import nn

import hookscope

TARGET = 3

IN_PLACE, PLAIN, RELU = (
    SUBJECTS[kind] for kind in ("in place after the layer", "nothing in place", "behind a relu")
)


def sure():
    """Logits so far apart that Score-CAM's softmax is not flat."""
    model = Convolutional(True)
    model.fc.weight.data *= 50
    return model


SURE = Subject(sure, RELU.layer)

RIGHT = ["nothing in place", "behind a relu", "vit block", "vit norm", "swin"]
"""Where nothing rewrites what the layer returned: a hook that keeps it keeps what it was."""


def ours(subject, name, *, model=None, x=None, **options):
    """(N, h, w) signed, of one class for all pictures."""
    model, x = model or subject.model(), pictures() if x is None else x
    options = {"targets": [TARGET], "relu": False} | options
    maps = hookscope.gradcam(model, x, layers=subject.layer, methods=name, **options)
    return torch.stack([each.raw for each in maps])


def formula(subject, name):
    return truth(name, subject, subject.model(), pictures(), of_classes([TARGET] * 2))


def up_to_sign(one, other):
    """The second, each picture's turned to agree with the first."""
    return other * (one * other).sum((1, 2), keepdim=True).sign()


# captum.


def captum(kind):
    module = pytest.importorskip("captum.attr")
    warnings.simplefilter("ignore", UserWarning)  # that it sets hooks, and that it asks for gradients
    return getattr(module, kind)


@pytest.mark.parametrize("kind", ["in place after the layer", "nothing in place", "behind a relu"])
def test_gradcam_is_captums(kind):
    subject = SUBJECTS[kind]
    model = subject.model()
    theirs = captum("LayerGradCam")(model, model.get_submodule(subject.layer)).attribute(pictures(), TARGET)
    assert close(ours(subject, "gradcam"), theirs[:, 0].detach())


def test_gradcam_of_a_swins_permuted_output_is_captums():
    # Of tokens and of channels that are last captum averages over another axis than the positions.
    subject = Subject(SUBJECTS["swin"].make, "permute")
    model = subject.model()
    theirs = captum("LayerGradCam")(model, model.permute).attribute(pictures(), TARGET)
    assert close(ours(subject, "gradcam"), theirs[:, 0].detach())


@pytest.mark.parametrize("kind", [kind for kind in SUBJECTS if kind != "vit block"])
def test_hirescam_is_captums_gradient_times_activation(kind):
    # Of a block before a layer norm it is 0 but for rounding: see the truths.
    subject = SUBJECTS[kind]
    model = subject.model()
    theirs = captum("LayerGradientXActivation")(model, model.get_submodule(subject.layer))
    found = subject.grid(theirs.attribute(pictures(), TARGET).detach()).sum(1)
    assert close(ours(subject, "hirescam"), found)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_ablationcam_is_captums_feature_ablation_times_activation(kind):
    subject = SUBJECTS[kind]
    model, x = subject.model(), pictures()
    classes = strongest(model, x)
    leaf = split(model, subject.layer, x)[0].detach()
    groups = torch.zeros_like(leaf[:1], dtype=torch.long)  # a ViT's class token is a group of its own
    grid = subject.grid(groups)
    grid[:] = torch.arange(1, grid.shape[1] + 1)[None, :, None, None]
    ablation = captum("LayerFeatureAblation")(model, model.get_submodule(subject.layer))
    with torch.no_grad():
        drops = ablation.attribute(x, target=classes, layer_mask=groups)
        scores = model(x).gather(1, classes[:, None])[:, 0].abs()
    expected = (subject.grid(drops)[:, :, :1, :1] * subject.grid(leaf)).sum(1) / scores[:, None, None]
    assert close(ours(subject, "ablationcam", targets=classes), expected)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_saliency_is_captums(kind):
    subject = SUBJECTS[kind]
    theirs = captum("Saliency")(subject.model()).attribute(pictures().requires_grad_(), TARGET)
    assert close(ours(subject, "saliency"), theirs.amax(1))


@pytest.mark.parametrize("kind", ["in place after the layer", "vit norm", "swin"])
def test_smoothgrad_is_captums_noise_tunnel(kind):
    # Signed gradients are averaged and their size is taken after; from one seed both draw the same noise.
    subject, x = SUBJECTS[kind], pictures(1)
    tunnel = captum("NoiseTunnel")(captum("Saliency")(subject.model()))
    deviation = 0.15 * float(x.max() - x.min())
    with torch.random.fork_rng():
        torch.manual_seed(7)
        theirs = tunnel.attribute(
            x, nt_type="smoothgrad", nt_samples=4, stdevs=deviation, target=TARGET, abs=False
        )
    assert close(ours(subject, "smoothgrad", x=x, samples=4, seed=7), theirs.abs().amax(1).detach())


@pytest.mark.parametrize("kind", SUBJECTS)
def test_activations_are_captums(kind):
    subject = SUBJECTS[kind]
    model = subject.model()
    theirs = captum("LayerActivation")(model, model.get_submodule(subject.layer)).attribute(pictures())
    found = hookscope.feature_maps(model, pictures(), subject.layer)
    assert close(next(iter(found.values())), theirs.detach(), 1e-6)


# pytorch-grad-cam.


@pytest.fixture
def pgc(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("pytorch_grad_cam")
        targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    warnings.simplefilter("ignore")

    def run(
        name, subject, *, model=None, x=None, target=TARGET, whole=False, prepare=lambda cam: None, **options
    ):
        """What it makes of one layer before its ReLU and its scaling, or `whole`: after both."""
        model, x = copy.deepcopy(model or subject.model()), pictures() if x is None else x
        if subject.grid is not SUBJECTS["behind a relu"].grid:
            options["reshape_transform"] = subject.grid
        kept = []
        with getattr(library, name)(model, [model.get_submodule(subject.layer)], **options) as cam:
            prepare(cam)
            made = cam.get_cam_image
            cam.get_cam_image = lambda *args: kept.append(made(*args)) or kept[-1]
            shown = cam(x, [targets.ClassifierOutputTarget(target)] * len(x))
        return torch.from_numpy(np.float64(shown if whole else kept[0]))

    return run


BY_GRADIENT = {
    "gradcam": "GradCAM",
    "hirescam": "HiResCAM",
    "elementwise": "GradCAMElementWise",
    "xgradcam": "XGradCAM",
    "layercam": "LayerCAM",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    # HiResCAM of a block before a layer norm is 0 but for rounding: see the truths.
    [(name, kind) for name in BY_GRADIENT for kind in RIGHT if (name, kind) != ("hirescam", "vit block")],
)
def test_maps_are_pytorch_grad_cams(name, kind, pgc):
    # It adds 1e-7 to XGradCAM's sum over the positions, which of signed channels may be small.
    share = 1e-5 if name != "xgradcam" else 2e-5
    assert close(ours(SUBJECTS[kind], name), pgc(BY_GRADIENT[name], SUBJECTS[kind]), share)


@pytest.mark.parametrize("name", [name for name in BY_GRADIENT if name != "elementwise"])
def test_pytorch_grad_cam_pairs_what_an_in_place_relu_left_with_the_gradient_before_it(name, pgc):
    # On a CPU its copy shares memory with the activation, which the ReLU after the layer rewrites.
    expected = formula(IN_PLACE, name)
    assert close(ours(IN_PLACE, name), expected)
    theirs = pgc(BY_GRADIENT[name], IN_PLACE)
    if name in ("hirescam", "layercam"):
        # Where the activation was negative the gradient is 0: there it makes no difference.
        assert close(theirs, expected)
    else:
        assert not close(theirs, expected, 0.05)


def test_eigencam_of_centred_channels_is_pytorch_grad_cams_but_for_its_sign(pgc):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6), nn.Linear(6, 5)

        def forward(self, x):
            return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))

    subject = Subject(Centred, "norm")
    found = ours(subject, "eigencam")
    assert close(found, up_to_sign(found, pgc("EigenCAM", subject)))


@pytest.mark.parametrize("kind", ["behind a relu", "vit norm", "swin"])
@pytest.mark.parametrize(("name", "theirs"), [("eigencam", "EigenCAM"), ("eigengradcam", "EigenGradCAM")])
def test_pytorch_grad_cam_takes_the_channels_means_off_before_the_component(name, theirs, kind, pgc):
    subject = SUBJECTS[kind]
    found, other = ours(subject, name), pgc(theirs, subject)
    assert close(found, formula(subject, name))
    assert not close(found, up_to_sign(found, other), 0.01)
    a, g = (each.double() for each in _pair(subject))
    values = a if name == "eigencam" else a * g
    values = values - values.mean((2, 3), keepdim=True)
    matrix = values.flatten(2).mT
    component = (matrix @ torch.linalg.svd(matrix).Vh[:, :1].mT).view(len(values), *values.shape[2:])
    assert close(up_to_sign(component, other), component, 1e-4)


def _pair(subject):
    model, x = subject.model(), pictures()
    leaf, output = split(model, subject.layer, x)
    (gradient,) = torch.autograd.grad(output[:, TARGET].sum(), leaf)
    return subject.grid(leaf.detach()), subject.grid(gradient)


def _one_with(positive):
    """A class whose score of the first picture has that sign."""
    scores = RELU.model()(pictures(1)).detach()[0]
    return int(scores.argmax() if positive else scores.argmin())


@pytest.mark.parametrize("batch_size", [3, 32])
def test_ablationcam_behind_a_relu_is_pytorch_grad_cams(batch_size, pgc):
    # Where the least activation is exactly 0 it does set a channel to 0, however many run at once.
    target = _one_with(positive=True)
    assert split(RELU.model(), RELU.layer, pictures(1))[0].min() == 0
    theirs = pgc("AblationCAM", RELU, x=pictures(1), target=target, batch_size=batch_size)
    assert close(ours(RELU, "ablationcam", x=pictures(1), targets=[target]), theirs)


def test_pytorch_grad_cam_divides_by_a_negative_score(pgc):
    # Of a negative score its map is that of the opposite.
    target = _one_with(positive=False)
    assert RELU.model()(pictures(1))[0, target] < 0
    theirs = pgc("AblationCAM", RELU, x=pictures(1), target=target)
    assert close(ours(RELU, "ablationcam", x=pictures(1), targets=[target]), -theirs)


def test_ablationcam_before_a_relu_is_pytorch_grad_cams(pgc):
    # Of signed channels it sets one to the least value less 1e7, which the ReLU after the layer makes 0.
    target, x = _one_with(positive=True), pictures(1)
    assert close(
        ours(PLAIN, "ablationcam", x=x, targets=[target]), pgc("AblationCAM", PLAIN, x=x, target=target)
    )


def test_pytorch_grad_cam_does_not_set_signed_channels_to_zero(pgc):
    # Nothing makes 0 of the least value less 1e7 here, and of it and another 1e7 less for the next in a batch.
    subject, x = Subject(SUBJECTS["swin"].make, "permute"), pictures(1)
    classes = strongest(subject.model(), x).tolist()
    found = ours(subject, "ablationcam", x=x, targets=classes)
    assert close(found, truth("ablationcam", subject, subject.model(), x, of_classes(classes)))
    one, many = (pgc("AblationCAM", subject, x=x, target=classes[0], batch_size=size) for size in (1, 8))
    assert not close(one, found, 0.5)
    assert not close(many, one, 0.1)


def test_scorecam_of_a_layer_as_large_as_the_picture_is_pytorch_grad_cams(pgc):
    subject = Subject(SURE.make, "act_a")
    assert close(ours(subject, "scorecam"), pgc("ScoreCAM", subject))


def test_pytorch_grad_cam_enlarges_score_cams_masks_by_their_corners(pgc):
    # Its masks of a coarser layer are enlarged with aligned corners: shifted by up to half a position.
    found = ours(SURE, "scorecam")
    assert close(found, formula(SURE, "scorecam"))
    assert not close(pgc("ScoreCAM", SURE), found, 5e-3)


def ranged(maps):
    low = maps.amin((1, 2), keepdim=True)
    return (maps - low) / (maps.amax((1, 2), keepdim=True) - low)


def test_fullgrad_of_single_channels_is_pytorch_grad_cams(pgc):
    # It ranges every channel alone, which makes no difference where a layer has one.
    subject = Subject(lambda: Convolutional(False, widths=(1, 1, 1), colours=1), "act_b")
    model, x = seeded(subject.make, 4), pictures(colours=1)  # of many others every layer is dead
    found = ranged(ours(subject, "fullgrad", model=model, x=x))
    theirs = pgc("FullGrad", Subject(subject.make, ""), model=model, x=x, whole=True)
    assert close(found, theirs, 1e-4)  # it adds 1e-7 to every largest value, some of which are small


def test_pytorch_grad_cam_ranges_every_channel_of_fullgrad_alone(pgc):
    found = ours(PLAIN, "fullgrad")
    assert close(found, formula(PLAIN, "fullgrad"))
    assert not close(ranged(found), pgc("FullGrad", Subject(PLAIN.make, ""), whole=True), 0.05)


# torch-cam.


@pytest.fixture
def tc():
    library = pytest.importorskip("torchcam.methods")

    def run(name, subject, *, x=None, layers=None, relu=True, call=None, seed=0, **options):
        """Its maps before scaling; after its ReLU, where it has one that is not switched off."""
        model, x = subject.model(), pictures() if x is None else x
        torch.manual_seed(seed)
        if subject.grid is not RELU.grid:
            options["reshape_transform"] = subject.grid
        with getattr(library, name)(model, layers or subject.layer, **options) as cam:
            getattr(cam, "base_cam", cam)._relu &= relu
            return [each.detach() for each in cam(TARGET, model(x), normalized=False, **(call or {}))]

    return run


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize(
    ("name", "theirs"), [("gradcam", "GradCAM"), ("xgradcam", "XGradCAM"), ("layercam", "LayerCAM")]
)
def test_maps_are_torch_cams(name, theirs, kind, tc):
    assert close(ours(SUBJECTS[kind], name), *tc(theirs, SUBJECTS[kind], relu=False))


@pytest.mark.parametrize(("name", "theirs"), [("gradcam", "GradCAM"), ("xgradcam", "XGradCAM")])
def test_torch_cam_takes_an_in_place_relus_output_for_the_layers(name, theirs, tc):
    # The tensor that it kept was rewritten, and is asked for its gradient after that.
    expected = formula(IN_PLACE, name)
    assert close(ours(IN_PLACE, name), expected)
    (found,) = tc(theirs, IN_PLACE, relu=False)
    assert not close(found, expected, 0.05)
    assert close(found, formula(RELU, name))  # the map of the ReLU


def test_layercam_before_an_in_place_relu_is_torch_cams(tc):
    # It too takes the ReLU's output and gradient; where that is 0, the gradient before it is.
    assert close(ours(IN_PLACE, "layercam"), *tc("LayerCAM", IN_PLACE, relu=False))


def test_cam_is_torch_cams(tc):
    subject = Subject(RELU.make, "act_c")
    assert close(ours(subject, "cam"), *tc("CAM", subject, fc_layer="fc"))


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("name", ["GradCAM", "LayerCAM"])
def test_contrast_is_torch_cams_finercam(name, kind, tc):
    base = getattr(pytest.importorskip("torchcam.methods"), name)
    theirs = tc("FinerCAM", SUBJECTS[kind], base_method=base, relu=False, call={"comparison_idx": [0, 2]})
    assert close(ours(SUBJECTS[kind], name.lower(), contrast=[0, 2]), *theirs)


def test_scorecam_of_a_layer_as_large_as_the_picture_is_torch_cams(tc):
    subject = Subject(SURE.make, "act_a")
    assert close(ours(subject, "scorecam"), *tc("ScoreCAM", subject))


def test_torch_cam_ranges_score_cams_masks_before_it_enlarges_them(tc):
    # So that the enlarged masks do not reach 1.
    found = ours(SURE, "scorecam")
    assert close(found, formula(SURE, "scorecam"))
    assert not close(*tc("ScoreCAM", SURE), found, 5e-3)


def test_smoothgradcam_plusplus_is_not_torch_cams(tc):
    # Its map is made of the last noisy activation, and of the last noisy gradient's positive part.
    found = ours(RELU, "smoothgradcam++", samples=4)
    assert close(ours(RELU, "smoothgradcam++", samples=3), formula(RELU, "smoothgradcam++"))
    one, two = (*tc("SmoothGradCAMpp", RELU, seed=1), *tc("SmoothGradCAMpp", RELU, seed=2))
    assert not close(one, found, 0.05)
    assert not close(one, two, 0.05)
    # Without noise ours is Grad-CAM++; it adds 1e-8 to a denominator of the size of g^2, which is not much larger.
    without = ours(RELU, "smoothgradcam++", samples=1, noise=0.0)
    assert close(without, formula(RELU, "gradcam++"))
    assert not close(*tc("SmoothGradCAMpp", RELU, std=1e-9), without, 0.01)


@pytest.mark.parametrize("kind", ["in place after the layer", "nothing in place"])
def test_refine_is_torch_cams_refinecam(kind, tc):
    subject = SUBJECTS[kind]
    layers = ["act_a", "act_b", "act_c"]
    base = pytest.importorskip("torchcam.methods").LayerCAM
    (theirs,) = tc("RefineCAM", subject, layers=layers, base_method=base)
    maps = hookscope.gradcam(
        subject.model(), pictures(), layers=layers, targets=[TARGET], methods="layercam", fuse="refine"
    )
    assert close(torch.stack([each.raw for each in maps]), theirs)


def test_max_is_torch_cams_fusion_of_ranged_maps(tc):
    # Of LayerCAM's maps it takes the tanh first; of others it joins what it is given.
    library = pytest.importorskip("torchcam.methods")
    layers = ["act_a", "act_b", "act_c"]
    theirs = tc("GradCAM", RELU, layers=layers)
    theirs = [each / each.amax((1, 2), keepdim=True) for each in theirs]
    maps = hookscope.gradcam(
        RELU.model(), pictures(), layers=layers, targets=[TARGET], methods="gradcam", fuse="max"
    )
    assert close(torch.stack([each.raw for each in maps]), library.GradCAM.fuse_cams(theirs))
