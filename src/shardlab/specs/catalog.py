"""Published models by name: their sizes, with the source and the date of each, from `data/models.toml`."""

from __future__ import annotations

from .attention import Compressed, Latent
from .datafile import bundled, entry
from .experts import Experts
from .model import ModelSpec
from .rope import RopeScaling

_PARTS = {"rope_scaling": RopeScaling, "experts": Experts, "latent": Latent, "compressed": Compressed}


def bundled_models() -> dict[str, dict]:
    """Every bundled model as it stands in the file: name → sizes, `source` and `date` (year-month of the release)."""
    return bundled("models")


def find_model(name: str) -> ModelSpec:
    """The spec of a bundled model: `find_model("llama-3.1-70b")`. ValueError on another name, with the nearest ones."""
    found = entry("model", name, bundled_models())
    sizes = {key: value for key, value in found.items() if key not in ("source", "date")}
    parts = {key: kind(**sizes.pop(key)) for key, kind in _PARTS.items() if key in sizes}
    return ModelSpec(name=name.lower(), **sizes, **parts)
