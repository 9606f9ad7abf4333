"""The tensors in a Hugging Face folder, by name, whichever of its safetensors files they are in, read and written.

One file, `model.safetensors`, or several beside an index that says which tensor is in which. What lies beside the
weights in the same way, under a stem of its own, is read and written alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .mapped import Mapped

MOST = 2 * 2**30  # bytes of a file, and so of what is held while one is written


class Stored:
    """A folder's tensors, memory-mapped: nothing is read but file headers until a tensor is touched.

    `with Stored(folder) as stored: stored.names`, `stored.tensor(name)[rows]`. Raises ValueError, with the file's name
    and the remedy, where a file is missing, cut short or no safetensors; pickled weights are refused.
    """

    def __init__(self, folder: str | Path, stem: str = "model"):
        self.folder = Path(folder)
        self._whole, self._index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        self._files: dict[str, Mapped] = {}
        self._file_of = self._read_index()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()  # a file is unmapped with the last view of it

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of its file: only what is touched is read. To be copied, never written into."""
        return self._files[self._file_of[name]].tensor(name)

    def _read_index(self) -> dict[str, str]:
        """Tensor name → file name, of a single file or of all files of an index, each opened."""
        index = self.folder / self._index
        if not index.exists():
            return dict.fromkeys(self._open(self._whole), self._whole)
        try:
            file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if not all(isinstance(file, str) and file for file in file_of.values()):
                raise ValueError("weight_map")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files ({error!r}): write the folder again") from None
        held = {file: self._open(file) for file in sorted(set(file_of.values()))}
        if lost := [name for name, file in file_of.items() if name not in held[file]]:
            raise ValueError(f"{index} names tensors that its files lack: {some(lost)}; write the folder again")
        return file_of

    def _open(self, file: str) -> list[str]:
        """Open one file and return the names of its tensors."""
        path = self.folder / file
        if not path.exists():
            raise ValueError(self._missing(path))
        try:
            self._files[file] = Mapped(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is cut short or damaged ({error}): fetch or write it again") from None
        return self._files[file].names

    def _missing(self, path: Path) -> str:
        if not self.folder.is_dir():
            return f"{self.folder} is not a folder"
        if path.name != self._whole:
            return f"{path} is named by {self._index} and missing: fetch the folder's remaining files"
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in self.folder.glob(pattern))
        if pickled:
            return (
                f"{self.folder} has its weights in {some(pickled)}: pickled, which can run any code when read. "
                "Convert them where you trust them: transformers' from_pretrained, then save_pretrained"
            )
        return f"{self.folder} has neither {self._whole} nor {self._index}"


def write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, stem: str = "model",
                  most: int = MOST) -> None:
    """Write `tensors`, (name, value) one after another, into `folder`, as `Stored` reads them; of none, nothing.

    A file has `most` bytes at most, or a single tensor, and no more is held on the way. Raises OSError where one can't
    be written.
    """
    held: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []  # the names in each
    size = total = 0

    def close() -> None:
        path = folder / f"{stem}-{len(files)}"
        try:
            save_file(held, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} can't be written: {error}") from None
        files.append(list(held))
        held.clear()

    for name, value in tensors:
        if held and size + value.nbytes > most:
            close()
            size = 0
        held[name] = value.detach().cpu().contiguous()
        size += value.nbytes
        total += value.nbytes
    if held:
        close()
    n = len(files)
    called = [f"{stem}.safetensors" if n == 1 else f"{stem}-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    for i, file in enumerate(called):
        (folder / f"{stem}-{i}").rename(folder / file)
    if n > 1:
        index = {"metadata": {"total_size": total},
                 "weight_map": {name: file for file, names in zip(called, files, strict=True) for name in names}}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def some(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
