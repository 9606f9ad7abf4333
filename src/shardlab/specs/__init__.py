"""What a model, a card, a link, a cluster, a topology and a layout are, in plain data. Standard library only."""

from .attention import Compressed, Latent
from .card import CardSpec, bundled_cards, find_card
from .catalog import bundled_models, find_model
from .cluster import ClusterSpec
from .dtype import Dtype, dtype_of
from .experts import Experts
from .layout import Layout
from .link import LinkSpec, bundled_links, find_link
from .model import ModelSpec
from .rope import RopeScaling
from .storage import Format, Packed, format_of
from .tensor import TensorSpec, padded
from .topology import Topology

__all__ = ["CardSpec", "ClusterSpec", "Compressed", "Dtype", "Experts", "Format", "Latent", "Layout", "LinkSpec",
           "ModelSpec", "Packed", "RopeScaling", "TensorSpec", "Topology", "bundled_cards", "bundled_links",
           "bundled_models", "dtype_of", "find_card", "find_link", "find_model", "format_of", "padded"]
