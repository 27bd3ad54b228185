"""Means over seeds: one row for the rows that agree in everything else."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moejax.report._rows import STATUS, Rows


COUNT = "rows"


def group_ids(columns: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """[rows] numbers from 0, equal where rows agree in all columns, in order of appearance."""
    group = np.zeros(rows, np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        group = np.unique(group * len(values) + code, return_inverse=True)[1]
    first = np.unique(group, return_index=True)[1]
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[group]


def average(rows: Rows, over: Sequence[str]) -> Rows:
    """Means over some axes, of the rows that did not fail.

    Numbers are averaged; a truth value holds where it holds in all; of text, the most frequent
    (the first in the alphabet of equally many). A column `rows` counts what went in.

    **Raises:** `ValueError` for a name that is no column.
    """
    for name in over:
        rows[name]
    rows = rows.take(rows.okay)
    keys = [name for name in rows.axes if name not in over]
    group = group_ids([rows.columns[name] for name in keys], len(rows))
    count = np.bincount(group)
    first = np.unique(group, return_index=True)[1]
    columns = {}
    for name, column in rows.columns.items():
        if name in keys or name == STATUS:
            columns[name] = column[first]
        elif name not in over:
            columns[name] = _merged(column, group, count)
    columns[COUNT] = count
    return dataclasses.replace(rows, columns=columns, axes=tuple(keys))


def _merged(column: np.ndarray, group: np.ndarray, count: np.ndarray) -> np.ndarray:
    if column.dtype == bool:
        return np.bincount(group, column) == count
    if column.dtype.kind in "iuf":
        mean = np.bincount(group, column.astype(np.float64), len(count)) / count
        whole = column.dtype.kind in "iu" and np.array_equal(mean[group], column)
        return mean.astype(column.dtype) if whole else mean
    return _most_frequent(column, group, len(count))


def _most_frequent(column: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    words, code = np.unique(column, return_inverse=True)
    pairs, number = np.unique(group * len(words) + code, return_counts=True)
    of_group, word = np.divmod(pairs, len(words))
    best = np.lexsort((-word, number, of_group))  # the last of a group is its most frequent
    last = np.flatnonzero(np.diff(of_group[best], append=groups))
    return words[word[best[last]]]


def half_width(column: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[groups], half of the 95 % confidence interval of the mean (Student's t); NaN for one and
    where a number is infinite."""
    from scipy.special import stdtrit

    column = column.astype(np.float64)
    count = np.bincount(group)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(group, column) / count
        square = np.bincount(group, (column - mean[group]) ** 2)
    freedom = np.where(count > 1, count - 1, np.nan)
    return stdtrit(freedom, 0.975) * np.sqrt(square / freedom / count)
