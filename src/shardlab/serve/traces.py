"""Readers of two public formats of what users asked a service for: when, how long, and with which prefix."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from ..specs.check import whole
from .arrivals import draws
from .request import Request
from .workload import tokens

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK = 512  # tokens that one of Mooncake's hash_ids stands for
MOST = 10**7  # tokens of a prompt: no model reads more, and a wrong column may say so
Line = tuple[float, int, int, list[int]]  # seconds on the trace's clock, tokens in and out, ids of the prompt's blocks


def azure(path: str | Path, vocab: int, seed: int = 0) -> list[Request]:
    """The requests of a CSV file TIMESTAMP,ContextTokens,GeneratedTokens, the first at 0 s, with random prompts.

    The format of the Azure LLM inference traces of 2023 (github.com/Azure/AzurePublicDataset; Patel et al., Splitwise,
    ISCA 2024), which say how many tokens came in and went out, not which. Raises ValueError that names file and line.
    """
    generator = draws(seed, "tokens")
    return _requests(path, _read(Path(path), _azure_line, ",".join(COLUMNS)),
                     lambda length, _: tokens(generator, length, vocab))


def mooncake(path: str | Path, vocab: int, seed: int = 0) -> list[Request]:
    """The requests of a file of JSON lines {timestamp (ms), input_length, output_length, hash_ids}, the first at 0 s.

    The format of Mooncake's traces (github.com/kvcache-ai/Mooncake; Qin et al., FAST 2025). An id stands for 512 tokens
    and all before them; equal ids become equal tokens, drawn from `vocab`, so that prompts share the prefixes they
    shared. Raises ValueError that names file and line.
    """
    seed, known = whole("seed", seed, least=0), dict[int, "array[int]"]()

    def prompt(length: int, ids: list[int]) -> array[int]:
        out = array("i")
        for i in ids:
            if i not in known:
                known[i] = tokens(np.random.default_rng([seed, i]), BLOCK, vocab)
            out.extend(known[i])
        return out[:length]

    return _requests(path, _read(Path(path), _mooncake_line), prompt)


def _requests(path: str | Path, lines: Iterator[Line], prompt: Callable[[int, list[int]], array[int]]) -> list[Request]:
    """Requests in order of time, numbered from 0."""
    ordered = sorted(lines, key=lambda line: line[0])
    if not ordered:
        raise ValueError(f"{path} has no requests")
    start = ordered[0][0]
    return [Request(i, prompt(length, ids), new, at - start) for i, (at, length, new, ids) in enumerate(ordered)]


def _read(path: Path, parse: Callable[[str], Line], header: str = "") -> Iterator[Line]:
    """What `parse` makes of each line that is not empty, and of what it doesn't like an error with its number."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        if header and (found := file.readline().strip()) != header:
            raise ValueError(f"{path}, line 1: the columns are {found[:60] or 'missing'}, not {header}")
        for n, text in enumerate(file, 2 if header else 1):
            if text.strip():
                try:
                    yield parse(text.strip())
                except ValueError as error:  # json's and datetime's are
                    raise ValueError(f"{path}, line {n}: {error}") from None


def _azure_line(text: str) -> Line:
    row = text.split(",")
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} columns, not {len(COLUMNS)}")
    try:
        at = datetime.fromisoformat(row[0]).replace(tzinfo=None)  # drops the seventh digit of a second
    except ValueError:
        raise ValueError(f"TIMESTAMP must be like 2023-11-16 18:15:46.6805900, not {row[0]!r:.60}") from None
    length, new = (_tokens(name, int(value) if value.isdecimal() else value)
                   for name, value in zip(COLUMNS[1:], row[1:], strict=True))
    return (at - datetime(1970, 1, 1)).total_seconds(), length, new, []


def _mooncake_line(text: str) -> Line:
    line = json.loads(text)
    if not isinstance(line, dict) or not set(KEYS) <= set(line):
        raise ValueError(f"a JSON object with {', '.join(KEYS)} should be here, not {text[:60]}")
    at, length, new, ids = (line[key] for key in KEYS)
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise ValueError(f"timestamp must be milliseconds, 0 or more, not {at!r}")
    blocks = -(-_tokens("input_length", length) // BLOCK)
    if not isinstance(ids, list) or len(ids) != blocks:
        found = f"{len(ids)} ids" if isinstance(ids, list) else f"{ids!r:.60}"
        raise ValueError(f"{length:,} tokens are {blocks} blocks of {BLOCK}, but hash_ids has {found}")
    return at / 1000, length, whole("output_length", new), [whole("a hash id", i, least=0) for i in ids]


def _tokens(name: str, value: object) -> int:
    if (count := whole(name, value)) > MOST:
        raise ValueError(f"{name} is {count:,}, and no prompt has more than {MOST:,} tokens")
    return count
