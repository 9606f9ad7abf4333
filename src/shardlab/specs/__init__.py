"""What a model and a layout are, in plain data. Standard library only."""

from .catalog import bundled_models, find_model
from .dtype import Dtype, dtype_of
from .layout import Layout
from .model import ModelSpec
from .rope import RopeScaling
from .storage import Format, Packed, format_of
from .tensor import TensorSpec, padded

__all__ = ["Dtype", "Format", "Layout", "ModelSpec", "Packed", "RopeScaling", "TensorSpec", "bundled_models",
           "dtype_of", "find_model", "format_of", "padded"]
