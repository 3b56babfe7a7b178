"""What is explained: classes, pixels, boxes, embeddings; by the command and by the library."""

from __future__ import annotations

import os
import shutil

import answers
import numpy as np
import pytest
import torch
from command import Shell, manifest
from PIL import Image

import hookscope
from hookscope.artifacts import MapStatus
from hookscope.cam.geometry import covered, on_input
from hookscope.cam.questions import Asked, Question, scores_for
from hookscope.cam.scores import GAMMA, objective
from hookscope.cam.targets import TargetSpec, parse_targets
from hookscope.errors import UsageError
from hookscope.images.geometry import View

FILE = answers.__file__
NAMES = ("nothing", "red", "green", "deep blue")
RED = {"red": (8, 8, 16, 16)}


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    shutil.rmtree("pics")
    save("pics/red.png", **RED)
    save("pics/green.png", green=(24, 8, 40, 16))
    save("pics/both.png", blue=(0, 0, 16, 16), red=(32, 16, 40, 24))
    save("black.png")
    (tmp_path / "names.txt").write_text("\n".join(NAMES) + "\n")
    (tmp_path / "broken.png").write_text("no picture")
    return shell


def save(name, **patches):
    pixels = answers.colours(**patches)[0].permute(1, 2, 0).mul(255).byte().numpy()
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    Image.fromarray(pixels).save(name)


def maps(out):
    """The maps of a run: (picture, target, status), values."""
    return {
        (os.path.basename(record["image"]), record["target"], record["status"]): np.load(
            f"{out}/{record['path']}"
        )
        for record in manifest(out)["artifacts"]
        if record["part"] == "raw"
    }


def hot(values):
    """(left, top, right, bottom) of what is above zero, in cells."""
    rows, columns = np.nonzero(np.asarray(values) > 0)
    return (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)


# Classes


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("top1", {("red.png", 1), ("green.png", 2), ("both.png", 3)}),
        (
            "top:2",
            {("red.png", 1), ("red.png", 0), ("green.png", 2), ("green.png", 0), ("both.png", 3), ("both.png", 1)},
        ),
        ("2", {("red.png", 2), ("green.png", 2), ("both.png", 2)}),
        ("Deep_Blue", {("red.png", 3), ("green.png", 3), ("both.png", 3)}),
        ("each:1,deep blue,0", {("red.png", 1), ("green.png", 3), ("both.png", 0)}),
        ("norm", {("red.png", "norm"), ("green.png", "norm"), ("both.png", "norm")}),
    ],
)  # fmt: skip
def test_every_word_of_target(shell, target, wanted):
    where = f"{FILE}:Scores pics/red.png pics/green.png pics/both.png --labels names.txt -l conv"
    assert shell(f"gradcam {where} -t '{target}' --batch-size 2 -o out").code == 0
    assert {(image, index) for image, index, _ in maps("out")} == wanted


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ("-t 'deep bleu'", "no class is called 'deep bleu'", "did you mean 'deep blue'?"),
        ("-t 4", "class 4 is out of range: the model has 4 classes", "0 to 3"),
        ("-t -1", "class -1 is out of range", "classes are counted from 0"),
        ("-t top:5", "the model has 4 classes", "top:4 at the most"),
        ("-t dataset", "target 'dataset' without a data set", "--dataset DIR, a folder for each class"),
        ("-t each:1,2", "2 targets for 3 pictures", "each: takes one class a picture"),
        ("-t each:1,,2", "target 'each:1,,2': entry 2 is empty", "one class a picture"),
        ("-t each:1,2,7 --batch-size 1", "class 7 is out of range", "0 to 3"),
        ("-t each:@none.txt", "there is no labels file 'none.txt'", "names.txt"),
        ("-t 1 --contrast each:1,2", "2 targets for 3 pictures", "each: takes one class a picture"),
        ("-t 1 --contrast 1", "--contrast names no class but the target 1 itself", "name another class"),
        ("-t 1 --contrast norm", "--contrast 'norm' is no class", "an id, a label or top:K"),
        ("-t norm --contrast 1", "--contrast needs a class to tell from others", "--target CLASS"),
        ("-t ''", "an empty target", "top1, top:K"),
    ],
)  # fmt: skip
def test_targets_that_cannot_be_served_are_usage_errors_before_anything_is_written(
    shell, flags, message, hint
):
    done = shell(f"gradcam {FILE}:Scores pics --labels names.txt {flags} -o out")
    assert (done.code, message in done.err, hint in done.err) == (2, True, True), done.err
    assert not list(shell.folder.glob("out/**/*.npy"))


