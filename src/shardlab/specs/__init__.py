"""What a model and a layout are, in plain data. Standard library only."""

from .dtype import Dtype, dtype_of
from .layout import Layout
from .model import ModelSpec
from .rope import RopeScaling
from .tensor import TensorSpec, padded

__all__ = ["Dtype", "Layout", "ModelSpec", "RopeScaling", "TensorSpec", "dtype_of", "padded"]
