"""The tensors in a Hugging Face folder, by name, whichever of its safetensors files they are in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError

from .mapped import Mapped

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored:
    """A folder's tensors, memory-mapped: nothing is read but file headers until a tensor is touched.

    `with Stored(folder) as stored: stored.names`, `stored.tensor(name)[rows]`. Raises ValueError, with the file's name
    and the remedy, where a file is missing, cut short or no safetensors; pickled weights are refused.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
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
        index = self.folder / INDEX
        if not index.exists():
            return dict.fromkeys(self._open(WHOLE), WHOLE)
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
        if path.name != WHOLE:
            return f"{path} is named by {INDEX} and missing: fetch the folder's remaining files"
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in self.folder.glob(pattern))
        if pickled:
            return (
                f"{self.folder} has its weights in {some(pickled)}: pickled, which can run any code when read. "
                "Convert them where you trust them: transformers' from_pretrained, then save_pretrained"
            )
        return f"{self.folder} has neither {WHOLE} nor {INDEX}"


def some(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
