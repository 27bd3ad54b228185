"""Means over seeds, and how far to trust them."""

from collections.abc import Mapping, Sequence

import numpy as np

from moejax._checks import lookup


def mean_and_interval(values: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half-width of its 95 % confidence interval (Student's t), over one axis.

    Pair what is compared before: the interval of a ratio per seed is far narrower than that of
    two means. The half-width is NaN for a single value.

    **Raises:** `ValueError` where there is no value at all.
    """
    from scipy import stats

    values = np.asarray(values, dtype=float)
    if values.ndim == 0 or values.size == 0:
        raise ValueError(f"values of shape {values.shape}: allowed is at least one along an axis")
    number = values.shape[axis]
    if number == 1:
        mean = np.mean(values, axis=axis)
        return mean, np.full_like(mean, np.nan)
    spread = np.std(values, axis=axis, ddof=1) / np.sqrt(number)
    return np.mean(values, axis=axis), stats.t.ppf(0.975, number - 1) * spread


def mean_by(
    table: Mapping[str, np.ndarray], by: Sequence[str], values: Sequence[str]
) -> dict[str, np.ndarray]:
    """Averages the rows of a tidy table that agree in some columns, in order of appearance.

    **Arguments:**

    - `table`: columns of equal length.
    - `by`: columns that name a group.
    - `values`: columns to average.

    **Returns:** the columns `by`, the means `values`, and `NAME_low`, `NAME_high`: their 95 %
    confidence intervals (NaN for a group of one).

    **Raises:** `ValueError` for an unknown column, naming the nearest, columns of unequal length,
    and an empty table.
    """
    columns = {name: np.asarray(lookup("column", name, table)) for name in (*by, *values)}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"mean_by: columns of length {lengths}: allowed is one length above 0")
    keys = list(zip(*(columns[name].tolist() for name in by), strict=True))
    groups = list(dict.fromkeys(keys))
    which = np.array([groups.index(key) for key in keys])
    result = {name: np.array([group[i] for group in groups]) for i, name in enumerate(by)}
    for name in values:
        column = columns[name].astype(float)
        parts = [mean_and_interval(column[which == i]) for i in range(len(groups))]
        mean, half = (np.array(part) for part in zip(*parts, strict=True))
        result |= {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return result
