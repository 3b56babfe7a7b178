"""Text: wrapped to a width without losing a letter, with whatever font there is."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageFont

from hookscope.render import text


def _clear():
    for cached in (text.font, text.line_height, text._dejavu, text._drawable):
        cached.cache_clear()


@pytest.fixture(params=["dejavu", "pillow", "bitmap"])
def any_font(request, monkeypatch):
    _clear()
    if request.param != "dejavu":
        monkeypatch.setattr(text, "find_spec", lambda name: None)
    if request.param == "bitmap":
        monkeypatch.setattr(text.features, "check", lambda name: False)
        monkeypatch.setattr(text.ImageFont, "load_default", lambda: ImageFont.load_default_imagefont())
    yield request.param
    monkeypatch.undo()
    _clear()


@pytest.mark.parametrize("words", ["layer4.2.conv3", "64 × 7 × 7 · é 漢 \n \x00 …"], ids=["plain", "odd"])
def test_mask_has_ink_and_the_size_of_a_line(any_font, words):
    mask = text.mask(words, 12)
    assert mask.shape == (text.line_height(12), text.width(words, 12))
    assert mask.dtype == np.uint8
    assert mask.max() > 128


def test_empty_text_has_no_ink(any_font):
    assert text.mask("", 12).max() == 0


@pytest.mark.parametrize("width_px", [40, 90, 400])
def test_wrap_keeps_every_letter_within_the_width(any_font, width_px):
    words = "features.denseblock3.denselayer24.norm1 is a long name"
    lines = text.wrap(words, 12, width_px)
    assert "".join(lines).replace(" ", "") == words.replace(" ", "")
    assert max(text.width(line, 12) for line in lines) <= width_px


def test_wrap_breaks_at_spaces_first():
    width_px = text.width("one two", 12)
    assert text.wrap("one two three", 12, width_px) == ["one two", "three"]
