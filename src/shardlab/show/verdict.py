"""A prediction met with what was found, and with the reason."""

from __future__ import annotations


def verdict(what: str, predicted: float | str | bool | None, found: float | str | bool, because: str,
            within: float = 0.0) -> str:
    """What was found, and whether that was predicted (to a relative `within`); `because` on a second line if not.

    A prediction of None is one not made yet.
    """
    if predicted is None:
        return f"{what}: {_text(found)}\n    {because}"
    if isinstance(predicted, (int, float)) and isinstance(found, (int, float)):
        right = abs(predicted - found) <= within * abs(found)
    else:
        right = predicted == found
    if right:
        return f"{what}: {_text(found)}, as you predicted"
    return f"{what}: {_text(found)}; you predicted {_text(predicted)}\n    {because}"


def _text(value: float | str | bool) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
