"""Maps of every layout: rows and columns from patch layer, picture or `--grid`, and which layer is the default."""

from __future__ import annotations

import answers
import numpy as np
import pytest
import torch
import torchvision
from command import Shell, manifest
from torch import nn

import hookscope
from hookscope.artifacts import MapStatus
from hookscope.cam.choice import deepest_layer, default_layer, site_infos
from hookscope.cam.questions import Asked, Question, scores_for
from hookscope.cam.scores import objective
from hookscope.cam.targets import parse_targets
from hookscope.errors import UsageError
from hookscope.layers import OutputInfo, Site


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def chosen_for(model, x, target="top1", **question):
    """The default layer for a target."""
    asked = Question(parse_targets([target], None), **question)

    def scores(output):
        return list(filter(None, map(objective, scores_for(asked, output, Asked((1, 1), range(len(x)))))))

    return default_layer(model, x, site_infos(hookscope.list_layers(model, x)), scores)


def gradient_of_tokens(model, x, block, target, prefix, grid):
    """Grad-CAM of a block of tokens by autograd on the rest of the model: sum over channels of the mean gradient."""
    kept = []
    handle = model.blocks[block].register_forward_hook(lambda m, a, output: kept.append(output))
    scores = model.eval()(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(scores[:, target].sum(), kept)
    patches, slopes = kept[0][:, prefix:].detach(), gradient[:, prefix:]
    return (patches * slopes.mean(1, keepdim=True)).sum(2).reshape(len(x), *grid).clamp(min=0)


PICTURE = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("patches", ["conv", "linear"])
@pytest.mark.parametrize("prefix", [1, 5], ids=["class token", "class token and 4 registers"])
def test_tokens_are_laid_out_as_the_patches_were_cut(patches, prefix):
    # A grid that is not square, from a patch layer or, where there is none, from the picture's size.
    model = answers.Transformer(prefix=prefix, patches=patches)
    maps = hookscope.gradcam(model, PICTURE, layers="blocks.0", targets=[1])
    wanted = gradient_of_tokens(model, PICTURE, 0, 1, prefix, (4, 6))
    for found in maps:
        torch.testing.assert_close(found.raw, wanted[found.image])
    assert float(wanted.max()) > 0


def test_a_grid_from_the_picture_is_square_patches_with_the_fewest_tokens_before_them():
    # 25 tokens are 4 x 6 patches and one more; 2 x 3 patches would leave 19 unexplained.
    model = answers.Transformer(patches="linear")
    grids = {
        layer.name: layer.outputs[0].grid for layer in hookscope.list_layers(model, PICTURE) if layer.outputs
    }
    assert grids["blocks.0"] == grids["blocks.1"] == (4, 6, 1)
    assert grids["embed"] == (4, 6, 0)


def test_tokens_beside_a_picture_are_not_made_a_grid_of():
    class Queries(nn.Module):
        """100 queries beside features: they are no patches."""

        def __init__(self):
            super().__init__()
            self.conv, self.project, self.head = nn.Conv2d(3, 4, 3), nn.Linear(8, 8), nn.Linear(8, 2)
            self.queries = nn.Parameter(torch.randn(1, 100, 8))

        def forward(self, x):
            features = self.conv(x).mean()
            return self.head(self.project(self.queries.expand(len(x), -1, -1)).mean(1) + features)

    infos = site_infos(hookscope.list_layers(Queries(), torch.rand(1, 3, 20, 20)))
    assert infos[Site("project")].grid is None


def test_the_grid_that_the_user_says_is_taken():
    model = answers.Transformer(patches="linear")
    maps = hookscope.gradcam(model, PICTURE, layers="blocks.0", targets=[1], grid=(3, 8))
    wanted = gradient_of_tokens(model, PICTURE, 0, 1, 1, (3, 8))
    for found in maps:
        torch.testing.assert_close(found.raw, wanted[found.image])
    with pytest.raises(UsageError, match="--grid 7x9 fits no layer") as caught:
        hookscope.gradcam(model, PICTURE, layers="blocks.0", targets=[1], grid=(7, 9))
    assert "25 tokens" in caught.value.hint


@pytest.mark.parametrize("patches", ["conv", "linear"])
def test_behind_a_class_token_the_last_block_has_no_gradient_and_is_not_the_default(patches):
    model = answers.Transformer(patches=patches, prefix=5)
    before, last = hookscope.gradcam(model, PICTURE, layers=["blocks.0", "blocks.1"], targets=[0])[:2]
    assert (before.layer, before.status) == ("blocks.0", MapStatus.OK)
    assert (last.layer, last.status) == ("blocks.1", MapStatus.ZERO_GRADIENT)
    assert chosen_for(model, PICTURE[:1]).layer.startswith(("blocks.1.", "blocks.0"))


def test_behind_a_mean_over_patches_the_last_block_serves():
    model = answers.Transformer(pool="mean")
    found = hookscope.gradcam(model, PICTURE, layers="blocks.1", targets=[0])
    wanted = gradient_of_tokens(model, PICTURE, 1, 0, 1, (4, 6))
    for one in found:
        torch.testing.assert_close(one.raw, wanted[one.image])
    assert chosen_for(model, PICTURE[:1]) == Site("norm")


def test_the_command_names_the_layer_to_use_instead_of_a_last_block(shell):
    for place in ("layer", "default"):
        flag = "-l blocks.1" if place == "layer" else ""
        assert (
            shell(f"gradcam {answers.__file__}:Transformer pics/0.png --resize 32x48 {flag} -o {place}").code
            == 0
        )
    (record,) = manifest("layer")["layers"]
    assert (record["layer"], record["status"]) == ("blocks.1", "zero-gradient")
    (default,) = manifest("default")["layers"]
    assert default["status"] == "ok"
    (said,) = [text for text in manifest("layer")["warnings"] if "blocks.1" in text]
    assert said.endswith(f"zero at every position of the picture; use {default['layer']}")


def test_the_grid_flag_and_a_layer_without_places(shell):
    where = f"{answers.__file__}:Transformer pics/0.png --resize 32x48"
    assert shell(f"gradcam {where} --grid 8x3 -l blocks.0 -o out").code == 0
    (raw,) = [record["path"] for record in manifest("out")["artifacts"] if record["part"] == "raw"]
    assert np.load(f"out/{raw}").shape == (8, 3)
    done = shell(f"gradcam {where} --grid 8x4 -l blocks.0 -o no")
    assert (done.code, "error: --grid 8x4 fits no layer" in done.err) == (2, True)
    done = shell(f"gradcam {where} -l head -o no")
    assert done.code == 2
    assert "layer 'head' has no spatial output: head returns (1, 3)" in done.err
    assert "hint: near it: 'norm'" in done.err


@pytest.mark.parametrize(
    ("name", "layer", "axes", "grid"),
    [
        ("swin_t", "features.5", (0, 1, 2, 3), (4, 6)),
        ("convnext_tiny", "features.5", (0, 2, 3, 1), (4, 6)),
        ("maxvit_t", "blocks.2", (0, 2, 3, 1), (14, 14)),
    ],
)
def test_channels_are_found_wherever_they_are(name, layer, axes, grid):
    # Against explicit autograd: the mean of the gradient over places, times the activation, summed over channels.
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=3).eval()
    size = (224, 224) if name == "maxvit_t" else (64, 96)
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    kept = []
    handle = model.get_submodule(layer).register_forward_hook(lambda m, a, output: kept.append(output))
    scores = model(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(scores[0, 1], kept)
    a, g = kept[0].detach().permute(axes), gradient.permute(axes)
    wanted = (a * g.mean((1, 2), keepdim=True)).sum(3)[0]
    (found,) = hookscope.gradcam(model, x, layers=layer, targets=[1], relu=False)
    assert tuple(found.raw.shape) == grid
    torch.testing.assert_close(found.raw, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))


