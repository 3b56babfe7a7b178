"""Finding: what files, directories and globs mean, how pictures are named, and which class a folder is."""

import os
import unicodedata

import pytest

from hookscope.errors import ExitCode, UsageError
from hookscope.images import ImageFailure, find, find_dataset
from hookscope.images.naming import folder_keys, shown_paths


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test runs in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plant(here, *paths):
    """Empty files: no search looks inside."""
    for path in paths:
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).touch()


def paths(found):
    return [ref.path for ref in found.refs]


def errors(found):
    return [failure.error for failure in found.failures]


# Files, directories, globs ---------------------------------------------------------------------------------

TREE = (
    "photos/b.PNG",
    "photos/a.jpg",
    "photos/Z.png",
    "photos/notes.txt",
    "photos/.hidden.png",
    "photos/.git/x.png",
    "photos/sub/c.webp",
    "photos/sub/deep/d.png",
    "photos/sub.png/e.png",
    "photos/kit[1].png",
    "photos/kit1.png",
    "other/raw.dat",
    "other/readme",
)

ALL = ["Z.png", "a.jpg", "b.PNG", "kit1.png", "kit[1].png", "sub/c.webp", "sub/deep/d.png", "sub.png/e.png"]

SPECS = {
    "a file": ("photos/a.jpg", ["photos/a.jpg"]),
    "a file as typed": ("./photos/../photos/a.jpg", ["./photos/../photos/a.jpg"]),
    "a file of any extension": ("photos/notes.txt", ["photos/notes.txt"]),
    "a hidden file": ("photos/.hidden.png", ["photos/.hidden.png"]),
    "a directory": ("photos", [f"photos/{name}" for name in ALL]),
    "a directory with a slash": ("photos/", [f"photos/{name}" for name in ALL]),
    "a directory named like a picture": ("photos/sub.png", ["photos/sub.png/e.png"]),
    "a hidden directory": ("photos/.git", ["photos/.git/x.png"]),
    "the current directory": (".", [f"./photos/{name}" for name in ALL]),
    "a glob": ("photos/[a-z].*", ["photos/a.jpg", "photos/b.PNG"]),
    "a name before a glob": ("photos/kit[1].png", ["photos/kit[1].png"]),
    "a glob that names an extension": ("other/*.dat", ["other/raw.dat"]),
    "a glob of pictures only": ("photos/[an]*", ["photos/a.jpg"]),
    "a glob of directories": ("ph*", [f"photos/{name}" for name in ALL]),
    "stars at the front": ("**/*.webp", ["photos/sub/c.webp"]),
    "stars in the middle": ("photos/**/*.png", [f"photos/{name}" for name in ALL if name.endswith(".png")]),
    "stars at the end": ("photos/sub/**", ["photos/sub/c.webp", "photos/sub/deep/d.png"]),
    "stars alone": ("**", [f"./photos/{name}" for name in ALL]),
    "stars twice": ("**/sub/**/*.png", ["photos/sub/deep/d.png"]),
    "stars as none": ("photos/**/sub/c.*", ["photos/sub/c.webp"]),
    "stars inside a segment": ("photos/s**/c.webp", ["photos/sub/c.webp"]),
}


@pytest.mark.parametrize(("spec", "expected"), SPECS.values(), ids=SPECS)
def test_what_a_spec_means(here, spec, expected):
    plant(here, *TREE)
    found = find([spec])
    assert paths(found) == expected
    assert found.failures == ()
    assert [ref.index for ref in found.refs] == list(range(len(expected)))
    assert all(ref.file.exists() and ref.label is None for ref in found.refs)


MISSES = {
    "a missing file": ("photos/no.png", "cannot read picture 'photos/no.png': no such file or directory"),
    "nothing": ("", "cannot read picture '': no such file or directory"),
    "a null byte": ("a\0b", "cannot read picture 'a\\x00b': "),
    "a file taken for a directory": (
        "photos/a.jpg/b.png",
        "cannot read picture 'photos/a.jpg/b.png': not a dir",
    ),
    "a glob": ("photos/no*.png", "no picture matches 'photos/no*.png'"),
    "a deep glob": ("**/no.*", "no picture matches '**/no.*'"),
    "a glob of text": ("photos/n*", "no picture matches 'photos/n*'"),
    "a directory without pictures": ("other", "no pictures in directory 'other'"),
}


