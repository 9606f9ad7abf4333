"""A mapped safetensors file gives what safetensors itself reads, in every number format, at any offset."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from shardlab.model.mapped import Mapped

TENSORS = {"a": torch.arange(12.0, dtype=torch.float64).view(3, 4), "b": torch.arange(7.0),
           "c": torch.arange(15.0).bfloat16().view(5, 3), "d": torch.arange(3.0).half(), "e": torch.arange(-4, 4),
           "f": torch.tensor([True, False]), "g": torch.arange(9.0).to(torch.float8_e4m3fn),
           "h": torch.zeros(0, 4), "i": torch.tensor(2.5)}


def same(mapped):
    assert sorted(mapped.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        read = mapped.tensor(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_tensors_are_those_of_the_file(tmp_path):
    save_file(TENSORS, tmp_path / "x", metadata={"format": "pt"})
    same(Mapped(tmp_path / "x"))


def test_a_header_of_odd_length_is_no_obstacle(tmp_path):
    save_file(TENSORS, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.dumps(json.loads(whole[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    assert len(header) % 2
    same(Mapped(tmp_path / "x"))


def test_an_unknown_format_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="x is stored as U16: known are F64"):
        Mapped(tmp_path / "x").tensor("x")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc, which only Linux has")
def test_a_mapped_file_costs_no_memory_and_goes_with_its_last_view(tmp_path):
    def data():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmData"))

    save_file({"x": torch.zeros(64, 2**18)}, tmp_path / "x")
    before = data()
    view = Mapped(tmp_path / "x").tensor("x")[3:5]
    assert data() - before < 1024  # KiB, of a file of 64 MiB
    with open("/proc/self/maps") as maps:
        assert str(tmp_path / "x") in maps.read()
    del view
    with open("/proc/self/maps") as maps:
        assert str(tmp_path / "x") not in maps.read()