def test_the_default_layer_is_not_the_model_itself():
    # A model that returns its features beside its scores, and one that is a body alone.
    x = answers.colours(red=(8, 8, 16, 16))
    assert chosen_for(answers.Scores("object"), x) == Site("conv")
    assert chosen_for(answers.Scores("tokens"), x, "norm") == Site("conv")


def test_the_default_layer_of_a_segmentation_is_the_backbones_end_not_the_scores():
    x = answers.colours(red=(8, 8, 16, 16))
    assert chosen_for(answers.Segmenter(), x, "1") == Site("conv")
    torch.manual_seed(0)
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    assert chosen_for(model.eval(), torch.rand(1, 3, 64, 96)) == Site("backbone.16")


def test_the_default_layer_of_a_detector_is_the_backbones_end():
    x = answers.colours(red=(8, 8, 16, 16))
    assert chosen_for(answers.Detector(), x) == Site("backbone")
    assert chosen_for(answers.Detector(), x * 0) == Site("backbone")


def test_the_deepest_layer_is_the_last_of_the_most_channels_and_no_head():
    sizes = {"backbone.a": 8, "backbone.b": 16, "backbone.c": 16, "backbone.d": 4, "head": 99}
    infos = {
        Site(name): OutputInfo(Site(name), (1, channels, 4, 4), "float32", "NCHW", (4, 4, 0))
        for name, channels in sizes.items()
    }
    assert deepest_layer(infos) == Site("backbone.c")
    assert deepest_layer(infos, classes=16) == Site("backbone.a")
    renamed = {Site(str(site).replace("backbone", "body")): info for site, info in infos.items()}
    assert deepest_layer(renamed) == Site("head")
    assert deepest_layer(renamed, classes=99) == Site("body.c")
