"""What a model returned: which kind it is, which tensor counts, and what the manifest says of it."""

from __future__ import annotations

import answers
import pytest
import torch

import hookscope
from hookscope.cam.outputs import Answer, answer_of, embedding_of, logits_of
from hookscope.errors import UsageError
from hookscope.records import top_records

ROWS, OTHER, MAP, TOKENS = torch.zeros(2, 5), torch.ones(2, 5), torch.zeros(2, 4, 3, 3), torch.zeros(2, 9, 6)
BOXES = {"boxes": torch.zeros(1, 4), "labels": torch.zeros(1), "scores": torch.zeros(1)}


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (ROWS, Answer.CLASSES),
        (ROWS[:, 0], Answer.CLASSES),
        ((ROWS,), Answer.CLASSES),
        ({"scores": ROWS, "features": MAP}, Answer.CLASSES),
        ({"logits": ROWS, "aux": OTHER}, Answer.CLASSES),
        ({"out": MAP, "presence": ROWS}, Answer.DENSE),
        ({"out": MAP, "aux": MAP}, Answer.DENSE),
        (answers.Output(logits=ROWS, hidden_states=(MAP, OTHER)), Answer.CLASSES),
        (answers.Output(logits=MAP, hidden_states=(MAP, OTHER)), Answer.DENSE),
        (TOKENS, Answer.EMBEDDING),
        ({"last_hidden_state": TOKENS, "pooler_output": ROWS}, Answer.EMBEDDING),
        ([BOXES, BOXES], Answer.BOXES),
    ],
    ids=[
        "scores", "flat", "tuple of one", "scores and features", "logits", "out and more", "segmentation", "object",
        "object of a segmentation", "tokens", "pooled", "detections",
    ],
)  # fmt: skip
def test_the_kind_of_an_output_is_found_by_itself(output, kind):
    assert answer_of(output) is kind


@pytest.mark.parametrize(
    ("output", "several", "hint"),
    [
        ((ROWS, OTHER), "class scores: 0 (2, 5), 1 (2, 5)", "--logits 0 or --logits 1"),
        ({"a": ROWS, "b": OTHER, "h": MAP}, "class scores: a (2, 5)", "--logits a or --logits b"),
        ({"a": MAP, "b": MAP}, "a map of class scores: a (2, 4, 3, 3)", "--logits a or --logits b"),
    ],
    ids=["tuple", "dict with features", "maps"],
)
def test_several_candidates_are_an_error_that_says_how_to_choose(output, several, hint):
    with pytest.raises(UsageError, match="several tensors that could be") as caught:
        answer_of(output)
    assert several in str(caught.value)
    assert caught.value.hint == hint


def test_a_key_chooses_whatever_it_is_called():
    output = {"pooler_output": ROWS, "deep": [OTHER, {"map": MAP}]}
    assert logits_of(output, "pooler_output") is ROWS
    assert logits_of(output, "deep.0") is OTHER
    assert answer_of(output, "deep.1.map") is Answer.DENSE
    with pytest.raises(UsageError, match="--logits 'deep.2': the model's output has no such") as caught:
        answer_of(output, "deep.2")
    assert "deep.0" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        answer_of((ROWS, OTHER), "7")
    assert caught.value.hint == "there are: 0, 1"


@pytest.mark.parametrize(
    ("output", "numbers"),
    [(ROWS, 5), (MAP, 36), (TOKENS, 54), ({"last_hidden_state": TOKENS, "pooler_output": ROWS}, 5)],
    ids=["rows", "features", "tokens", "pooled"],
)
def test_an_embedding_is_one_row_a_picture(output, numbers):
    assert embedding_of(output).shape == (2, numbers)


def test_detections_and_several_tensors_are_no_embedding():
    with pytest.raises(UsageError, match="detections, which are no embedding"):
        embedding_of([BOXES])
    with pytest.raises(UsageError) as caught:
        embedding_of((ROWS, OTHER))
    assert caught.value.hint == "--logits 0 or --logits 1"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("dict", None),
        ("usual", None),
        ("object", None),
        ("tuple", "0"),
        ("nested", "heads.0"),
        ("several", "scores"),
    ],
)
def test_the_map_is_the_same_wherever_the_scores_are(kind, key):
    x = answers.colours(red=(8, 8, 16, 16))
    (plain,) = hookscope.gradcam(answers.Scores(), x, layers="conv", targets=[1])
    (nested,) = hookscope.gradcam(answers.Scores(kind), x, layers="conv", targets=[1], logits=key)
    torch.testing.assert_close(nested.raw, plain.raw)
    assert plain.raw.nonzero().tolist() == [[2, 2], [2, 3], [3, 2], [3, 3]]


@pytest.mark.parametrize("kind", ["one", "flat"])
def test_a_single_logit_is_class_1_and_its_negative_class_0(kind):
    x = answers.colours(red=(8, 8, 16, 16))
    maps = hookscope.gradcam(answers.Scores(kind), x, layers="conv", targets=[0, 1], relu=False)
    activation = answers.Scores().conv(x)[0, 0].detach() / 96  # by 1 / (8 x 12), the gradient of the mean
    for found, sign in zip(maps, (-1, 1), strict=True):
        torch.testing.assert_close(found.raw, sign * activation)
    assert [m.explained.score for m in maps] == pytest.approx([0.5 - 1 / 24, 1 / 24 - 0.5])
    (best,) = hookscope.gradcam(answers.Scores(kind), x, layers="conv")
    assert best.target == 0


def test_top_of_a_segmentation_is_the_largest_classes_with_their_share_of_the_picture():
    x = answers.colours(red=(0, 0, 24, 32), blue=(24, 0, 48, 16))
    (top,) = top_records(answers.Segmenter()(x), 1, ("background", "red", "green", "blue"))
    assert [(best["label"], best["area"]) for best in top] == [
        ("red", 0.5),
        ("background", 0.25),
        ("blue", 0.25),
    ]
    assert [round(best["score"], 6) for best in top] == [1.0, 0.1, 1.0]
    scores = torch.tensor([0.1, 1, 0, 0], dtype=torch.float64)
    assert top[0]["probability"] == pytest.approx(float(scores.softmax(0)[1]))


def test_top_of_a_detector_is_the_classes_of_its_best_boxes():
    x = answers.colours(red=(8, 8, 16, 16)) * 0.5 + answers.colours(blue=(24, 8, 32, 16))
    boxed, empty = top_records(answers.Detector()(torch.cat([x, x * 0])), 2, None)
    assert boxed == [
        {"class": 3, "label": "", "score": 1.0, "probability": 1.0},
        {"class": 1, "label": "", "score": 0.5, "probability": 0.5},
    ]
    assert empty == []


@pytest.mark.parametrize(
    "output", [TOKENS, (ROWS, OTHER), None, [BOXES]], ids=["tokens", "several", "none", "count"]
)
def test_top_says_nothing_where_the_output_says_no_class(output):
    assert top_records(output, 2, None) == [[], []]


def test_top_of_several_candidates_is_that_under_the_key():
    ((best, *_),) = top_records(answers.Scores("tuple")(answers.colours(red=(0, 0, 48, 32))), 1, None, "0")
    assert (best["class"], best["score"]) == (1, 1.0)
