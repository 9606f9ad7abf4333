"""The real model on one and on three ranks: logits of `transformers`, the same words, a third of the bytes."""

import pytest
import torch

from shardlab.cost.memory import memory
from shardlab.launch import launch
from shardlab.model import Transformer, checkpoint, pretrained
from shardlab.parallel import tensor
from shardlab.specs import Layout, ModelSpec

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder():
    try:
        return pretrained.smollm2()
    except RuntimeError as error:
        pytest.skip(f"the weights of SmolLM2-135M are not here and can't be fetched: {error}")


@pytest.fixture(scope="module")
def prompt(folder):
    return torch.tensor([pretrained.tokenizer(folder).encode(pretrained.chat(QUESTION)).ids])


@pytest.fixture(scope="module")
def expected(folder, prompt):
    """Logits and 40 greedy tokens of `transformers` on the same folder."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(prompt).logits
    return logits, model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)


def speak(group, folder, prompt):
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))
    model = tensor.cut(model, group)
    read = checkpoint.load(model, folder)
    with torch.no_grad():
        logits = model(prompt)
    held = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    return logits, model.generate(prompt, 16), held, read


@pytest.mark.parametrize("p", [1, 3])
def test_the_real_model_on_ranks(folder, prompt, expected, p):
    bill = memory(ModelSpec.from_config(folder), Layout(tp=p), "fp32")
    for logits, words, held, read in launch(speak, p, folder, prompt, timeout=240):
        assert ((logits - expected[0]).abs().max() / expected[0].abs().max()).item() < 1e-4
        assert torch.equal(words, expected[1][:, : prompt.shape[1] + 16])
        assert held == bill.weights == read


def test_it_answers_and_ends_its_turn(folder, prompt, expected):
    words = expected[1][0, prompt.shape[1] :].tolist()
    said = pretrained.tokenizer(folder).decode(words, skip_special_tokens=False)
    assert said.startswith("The capital of France is Paris.<|im_end|>")


def test_two_ranks_cannot_share_nine_heads(folder):
    with pytest.raises(ValueError, match="9 heads and 3 KV heads"):
        Layout(tp=2).check(ModelSpec.from_config(folder))
