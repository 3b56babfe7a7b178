"""Official weights from the network into torch's cache: the one file that is not read but made here.

It is written beside its place, checked against the hash in its name, and only then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

_CHUNK_BYTES = 2**20
_HASH = re.compile(r"-([a-f0-9]{8,})\.")

Told = Callable[[int, int | None], None]


def download(url: str, path: Path, told: Told = lambda done, total: None) -> None:
    """The file lies at `path`, whole; `told` hears the MiB so far and, where known, those in all.

    Raises:
        OSError: the network or the disk fails.
        ValueError: what came is not what the hash in the file's name says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with urlopen(Request(url, headers={"User-Agent": "hookscope"})) as answer, partial.open("wb") as file:
            digest = _copied(answer, file, told)
        wanted = _HASH.search(path.name)
        if wanted and not digest.startswith(wanted.group(1)):
            raise ValueError(f"its hash {digest[:8]} is not {wanted.group(1)}: the download is damaged")
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _copied(answer: Any, file: Any, told: Told) -> str:
    """Copies to the end and gives the SHA-256 of all."""
    length = answer.headers.get("Content-Length")
    total = int(length) if length else None
    done, digest = 0, hashlib.sha256()
    while chunk := answer.read(_CHUNK_BYTES):
        file.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        told(done // 2**20, None if total is None else total // 2**20)
    if total is not None and done < total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
    return digest.hexdigest()
