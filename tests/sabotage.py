"""Does faults to a copy of the library, one at a time, and sees whether the test that is meant for each goes red.

    python tests/sabotage.py                 all, two at a time
    python tests/sabotage.py --list          their names, rows and tests
    python tests/sabotage.py --only NAME     one, with what its test said

The checkout is never changed. A fault is seen where its test fails by an assertion: not where it can't be imported,
ends by another error, or stands still. Exits with 1 where one is not seen.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sabotages import FAULTS, Fault

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/shardlab")
WORKERS, LIMIT = 2, 120.0


class Outcome(NamedTuple):
    fault: Fault
    seen: bool
    seconds: float
    said: str


def copy(fault: Fault, folder: Path) -> None:
    """Library and tests with the fault in them. What Python has compiled is copied too, for it goes by times of files.
    Raises ValueError where the fault's text does not stand in its file once."""
    for part in ("src", "tests", "tools", "book/_ext"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    file = folder / PACKAGE / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} stands {text.count(fault.old)} times in {fault.file}, not once")
    file.write_text(text.replace(fault.old, fault.new))


def run(test: str, folder: Path, limit: float) -> tuple[int | None, str]:
    """(pytest's exit status, None at the time limit; what it said), of one test in the folder."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "more or not more", f"tests/{test}"]
    # no plugins: those of notebooks take longer to import than most of these tests run
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=limit)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]


def do(fault: Fault, limit: float = LIMIT) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardlab-sabotage-") as name:
        copy(fault, Path(name))
        status, said = run(fault.test, Path(name), limit)
    return Outcome(fault, status == 1 and asserted(said), time.monotonic() - start, said)


def asserted(said: str) -> bool:
    """Whether what ended pytest's test was an assertion, here or on a rank."""
    ended = re.findall(r"^\S+\.py:\d+: (\w+)$", said, re.M)  # under each traceback: where, and by what
    on_rank = ended[-1:] == ["RankError"] and bool(re.search(r"^E +AssertionError", said, re.M))
    return on_rank or ended[-1:] in (["AssertionError"], ["Failed"])


def every(some: Sequence[Fault], limit: float = LIMIT, workers: int = WORKERS) -> Iterator[Outcome]:
    with ThreadPoolExecutor(workers) as executor:
        yield from executor.map(lambda fault: do(fault, limit), some)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="say which faults there are, and do nothing")
    parser.add_argument("--only", metavar="NAME", help="the one fault of this name")
    parser.add_argument("--timeout", type=float, default=LIMIT, help="seconds for one test (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="faults at a time (default: %(default)s)")
    given = parser.parse_args()
    some = [fault for fault in FAULTS if given.only in (None, fault.name)]
    if not some:
        parser.error(f"no fault is called {given.only!r}: see --list")
    if given.list:
        for fault in some:
            print(f"{fault.row:5} {fault.name:50} {fault.file:25} {fault.test}")
        return 0
    left = 0
    for outcome in every(some, given.timeout, given.workers):
        left += not outcome.seen
        told = "red" if outcome.seen else "NOT SEEN"
        print(f"{told:9} {outcome.seconds:5.0f} s  {outcome.fault.name}", flush=True)
        if given.only or not outcome.seen:
            print("\n".join(outcome.said.splitlines()[-40:]), flush=True)
    print(f"{len(some) - left} of {len(some)} faults are seen by their tests")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
