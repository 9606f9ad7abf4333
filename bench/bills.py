"""How fast the accounts answer: 10,000 memory bills, the planner's search, a fresh process's import of `shardlab.cost`.

Bills are a mix of models, layouts, formats and tasks, each asked for its bytes on a rank. The search is for the best
layouts of DeepSeek-V3 on 2048 H800 at its published batch; the plan's page has the bill of each of the best ten, to the
last action of their schedules. The import is what it adds to an empty Python, bytecode cached, the least of several.
All are processor time: a shared machine's clock tells of others.

    python bench/bills.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice

from shardlab.cost import memory, plan_training, serving, training
from shardlab.specs import ClusterSpec, Layout, find_model

BILLS, BILLS_LIMIT, PLAN_LIMIT, IMPORT_LIMIT = 10_000, 2.0, 2.0, 0.1
MODELS = [find_model(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3")]
ASKED = [
    lambda spec, layout: memory(spec, layout, "bf16", training=True, master="fp32"),
    lambda spec, layout: memory(spec, layout, "fp8"),
    lambda spec, layout: serving(spec, layout, context=8192, concurrency=32, dtype="fp8"),
    lambda spec, layout: training(spec, layout, batch=1, seq=4096, recompute="full"),
]


def bills(n: int) -> float:
    """Seconds of processor time for `n` bills, no two alike in a row."""
    mix = [(ask, spec, Layout(tp)) for ask in ASKED for spec in MODELS for tp in (1, 2, 4)]
    start = time.process_time()
    for ask, spec, layout in islice(cycle(mix), n):
        assert ask(spec, layout).per_rank > 0
    return time.process_time() - start


def plan() -> tuple[int, float, float]:
    """How many layouts fit, seconds of processor time that it took to find the best, and to write the page of them."""
    start = time.process_time()
    found = plan_training(find_model("deepseek-v3"), ClusterSpec.of("h800", 2048), tokens=15360 * 4096, seq=4096,
                          arithmetic="fp8")
    searched = time.process_time()
    str(found)
    return found.search.fit, searched - start, time.process_time() - searched


def processor_time(code: str, environ: dict[str, str], repeats: int = 7) -> float:
    """The least processor time, in seconds, of a fresh Python that runs `code`."""
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=environ, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> None:
    seconds = bills(BILLS)
    fit, search, page = plan()
    with tempfile.TemporaryDirectory() as cache:
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = cache
        processor_time("import shardlab.cost", environ, 1)
        added = processor_time("import shardlab.cost", environ) - processor_time("pass", environ)
    print(f"{BILLS:,} bills in {seconds:.2f} s, {seconds / BILLS * 1e6:.0f} µs each (aim: {BILLS_LIMIT} s)")
    print(f"DeepSeek-V3 on 2048 cards: the best of {fit:,} layouts that fit in {search:.2f} s (aim: {PLAN_LIMIT} s), "
          f"their page in {page:.1f} s")
    print(f"import shardlab.cost: {added * 1000:.0f} ms (aim: {IMPORT_LIMIT * 1000:.0f} ms)")


if __name__ == "__main__":
    main()
