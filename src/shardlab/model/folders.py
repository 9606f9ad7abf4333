"""A folder that is whole or not there: written beside its place under another name, then renamed.

All of it is on the disk (fsync) before it is renamed, so that a machine that loses power then has the whole folder too,
or none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes `folder` at the end; after an error nothing is left of it.

    Raises FileExistsError where `folder` is there already and not empty, at the start or (another process wrote it) at
    the end: nothing of it is changed.
    """
    _refuse(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            _on_disk(path)
        try:
            os.rename(unfinished, folder)  # onto an empty folder, or none: atomic
        except OSError:
            _refuse(folder)
            raise
        _on_disk(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def is_full(folder: Path) -> bool:
    """Whether `folder` is there already, and not an empty folder."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def leftovers(folder: Path, pattern: str) -> list[Path]:
    """What killed processes have left in `folder` of folders called like `pattern` ("step-*"), which they were about to
    write there."""
    return sorted(folder.glob(f".{pattern}.{'[0-9a-f]' * 32}"))


def _on_disk(path: Path) -> None:
    if os.name == "nt":  # where a folder can't be opened
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _refuse(folder: Path) -> None:
    if is_full(folder):
        raise FileExistsError(f"{folder} exists already: name another folder, or remove it first")
