"""Data by name and data by path: the tables that come with the library, and the reader's own files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any


def bundled(table: str) -> dict[str, dict[str, Any]]:
    """The table `data/TABLE.toml`: name → entry, as it stands in the file."""
    import tomllib  # here, as below: what is imported without being asked for any data should not wait for parsers

    return tomllib.loads(Path(__file__).with_name("data").joinpath(f"{table}.toml").read_text(encoding="utf-8"))


def is_path(name: str | Path) -> bool:
    """Whether `name` means a file: a Path, or text that ends in .toml or .json."""
    return isinstance(name, Path) or name.endswith((".toml", ".json"))


def own_file(path: str | Path) -> dict[str, Any]:
    """The content of the reader's own TOML or JSON file. Raises ValueError where it is broken, FileNotFoundError."""
    import json
    import tomllib

    path = Path(path)
    parse = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a whole {path.suffix[1:].upper()} file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not keys with values")
    return content


def entry(what: str, name: str, table: dict[str, Any]) -> Any:
    """The entry of `table` called `name`, in any case. ValueError on another name, with the nearest there are."""
    if name.lower() in table:
        return table[name.lower()]
    raise ValueError(f"no bundled {what} {name!r}: did you mean {' or '.join(nearest(name.lower(), table))}?")


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The names most like `name`, up to three; all there are if none is like it."""
    import difflib

    return difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)


def check_keys(where: str, found: Collection[str], needed: Collection[str], optional: Collection[str]) -> None:
    """ValueError, by name, on a needed key that is missing and on a key that means nothing."""
    known = [*needed, *optional]
    for key in found:
        if key not in known:
            raise ValueError(f"{where} has an unknown key {key!r}: did you mean {' or '.join(nearest(key, known))}?")
    for key in needed:
        if key not in found:
            raise ValueError(f"{where} lacks the key {key!r}")
