"""What is kept for weight gradients that are put off (`parallel.deferred`): of each matrix its input, gathered where it
was cut, and the gradient of its output. Latent attention and experts are reckoned from their shapes."""

from __future__ import annotations

from ..specs import padded
from .saved import Saved, Term


def layer_put_off(saved: Saved, mixture: bool) -> list[Term]:
    """Of a layer, dense or with experts."""
    spec, hidden, heads, whole = saved.spec, saved.spec.hidden, saved.query_heads, saved.gathered
    if latent := spec.latent:
        attended = heads * latent.value_dim
        ins = 2 * (latent.q_rank or 0) + latent.kv_rank
        outs = heads * (2 * latent.nope_dim + latent.rope_dim + latent.value_dim) + latent.kv_rank + latent.rope_dim
    else:
        attended, ins = heads * spec.head_dim, 0
        outs = attended + 2 * saved.key_heads * spec.head_dim
    numbers = {"q, k, v in": hidden, "latents": ins, "gradients of q, k, v": outs, "of o": hidden, "mlp in": hidden}
    if not mixture:
        part = padded(spec.ffn, saved.tp) // saved.tp
        numbers |= {"product": part, "of gate and up": (1 + spec.gated) * part, "of down": hidden}
    terms = [Term("attention out", saved.tokens, attended, saved.width),
             *(Term(what, whole, n, saved.width) for what, n in numbers.items() if n)]
    return terms + (_experts(saved) if mixture else [])


def head_put_off(saved: Saved) -> list[Term]:
    """Of the head."""
    return [Term("head in", saved.gathered, saved.spec.hidden, saved.width),
            Term("gradients of logits", saved.gathered, saved.columns, saved.width)]


def _experts(saved: Saved) -> list[Term]:
    """Of router, experts and shared ones: each token is copied for each of its experts."""
    mixture, etp = saved.spec.experts, saved.layout.expert_tp
    assert mixture is not None
    rows = saved.tokens if etp == saved.tp else padded(saved.tokens, saved.tp) // saved.tp
    part, shared = (padded(ffn, etp) // etp for ffn in (mixture.ffn, mixture.shared * mixture.ffn))
    numbers = {"gradients of scores": mixture.routed, "sent to experts": mixture.active * saved.spec.hidden,
               "products, of gates and ups": mixture.active * 3 * part, "of downs": mixture.active * saved.spec.hidden,
               "of shared experts": 3 * shared + saved.spec.hidden * (shared > 0)}
    return [Term(what, rows, n, saved.width) for what, n in numbers.items() if n]
