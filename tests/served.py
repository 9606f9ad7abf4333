"""Small models to serve, requests for them, and what must come back: the plain model's text, computed without a cache.

Weights are large and norms stray from 1, so that texts are not one token over and over, and differ from prompt to
prompt: `test_the_texts_mean_something` keeps that. Nothing divides: 3 layers, FFN 44, vocabulary 101.
"""

from collections import deque
from functools import lru_cache

import torch

from shardlab.model import Transformer, initialise
from shardlab.serve import BlockPool, Engine, Request, Scheduler, VirtualClock, likeliest
from shardlab.specs import Experts, Latent, ModelSpec

SIZES = dict(hidden=32, layers=3, heads=4, head_dim=8, ffn=44, vocab=101)
LATENT = Latent(kv_rank=12, rope_dim=4, nope_dim=6, value_dim=5, q_rank=14)
KINDS = {
    "gqa": dict(kv_heads=2),
    "mha, tied": dict(kv_heads=4, tied=True, qk_norm=True, attention_bias=True),
    "mqa": dict(kv_heads=1),
    "mla": dict(kv_heads=4, latent=LATENT),
    "mixture": dict(kv_heads=2, experts=Experts(routed=8, active=2, ffn=13, shared=1, first_dense=1)),
}
PROMPTS, NEW = (3, 24, 1, 17, 8, 33), 12  # tokens; of block sizes 4 and 8 whole blocks too


def build(kind="gqa", dtype=torch.float32):
    model = initialise(Transformer(ModelSpec(**SIZES, **KINDS[kind])), seed=24, std=0.35)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        if model.spec.tied:
            model.embed_tokens.weight.mul_(0.1)  # or each token is followed by itself
    return model.to(dtype)


def prompts(lengths=PROMPTS, vocab=101, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def requests(some=None, new=NEW, **how):
    """One for each prompt, by default those of `prompts`."""
    return [Request(i, prompt, new, **how) for i, prompt in enumerate(prompts() if some is None else some)]


def plain(model, request):
    """(The tokens that the uncached model makes of a request, the logits (tokens, vocab) that they were chosen by)."""
    start = len(request.prompt)
    text = model.generate(torch.tensor([request.prompt]), request.new_tokens, request.stop, cached=False)
    with torch.no_grad():
        return text[0, start:].tolist(), model(text)[0, start - 1 : -1]


@lru_cache
def expected(kind="gqa", dtype=torch.float32):
    """What `build(kind)` makes of `requests()`: tokens of each, logits of each."""
    model = build(kind, dtype)
    made = [plain(model, request) for request in requests()]
    return [tokens for tokens, _ in made], [logits for _, logits in made]


def serve(model, given, **how):
    """(The engine after its run, the answers, and of each the logits (tokens, vocab) that it was chosen by)."""
    rows, kept = list[torch.Tensor](), {request.number: [] for request in given}

    def choose(logits):
        rows.append(logits)
        return likeliest(logits)

    engine = Engine(model, choose=choose, **how)
    made = engine.scheduler.made

    def look(batch, tokens, now):
        wanted = [item.number for item in batch.items if item.samples]
        for number, row in zip(wanted, rows.pop() if wanted else [], strict=True):
            kept[number].append(row)
        return made(batch, tokens, now)

    engine.scheduler.made = look
    answers = engine.run(given)
    return engine, answers, [torch.stack(each) for each in kept.values() if each]


def texts(answers):
    return [answer.tokens for answer in answers]


def apart(ours, theirs):
    """The largest distance of logits, over the largest of them."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


class Faked:
    """A scheduler with nobody who computes: tokens are made up, and time passes as `step_time` says."""

    def __init__(self, blocks, block_size, policy, step_time=lambda work: 1.0, **how):
        self.scheduler = Scheduler(BlockPool(blocks, block_size), policy, **how)
        self.clock, self.batches = VirtualClock(step_time), []

    def run(self, given, look=lambda batch: None, most=10_000):
        """The answers; `look(batch)` sees each batch before it is computed."""
        due, answers = deque(sorted(given, key=lambda request: request.arrival)), {}
        for _ in range(most):
            while due and due[0].arrival <= self.clock.now():
                request = due.popleft()
                answers[request.number] = self.scheduler.add(request)
            batch = self.scheduler.step()
            if batch is None:
                if not due:
                    return [answers[request.number] for request in given]
                self.clock.wait_until(due[0].arrival)
                continue
            look(batch)
            self.batches.append(batch.work)
            self.clock.spend(batch)
            self.scheduler.made(batch, made_up(batch), self.clock.now())
        raise AssertionError(f"not done after {most} steps: {len(self.scheduler.running)} run, "
                             f"{len(self.scheduler.waiting)} wait")


def made_up(batch):
    """A token for each item that wants one: by number and place, so that it is the same after a preemption."""
    return {item.number: (7 * item.number + 3 * (item.start + len(item.tokens))) % 11 for item in batch.items
            if item.samples}