@pytest.mark.parametrize(("spec", "error"), MISSES.values(), ids=MISSES)
def test_what_names_nothing_does_not_stop_the_others(here, spec, error):
    plant(here, *TREE)
    found = find(["photos/b.PNG", spec, "photos/a.jpg"])
    assert paths(found) == ["photos/b.PNG", "photos/a.jpg"]
    assert [failure.path for failure in found.failures] == [spec]
    assert errors(found)[0].startswith(error)


def test_a_broken_link_is_a_miss(here):
    (here / "x.png").symlink_to("nowhere")
    assert errors(find(["x.png"])) == ["cannot read picture 'x.png': no such file or directory"]


def test_a_directory_that_cannot_be_listed_is_said(here, monkeypatch):
    plant(here, "photos/a.png", "photos/locked/b.png")
    plain = os.listdir

    def listdir(path):
        if path.endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return plain(path)

    monkeypatch.setattr(os, "listdir", listdir)
    found = find(["photos"])
    assert paths(found) == ["photos/a.png"]
    error = "cannot search directory 'photos/locked': permission denied"
    assert found.failures == (ImageFailure("photos/locked", error),)
    assert find(["photos/locked"]).failures == found.failures


@pytest.mark.parametrize(
    "specs",
    [
        ["a.png", "a.png"],
        ["a.png", "./a.png"],
        ["a.png", "."],
        ["a.png", "link.png"],
        ["a.png", "*.png", "a*"],
    ],
    ids=" ".join,
)
def test_the_same_file_is_taken_once(here, specs):
    plant(here, "a.png")
    (here / "link.png").symlink_to("a.png")
    assert paths(find(specs)) == ["a.png"]


def test_equal_files_of_different_names_are_both_taken(here):
    plant(here, "a.png", "b.png")
    assert paths(find(["b.png", "a.png"])) == ["b.png", "a.png"]


@pytest.mark.parametrize("spec", ["photos", "photos/**/*.png", "**/*.png"])
def test_loops_of_links_are_walked_once(here, spec):
    plant(here, "photos/a.png", "photos/sub/b.png")
    for name in ("one", "two", "three"):
        (here / "photos/sub" / name).symlink_to(here / "photos", target_is_directory=True)
    assert paths(find([spec])) == ["photos/a.png", "photos/sub/b.png"]


def test_directories_named_like_globs_are_searched_by_their_names(here):
    plant(here, "photos/[ab]/x.png", "photos/a/y.txt")
    assert paths(find(["photos/**/*.png"])) == ["photos/[ab]/x.png"]


def test_a_link_to_a_directory_elsewhere_is_followed(here):
    plant(here, "store/b.png", "photos/a.png")
    (here / "photos/more").symlink_to(here / "store", target_is_directory=True)
    assert paths(find(["photos"])) == ["photos/a.png", "photos/more/b.png"]


LIMITS = {None: 4, 0: 0, 1: 1, 3: 3, 4: 4, 9: 4}


@pytest.mark.parametrize(("limit", "count"), LIMITS.items(), ids=map(str, LIMITS))
def test_limit_counts_pictures(here, limit, count):
    plant(here, "a/1.png", "a/2.png", "b.png", "c.png")
    found = find(["a", "a/1.png", "b.png", "c.png"], limit)
    assert paths(found) == ["a/1.png", "a/2.png", "b.png", "c.png"][:count]
    assert found.failures == ()


def test_a_wrong_name_is_reported_beyond_the_limit_too(here):
    plant(here, "a.png")
    assert errors(find(["a.png", "b.png"], 1)) == ["cannot read picture 'b.png': no such file or directory"]


# Paths as shown --------------------------------------------------------------------------------------------

SHOWN = {
    "as typed": (["a.png", "./b//c.png", "../d.png"], ["a.png", "./b//c.png", "../d.png"]),
    "one absolute": (["/x/y/a.png"], ["a.png"]),
    "absolute together": (["/x/y/a.png", "/x/z/b.png"], ["y/a.png", "z/b.png"]),
    "absolute among others": (["a.png", "/x/y/a.png", "/x/y/z/b.png"], ["a.png", "a.png", "z/b.png"]),
    "absolute by a detour": (["/x/y/../a.png", "/x/z/b.png"], ["a.png", "z/b.png"]),
    "no common parent but the root": (["/x/a.png", "/y/b.png"], ["x/a.png", "y/b.png"]),
    "none": ([], []),
    "not unicode": ([os.fsdecode(b"\xff.png")], ["?.png"]),
}


