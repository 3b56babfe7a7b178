"""Downloads: whole and with the right hash, or not there at all; and told of as they come."""

from __future__ import annotations

import hashlib
import http.client
import io
from types import SimpleNamespace

import pytest
import torch
from torchvision import models

from hookscope.errors import ModelError
from hookscope.models import download, load_model, zoo

DATA = bytes(range(256)) * 4096 * 3  # three MiB


@pytest.fixture
def served(tmp_path):
    """The data as the address of a file named by its hash."""
    path = tmp_path / f"served-{hashlib.sha256(DATA).hexdigest()[:8]}.pth"
    path.write_bytes(DATA)
    return path


def test_a_file_comes_whole_and_its_progress_is_told(served, tmp_path):
    target, told = tmp_path / "cache" / "checkpoints" / served.name, []
    download.download(served.as_uri(), target, lambda *progress: told.append(progress))
    assert target.read_bytes() == DATA
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert list(target.parent.iterdir()) == [target]


def test_what_is_not_what_its_name_says_is_not_kept(served, tmp_path):
    served.write_bytes(DATA[1:])
    target = tmp_path / "cache" / served.name
    with pytest.raises(ValueError, match="the download is damaged"):
        download.download(served.as_uri(), target)
    assert list(target.parent.iterdir()) == []


class _Answer(io.BytesIO):
    """An answer of a server: its bytes, and how many it promised."""

    def __init__(self, data, promised):
        super().__init__(data)
        self.headers = {} if promised is None else {"Content-Length": str(promised)}


def test_a_connection_that_ends_early_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "urlopen", lambda request: _Answer(b"half", 8))
    with pytest.raises(OSError, match="ended after 4 of 8 bytes"):
        download.download("https://example.invalid/x.pth", tmp_path / "x.pth")
    assert list(tmp_path.iterdir()) == []


def test_a_server_need_not_say_how_much_there_is(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(download, "urlopen", lambda request: _Answer(b"all", None))
    download.download("https://example.invalid/x.pth", tmp_path / "x.pth", lambda *given: told.append(given))
    assert (tmp_path / "x.pth").read_bytes() == b"all"
    assert told == [(0, None)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


def test_official_weights_are_told_of_while_they_come(cache, monkeypatch):
    torch.manual_seed(0)
    buffer = io.BytesIO()
    torch.save(models.squeezenet1_1(weights=None).state_dict(), buffer)
    name = f"squeezenet1_1-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}.pth"
    monkeypatch.setattr(
        download, "urlopen", lambda request: _Answer(buffer.getvalue(), len(buffer.getvalue()))
    )
    entry = SimpleNamespace(name="IMAGENET1K_V1", url=f"https://example.invalid/{name}")
    told = []
    found = zoo._fetched("squeezenet1_1", entry, lambda *given: told.append(given))
    assert found == cache / name
    assert {what for what, _, _ in told} == {f"downloading {name} (MiB)"}
    assert told[-1][1:] == (4, 4)


@pytest.mark.parametrize(
    "error", [http.client.IncompleteRead(b""), TimeoutError("slow"), ConnectionResetError("gone")], ids=repr
)
def test_whatever_the_network_raises_is_one_error(cache, monkeypatch, error):
    def fails(request):
        raise error

    monkeypatch.setattr(download, "urlopen", fails)
    with pytest.raises(ModelError, match="cannot be downloaded"):
        load_model("squeezenet1_1", weights="IMAGENET1K_V1")