def test_a_wrong_count_is_an_error_before_the_model_is_run(shell):
    (shell.folder / "untouched.py").write_text(
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def forward(self, x): raise AssertionError('it was run')\n"
    )
    done = shell("gradcam untouched.py:Model pics -t each:0,1 -o out")
    assert (done.code, "2 targets for 3 pictures" in done.err, "it was run" in done.err) == (2, True, False)


def test_a_list_of_targets_from_a_file_holds_names_with_commas(shell):
    (shell.folder / "names.txt").write_text("nothing\nred, or so\ngreen\nblue\n")
    (shell.folder / "one.txt").write_text("red, or so\n")
    (shell.folder / "three.txt").write_text("green\nred, or so\n0\n")
    where = f"gradcam {FILE}:Scores --labels names.txt -l conv"
    assert shell(f"{where} pics/both.png -t each:@one.txt -o one").code == 0
    assert [index for _, index, _ in maps("one")] == [1]
    assert shell(f"{where} pics/red.png pics/green.png pics/both.png -t each:@three.txt -o three").code == 0
    assert {(image, index) for image, index, _ in maps("three")} == {
        ("red.png", 2), ("green.png", 1), ("both.png", 0),
    }  # fmt: skip


def test_pictures_that_cannot_be_read_do_not_shift_the_others_targets(shell):
    where = f"{FILE}:Scores pics/red.png broken.png pics/both.png -l conv"
    assert shell(f"gradcam {where} -t each:1,2,3 --batch-size 1 -o out").code == 4
    assert {(image, index) for image, index, _ in maps("out")} == {("red.png", 1), ("both.png", 3)}


@pytest.mark.parametrize("model", ["Scores", "Segmenter", "Detector"])
def test_the_class_of_a_data_set_is_that_of_the_folder(shell, model):
    for folder, name in (("1", "red"), ("2", "green"), ("3", "both")):
        save(f"data/{folder}/{name}.png")
        shutil.copy(f"pics/{name}.png", f"data/{folder}/{name}.png")
    layer = "backbone" if model == "Detector" else "conv"
    assert shell(f"gradcam {FILE}:{model} --dataset data -t dataset -l {layer} -o out").code == 0
    assert set(maps("out")) == {("red.png", 1, "ok"), ("green.png", 2, "ok"), ("both.png", 3, "ok")}
    done = shell(f"gradcam {FILE}:{model} pics -t dataset -l {layer} -o no")
    assert (done.code, "target 'dataset' without a data set" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ([3, 1, 3], [3, 1, 3, 1]),
        (torch.tensor([2, 1]), [2, 1]),
        ("top:2", [1, 0, 2, 0]),
        ("norm", [None, None]),
        ("each:0,3", [0, 3]),
        (None, [1, 2]),
    ],
    ids=["list", "tensor", "top", "norm", "each", "nothing"],
)
def test_the_targets_of_the_library(targets, wanted):
    x = torch.cat([answers.colours(**RED), answers.colours(green=(24, 8, 40, 16))])
    found = hookscope.gradcam(answers.Scores(), x, layers="conv", targets=targets)
    assert [one.target for one in found] == wanted


