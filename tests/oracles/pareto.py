"""The Pareto front by its definition: every row against every other."""

import math


def front(rows, maximize, valid):
    """Whether each row (a list of numbers) is on the front."""
    signed = [[-v if m else v for v, m in zip(row, maximize)] for row in rows]
    counts = [ok and not any(math.isnan(v) for v in row) for row, ok in zip(signed, valid)]

    def dominates(a, b):
        no_worse = all(x <= y for x, y in zip(a, b))
        return no_worse and any(x < y for x, y in zip(a, b))

    others = [row for row, ok in zip(signed, counts) if ok]
    return [
        ok and not any(dominates(other, row) for other in others) for row, ok in zip(signed, counts)
    ]
