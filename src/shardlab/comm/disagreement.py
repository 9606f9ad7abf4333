"""What ranks are told that do not do the same: one wording, whichever way they found out."""

from __future__ import annotations

from collections.abc import Mapping


def of_ranks(said: Mapping[int, str]) -> str:
    """{rank: what it is about to do} as the text of an error."""
    return "\n".join(["the ranks disagree on the collective they enter:",
                      *(f"  rank {rank}: {text}" for rank, text in said.items())])


def of_message(src: int, dst: int, sent: tuple[str, int], expected: tuple[str, int]) -> str:
    """(what it is, its bytes) as rank `src` has sent it and rank `dst` expects it, as the text of an error; "" where
    the two are the same."""
    if sent == expected:
        return ""
    return (f"rank {dst} waits for {expected[0]} ({expected[1]:,} B) from rank {src}, which has sent {sent[0]} "
            f"({sent[1]:,} B): both must send and receive in the same order")
