"""Decoding: hostile files are read right or refused in one line; hand-made ones have closed forms."""

import errno
import logging
import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hookscope.errors import ExitCode, ImageError
from hookscope.images import decode, decoding

HOSTILE = Path(__file__).parent / "data" / "hostile"


def pixels(file):
    """What decode() gives, as (h, w, 3) integers."""
    picture = decode(file, file.name)
    assert picture.mode == "RGB"
    assert picture.info == {}
    return np.asarray(picture).astype(int)


def raw(name):
    """The numbers in a hostile file, as Pillow delivers them."""
    with Image.open(HOSTILE / name) as image:
        return np.asarray(image).astype(float)


def saved(tmp_path, picture, name="x.png", **options):
    file = tmp_path / name
    picture.save(file, **options)
    return file


def png(tmp_path, depth, colour, row, key):
    """A PNG of one row, written by hand: `row` are its packed bytes, `key` its tRNS chunk."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width = len(row) * 8 // (depth * {0: 1, 2: 3}[colour])
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    body = [(b"IHDR", header), (b"tRNS", key), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    file = tmp_path / "by-hand.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in body))
    return file


# Hostile files ---------------------------------------------------------------------------------------------

READ = {
    "10ct_32bit_128.tiff": (128, 128),
    "16bit.cropped.tif": (64, 64),
    "exif_imagemagick_orientation.png": (512, 512),
    "hopper.jpg": (128, 128),
    "hopper_16bit.pgm": (128, 128),
    "hopper_gray.jpg": (128, 128),
    "hopper_orientation_3.jpg": (128, 128),
    "hopper_orientation_6.jpg": (128, 128),
    "hopper_orientation_8.jpg": (128, 128),
    "i_trns.png": (64, 64),
    "iss634.gif": (245, 245),
    "l_trns.png": (64, 64),
    "multipage.tiff": (10, 10),
    "pil123p.png": (162, 150),
    "pil_sample_cmyk.jpg": (100, 100),
    "transparent.png": (200, 150),
    "uncompressed_la.png": (128, 128),
}

REFUSED = {
    "broken.png": "not a picture",
    "broken_data_stream.png": "unrecognized data stream",
    "decompression_bomb.gif": "4364696535 pixels",
    "png_decompression_dos.png": "data too large",
    "seek_too_large.tif": "unable to seek",
    "test-ole-file.doc": "not a picture",
    "truncated_image.png": "truncated",
    "truncated_jpeg.jpg": "truncated",
    "unimplemented_dxgi_format.dds": "unimplemented DXGI",
    "zero_width.gif": "not a picture",
}


def test_every_hostile_file_is_accounted_for():
    assert {file.name for file in HOSTILE.iterdir()} == {*READ, *REFUSED, "NOTICE.md"}


@pytest.mark.parametrize(("name", "size"), READ.items(), ids=READ)
def test_a_hostile_file_is_read(name, size):
    picture = decode(HOSTILE / name, name)
    assert (picture.mode, picture.size) == ("RGB", size)


@pytest.mark.parametrize(("name", "why"), REFUSED.items(), ids=REFUSED)
def test_a_hostile_file_is_refused_in_one_line(name, why):
    with pytest.raises(ImageError) as caught:
        decode(HOSTILE / name, f"photos/{name}")
    message = str(caught.value)
    assert message.startswith(f"cannot read picture 'photos/{name}': ")
    assert why.lower() in message.lower()
    assert message.isprintable()
    assert len(message) < 200
    assert caught.value.exit_code == ExitCode.IMAGES


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_turned_photos_are_set_upright(orientation):
    upright = pixels(HOSTILE / "hopper.jpg")
    turned = pixels(HOSTILE / f"hopper_orientation_{orientation}.jpg")
    assert np.abs(turned - upright).mean() < 5


def test_orientation_in_a_png_text_chunk_counts():
    assert (
        pixels(HOSTILE / "exif_imagemagick_orientation.png")
        == raw("exif_imagemagick_orientation.png")[::-1, ::-1]
    ).all()


@pytest.mark.parametrize(
    "name", ["10ct_32bit_128.tiff", "16bit.cropped.tif", "hopper_16bit.pgm", "i_trns.png"]
)
def test_wide_pictures_are_spread_over_their_own_range(name):
    values = raw(name)
    if name == "i_trns.png":
        values[values == 255] = 254  # its colour key: not seen, so it does not count
    expected = (values - values.min()) / (values.max() - values.min()) * 255
    grey = pixels(HOSTILE / name)
    assert (grey.min(), grey.max()) == (0, 255)
    assert np.abs(grey - expected[..., None]).max() <= 0.51


def test_a_16_bit_photo_looks_like_the_8_bit_one():
    assert np.abs(pixels(HOSTILE / "hopper_16bit.pgm") - pixels(HOSTILE / "hopper_gray.jpg")).mean() < 5


@pytest.mark.parametrize("name", ["pil123p.png", "transparent.png", "uncompressed_la.png"])
def test_transparent_corners_are_white(name):
    with Image.open(HOSTILE / name) as image:
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
    shown = pixels(HOSTILE / name)
    assert (shown[alpha == 0] == 255).all()
    assert alpha[0, 0] == alpha[-1, -1] == 0
    assert shown.min() < 255


def test_cmyk_is_ink_on_paper():
    ink = raw("pil_sample_cmyk.jpg")
    expected = (255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255
    assert np.abs(pixels(HOSTILE / "pil_sample_cmyk.jpg") - expected).max() <= 1.5


def test_the_first_of_many_pages_is_taken():
    assert (pixels(HOSTILE / "multipage.tiff") == [0, 128, 0]).all()


# Transparency ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 1, 127, 128, 254, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_half_transparent_is_composited_on_white(tmp_path, mode, alpha):
    colour = (200, 100, 0)[: len(mode) - 1]
    shown = pixels(saved(tmp_path, Image.new(mode, (1, 1), (*colour, alpha))))[0, 0]
    assert list(shown) == [int((c * alpha + 255 * (255 - alpha)) / 255 + 0.5) for c in (colour * 3)[:3]]


@pytest.mark.parametrize("key", [1, bytes([255, 0, 128])], ids=["one entry", "alpha for each entry"])
def test_palette_transparency(tmp_path, key):
    picture = Image.new("P", (3, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60, 0, 0, 0])
    picture.putdata([0, 1, 2])
    shown = pixels(saved(tmp_path, picture, transparency=key))[0]
    assert shown.tolist() == [[10, 20, 30], [255] * 3, [127] * 3 if isinstance(key, bytes) else [0] * 3]


KEYED = {
    "grey 1 bit": (1, 0, b"\x7f", b"\0\0", [255] * 8),
    "grey 2 bits": (2, 0, b"\x1b", b"\0\1", [0, 255, 170, 255]),
    "grey 4 bits": (4, 0, b"\x3a", b"\0\x0a", [51, 255]),
    "grey 8 bits": (8, 0, b"\x10\x20", b"\0\x10", [255, 32]),
    "grey 16 bits": (16, 0, b"\xff\xff\x01\x00\x01\x02", b"\xff\xff", [255, 0, 255]),
    "colour 8 bits": (8, 2, b"\5\5\5\6\6\6", b"\0\5\0\5\0\5", [255, 6]),
    "colour 16 bits": (16, 2, b"\x05\xfe" * 3 + b"\6\0" * 3, b"\x05\xfe" * 3, [255, 6]),
}


@pytest.mark.parametrize(("depth", "colour", "row", "key", "shown"), KEYED.values(), ids=KEYED)
def test_a_colour_key_is_transparent(tmp_path, depth, colour, row, key, shown):
    found = pixels(png(tmp_path, depth, colour, row, key))[0]
    assert found.tolist() == [[grey] * 3 for grey in shown]


# Other modes -----------------------------------------------------------------------------------------------

GREYS = {
    "I;16": (np.array([[1000, 1001, 1002]], np.uint16), "x.png", [0, 128, 255]),
    "I;16 tiff": (np.array([[0, 65535, 13107]], np.uint16), "x.tif", [0, 255, 51]),
    "I;16B": (np.array([[7, 9, 8]], ">u2"), "x.tif", [0, 255, 128]),
    "I": (np.array([[-(2**31), 0, 2**31 - 1]], np.int32), "x.tif", [0, 128, 255]),
    "F": (np.array([[-1.0, 0.2, 0.0]], np.float32), "x.tif", [0, 255, 212]),
    "F huge": (np.array([[-3e38, 0.0, 3e38]], np.float32), "x.tif", [0, 128, 255]),
    "F with NaN": (np.array([[np.nan, 1.0, 2.0]], np.float32), "x.tif", [0, 0, 255]),
    "F infinite": (np.array([[-np.inf, np.inf, 1.0, 2.0]], np.float32), "x.tif", [0, 255, 0, 255]),
    "F nothing finite": (np.array([[np.nan, np.inf]], np.float32), "x.tif", [0, 255]),
    "constant I;16": (np.full((1, 2), 700, np.uint16), "x.png", [0, 0]),
    "constant F": (np.full((1, 2), 0.5, np.float32), "x.tif", [0, 0]),
}


@pytest.mark.parametrize(("values", "name", "shown"), GREYS.values(), ids=GREYS)
def test_grey_of_many_bits(tmp_path, values, name, shown):
    found = pixels(saved(tmp_path, Image.fromarray(values), name))
    assert found[0].tolist() == [[grey] * 3 for grey in shown]


def test_one_bit(tmp_path):
    picture = Image.new("1", (2, 1))
    picture.putpixel((1, 0), 1)
    assert pixels(saved(tmp_path, picture))[0].tolist() == [[0] * 3, [255] * 3]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB"])
def test_other_colour_spaces(tmp_path, mode):
    picture = Image.new("RGB", (4, 4), (200, 60, 30)).convert(mode)
    assert np.abs(pixels(saved(tmp_path, picture, "x.tif")) - [200, 60, 30]).max() <= 4


def test_animation_gives_its_first_frame(tmp_path):
    first, second = Image.new("RGB", (3, 2), (255, 0, 0)), Image.new("RGB", (3, 2), (0, 0, 255))
    file = saved(tmp_path, first, "x.gif", save_all=True, append_images=[second])
    assert (pixels(file) == [255, 0, 0]).all()


# Orientation -----------------------------------------------------------------------------------------------

UPRIGHT = np.array([[0, 50, 100], [150, 200, 250]], np.uint8)
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,
    6: UPRIGHT.T[::-1],
    7: UPRIGHT.T[::-1, ::-1],
    8: UPRIGHT.T[:, ::-1],
}
"""What a camera held in each of the eight ways stores of the same scene (Exif: where row 0, column 0 are)."""


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.webp"])
def test_exif_orientation(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(np.ascontiguousarray(STORED[orientation])).convert("RGB")
    options = {"lossless": True} if name == "x.webp" else {}
    shown = pixels(saved(tmp_path, picture, name, exif=exif, **options))
    assert shown[..., 0].tolist() == UPRIGHT.tolist()


def test_transparent_and_wide_pictures_are_turned_too(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = saved(tmp_path, Image.fromarray(np.array([[5, 6]], np.uint16)), exif=exif)
    assert pixels(wide)[..., 0].tolist() == [[0], [255]]
    clear = saved(tmp_path, Image.fromarray(np.array([[[9, 0], [9, 255]]], np.uint8)), exif=exif)
    assert pixels(clear)[..., 0].tolist() == [[255], [9]]


@pytest.mark.parametrize(
    "block", [b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x09\1"]
)
def test_a_damaged_exif_block_does_not_cost_the_picture(tmp_path, block):
    assert (
        pixels(saved(tmp_path, Image.new("RGB", (2, 3), "red"), "x.jpg", exif=block)) == [254, 0, 0]
    ).all()


@pytest.mark.parametrize("orientation", [0, 9, -1, "up", (6, 6), None], ids=repr)
def test_a_senseless_orientation_means_none(monkeypatch, tmp_path, orientation):
    file = saved(tmp_path, Image.fromarray(UPRIGHT))
    monkeypatch.setattr(Image.Exif, "get", lambda *_: orientation)
    assert pixels(file)[..., 0].tolist() == UPRIGHT.tolist()


# Files that are none ---------------------------------------------------------------------------------------


def nothing(file):
    pass


NO_PICTURE = {
    "missing": (nothing, "no such file or directory"),
    "directory": (Path.mkdir, "it is a directory"),
    "empty": (Path.touch, "the file is empty"),
    "text": (
        lambda file: file.write_text("hello\nthere"),
        "not a picture, or of a kind Pillow does not know",
    ),
    "pipe": (os.mkfifo, "not a regular file"),
    "broken link": (lambda file: file.symlink_to("nowhere"), "no such file or directory"),
    "link to itself": (lambda file: file.symlink_to(file), "too many levels of symbolic links"),
}


@pytest.mark.parametrize(("make", "why"), NO_PICTURE.values(), ids=NO_PICTURE)
def test_what_is_no_picture_is_refused(tmp_path, make, why):
    file = tmp_path / "x.png"
    make(file)
    with pytest.raises(ImageError) as caught:
        decode(file, "a/x.png")
    assert str(caught.value) == f"cannot read picture 'a/x.png': {why}"


THROWN = {
    "struct": (struct.error("unpack requires\na buffer"), "unpack requires a buffer"),
    "nameless": (EOFError(), "EOFError"),
    "memory": (MemoryError(), "not enough memory"),
    "recursion": (RecursionError("maximum depth"), "maximum depth"),
    "permission": (PermissionError(errno.EACCES, "Permission denied", "/secret/x"), "permission denied"),
    "warning": (UserWarning("odd"), "odd"),
    "escapes": (ValueError("bad \x1b[31m\0tag"), "bad [31m tag"),
    "endless": (SyntaxError("very " * 1000), "very " * 24),
}


@pytest.mark.parametrize(("error", "why"), THROWN.values(), ids=THROWN)
def test_whatever_is_thrown_becomes_one_line(monkeypatch, error, why):
    def throw(file):
        raise error

    monkeypatch.setattr(Image, "open", throw)
    with pytest.raises(ImageError) as caught:
        decode(HOSTILE / "hopper.jpg", "x\n.jpg")
    assert str(caught.value) == f"cannot read picture 'x\\n.jpg': {why}"
    assert caught.value.__cause__ is error


def test_ctrl_c_goes_through(monkeypatch):
    def interrupt(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(Image, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(HOSTILE / "hopper.jpg", "hopper.jpg")


@pytest.mark.parametrize(("limit", "refused"), [(16384, False), (8192, False), (8191, True)])
def test_large_pictures_are_read_up_to_twice_the_limit(monkeypatch, limit, refused):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)  # the picture has 16384
    if not refused:
        assert pixels(HOSTILE / "hopper.jpg").shape == (128, 128, 3)
        return
    with pytest.raises(ImageError, match="16384 pixels"):
        decode(HOSTILE / "hopper.jpg", "hopper.jpg")


@pytest.mark.parametrize(
    "name", ["bild ü.png", "猫.png", "кот [1].png", "a'b.png", os.fsdecode(b"\xff.png")], ids=ascii
)
def test_names_of_all_kinds(tmp_path, name):
    assert (pixels(saved(tmp_path, Image.new("RGB", (1, 1), (1, 2, 3)), name)) == [1, 2, 3]).all()


def test_the_content_decides_not_the_extension(tmp_path):
    file = tmp_path / "x.png"
    file.write_bytes((HOSTILE / "hopper.jpg").read_bytes())
    assert (pixels(file) == pixels(HOSTILE / "hopper.jpg")).all()


# Side effects ----------------------------------------------------------------------------------------------


def test_the_file_is_closed_and_the_picture_stays_usable(tmp_path):
    file = saved(tmp_path, Image.new("RGB", (2, 2), (1, 2, 3)))
    picture = decode(file, "x.png")
    file.unlink()
    assert picture.copy().getpixel((1, 1)) == (1, 2, 3)
    assert not dict(picture.getexif())


def test_warnings_of_pillow_stay_inside_and_filters_are_put_back(monkeypatch):
    before = list(warnings.filters)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10000)  # every file here makes Pillow warn
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: pixels(HOSTILE / "hopper.jpg").sum(), range(24)))
    assert len(set(done)) == 1
    assert list(warnings.filters) == before


def test_warnings_of_others_are_heard_meanwhile(monkeypatch):
    def open_and_warn(file):
        warnings.warn("not Pillow's", stacklevel=1)  # an error, as everywhere in these tests

    monkeypatch.setattr(Image, "open", open_and_warn)
    with pytest.raises(ImageError, match="not Pillow's"):
        decode(HOSTILE / "hopper.jpg", "hopper.jpg")


def test_what_pillow_logs_is_not_printed(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.getLogger("PIL.TiffImagePlugin").error("more samples than can be decoded")
    assert capsys.readouterr().err == ""


def test_threads_agree_with_one_another():
    names = [name for name in READ if not name.startswith("exif")]
    alone = [pixels(HOSTILE / name) for name in names]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda name: pixels(HOSTILE / name), names * 3))
    assert all((one == other).all() for one, other in zip(alone * 3, together, strict=True))


# The rest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extension", [".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".pgm"]
)
def test_extensions_of_pictures(extension):
    assert extension in decoding.readable_extensions()


@pytest.mark.parametrize("extension", ["", ".txt", ".pdf", ".h5", ".mpg", ".eps", ".npy", ".pt"])
def test_extensions_of_other_files(extension):
    assert extension not in decoding.readable_extensions()