@pytest.mark.parametrize(("typed", "shown"), SHOWN.values(), ids=SHOWN)
def test_paths_as_people_are_shown_them(typed, shown):
    assert shown_paths(typed) == shown


def test_absolute_directories_leave_no_trace_of_where_they_are(here):
    plant(here, "photos/a/cat.png", "photos/b/cat.png")
    found = find([str(here / "photos"), str(here / "photos" / "no.png")])
    assert paths(found) == ["a/cat.png", "b/cat.png"]
    assert [ref.file for ref in found.refs] == [here / "photos/a/cat.png", here / "photos/b/cat.png"]
    assert str(here) not in errors(found)[0]


# Keys ------------------------------------------------------------------------------------------------------

KEYS = {
    "stems": (["photos/cat.png", "dog.jpg"], ["cat", "dog"]),
    "two folders": (["a/cat.png", "b/cat.png", "a/dog.png"], ["a-cat", "b-cat", "dog"]),
    "with and without folder": (["cat.png", "a/cat.png"], ["cat", "a-cat"]),
    "case": (["Cat.png", "a/cat.png"], ["Cat", "a-cat"]),
    "sharp s": (["straße.png", "a/STRASSE.png"], ["straße", "a-STRASSE"]),
    "extension": (["cat.png", "cat.jpg", "b/dog.png"], ["cat-png", "cat-jpg", "dog"]),
    "case of the extension": (["cat.png", "cat.PNG"], ["cat-png", "cat-PNG-2"]),
    "dots and slashes": (["./a/../cat.png", "/x/cat.png"], ["a-cat", "x-cat"]),
    "a key that looks like another": (
        ["a-cat.png", "a/cat.png", "b/cat.png"],
        ["a-cat", "a-cat-png", "b-cat"],
    ),
    "a number that is taken": (["x?.png", "x*.png", "x_-png-2.png"], ["x_-png", "x_-png-3", "x_-png-2"]),
    "odd marks": (["a b:c*.png", "d\ne.png"], ["a_b_c_", "d_e"]),
    "dots": (["photo.v2.png", "..png", ".png"], ["photo_v2", "__png", "_png"]),
    "languages": (["猫.png", "кот.png", "बिल्ली.png", "über.png"], ["猫", "кот", "बिल्ली", "über"]),
    "two ways to write an accent": (
        [unicodedata.normalize("NFC", "é.png"), "a/" + unicodedata.normalize("NFD", "é.png")],
        ["é", "a-é"],
    ),
    "devices": (
        ["con.png", "a/Lpt1.png", "console.png", "nul.tar.png"],
        ["_con", "_Lpt1", "console", "nul_tar"],
    ),
    "no name": ([""], ["picture"]),
    "same path twice": (["a.png", "a.png", "a.png"], ["a-png", "a-png-2", "a-png-3"]),
}


@pytest.mark.parametrize(("shown", "keys"), KEYS.values(), ids=KEYS)
def test_keys(shown, keys):
    assert folder_keys(shown) == keys


@pytest.mark.parametrize("letter", ["a", "é", "猫", "😀", "𝔞"])
def test_long_names_become_short_keys_that_a_file_system_takes(here, letter):
    keys = folder_keys([f"{letter * 300}{number}.png" for number in (1, 2)] + [letter * 300 + "1.jpg"] * 2)
    assert len({key.casefold() for key in keys}) == 4
    for key in keys:
        assert 0 < len(key) <= 100
        (here / key).mkdir()


def test_found_pictures_have_keys_of_their_own(here):
    plant(here, "p/a/cat.png", "p/b/Cat.png", "p/b/dog.png")
    assert [ref.key for ref in find(["p"]).refs] == ["p-a-cat", "p-b-Cat", "dog"]


# Datasets --------------------------------------------------------------------------------------------------

CATEGORIES = ["tabby", "Egyptian cat", "espresso", "crane", "crane"]

