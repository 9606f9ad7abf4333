"""What a collective takes: bytes sent and messages waited for, in a ring."""

from __future__ import annotations


def ring_wire(op: str, payload: int, ranks: int) -> float:
    """Bytes that each of `ranks` sends for `op` on `payload` bytes handed in, in a ring.

    2 (p-1)/p of an all-reduce's payload, p-1 times an all-gather's (Patarasuk & Yuan 2009). Raises ValueError on
    another op.
    """
    return _share(op, ranks) * payload


def ring_hops(op: str, ranks: int) -> int:
    """Messages that follow one another in a ring of `ranks`: what each costs is paid that many times."""
    _share(op, ranks)
    return {"all_reduce": 2, "all_gather": 1}[op] * (ranks - 1)


def _share(op: str, p: int) -> float:
    shares = {"all_reduce": 2 * (p - 1) / p, "all_gather": p - 1}
    if op not in shares:
        raise ValueError(f"no ring known for {op!r}: use one of {', '.join(shares)}")
    return shares[op]
