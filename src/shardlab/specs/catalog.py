"""Published models by name: their sizes, with the source and the date of each, from `data/models.toml`."""

from __future__ import annotations

import difflib
import tomllib
from importlib.resources import files

from .attention import Compressed, Latent
from .experts import Experts
from .model import ModelSpec
from .rope import RopeScaling

_PARTS = {"rope_scaling": RopeScaling, "experts": Experts, "latent": Latent, "compressed": Compressed}


def bundled_models() -> dict[str, dict]:
    """Every bundled model as it stands in the file: name → sizes, `source` and `date` (year-month of the release)."""
    return tomllib.loads(files(__package__).joinpath("data/models.toml").read_text(encoding="utf-8"))


def find_model(name: str) -> ModelSpec:
    """The spec of a bundled model: `find_model("llama-3.1-70b")`. ValueError on another name, with the nearest ones."""
    known = bundled_models()
    name = name.lower()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)
        raise ValueError(f"no bundled model {name!r}: did you mean {' or '.join(near)}?")
    sizes = {key: value for key, value in known[name].items() if key not in ("source", "date")}
    parts = {key: kind(**sizes.pop(key)) for key, kind in _PARTS.items() if key in sizes}
    return ModelSpec(name=name, **sizes, **parts)
