"""One plain model that knows nothing of ranks: its layers, its loss, its weights on disk."""

from .cache import KVCache
from .checkpoint import from_folder, load, save
from .parameters import Window, initialise, materialise
from .router import Routing, Rules
from .transformer import Transformer

__all__ = ["KVCache", "Routing", "Rules", "Transformer", "Window", "from_folder", "initialise", "load", "materialise",
           "save"]
