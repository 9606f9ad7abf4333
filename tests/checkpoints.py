"""Tiny Hugging Face checkpoints with random weights, written by `transformers`: what the plain model must agree with.

Every kind of layer the model knows is in one of them. Weights, biases too, have std 0.1 and norms stray from 1 by as
much, so that a wrong layer shows in the logits; vocabularies and FFNs of 101 and 90 divide by nothing convenient.
"""

import pytest
import torch

SIZES = dict(
    vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="eager",
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=30)
LATENT = EXPERTS | dict(
    num_key_value_heads=4, kv_lora_rank=20, q_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=18,
    head_dim=8, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    num_nextn_predict_layers=0,
)  # fmt: skip
KINDS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "yarn": ("Llama", dict(rope_parameters=YARN)),
    "linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "tied": ("Llama", dict(tie_word_embeddings=True)),
    "bias": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "odd": ("Llama", dict(vocab_size=101, intermediate_size=90, num_key_value_heads=4)),
    "qwen2": ("Qwen2", dict(num_key_value_heads=1)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True, vocab_size=101, intermediate_size=90)),
    "deepseek-dense": ("DeepseekV3", LATENT | dict(first_k_dense_replace=2, attention_bias=True)),
}
MIXTURES = {
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=30)),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | dict(num_experts=8, norm_topk_prob=True, mlp_only_layers=[0])),
    "qwen3_moe, weights as they are": ("Qwen3Moe", EXPERTS | dict(num_experts=8, tie_word_embeddings=True)),
    "deepseek": ("DeepseekV3", LATENT | dict(n_group=2, topk_group=1)),
    "deepseek, straight queries": ("DeepseekV3", LATENT | dict(q_lora_rank=None, norm_topk_prob=False,
                                                               n_shared_experts=2, first_k_dense_replace=0)),
    "deepseek, yarn": ("DeepseekV3", LATENT | dict(rope_interleave=False, n_group=4, topk_group=2,
                                                   rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7))),
}
KINDS |= MIXTURES


def write(kind, folder):
    """Write the checkpoint called `kind` into `folder`; the same bytes each time."""
    import transformers

    family, changes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(folder)


def oracle(folder):
    """The checkpoint as `transformers` runs it: float32, eager attention, experts one after another."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def apart(tensors):
    """What `transformers` holds, by our names: experts one by one, which it stacks, gate above up."""
    out = {}
    for name, tensor in tensors.items():
        before, stacked, kind = name.removeprefix("model.").partition(".experts.")
        if not stacked:
            out[before] = tensor
        elif kind == "down_proj":
            out |= {f"{before}.experts.{e}.down_proj.weight": each for e, each in enumerate(tensor)}
        else:
            for e, each in enumerate(tensor):
                names = [f"{before}.experts.{e}.{half}_proj.weight" for half in ("gate", "up")]
                out |= dict(zip(names, each.chunk(2), strict=True))
    return out


def prompt(vocab, batch=2, seq=24, seed=1):
    """Random tokens (batch, seq), none of them special."""
    return torch.randint(3, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(kind)`: the folder of a tiny random Hugging Face checkpoint, one of `KINDS`, written once."""
    pytest.importorskip("transformers", reason="the tiny checkpoints are written by transformers, of the test extra")
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind):
        if not (root / kind).exists():
            write(kind, root / kind)
        return root / kind

    return folder
