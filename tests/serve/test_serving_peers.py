"""The engine beside `transformers`: its own `generate`, on the same folders, one prompt after the other."""

import pytest
import torch
from checkpoints import oracle
from served import prompts, requests, texts

from shardlab.model import pretrained
from shardlab.model.checkpoint import from_folder
from shardlab.serve import Engine, Request, mixed


def generated(model, given):
    """What `transformers` makes of each request, greedily, never ending early."""
    out = []
    for request in given:
        prompt = torch.tensor([request.prompt])
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.new_tokens,
                              do_sample=False, eos_token_id=None, pad_token_id=0)
        out.append(text[0, prompt.shape[1] :].tolist())
    return out


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3_moe", "deepseek", "deepseek, yarn"])
def test_tiny_checkpoints(tiny, kind):
    """All at once, in chunks, in a pool that is too small for all of them."""
    given = requests(prompts(vocab=200), new=16)
    want = generated(oracle(tiny(kind)), given)
    assert len(set(map(tuple, want))) == len(want) and min(len(set(text)) for text in want) >= 4
    engine = Engine(from_folder(tiny(kind)), blocks=14, block_size=4, policy=mixed(16))
    assert texts(engine.run(given)) == want
    assert engine.scheduler.preempted > 0


QUESTIONS = "What is the capital of France?", "Why is the sky blue?"


def test_the_real_model():
    """SmolLM2-135M asked two questions at once, then again when it knows their beginnings."""
    transformers = pytest.importorskip("transformers")
    try:
        folder = pretrained.smollm2()
    except RuntimeError as error:
        pytest.skip(f"the weights of SmolLM2-135M are not here and can't be fetched: {error}")
    tokenizer = pretrained.tokenizer(folder)
    given = [Request(i, tokenizer.encode(pretrained.chat(question)).ids, 10) for i, question in enumerate(QUESTIONS)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    want = generated(theirs, given)
    assert "Paris" in tokenizer.decode(want[0]) and want[0] != want[1]
    engine = Engine(from_folder(folder), blocks=24, block_size=16, policy=mixed(32))
    for _ in range(2):
        answers = engine.run(given)
        assert texts(answers) == want
    assert [answer.cached for answer in answers] == [len(request.prompt) // 16 * 16 for request in given]
