"""The methods against worked examples, loops written from the papers' formulas, numpy's SVD, and other libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hookscope
from hookscope.cam import component, methods
from hookscope.cam.methods import METHODS, Kind, Method, method
from hookscope.errors import UsageError

A = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[-1.0, 0.0], [2.0, -2.0]]]], dtype=torch.float64)
G = torch.tensor([[[[1.0, -1.0], [2.0, 2.0]], [[-4.0, 0.0], [1.0, -1.0]]]], dtype=torch.float64)


def random_pair(seed=0, shape=(3, 5, 4, 6), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator, dtype=dtype).relu(),
        torch.randn(shape, generator=generator, dtype=dtype),
    )


def given(kind, activation, gradient):
    """The arguments that a method of a kind takes, of the sizes of an activation and a gradient."""
    channels = torch.arange(activation.shape[1])
    means = gradient.mean((0, 2, 3))
    return {
        Kind.GRADIENT: lambda: (activation, gradient),
        Kind.ACTIVATION: lambda: (activation,),
        Kind.NOISY: lambda: (activation, tuple(gradient.double() ** power for power in (1, 2, 3))),
        Kind.MASKED: lambda: (activation[:1], means, channels),
        Kind.ABLATED: lambda: (activation[:1], means.sum(), means),
        Kind.INPUT: lambda: (gradient[:, :3],),
        Kind.BIASES: lambda: ([gradient * activation, gradient[:, :2] * 3], (9, 11)),
    }[kind]()


def computed(name, activation, gradient):
    return METHODS[name].compute(*given(METHODS[name].kind, activation, gradient))


# By hand.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Mean gradients are 1 and -1.
        ("gradcam", [[2.0, 2.0], [1.0, 6.0]]),
        # The sums are 10 and -1. Positive gradients 1, 2, 2: 1/12 + 2 * 2/22 = 35/132; and 1: 1/(2 - 1) = 1.
        ("gradcam++", [[35 / 132 - 1, 70 / 132], [105 / 132 + 2, 140 / 132 - 2]]),
        # g A sums to 13 and 8, A to 10 and -1.
        ("xgradcam", [[9.3, 2.6], [-12.1, 21.2]]),
        ("hirescam", [[5.0, -2.0], [8.0, 10.0]]),
        ("elementwise", [[5.0, 0.0], [8.0, 10.0]]),
        ("layercam", [[1.0, 0.0], [8.0, 8.0]]),
        # Gradients sum to 4 and -4.
        ("cam", [[8.0, 8.0], [4.0, 24.0]]),
    ],
)
def test_methods_of_a_gradient_by_hand(name, expected):
    torch.testing.assert_close(
        METHODS[name].compute(A, G), torch.tensor([expected], dtype=torch.float64), rtol=1e-14, atol=1e-14
    )


def test_eigencam_by_hand():
    # Channels 3 u and 4 u: one component, of strength 5.
    u = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], dtype=torch.float64)
    found = methods.eigencam(torch.stack([3 * u, 4 * u])[None])
    torch.testing.assert_close(found, 5 * u[None])


def test_eigengradcam_is_eigencam_of_gradient_times_activation():
    activation, gradient = random_pair()
    assert torch.equal(methods.eigengradcam(activation, gradient), methods.eigencam(gradient * activation))


def test_smoothgradcam_plusplus_by_hand():
    # Gradients 1 and 3: means of powers 2, 5 and 14. alpha = 5 / (2 * 5 + 2 * 14).
    moments = tuple(torch.full((1, 1, 1, 1), value, dtype=torch.float64) for value in (2.0, 5.0, 14.0))
    found = methods.smoothgradcam_plusplus(torch.full((1, 1, 1, 1), 2.0), moments)
    torch.testing.assert_close(found, torch.tensor([[[2 * 2 * 5 / 38]]]))


def test_smoothgradcam_plusplus_without_noise_is_gradcam_plusplus():
    activation, gradient = random_pair()
    torch.testing.assert_close(
        computed("smoothgradcam++", activation, gradient), computed("gradcam++", activation, gradient)
    )


def test_scorecam_by_hand():
    # Of the scores log 3 and 0 the softmax is 3/4 and 1/4.
    scores = torch.tensor([np.log(3.0), 0.0], dtype=torch.float64)
    found = methods.scorecam(A, scores, torch.tensor([1, 0]))
    torch.testing.assert_close(found, 0.75 * A[:, 1] + 0.25 * A[:, 0])
    # A baseline score taken off all of them changes nothing.
    torch.testing.assert_close(methods.scorecam(A, scores - 7, torch.tensor([1, 0])), found)


@pytest.mark.parametrize(
    ("score", "ablated", "weights"),
    [(2.0, [1.0, 3.0], [0.5, -0.5]), (-2.0, [-3.0, -1.0], [0.5, -0.5]), (0.0, [-1.0, 1.0], [1.0, -1.0])],
    ids=["positive", "negative: a loss stays a loss", "zero"],
)
def test_ablationcam_by_hand(score, ablated, weights):
    found = methods.ablationcam(
        A, torch.tensor(score, dtype=torch.float64), torch.tensor(ablated, dtype=torch.float64)
    )
    torch.testing.assert_close(found, weights[0] * A[:, 0] + weights[1] * A[:, 1])


@pytest.mark.parametrize("name", ["saliency", "smoothgrad"])
def test_saliency_by_hand(name):
    gradient = torch.tensor([[[[1.0, -5.0]], [[-2.0, 4.0]], [[0.5, 0.0]]]])
    assert METHODS[name].compute(gradient).tolist() == [[[2.0, 5.0]]]


def test_fullgrad_by_hand():
    # The input's terms go from 0 to 4 in absolute value, over both channels together; the bias's from 1 to 3.
    x = torch.tensor([[[[-4.0, 0.0]], [[2.0, 1.0]]]])
    bias = torch.tensor([[[[1.0, -3.0]]]])
    assert methods.fullgrad([x, bias], (1, 2)).tolist() == [[[1.0 + 0.5 + 0.0, 0.0 + 0.25 + 1.0]]]


def test_fullgrad_adds_nothing_for_terms_that_are_all_alike_and_enlarges_coarse_ones():
    x = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    flat = torch.full((1, 3, 1, 1), -7.0)
    coarse = torch.tensor([[[[1.0]], [[0.0]]]])
    assert methods.fullgrad([x, flat, coarse], (2, 2)).tolist() == [[[1.0, 2.0], [1.0, 2.0]]]


# By loops written from the formulas.


def _weights(weight):
    def looped(a, g):
        return sum(weight(a[k], g[k]) * a[k] for k in range(len(a)))

    return looped


def _plusplus(a, g):
    total, weight = a.sum(), 0.0
    for slope in g.flat:
        bottom = 2 * slope**2 + total * slope**3
        weight += (slope**2 / bottom if slope != 0 and bottom != 0 else 0.0) * max(slope, 0.0)
    return weight


LOOPS = {
    "gradcam": _weights(lambda a, g: g.mean()),
    "gradcam++": _weights(_plusplus),
    "smoothgradcam++": _weights(_plusplus),
    "xgradcam": _weights(lambda a, g: (g * a).sum() / a.sum() if a.sum() != 0 else 0.0),
    "cam": _weights(lambda a, g: g.sum()),
    "hirescam": lambda a, g: sum(g[k] * a[k] for k in range(len(a))),
    "elementwise": lambda a, g: sum(np.maximum(g[k] * a[k], 0) for k in range(len(a))),
    "layercam": lambda a, g: sum(np.maximum(g[k], 0) * a[k] for k in range(len(a))),
    "eigencam": lambda a, g: by_svd(a),
    "eigengradcam": lambda a, g: by_svd(g * a),
}


def by_svd(values):
    matrix = values.reshape(len(values), -1).T
    *_, right = np.linalg.svd(matrix, full_matrices=False)
    found = (matrix @ right[0]).reshape(values.shape[1:])
    return found if found.sum() >= 0 else -found


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6], ids="gradients of {:g}".format)
def test_float32_maps_are_the_formula_in_double_precision(name, size):
    activation, gradient = random_pair(dtype=torch.float32)
    activation[0, 2], gradient[1, 1] = 0.0, 0.0  # a dead channel, and one without a gradient
    found = computed(name, activation, gradient * size)
    expected = np.stack([
        LOOPS[name](a, g) for a, g in zip(activation.double().numpy(), (gradient * size).double().numpy(), strict=True)
    ])  # fmt: skip
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max())
    assert np.abs(expected).max() > 0


def test_every_method_of_one_layer_has_a_loop_to_be_checked_by():
    assert {
        name for name, each in METHODS.items() if each.kind in (Kind.GRADIENT, Kind.ACTIVATION, Kind.NOISY)
    } == set(LOOPS)


# What never happens.

AWKWARD = {
    "zeros": lambda a, g: (a * 0, g),
    "no gradient": lambda a, g: (a, g * 0),
    "dead channels": lambda a, g: (a * torch.tensor([0.0, 1, 0, 0, 0])[:, None, None], g),
    "flat fp16": lambda a, g: (torch.full_like(a, 65504).half().float(), g),
    "flat of a tenth": lambda a, g: (torch.full_like(a, 0.1).half().float(), g),
    "negative": lambda a, g: (-a - 1, g),
    "sums of zero": lambda a, g: (torch.cat([a[..., :3], -a[..., :3]], dim=-1), g),
    "denominators of zero": lambda a, g: (torch.full_like(a, -2 / 24), torch.ones_like(g)),
    "tiny": lambda a, g: (a * 1e-12, g * 1e-12),
    "large": lambda a, g: (a * 1e6, g * 1e6),
    "one position": lambda a, g: (a[..., :1, :1], g[..., :1, :1]),
    "one channel": lambda a, g: (a[:, :1], g[:, :1]),
}


@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize("name", METHODS)
def test_finite_values_give_finite_maps(name, case):
    activation, gradient = AWKWARD[case](*random_pair(dtype=torch.float32))
    assert computed(name, activation, gradient).isfinite().all()


@pytest.mark.parametrize(
    "name", [name for name, each in METHODS.items() if each.kind not in (Kind.MASKED, Kind.ABLATED)]
)
def test_a_batch_of_three_is_three_batches_of_one(name):
    activation, gradient = random_pair()
    together = computed(name, activation, gradient)
    for i in range(3):
        alone = computed(name, activation[i : i + 1], gradient[i : i + 1])
        torch.testing.assert_close(together[i], alone[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_given_is_left_as_it_was(name):
    arguments = given(METHODS[name].kind, *random_pair())
    flat = [
        t
        for each in arguments
        for t in (each if isinstance(each, list | tuple) else [each])
        if torch.is_tensor(t)
    ]
    before = [each.clone() for each in flat]
    METHODS[name].compute(*arguments)
    assert all(map(torch.equal, flat, before))


@pytest.mark.parametrize("name", ["gradcam", "gradcam++", "eigencam", "eigengradcam", "layercam"])
def test_a_picture_that_is_not_finite_spoils_no_other(name):
    activation, gradient = random_pair()
    clean = computed(name, activation, gradient)
    activation[1, 0, 0, 0] = float("nan")
    found = computed(name, activation, gradient)
    assert found[1].isnan().any()
    torch.testing.assert_close(found[[0, 2]], clean[[0, 2]])


# The first principal component.


@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [(5, 4, 6), (40, 3, 3), (200, 15, 15), (230, 14, 15), (300, 20, 20), (1, 4, 4), (7, 1, 1)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("signed", [False, True], ids=["relu", "signed"])
def test_the_first_component_is_that_of_numpys_svd(channels, height, width, signed):
    values = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(1))
    values = values if signed else values.relu()
    found = component.first_component(values)
    for each, map_ in zip(values.double().numpy(), found.numpy(), strict=True):
        expected = by_svd(each)
        np.testing.assert_allclose(map_, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("ratio", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize(("channels", "positions"), [(64, 144), (200, 256), (256, 225)])
def test_components_of_nearly_equal_strength_are_told_apart(ratio, channels, positions):
    generator = torch.Generator().manual_seed(2)

    def basis(size, count):
        return torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64)).Q

    left, right = basis(positions, 40), basis(channels, 40)
    strengths = torch.tensor([1.0, ratio, *torch.linspace(0.8, 0.1, 38)], dtype=torch.float64)
    values = ((right * strengths) @ left.T).view(1, channels, positions, 1)
    found = component.first_component(values).flatten()
    expected = left[:, 0] * left[:, 0].sum().sign()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_layer_in_the_middle_of_a_net_needs_no_decomposition(monkeypatch):
    values = torch.randn(2, 512, 28, 28, generator=torch.Generator().manual_seed(3)).relu()
    expected = component.first_component(values)
    monkeypatch.setattr(component, "_decomposed", None)
    assert torch.equal(component.first_component(values), expected)


def test_where_the_iteration_does_not_settle_the_decomposition_answers(monkeypatch):
    # A second picture that settles at once keeps its own answer.
    flat = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(4))).Q
    flat = flat * torch.linspace(1, 0.99, 256).clone().index_fill_(0, torch.tensor([0]), 1.001)
    values = torch.stack([flat.T.reshape(256, 16, 16), torch.ones(256, 16, 16)])
    seen = []
    whole = component._decomposed
    monkeypatch.setattr(component, "_decomposed", lambda matrix: seen.append(len(matrix)) or whole(matrix))
    found = component.first_component(values)
    assert seen == [1]
    expected = by_svd(values[0].double().numpy())
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5 * np.abs(expected).max())
    torch.testing.assert_close(found[1], torch.full((16, 16), 16.0))


@pytest.mark.parametrize("channels", [4, 300], ids=["decomposed", "iterated"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [([3.0, -1.0], 1), ([1.0, -3.0], -1), ([1.0, -1.0], 1), ([-1.0, 1.0], -1), ([-2.0, 1.0, 1.0], -1)],
    ids=["positive mean", "negative mean", "no mean", "no mean, first negative", "no mean, largest negative"],
)
def test_the_sign_is_that_of_the_mean_then_of_the_largest_value(shape, expected, sign, channels):
    direction = torch.randn(channels, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    row = torch.tensor(shape, dtype=torch.float64).repeat_interleave(200)
    found = component.first_component(sign * direction[None, :, None, None] * row)
    torch.testing.assert_close(found[0, 0], expected * row * direction.norm())


def test_a_component_has_its_values_kind():
    values = torch.ones(1, 2, 3, 3, dtype=torch.float16)
    assert component.first_component(values).dtype == torch.float16


# Masks and channels.


def test_masks_are_upsampled_then_ranged():
    activation = torch.randn(1, 6, 5, 7, generator=torch.Generator().manual_seed(6))
    found = methods.masks(activation, torch.tensor([4, 1]), (40, 33))
    assert found.shape == (2, 1, 40, 33)
    # torch-cam ranges first: the interpolated peaks of its masks stay below 1.
    assert found.amin((2, 3)).flatten().tolist() == [0.0, 0.0]
    assert found.amax((2, 3)).flatten().tolist() == [1.0, 1.0]
    large = torch.nn.functional.interpolate(activation[:, [4, 1]], size=(40, 33), mode="bilinear")[0]
    for mask, plain in zip(found[:, 0], large, strict=True):
        torch.testing.assert_close(mask, (plain - plain.min()) / (plain.max() - plain.min()))


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 65504.0])
def test_a_flat_channel_has_no_mask_and_no_say(value):
    # Upsampling rounds: ranged, that would be a pattern from 0 to 1.
    activation = torch.randn(1, 3, 7, 7, generator=torch.Generator().manual_seed(7))
    activation[:, 1] = value
    channels = torch.arange(3)
    assert not methods.masks(activation, channels, (224, 224))[1].any()
    scores = torch.tensor([1.0, 99.0, 2.0])
    torch.testing.assert_close(
        methods.scorecam(activation, scores, channels),
        methods.scorecam(activation, scores[[0, 2]], channels[[0, 2]]),
    )
    assert not methods.scorecam(activation, scores[[1]], channels[[1]]).any()


def test_the_most_varied_channels_come_first_and_equals_in_order():
    spreads = torch.tensor([1.0, 3.0, 0.0, 3.0, 2.0])
    activation = torch.tensor([[-1.0, 1.0]])[None] * spreads[None, :, None, None] + 100
    assert methods.most_varied(activation, 3).tolist() == [1, 3, 4]
    assert methods.most_varied(activation, 99).tolist() == [1, 3, 4, 0, 2]


# Other libraries: where they are right, and where not.


@pytest.mark.parametrize(
    ("module", "theirs", "name"),
    [
        ("hirescam", "HiResCAM", "hirescam"),
        ("grad_cam_elementwise", "GradCAMElementWise", "elementwise"),
        ("layer_cam", "LayerCAM", "layercam"),
    ],
)
def test_maps_equal_those_of_pytorch_grad_cam(module, theirs, name):
    their_module = pytest.importorskip(f"pytorch_grad_cam.{module}")
    activation, gradient = random_pair()
    image = getattr(their_module, theirs).get_cam_image
    found = image(None, None, None, None, activation.numpy(), gradient.numpy(), False)
    np.testing.assert_allclose(computed(name, activation, gradient), found, rtol=1e-12)


def test_xgradcam_weights_equal_those_of_pytorch_grad_cam():
    theirs = pytest.importorskip("pytorch_grad_cam.xgrad_cam").XGradCAM
    activation, gradient = random_pair()
    weights = theirs.get_cam_weights(None, None, None, None, activation.numpy(), gradient.numpy())
    expected = np.einsum("nk,nkhw->nhw", weights, activation.numpy())
    np.testing.assert_allclose(computed("xgradcam", activation, gradient), expected, rtol=1e-5)


def test_gradcam_plusplus_has_no_epsilon_that_eats_small_gradients():
    # pytorch-grad-cam 1.5.7 adds 1e-6 to a denominator of the order of g^2: at gradients of 1e-4 little is left.
    theirs = pytest.importorskip("pytorch_grad_cam.grad_cam_plusplus").GradCAMPlusPlus
    activation, gradient = random_pair()
    for size, agree in ((1.0, True), (1e-4, False)):
        a, g = activation.numpy(), gradient.numpy() * size
        formula = np.stack([LOOPS["gradcam++"](*pair) for pair in zip(a, g, strict=True)])
        weights = theirs.get_cam_weights(None, None, None, None, a, g)
        found = np.einsum("nk,nkhw->nhw", weights, a)
        np.testing.assert_allclose(computed("gradcam++", activation, gradient * size), formula, rtol=1e-10)
        assert np.allclose(found, formula, rtol=1e-2) == agree
    assert np.abs(found).max() < 0.1 * np.abs(formula).max()


def test_gradcam_plusplus_divides_where_torch_cam_does_not():
    # torch-cam divides a copy (alpha[idx][mask].div_), so that its alpha stays g^2 and its weight sum ReLU(g)^3.
    theirs = pytest.importorskip("torchcam.methods.gradient").GradCAMpp
    activation, gradient = random_pair()
    hooked = SimpleNamespace(hook_a=[activation], hook_g=[gradient.clone()], _backprop=lambda *_, **__: None)
    (weights,) = theirs._get_weights(hooked, 0, None)
    found = (weights[:, :, None, None] * activation).sum(1)
    formula = np.stack(
        [LOOPS["gradcam++"](*pair) for pair in zip(activation.numpy(), gradient.numpy(), strict=True)]
    )
    np.testing.assert_allclose(computed("gradcam++", activation, gradient), formula, rtol=1e-10)
    assert not np.allclose(found, formula, rtol=0.1)
    torch.testing.assert_close(weights, gradient.relu().pow(3).sum((2, 3)))


def test_eigencam_is_positive_on_what_the_layer_sees():
    # pytorch-grad-cam centres the channels, and keeps whatever sign the decomposition gives: of some pictures its map
    # is the negative.
    projection = pytest.importorskip("pytorch_grad_cam.utils.svd_on_activations").get_2d_projection
    thing = torch.zeros(8, 8)
    thing[2:5, 3:6] = 1
    generator = torch.Generator().manual_seed(8)
    strengths = torch.rand(40, 6, 1, 1, generator=generator)
    activation = strengths * thing + 0.3 * torch.rand(40, 6, 8, 8, generator=generator)
    inside = thing.bool()
    ours, theirs = methods.eigencam(activation), torch.from_numpy(projection(activation.numpy()))
    expected = np.stack([by_svd(each) for each in activation.double().numpy()])
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert (ours[:, inside].mean(1) > ours[:, ~inside].mean(1)).all()
    assert not np.allclose(theirs.abs(), np.abs(expected), atol=1e-3)
    assert (theirs[:, inside].mean(1) < theirs[:, ~inside].mean(1)).any()


def test_fullgrad_ranges_a_layers_channels_together():
    # pytorch-grad-cam ranges every channel alone: one without weight counts as much as any other.
    scaled = pytest.importorskip("pytorch_grad_cam.utils.image").scale_accross_batch_and_channels
    term = torch.tensor([[[[0.0, 1.0]], [[0.01, 0.0]]]])
    nothing = torch.zeros(1, 3, 1, 2)
    np.testing.assert_allclose(methods.fullgrad([nothing, term], (1, 2)), [[[0.01, 1.0]]], rtol=1e-6)
    np.testing.assert_allclose(scaled(term.numpy(), (2, 1)).sum(1), [[[1.0, 1.0]]], rtol=1e-4)


# The registry.


def test_the_registry_loads_no_torch():
    program = "import sys, hookscope.cam.methods; assert not {'torch', 'numpy'} & set(sys.modules)"
    root = Path(hookscope.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0


def test_the_methods_are_these():
    assert {name: each.kind.value for name, each in METHODS.items()} == {
        "gradcam": "gradient", "gradcam++": "gradient", "xgradcam": "gradient", "hirescam": "gradient",
        "elementwise": "gradient", "layercam": "gradient", "eigengradcam": "gradient", "cam": "gradient",
        "eigencam": "activation", "smoothgradcam++": "noisy", "scorecam": "masked", "ablationcam": "ablated",
        "saliency": "input", "smoothgrad": "input", "fullgrad": "biases",
    }  # fmt: skip


def chosen(what):
    return {name for name, each in METHODS.items() if what(each)}


def test_what_is_known_of_the_methods():
    assert chosen(lambda each: each.class_free) == {"eigencam"}
    assert chosen(lambda each: each.on_input) == {"saliency", "smoothgrad", "fullgrad"}
    assert chosen(lambda each: not each.needs_gradient) == {"eigencam", "scorecam", "ablationcam"}
    assert chosen(lambda each: not each.rectified) == {"saliency", "smoothgrad", "fullgrad"}
    assert chosen(lambda each: each.noisy) == {"smoothgradcam++", "smoothgrad"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_in_short_lines_what_it_is(name):
    each = METHODS[name]
    assert isinstance(each, Method)
    assert each.compute.__name__ == name.replace("++", "_plusplus")
    for said in (each.summary, each.paper, each.needs, each.cost, each.when):
        assert 0 < len(said) <= 80
        assert "\n" not in said
    assert each.paper.split()[0] in each.compute.__doc__
    assert each.paper[-4:] in each.compute.__doc__


@pytest.mark.parametrize("name", ["saliency", "smoothgrad", "fullgrad"])
def test_what_is_not_rectified_is_never_negative(name):
    assert (computed(name, *random_pair()) >= 0).all()


def test_unknown_methods_name_the_nearest():
    assert method("gradcam++").compute is methods.gradcam_plusplus
    with pytest.raises(UsageError, match="unknown method 'score-cam'") as caught:
        method("score-cam")
    assert "'scorecam'" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        method("qqqq")
    assert caught.value.hint == f"methods: {', '.join(METHODS)}"
