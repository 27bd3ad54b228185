"""The best rows: one objective sorts, several leave their Pareto front."""

from collections.abc import Sequence

import numpy as np

from moejax.report._rows import STATUS, Rows
from moejax.sweep import pareto_mask


def best(
    rows: Rows, minimize: Sequence[str] = (), maximize: Sequence[str] = (), *, top: int = 10
) -> Rows:
    """The `top` rows of one objective, the best first, ties in the order of the sweep; or the
    rows that no other beats in all of several, sorted by the first.

    Rows that failed, and rows without a number, are not among them.

    **Raises:** `ValueError` where there is no objective, one is named twice or is no column of
    numbers, or no row has numbers.
    """
    names = [*minimize, *maximize]
    if not names:
        raise ValueError("name what to --minimize or --maximize")
    if len(set(names)) < len(names):
        raise ValueError(f"an objective is named twice: {', '.join(names)}")
    values, usable = objectives(rows, names)
    if not usable.any():
        raise ValueError(f"no row has {' and '.join(names)} (all failed, or without a number)")
    more = [False] * len(minimize) + [True] * len(maximize)
    if len(names) > 1:
        usable = np.asarray(pareto_mask(values, maximize=more, valid=usable))
    first = np.where(more[0], -values[:, 0], values[:, 0])
    order = np.argsort(np.where(usable, first, np.inf), kind="stable")
    return rows.take(order[: min(int(usable.sum()), top)])


def objectives(rows: Rows, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """[rows, objectives] numbers, and where a row is okay and all of them are there."""
    for name in names:
        if rows[name].dtype.kind not in "biuf":
            raise ValueError(f"column {name!r} holds text, not numbers")
    values = np.stack([rows[name].astype(np.float64) for name in names], axis=1)
    return values, ~np.isnan(values).any(axis=1) & rows.okay


def worth_showing(rows: Rows, names: Sequence[str]) -> list[str]:
    """Columns of a table of few rows: what was varied, what is asked for, what limits."""
    limits = [name for name in ("limited_by",) if name in rows.columns]
    failed = [STATUS] if STATUS in rows.columns and not rows.okay.all() else []
    return list(dict.fromkeys([*rows.axes, *names, *limits, *failed]))