def test_contrast_subtracts_the_mean_of_the_others_and_leaves_the_class_itself_out():
    x = answers.colours(red=(8, 8, 16, 16), blue=(24, 8, 32, 16), green=(40, 0, 44, 4))
    (found,) = hookscope.gradcam(
        answers.Scores(), x, layers="conv", targets=[1], contrast=[2, 1, 3], relu=False
    )
    assert found.explained.against == (2, 3)
    red, green, blue = answers.Scores().conv(x)[0].detach() / 96
    torch.testing.assert_close(found.raw, red - GAMMA * (green + blue) / 2)


def test_contrast_of_the_best_is_each_pictures_own(shell):
    done = shell(f"gradcam {FILE}:Scores pics -t top:2 --contrast top:2 -l conv -o out")
    assert done.code == 0
    against = {
        (os.path.basename(record["image"]), record["target"]): record["against"]
        for record in manifest("out")["artifacts"]
        if record["part"] == "raw"
    }
    assert against == {
        ("both.png", 3): [1], ("both.png", 1): [3], ("green.png", 2): [0], ("green.png", 0): [2],
        ("red.png", 1): [0], ("red.png", 0): [1],
    }  # fmt: skip


def test_a_picture_whose_best_class_is_the_contrasted_one_does_not_stop_the_others(shell):
    assert shell(f"gradcam {FILE}:Scores pics --contrast 2 -l conv -o out").code == 0
    assert set(maps("out")) == {("both.png", 3, "ok"), ("green.png", 2, "undefined"), ("red.png", 1, "ok")}
    assert "pics/green.png: --contrast names nothing but class 2 itself" in manifest("out")["warnings"]


# Embeddings


def test_a_model_without_class_scores_says_what_can_be_asked_of_it(shell):
    where = f"gradcam {FILE}:Scores --model-arg kind=tokens pics"
    done = shell(f"{where} -o no")
    assert done.code == 2
    assert "the model returns no class scores: output (1, 96, 3)" in done.err
    assert "--target norm, or --similar-to PICTURE" in done.err
    assert shell(f"{where} -m eigencam -o eigen").code == 0
    assert {(target, status) for _, target, status in maps("eigen")} == {(None, "ok")}
    assert [record["top"] for record in manifest("eigen")["images"]] == [[], [], []]
    assert shell(f"{where} -t norm -l conv -o norm").code == 0
    assert hot(maps("norm")["red.png", "norm", "ok"]) == (2, 2, 4, 4)


def test_what_makes_a_picture_similar_to_another(shell):
    # To a red picture, what is red in the other speaks for it and what is blue against it.
    where = (
        f"gradcam {FILE}:Scores --model-arg kind=embedding pics/both.png -l conv --similar-to pics/red.png"
    )
    assert shell(f"{where} -o alone").code == 0
    ((image, target, status),) = maps("alone")
    assert (image, target, status) == ("both.png", "similar-to red.png", "ok")
    assert hot(maps("alone")[image, target, status]) == (8, 4, 10, 6)
    assert shell(f"{where} -t norm -o both").code == 0
    assert {target for _, target, _ in maps("both")} == {"norm", "similar-to red.png"}
    done = shell(f"gradcam {FILE}:Scores pics --similar-to broken.png -o no")
    assert (done.code, "--similar-to: cannot read picture 'broken.png'" in done.err) == (2, True)


def test_similarity_is_the_cosine_by_autograd():
    model = answers.Scores("embedding")
    x, other = answers.colours(blue=(0, 0, 16, 16), red=(32, 16, 40, 24)), answers.colours(**RED)
    (found,) = hookscope.gradcam(model, x, layers="conv", similar_to=other, relu=False)
    a = model.conv(x).detach().requires_grad_()
    cosine = torch.cosine_similarity(a.mean((2, 3)), model.conv(other).mean((2, 3)).detach())
    (g,) = torch.autograd.grad(cosine.sum(), a)
    torch.testing.assert_close(found.raw, (a * g.mean((2, 3), keepdim=True)).sum(1)[0].detach())
    assert found.explained.score == pytest.approx(cosine.item())


# Segmentations


