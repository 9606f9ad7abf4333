"""The house keeps its rules, read from the source: which room imports which, who moves tensors, what is not loaded."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardlab
from shardlab.comm import algorithms as algorithms_of_comm
from shardlab.comm import shared
from shardlab.comm.algorithms import TABLE
from shardlab.cost.messages import ALGORITHMS, SHARED, messages

SRC = Path(shardlab.__file__).parent
FILES = sorted(SRC.rglob("*.py"))

# room → the rooms it may import; a room is a file or a folder of shardlab, and need not exist yet
ARROWS = {
    "__init__": set(), "schedule": set(), "specs": {"schedule"}, "cost": {"specs", "schedule"},
    "comm": {"specs"}, "card": {"specs"}, "launch": {"card", "comm", "specs"}, "model": {"specs"},
    "quant": {"model", "comm", "specs"}, "offload": {"model", "comm", "specs"},
    "parallel": {"model", "comm", "schedule", "specs"},
    "train": {"parallel", "model", "comm", "launch", "specs"},
    "serve": {"parallel", "model", "comm", "launch", "specs"},
    "show": {"specs", "schedule", "cost"},
}
ARROWS["cli"] = set(ARROWS)
PURE = {"specs", "schedule", "cost"}  # nothing but the standard library

# of torch.distributed, outside comm: what only looks, and what launch and mesh set up with; neither moves a tensor
LOOKS = {"ProcessGroup", "group", "get_rank", "get_world_size", "get_backend", "get_process_group_ranks",
         "get_global_rank", "get_group_rank", "is_available", "is_initialized", "is_nccl_available",
         "is_torchelastic_launched"}
SETS_UP = {"init_process_group", "destroy_process_group", "new_group", "FileStore", "TCPStore", "PrefixStore",
           "device_mesh"}
BRINGS_HOME = {"all_gather_object"}  # launch, under torchrun: each process gets the results of all
BARE = {"allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base", "_reduce_scatter_base"}  # of a group

UNPICKLERS = {f"{module}.{name}" for module in ("pickle", "cloudpickle", "dill", "joblib", "marshal")
              for name in ("load", "Unpickler")} | {"torch.load", "numpy.load", "shelve.open"}


def room_of(path: Path) -> str:
    """The room of a file: "parallel" of parallel/tensor.py, "card" of card.py."""
    return path.relative_to(SRC).with_suffix("").parts[0]


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, str, str]]:
    """(name, what the name stands for, what was imported) for every import in a file, relative ones spelled out."""
    package = ["shardlab", *path.relative_to(SRC).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = ".".join([*module, alias.name])
                yield alias.asname or alias.name, full, full


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The full name of an attribute chain that begins with an imported name ("torch.distributed.send"), else ""."""
    chain = []
    while isinstance(node, ast.Attribute):
        chain, node = [node.attr, *chain], node.value
    return ".".join([known[node.id], *chain]) if chain and isinstance(node, ast.Name) and node.id in known else ""


def uses(tree: ast.AST, path: Path) -> set[str]:
    """The full names of everything a file imports, and of everything it takes from what it imports."""
    found = list(imports(tree, path))
    known = {name: bound for name, bound, _ in found}
    return {full for _, _, full in found} | {dotted(node, known) for node in ast.walk(tree)} - {""}


def against_arrows(source: str, path: Path) -> set[str]:
    """What a file imports from rooms that its own may not import; in a pure room, what is not standard library too."""
    room, wrong = room_of(path), set()
    for full in {full for _, _, full in imports(ast.parse(source), path)}:
        top, *inner = full.split(".")
        if top == "shardlab":
            wrong |= {full} if inner and inner[0] in ARROWS and inner[0] not in {room, *ARROWS[room]} else set()
        elif room in PURE and top not in sys.stdlib_module_names:
            wrong.add(full)
    return wrong


def moves_tensors(source: str, path: Path) -> set[str]:
    """What a file outside comm takes from torch.distributed that is not in the lists above."""
    tree = ast.parse(source)
    if room_of(path) == "comm":
        return set()
    launch, mesh = room_of(path) == "launch", path.relative_to(SRC).parts == ("parallel", "mesh.py")
    allowed = LOOKS | (SETS_UP if launch or mesh else set()) | (BRINGS_HOME if launch else set())
    taken = {full for full in uses(tree, path) if full.startswith("torch.distributed.")}
    bare = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in BARE}
    return bare | {full for full in taken if full.split(".")[2] not in allowed}


def unpickles(source: str, path: Path) -> set[str]:
    """What in a file loads a pickle from disk. `loads` is for launch alone, which gets its pickles through a pipe."""
    tree = ast.parse(source)
    used = uses(tree, path)
    wrong = used & UNPICKLERS
    if room_of(path) != "launch":
        return wrong | {full for full in used if full in ("pickle.loads", "cloudpickle.loads")}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "loads":
            wrong |= {f"loads({name})" for node in ast.walk(call) if (name := getattr(node, "attr", "")) in
                      ("read_bytes", "read")}
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_the_file_keeps_the_rules(path):
    source = path.read_text(encoding="utf-8")
    assert not against_arrows(source, path)
    assert not moves_tensors(source, path)
    assert not unpickles(source, path)


