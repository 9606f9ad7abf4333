"""Write requirements.txt from a freeze: `pip freeze --all | python tools/freeze.py > requirements.txt`.

The freeze comes from an environment made from requirements.in alone (`make requirements`). Three things are changed:
a local build tag such as `torch==2.13.0+cpu` is dropped, because it names one index's file; pip itself and our own
library are left out; and lines of requirements.in that hold on another system only are carried over.
"""

import re
import sys
from pathlib import Path

HEADER = "# The exact set that CI passes on, written from requirements.in by `make requirements`. Edit that one.\n"
LEFT_OUT = {"pip", "shardlab"}


def exact(freeze: str, wanted: str) -> str:
    """The text of requirements.txt. `freeze` is pip's output, `wanted` the text of requirements.in."""
    pins = [line for line in freeze.splitlines() if re.fullmatch(r"[\w.-]+==\S+", line)]
    lines = [re.sub(r"\+\w+$", "", pin) for pin in pins if pin.split("==")[0].lower() not in LEFT_OUT]
    lines += [line for line in wanted.splitlines() if ";" in line.split("#")[0]]
    return HEADER + "\n".join(sorted(lines, key=str.lower)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(exact(sys.stdin.read(), Path("requirements.in").read_text()))
