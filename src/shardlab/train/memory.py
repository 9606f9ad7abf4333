"""How much memory a rank holds, cheap enough to be asked in every step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def held(device: torch.device) -> int:
    """Bytes: on a GPU the most that PyTorch's tensors have taken there so far; on a CPU what the process has in memory
    at this moment that is in no file (RssAnon), Python and PyTorch among it. Where the system tells no such thing
    (macOS), the most that the process has had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    import resource  # which Windows has not

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