def segmented(x, **question):
    (found,) = hookscope.gradcam(answers.Segmenter(), x, layers="conv", methods=["hirescam"], **question)
    return found


@pytest.mark.parametrize("kind", ["plain", "dict"])
def test_a_classes_own_pixels_are_summed(kind):
    x = answers.colours(red=(8, 8, 16, 16)) + 0.05 * answers.colours(red=(0, 0, 48, 32))
    (found,) = hookscope.gradcam(answers.Segmenter(kind), x, layers="conv", methods=["hirescam"], targets=[1])
    pixels = 1 if kind == "plain" else 16  # of the answer, for each cell
    wanted = torch.zeros(8, 12)
    wanted[2:4, 2:4] = 1.05 * pixels
    torch.testing.assert_close(found.raw, wanted)
    assert found.explained.score == pytest.approx(4 * 1.05 * pixels)


def test_all_pixels_count_where_that_is_asked_for():
    x = answers.colours(red=(8, 8, 16, 16)) + 0.05 * answers.colours(red=(0, 0, 48, 32))
    found = segmented(x, targets=[1], pixels="all")
    torch.testing.assert_close(found.raw, answers.Segmenter().conv(x)[0, 0].detach())


def test_one_pixel_counts_and_its_own_class_is_the_best_there():
    x = answers.colours(red=(0, 0, 40, 32), blue=(40, 0, 48, 32))
    found = segmented(x, point=(45.0, 31.0))
    assert found.target == 3
    assert hot(found.raw) == (11, 7, 12, 8)
    outside = segmented(x, point=(48.0, 0.0))
    assert (outside.status, outside.explained.missing) == (
        MapStatus.UNDEFINED, "the model does not see the point 48,0",
    )  # fmt: skip


def test_a_point_is_of_the_original_picture_through_resize_and_crop(shell):
    # 96 x 64, halved and cropped to the middle 32 x 32: the crop shows x from 16 to 80 of the original.
    big = Image.open("pics/both.png").resize((96, 64), Image.Resampling.NEAREST)
    big.save("big.png")
    where = f"gradcam {FILE}:Segmenter big.png --resize 32 --crop 32 -l conv -m hirescam -t 1"
    for x, name in ((70, "seen"), (90, "cropped"), (96, "outside")):
        assert shell(f"{where} --point {x},40 -o {name}").code == 0
    # Original (70, 40) is (35, 20) in halves and (27, 20) in the crop: cell (6, 5) of 4 pixels.
    assert hot(maps("seen")["big.png", 1, "ok"]) == (6, 5, 7, 6)
    for x, name in ((90, "cropped"), (96, "outside")):
        assert list(maps(name)) == [("big.png", 1, "undefined")]
        assert f"big.png: the model does not see the point {x},40" in manifest(name)["warnings"]


@pytest.mark.parametrize(
    ("point", "share"),
    [((0, 0), (0.025, 0.05)), ((19, 9), (0.975, 0.95)), ((20, 9), None), ((19, 10), None)],
)
def test_a_point_is_the_middle_of_its_pixel(point, share):
    view = View(original=(20, 10), box=(0.0, 0.0, 20.0, 10.0), size=(40, 40))
    assert on_input(point, view) == (None if share is None else pytest.approx(share))


def test_a_padded_crop_has_no_pixel_where_the_picture_ends():
    view = View(original=(20, 10), box=(-5.0, -5.0, 25.0, 15.0), size=(30, 20))
    assert on_input((0, 0), view) == pytest.approx((5.5 / 30, 5.5 / 20))
    assert on_input((20, 0), view) is None


def test_a_class_that_no_pixel_has_is_undefined_and_said(shell):
    names = "--labels names.txt"
    assert shell(f"gradcam {FILE}:Segmenter pics/red.png black.png {names} -l conv -t green -o out").code == 0
    assert set(maps("out")) == {("red.png", 2, "undefined"), ("black.png", 2, "undefined")}
    assert {"pics/red.png: no pixel is green", "black.png: no pixel is green"} <= set(
        manifest("out")["warnings"]
    )
    (area,) = manifest("out")["images"][1]["top"]
    assert (area["label"], area["area"]) == ("nothing", 1.0)


