"""The same gradients as torch.distributed.pipelining's, on the same model, schedule by schedule.

PyTorch's schedules take the loss of each micro-batch as it is and then divide the gradients by the number of
micro-batches, which is the gradient of the whole batch's mean only where all have as many labels. Here that is switched
off, `scale_grads=False`, and the loss they are given divides by the labels of all micro-batches, as `execute.run` does.
Their micro-batches must have one shape; labels are left out of some more than of others all the same.
"""

from pipes import build, distance

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from shardlab.model.head import cross_entropy
from shardlab.parallel import execute, grads, pipeline
from shardlab.schedule import SCHEDULES, placement
from shardlab.specs.stages import split

THEIRS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
          "dualpipe_v": "ScheduleDualPipeV"}


class Part(nn.Module):
    """Some layers of the model, as PyTorch takes them: from tokens or the stream to the stream or logits."""

    def __init__(self, model, layers, first, last, shape):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})
        self.embed = model.embed_tokens if first else None
        self.norm, self.head = (model.norm, model.lm_head) if last else (None, None)
        self.through, self.shape = model.through, shape

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        x = self.through(self.layers.values(), x, self.shape)
        return x if self.head is None else self.head(self.norm(x))


def against_pytorch(group, name, microbatches):
    """(The largest distance between gradients, between losses, how many gradients were compared)."""
    orders = SCHEDULES[name](group.size(), microbatches)
    theirs, ours = (build(tied=False, frozen=()) for _ in range(2))
    tokens, labels = torch.randint(0, 53, (2, 2 * microbatches, 6), generator=torch.Generator().manual_seed(0))
    labels = labels.where(torch.arange(2 * microbatches).unsqueeze(1) > torch.arange(6) - 2, -100)
    valid = int((labels != -100).sum())

    mine = placement(orders)[group.rank()]
    bounds = split(5, 1 + max(max(each) for each in placement(orders)))
    last = len(bounds) - 1
    stages = [PipelineStage(Part(theirs, bounds[i], i == 0, i == last, torch.Size((2, 6))), i, len(bounds),
                            torch.device("cpu"), group=group) for i in mine]
    runs = getattr(schedules, THEIRS[name])(
        stages if len(stages) > 1 else stages[0], microbatches, scale_grads=False,
        loss_fn=lambda logits, labels: cross_entropy(logits, labels, valid))
    losses = []
    runs.step(*([tokens] if 0 in mine else []), **(dict(target=labels, losses=losses) if last in mine else {}))

    pipeline.cut(ours, group, orders)
    loss = execute.run(ours, orders, list(zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True)))
    grads.finish(ours)
    compared = sum(p.grad is not None for p in ours.parameters())
    return (distance({n: p.grad for n, p in theirs.named_parameters()}, ours, lambda p: p.grad),
            abs(sum(losses) - loss).item() if losses else 0.0, compared)


@pytest.mark.parametrize("name,microbatches", [("gpipe", 3), ("1f1b", 4), ("interleaved", 4), ("dualpipe_v", 4)])
def test_the_gradients_are_those_of_pytorch_s_pipelining(pool, name, microbatches):
    outcomes = pool(2).run(against_pytorch, name, microbatches)
    assert sum(compared for *_, compared in outcomes) == 3 + 5 * 16
    for gradients, loss, _ in outcomes:
        assert gradients < 1e-10 and loss < 1e-10
