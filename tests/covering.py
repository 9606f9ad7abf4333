"""Fewer cases than a full product: so many that any two values of two parameters are in one of them together."""

from itertools import combinations, product

import pytest


def pairs(*values):
    """Rows of the product of `values` in which each pair of values of two parameters occurs at least once."""
    rows = list(product(*(range(len(each)) for each in values)))
    of = {row: {(i, row[i], j, row[j]) for i, j in combinations(range(len(values)), 2)} for row in rows}
    left, taken = set().union(*of.values()), []
    while left:
        best = max(rows, key=lambda row: len(of[row] & left))
        left -= of[best]
        taken.append(best)
    return [tuple(each[i] for each, i in zip(values, row, strict=True)) for row in sorted(taken)]


def pairs_first(*values, key=repr):
    """All rows of the product: `pairs` for `make test`, the others marked `more`."""
    first = {key(row) for row in pairs(*values)}
    return [pytest.param(*row, marks=[pytest.mark.more] * (key(row) not in first)) for row in product(*values)]