def test_the_background_is_not_the_default_target(shell):
    (shell.folder / "names.txt").write_text("__background__\nred\ngreen\nblue\n")
    where = f"gradcam {FILE}:Segmenter pics/red.png black.png --labels names.txt -l conv"
    assert shell(f"{where} -o out").code == 0
    assert set(maps("out")) == {("red.png", 1, "ok"), ("black.png", 1, "undefined")}
    assert "black.png: every pixel is __background__" in manifest("out")["warnings"]
    assert shell(f"{where} -t top:4 --pixels all -o all").code == 0
    assert "pics/red.png: only 2 classes have pixels" in manifest("all")["warnings"]


def test_of_a_single_channel_class_1_is_what_is_there():
    x = torch.cat([answers.colours(**RED), answers.colours()])
    seen, empty = hookscope.gradcam(answers.Segmenter("one"), x, layers="conv")
    assert (seen.target, seen.status) == (1, MapStatus.OK)
    assert (empty.status, empty.explained.missing) == (MapStatus.UNDEFINED, "every pixel is class 0")


def test_contrast_of_a_segmentation_is_taken_pixel_by_pixel():
    x = answers.colours(red=(8, 8, 16, 16), blue=(0, 0, 4, 4)) + 0.25 * answers.colours(blue=(8, 8, 12, 12))
    found = segmented(x, targets=[1], contrast=[3], relu=False)
    wanted = torch.zeros(8, 12)
    wanted[2:4, 2:4] = 1.0
    wanted[2, 2] -= GAMMA * 0.25
    torch.testing.assert_close(found.raw, wanted)


# Detections


