"""What a model and a layout are, in plain data. Standard library only."""

from .catalog import bundled_models, find_model
from .dtype import Dtype, dtype_of
from .layout import Layout
from .model import ModelSpec
from .rope import RopeScaling
from .tensor import TensorSpec, padded

__all__ = ["Dtype", "Layout", "ModelSpec", "RopeScaling", "TensorSpec", "bundled_models", "dtype_of", "find_model",
           "padded"]
