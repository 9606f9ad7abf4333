"""What the account says is kept is kept, to the byte: plain, recomputed, cut; and what inference holds."""

import pytest
import torch
from measure import saved_bytes

from shardlab.cost.activations import activations
from shardlab.model import Transformer
from shardlab.parallel import tensor
from shardlab.specs import Layout, ModelSpec

SIZES = dict(hidden=24, layers=3, heads=12, kv_heads=12, head_dim=4, ffn=90, vocab=101)
BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
CASES = [(1, {}), (1, dict(kv_heads=1, tied=True, qk_norm=True, **BIASES)), (2, dict(kv_heads=2, qk_norm=True)),
         (3, dict(ffn=5, vocab=5, **BIASES)), (4, dict(kv_heads=2, tied=True, qk_norm=True)),
         (1, dict(hidden=96, heads=3, kv_heads=3, head_dim=32, ffn=256, vocab=1000)),
         (4, dict(hidden=50, layers=1, heads=4, kv_heads=4, head_dim=16, ffn=127, vocab=515))]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def kept(group, spec, dtype, recompute, batch, seq):
    torch.manual_seed(0)
    model = tensor.cut(Transformer(spec, recompute).to(dtype), group)
    tokens, labels = torch.randint(0, spec.vocab, (2, batch, seq))
    return saved_bytes(model, lambda: model.loss(tokens, labels))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("p,sizes", CASES)
def test_kept_for_backward(pool, p, sizes, recompute, dtype):
    spec, size = ModelSpec(**(SIZES | sizes)), dict(batch=2, seq=13)
    bill = activations(spec, Layout(tp=p), **size, dtype=dtype, recompute=recompute)
    assert pool(p).run(kept, spec, DTYPES[dtype], recompute, 2, 13) == [bill.total] * p
