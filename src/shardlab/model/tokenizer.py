"""The tokenizer of a model: read from a Hugging Face folder, or made from a GGUF's vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .from_gguf import value

_CONTROL = 3  # gguf.TokenType.CONTROL: a token that no text makes, such as the end of a turn


def tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder: `.encode(text).ids`, `.decode(ids)`. Raises ValueError if it has none."""
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{folder} has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def from_vocabulary(file: gguf.GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer (GPT-2's, with digits one by one) of a GGUF file.

    Raises ValueError where the file's tokenizer is of another kind.
    """
    kind = (value(file, "tokenizer.ggml.model"), value(file, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF's tokenizer is of kind {kind[0]!r}, {kind[1]!r}; only 'gpt2', 'smollm' is read")
    words, merges = value(file, "tokenizer.ggml.tokens"), value(file, "tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, pairs))
    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    made.decoder = decoders.ByteLevel()
    kinds = value(file, "tokenizer.ggml.token_type")
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return made
