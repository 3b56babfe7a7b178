"""Small words: what a name is compared by, and numbers as a person writes them."""

from __future__ import annotations

import pytest

from hookscope.cam.targets import class_index
from hookscope.images.datasets import find_dataset
from hookscope.wording import folded, ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((4,), "4"), ((0, 1, 2), "0-2"), ((0, 1, 5, 7, 8), "0-1,5,7-8"), ((5, 3), "5,3")],
    ids=["none", "one", "run", "mixed", "by-rank"],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


SPELLINGS = ["Egyptian cat", "egyptian_cat", " EGYPTIAN  CAT ", "Egyptian_ cat"]


@pytest.mark.parametrize("text", SPELLINGS, ids=repr)
def test_spellings_of_a_class_name(text, tmp_path):
    assert folded(text) == "egyptian cat"
    (tmp_path / text).mkdir()
    (tmp_path / text / "x.png").write_bytes(b"")
    categories = ("tabby", "Egyptian  cat", "lynx")
    (ref,) = find_dataset(str(tmp_path), categories).refs
    assert ref.label == 1
    assert class_index(text, categories) == 1


def test_other_letters_are_another_name():
    assert folded("Egyptian-cat") != folded("Egyptian cat")
