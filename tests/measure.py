"""What a run holds, counted by storage: what autograd keeps, and the most that was alive at once."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def saved_bytes(model, forward):
    """Bytes that autograd keeps at the end of `forward()`, each storage once, parameters left out; and its result."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor  # which keeps it alive, so that no other gets its address

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(kept.values()), result


class Live(TorchDispatchMode):
    """Bytes of the storages made in the block that are alive: `now`, and at most, `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x.untyped_storage() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(x):
                self._enter(x.untyped_storage(), given)
        return result

    def _enter(self, storage, given):
        if storage in self._known or any(storage._cdata == other._cdata for other in given):
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._leave, size)

    def _leave(self, size):
        self.now -= size