def test_one_map_for_each_of_the_best_boxes_each_its_own(shell):
    assert shell(f"gradcam {FILE}:Detector pics/both.png -t top:3 -m hirescam -o out").code == 0
    records = [record for record in manifest("out")["artifacts"] if record["part"] == "raw"]
    # Blue fills four cells of 8 pixels and red one; equal scores keep the detector's order.
    boxes = {record["asked"]: record["box"] for record in records}
    assert boxes == {"box1": [0, 0, 8, 8], "box2": [8, 0, 16, 8], "box3": [0, 8, 8, 16]}
    for record in records:
        assert (record["target"], record["layer"]) == (3, "backbone")
        left, top, right, bottom = (int(edge) // 8 for edge in record["box"])
        assert hot(np.load(f"out/{record['path']}")) == (left, top, right, bottom)


def test_a_class_is_its_best_box_in_pixels_of_the_original(shell):
    Image.open("pics/both.png").resize((96, 64), Image.Resampling.NEAREST).save("big.png")
    where = f"gradcam {FILE}:Detector big.png --resize 32x48 -m hirescam -t 1 -o out"
    assert shell(where).code == 0
    (record,) = [record for record in manifest("out")["artifacts"] if record["part"] == "overlay"]
    assert (record["target"], record["box"]) == (1, [64.0, 32.0, 80.0, 48.0])
    assert record["status"] == "ok"
    # The outline is drawn there: what changes between a run of this box and the bare picture's map.
    drawn = np.asarray(Image.open(f"out/{record['path']}").convert("RGB")).astype(int)
    assert drawn.shape == (64, 96, 3)
    edge = drawn[33:47, 64:66].reshape(-1, 3).mean(0)
    beside = drawn[33:47, 54:58].reshape(-1, 3).mean(0)
    assert np.abs(edge - beside).max() > 60


def test_no_box_is_a_status_and_not_the_end(shell):
    where = f"gradcam {FILE}:Detector black.png pics/red.png"
    assert shell(f"{where} -t top:2 -o out --batch-size 2").code == 0
    assert set(maps("out")) == {
        ("black.png", "box1", "undefined"), ("black.png", "box2", "undefined"), ("red.png", 1, "ok"),
        ("red.png", "box2", "undefined"),
    }  # fmt: skip
    said = manifest("out")["warnings"]
    assert "black.png: no box scores 0.5 or more" in said
    assert "pics/red.png: no box 2 scores 0.5 or more" in said
    assert shell(f"gradcam {FILE}:Detector black.png -o none").code == 0
    assert list(maps("none")) == [("black.png", "box1", "undefined")]
    assert shell(f"gradcam {FILE}:Detector pics/red.png -t 3 -o other").code == 0
    assert "pics/red.png: no box of class 3 scores 0.5 or more" in manifest("other")["warnings"]


def test_the_least_score_is_the_users():
    x = 0.4 * answers.colours(**RED)
    (low,) = hookscope.gradcam(answers.Detector(), x, layers="backbone")
    assert low.explained.missing == "no box scores 0.5 or more, the best has 0.4"
    (found,) = hookscope.gradcam(answers.Detector(), x, layers="backbone", min_score=0.35)
    assert (found.status, found.explained.box) == (MapStatus.OK, (8.0, 8.0, 16.0, 16.0))


def test_ablation_takes_away_the_box_of_the_silenced_colour_alone():
    # (y - 0) / y for the class's own colour, 0 for the others, whose boxes stay: the map is that colour's cells.
    x = answers.colours(red=(8, 8, 16, 16), blue=(32, 16, 40, 24))
    for target, channel in ((1, 0), (3, 2)):
        (found,) = hookscope.gradcam(
            answers.Detector(), x, layers="backbone", methods=["ablationcam"], targets=[target]
        )
        torch.testing.assert_close(found.raw, answers.Detector().backbone(x)[0, channel].detach())


def test_masks_are_scored_by_the_same_box_of_the_same_class():
    # Seen through red the red box has the mask's mean as its score, through blue there is none; no green is there.
    x = answers.colours(red=(8, 8, 16, 16), blue=(32, 16, 40, 24))
    (found,) = hookscope.gradcam(
        answers.Detector(), x, layers="backbone", methods=["scorecam"], targets=[1], min_score=0.3
    )
    activation = answers.Detector().backbone(x).detach()
    mask = torch.nn.functional.interpolate(activation[:, :1], size=x.shape[2:], mode="bilinear")[0, 0]
    seen = float((mask / mask.max())[8:16, 8:16].mean())
    red, blue = torch.tensor([seen, 0.0]).softmax(0)
    torch.testing.assert_close(found.raw, red * activation[0, 0] + blue * activation[0, 2])


def test_a_score_of_another_output_is_that_of_the_box_that_overlaps():
    detector, x = answers.Detector(), answers.colours(red=(8, 8, 16, 16))
    found = detector(x)
    (score,) = scores_for(Question(parse_targets(["top1"], None)), found, Asked((32, 48), [0]))
    near, far, other = ({**found[0]} for _ in range(3))
    near["boxes"] = found[0]["boxes"] + 2  # 36 of 92 pixels: less than half
    far["labels"] = found[0]["labels"] + 1
    other["boxes"] = found[0]["boxes"] + 1  # 49 of 79
    other["scores"] = found[0]["scores"] * 0.75
    assert [score.values([one], torch.tensor([0])).item() for one in (near, far, other)] == [0, 0, 0.75]


@pytest.mark.parametrize("method", ["scorecam", "ablationcam", "saliency", "fullgrad", "smoothgrad"])
def test_methods_of_further_passes_make_none_where_no_picture_has_a_box(method):
    x = torch.cat([answers.colours(), answers.colours()])
    found = hookscope.gradcam(answers.Detector(), x, layers="backbone", methods=[method])
    assert [one.status for one in found] == [MapStatus.UNDEFINED] * 2


@pytest.mark.parametrize(
    "question", [{}, {"point": (33.0, 17.0)}, {"pixels": "all"}], ids=["mask", "point", "all"]
)
def test_mirrored_maps_of_a_segmentation_are_of_the_same_pixels(question):
    x = answers.colours(red=(8, 8, 16, 16)) + 0.5 * answers.colours(red=(32, 16, 40, 24))
    plain, flipped = (segmented(x, targets=[1], smooth=smooth, **question) for smooth in (None, "flip"))
    torch.testing.assert_close(flipped.raw, plain.raw)
    assert float(plain.raw.max()) > 0


def test_mirrored_maps_of_a_box_are_of_the_same_box():
    x = answers.colours(red=(8, 8, 16, 16), blue=(32, 16, 40, 24))
    for target in (1, 3):
        plain, flipped = (
            hookscope.gradcam(
                answers.Detector(),
                x,
                layers="backbone",
                methods=["hirescam"],
                targets=[target],
                smooth=smooth,
            )[0]
            for smooth in (None, "flip")
        )
        torch.testing.assert_close(flipped.raw, plain.raw)
        assert float(plain.raw.max()) > 0


def test_padding_that_a_detector_adds_is_no_part_of_the_picture(shell):
    # 480 x 400 becomes 48 x 40 and is padded to 64 x 64: 5 of 8 rows and 6 of 8 columns of the map are the picture's.
    x = answers.colours(400, 480, red=(320, 240, 400, 320))
    assert covered(answers.Padding().eval(), x) == (40 / 64, 48 / 64)
    (found,) = hookscope.gradcam(answers.Padding(), x, layers="backbone", methods=["hirescam"])
    assert (tuple(found.raw.shape), hot(found.raw)) == ((8, 8), (4, 3, 5, 4))
    assert found.explained.box == pytest.approx((320, 240, 400, 320))
    Image.fromarray(x[0].permute(1, 2, 0).mul(255).byte().numpy()).save("padded.png")
    assert shell(f"gradcam {FILE}:Padding padded.png -m hirescam --alpha 1 -o out").code == 0
    (path,) = [record["path"] for record in manifest("out")["artifacts"] if record["part"] == "overlay"]
    drawn = np.asarray(Image.open(f"out/{path}").convert("RGB")).astype(int)
    # Of turbo only what is hot is red: its middle is the patch's, (360, 280), not a third nearer the corner.
    rows, columns = np.nonzero(drawn[..., 0] - drawn[..., 2] > 100)
    assert (rows.mean(), columns.mean()) == (pytest.approx(280, abs=8), pytest.approx(360, abs=8))


def test_contrast_and_norm_are_not_for_detections(shell):
    done = shell(f"gradcam {FILE}:Detector pics --contrast 1 -o no")
    assert (done.code, "--contrast needs class scores, and the model returns detections" in done.err) == (
        2,
        True,
    )
    done = shell(f"gradcam {FILE}:Detector pics -t norm -o no")
    assert (done.code, "detections, which are no embedding" in done.err) == (2, True)


# Words and numbers


def test_an_empty_box_has_no_gradient_to_ask_for():
    (score,) = scores_for(
        Question(parse_targets(["top1"], None)), answers.Detector()(answers.colours()), Asked((32, 48), [0])
    )
    assert objective(score) is None


def test_a_target_for_each_picture_is_found_by_its_place_in_the_run():
    (spec,) = parse_targets(["each:2,1,3"], None)
    logits = torch.zeros(2, 4)
    (score,) = scores_for(Question((spec,)), logits, Asked((1, 1), positions=[0, 2]))
    assert [target.index for target in score.targets] == [2, 3]


def test_lists_of_targets_are_parted_by_lines_where_there_are_any():
    names = ["a, b", "c"]
    assert parse_targets(["each:a, b\n"], names) == (TargetSpec("each", per_picture=(0,)),)
    assert parse_targets(["each:c,1"], names) == (TargetSpec("each", per_picture=(1, 1)),)
    with pytest.raises(UsageError, match="no class is called 'a'"):
        parse_targets(["each:a, b"], names)
