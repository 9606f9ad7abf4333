"""What replicas do with one batch: how tokens are weighed, how often PyTorch's own sends, who holds what."""

import contextlib

import torch
import torch.distributed as dist
from facts import GB, SEVENTY
from facts_data import each
from torch.nn.parallel import DistributedDataParallel

from shardlab.cost import memory
from shardlab.launch import launch
from shardlab.model.head import cross_entropy
from shardlab.specs import Layout


def weight_of_a_lone_token(others):
    """How much more than each of another rank's tokens one counts that has its rank to itself, in a mean of means."""
    logits = torch.zeros(1 + others, 2, requires_grad=True)
    labels = torch.zeros(1 + others, dtype=torch.long)
    loss = (cross_entropy(logits[:1], labels[:1]) + cross_entropy(logits[1:], labels[1:])) / 2
    (gradient,) = torch.autograd.grad(loss, logits)
    return (gradient[0].norm() / gradient[-1].norm()).item()


def sent_by_ddp(group, passes):
    """How often PyTorch's DDP sends a bucket in so many passes, if no_sync is around all but the last backward."""
    model, sent = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group), []

    def hook(_, bucket):
        sent.append(bucket)
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    for i in range(passes):
        loss = model(torch.ones(1, 2)).sum()
        with contextlib.nullcontext() if i == passes - 1 else model.no_sync():
            loss.backward()
    return len(sent)


COMPUTED = {
    "A4-dp-fits": lambda: memory(SEVENTY, Layout(dp=64), "bf16", training=True, master="fp32").held / GB,
    "A4-zero-order": lambda: 7.5e9 * each(1, 64) / GB,
    "A4-mean-of-means": lambda: weight_of_a_lone_token(7),
    "A4-no-sync": lambda: launch(sent_by_ddp, 2, 4)[0],
}
