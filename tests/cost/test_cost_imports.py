"""specs, schedule and cost answer at once, in a browser too: they load nothing but the standard library."""

import subprocess
import sys

LOAD = """
import sys
before = set(sys.modules)
import shardlab.specs, shardlab.schedule, shardlab.cost
from shardlab.specs import units
shardlab.cost.memory(shardlab.specs.ModelSpec(hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=8, vocab=9))
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(tops - set(sys.stdlib_module_names) - {"shardlab"}))
"""


def test_nothing_outside_the_standard_library_is_loaded():
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
