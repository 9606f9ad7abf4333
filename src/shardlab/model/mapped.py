"""A safetensors file mapped for reading alone: its tensors are views of the file, read as they are touched.

safetensors' own `safe_open` maps the file for PyTorch as private and writable. The system
counts such a map as if all of it had been copied into memory, so that under a limit (a
`card`) a rank could not open a file from which it wants one slice. A map that can only be
read costs nothing.
"""

from __future__ import annotations

import json
import mmap
import warnings
from pathlib import Path

import torch
from safetensors import safe_open

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
           "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


class Mapped:
    """The tensors of the file at `path` by name. Raises SafetensorError where the file is cut short or damaged."""

    def __init__(self, path: str | Path):
        with safe_open(path, framework="np"):  # holds the header against the file's length
            pass
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(length))
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._header.pop("__metadata__", None)
        with warnings.catch_warnings():  # PyTorch has no tensors that can't be written, and says so
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._data = torch.frombuffer(whole, dtype=torch.uint8)[8 + length :]

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the file: to be read, or copied; to write into it ends the process.

        Raises ValueError on a number format that is not among those above.
        """
        entry = self._header[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} is stored as {entry['dtype']}: known are {', '.join(_DTYPES)}")
        start, stop = entry["data_offsets"]
        data, dtype = self._data[start:stop], _DTYPES[entry["dtype"]]
        if data.storage_offset() % dtype.itemsize:  # after a header of an odd length: rare, and no place for a view
            data = data.clone()
        return data.view(dtype).view(entry["shape"])
