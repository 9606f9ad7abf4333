"""Replicas in processes of their own, for tests: a cluster of them that is looked at after each event, and slow models,
so that what is sent can be caught on its way."""

import time

from clusters import Watched
from served import build, expected, plain, texts

from shardlab.serve.disagg import Workers
from shardlab.serve.metrics import finished
from shardlab.serve.replica import pools

BLOCKS, SIZE = 80, 4


def workers(prefill=1, decode=1, kind="gqa", made=None, **how):
    """Workers of `build(kind)`, or of what `made()` makes; `blocks`, `block_size`, `dtype` and so on are replicas'."""
    of_replicas = {name: how.pop(name) for name in ("prefill_tp", "decode_tp", "dtype", "policy", "watermark")
                   if name in how}
    replicas = pools(prefill, decode, blocks=how.pop("blocks", BLOCKS), block_size=how.pop("block_size", SIZE),
                     **of_replicas)
    return Workers(made or (lambda: build(kind)), replicas, **{"timeout": 300} | how)


def fresh(world):
    """New instances, at time 0, their pools empty and each in another order: no two block tables are alike."""
    instances = world.instances()
    for i, each in enumerate(instances):
        each.pool.release(each.pool.take(7 * i))
    return instances


def serve(world, given, instances=None, **how):
    """(The cluster after its run, the answers)."""
    cluster = Watched(instances or fresh(world), world, **how)
    return cluster, cluster.run(given)


def returned(cluster):
    """Nothing is left anywhere: each block of those that live is free, and each transfer has come to its end."""
    for each in cluster.instances:
        if each.alive:
            assert each.pool.free == each.pool.blocks and each.outstanding == 0 and not each.scheduler.busy, each.name
    assert not cluster.flights and not cluster.handovers.draining and not cluster.world._moving
    return {transfer.state for transfer in cluster.transfers.values()} <= {"freed", "dropped"}


def right(cluster, answers, kind="gqa"):
    """All of `served.requests()` are answered as the plain model does, and nothing is left."""
    assert texts(answers) == expected(kind)[0]
    assert all(map(finished, answers)) and returned(cluster)
    return True


def smoothly(cluster, answers, kind="gqa"):
    """And nothing was done twice on the way."""
    assert not cluster.world.failed and not sum(answer.preempted for answer in answers)
    return right(cluster, answers, kind)


def alone(given, kind="gqa"):
    """What the plain model makes of each of these requests."""
    model = build(kind)
    return [plain(model, request)[0] for request in given]


def slow(kind, each_layer, before_head):
    """A maker of `build(kind)` that takes so many seconds for each layer of a prompt, and so many after the last."""
    def made():
        model = build(kind)
        for layer in model.layers:
            wait(layer, each_layer)
        wait(model.norm, before_head)
        return model

    return made


def wait(module, seconds):
    """Have it take so many seconds more, where it is given a prompt."""
    module.register_forward_pre_hook(lambda module, args: time.sleep(seconds) if args[0].shape[1] > 1 else None)