DATASETS = {
    "labels": (["tabby", "espresso"], CATEGORIES, [2, 0]),
    "case and underscores": (["EGYPTIAN_CAT", "Tabby"], CATEGORIES, [1, 0]),
    "ids": (["0", "04", "2"], CATEGORIES, [0, 4, 2]),
    "labels and ids": (["3", "tabby"], CATEGORIES, [3, 0]),
    "order": (["n1", "n2", "n3"], ["x", "y", "z"], [0, 1, 2]),
    "order that agrees with a name": (["cat", "dogs"], ["cat", "dog"], [0, 1]),
    "digits are labels": (["1", "2"], ["2", "1"], [1, 0]),
    "digits are ids where not all are labels": (["0", "1"], ["1", "2"], [0, 1]),
    "no categories, ids": (["10", "9"], None, [10, 9]),
    "no categories, names": (["b", "a", "7"], None, [0, 1, 2]),
    "empty categories": (["b", "a"], [], [0, 1]),
}


@pytest.mark.parametrize(("folders", "categories", "labels"), DATASETS.values(), ids=DATASETS)
def test_class_folders(here, folders, categories, labels):
    plant(here, *(f"data/{folder}/deep/x.png" for folder in folders), "data/stray.png", "data/.cache/y.png")
    found = find_dataset("data", categories)
    assert [ref.label for ref in found.refs] == labels
    assert paths(found) == [f"data/{folder}/deep/x.png" for folder in sorted(folders)]
    assert found.failures == ()


ODD = {
    "near miss": (
        ["taby", "espresso"],
        CATEGORIES,
        "class folder 'taby' in 'data' is no",
        "did you mean 'tabby'?",
    ),
    "underscored near miss": (
        ["Egyptian_cats"],
        CATEGORIES,
        "'Egyptian_cats'",
        "did you mean 'Egyptian_cat'?",
    ),
    "id out of range": (["0", "5"], CATEGORIES, "class folder '5'", "class id 0 to 4"),
    "negative": (["-1"], CATEGORIES, "class folder '-1'", "class id 0 to 4"),
    "other digits": (["٣"], CATEGORIES, "class folder '٣'", "class id 0 to 4"),
    "many": (
        list("pqrst"),
        ["x"],
        "class folders 'p', 'q', 'r' and 2 more in 'data' are no",
        "class id 0 to 0",
    ),
    "order against a name": (["b", "x"], ["a", "b"], "class folder 'x'", "class id 0 to 1"),
    "a label of two classes": (
        ["crane"],
        CATEGORIES,
        "'crane' in 'data' is the label of classes 3, 4",
        "number",
    ),
}


@pytest.mark.parametrize(("folders", "categories", "message", "hint"), ODD.values(), ids=ODD)
def test_doubtful_class_folders_are_a_usage_error(here, folders, categories, message, hint):
    plant(here, *(f"data/{folder}/x.png" for folder in folders))
    with pytest.raises(UsageError) as caught:
        find_dataset("data", categories)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("no", "cannot read dataset 'no': no such file or directory"),
        ("flat/x.png", "cannot read dataset 'flat/x.png': not a directory"),
        ("flat", "dataset 'flat' has no class folders"),
        ("a\0b", "cannot read dataset 'a\\x00b': embedded null byte"),
    ],
)
def test_what_is_no_dataset_is_a_usage_error(here, directory, message):
    plant(here, "flat/x.png")
    with pytest.raises(UsageError) as caught:
        find_dataset(directory, None)
    assert caught.value.message.startswith(message)
    assert "folder" in caught.value.hint


def test_an_empty_class_is_recorded(here):
    plant(here, "data/a/x.png", "data/b/notes.txt")
    found = find_dataset("data", None)
    assert errors(found) == ["no pictures in directory 'data/b'"]
    assert paths(found) == ["data/a/x.png"]


def test_one_file_in_two_classes_is_two_samples(here):
    plant(here, "data/a/x.png")
    (here / "data/b").mkdir()
    (here / "data/b/x.png").symlink_to(here / "data/a/x.png")
    assert [(ref.label, ref.key) for ref in find_dataset("data", None).refs] == [
        (0, "data-a-x"),
        (1, "data-b-x"),
    ]


def test_limit_of_a_dataset(here):
    plant(here, "data/a/1.png", "data/a/2.png", "data/b/[3].png")
    assert paths(find_dataset("data", None, 2)) == ["data/a/1.png", "data/a/2.png"]
    assert len(find_dataset("data", None).refs) == 3
