"""A call, made to travel: function and arguments by value, so that no rank has to find and import them."""

from __future__ import annotations

import importlib
import io
import marshal
import sys
import sysconfig
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

_registry = threading.Lock()  # cloudpickle has one list of modules to send by value, for all threads


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps its file name: a traceback would show no source without it.

    And what stands for a module goes by name. A function that says `torch` and, anywhere, `ops`, takes `torch.ops`
    along, which is no module that cloudpickle knows, but an object of a class of its own.
    """

    dispatch_table: ClassVar = ChainMap({CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))},
                                        cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and "__slots__" in vars(obj) and reduced is not NotImplemented \
                and reduced[0] is cloudpickle.cloudpickle._make_skeleton_class and obj.__bases__ != (tuple,):
            # cloudpickle leaves the slots out, and what the class there makes would not fit the class here; a named
            # tuple gets them where it is made again
            reduced[1][3]["__slots__"] = vars(obj)["__slots__"]
        return reduced


def pack(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """The pickled call. A module of the reader's own goes by value, or, where it can't, by name.

    Raises TypeError where neither works, naming what can't be sent.
    """
    module = _own_module(fn)
    if module is not None:
        try:
            with _registry, _by_value(module):
                return _dumps((fn, args, kwargs))
        except Exception:  # it holds what can't be sent, a lock, say: the ranks may still import it
            pass
    try:
        return _dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(f"{name_of(fn)} and its arguments can't be sent to the ranks: {error}. Open files, locks, "
                        "generators and process groups don't travel: make them inside the function.") from error


def unpack(body: bytes, fn: Callable) -> Any:
    """What a rank has sent back. Raises TypeError, naming `fn`, where it can't be made again here."""
    try:
        return cloudpickle.loads(body)
    except Exception as error:
        raise TypeError(f"what {name_of(fn)} returned can't be read here: {type(error).__name__}: {error}. "
                        "Return tensors, numbers, strings, or lists and dicts of them.") from error


def name_of(fn: Callable) -> str:
    """What to call `fn` in a message."""
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _own_module(fn: Callable) -> ModuleType | None:
    """The module of `fn` if the reader wrote it: not installed, not ours, not __main__ (goes by value anyway)."""
    while isinstance(fn, partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None
    installed = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return None if file.startswith(installed) or module.__name__.startswith("shardlab.") else module


@contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