def test_every_room_has_its_arrows():
    assert {room_of(path) for path in FILES} <= set(ARROWS)
    assert {"specs", "schedule", "cost", "comm", "model", "parallel", "show"} <= {room_of(path) for path in FILES}


def test_every_algorithm_of_comm_has_its_messages_in_cost_and_the_reverse():
    assert {verb: tuple(algorithms) for verb, algorithms in TABLE.items()} == ALGORITHMS
    assert {verb for verb in TABLE if hasattr(shared, verb)} == set(SHARED)
    for verb, algorithms in TABLE.items():
        assert all(messages(verb, name, 8, 4, 4, per_node=2) for name in algorithms)
        assert re.search(rf"`{verb}` +\| {', '.join(algorithms)} +\|", algorithms_of_comm.__doc__)


@pytest.mark.parametrize(("file", "source", "wrong"), [
    ("cost/memory.py", "from ..comm import ops", "shardlab.comm.ops"),
    ("cost/memory.py", "def f():\n    import shardlab.comm.ops as o", "shardlab.comm.ops"),
    ("cost/memory.py", "from .. import comm", "shardlab.comm"),
    ("cost/memory.py", "from shardlab import comm", "shardlab.comm"),
    ("cost/memory.py", "import torch.nn", "torch.nn"),
    ("specs/model.py", "from numpy import array", "numpy.array"),
    ("specs/model.py", "from ..cost.bill import Bill", "shardlab.cost.bill.Bill"),
    ("card.py", "from .launch import launch", "shardlab.launch.launch"),
    ("parallel/layout.py", "from ..cost import traffic", "shardlab.cost.traffic"),
    ("serve/kv/cache.py", "from ...show import palette", "shardlab.show.palette"),
    ("__init__.py", "from .launch import launch", "shardlab.launch.launch"),
    ("cost/memory.py", "from ..specs import units\nfrom .bill import Bill\nimport json, shardlab.schedule", None),
    ("cli.py", "from .serve import engine", None),
    ("show/timeline.py", "import matplotlib.pyplot as plt", None),
])
def test_arrows_are_seen_in_every_form_of_import(file, source, wrong):
    assert against_arrows(source, SRC / file) == ({wrong} if wrong else set())


@pytest.mark.parametrize(("file", "source", "wrong"), [
    ("parallel/tensor.py", "import torch.distributed as dist\ndist.all_reduce(x)", "torch.distributed.all_reduce"),
    ("parallel/tensor.py", "import torch\ntorch.distributed.send(x, 1)", "torch.distributed.send"),
    ("parallel/tensor.py", "import torch.distributed\ntorch.distributed.send(x, 1)", "torch.distributed.send"),
    ("serve/engine.py", "from torch.distributed import isend as go", "torch.distributed.isend"),
    ("train/loop.py", "from torch import distributed\ndistributed.barrier()", "torch.distributed.barrier"),
    ("launch.py", "import torch.distributed as dist\ndist.broadcast(x, 0)", "torch.distributed.broadcast"),
    ("parallel/grads.py", "import torch.distributed as dist\ndist.new_group([0])", "torch.distributed.new_group"),
    ("parallel/grads.py", "group.allreduce([x])", "allreduce"),
    ("parallel/zero.py", "import torch.distributed.nn as dnn", "torch.distributed.nn"),
    ("parallel/grads.py", "import torch.distributed as dist\ndist.get_rank()\ndist.group.WORLD", None),
    ("parallel/mesh.py", "import torch.distributed as dist\ndist.new_group([0])", None),
    ("launch.py", "import torch.distributed as dist\ndist.init_process_group('gloo')", None),
    ("comm/ops.py", "import torch.distributed as dist\ndist.all_reduce(x)", None),
])
def test_a_collective_outside_comm_is_seen(file, source, wrong):
    assert moves_tensors(source, SRC / file) == ({wrong} if wrong else set())


@pytest.mark.parametrize(("file", "source", "wrong"), [
    ("model/stored.py", "import torch\ntorch.load(path)", "torch.load"),
    ("train/save.py", "from pickle import load", "pickle.load"),
    ("train/save.py", "import cloudpickle as cp\ncp.loads(data)", "cloudpickle.loads"),
    ("launch/run.py", "import pickle\npickle.loads(path.read_bytes())", "loads(read_bytes)"),
    ("launch/run.py", "import numpy as np\nnp.load(path)", "numpy.load"),
    ("launch/run.py", "import cloudpickle\ncloudpickle.loads(pipe.recv_bytes())", None),
    ("model/stored.py", "import json\njson.loads(path.read_text())\njson.load(file)", None),
])
def test_a_pickle_read_from_disk_is_seen(file, source, wrong):
    assert unpickles(source, SRC / file) == ({wrong} if wrong else set())
