"""Tables for figures: a dict of equally long columns, checked before anything is drawn."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from moejax._checks import nearest


Table: TypeAlias = Mapping[str, Any]


def column(table: Table, name: str, owner: str) -> np.ndarray:
    """One column as a 1-D array, or a `ValueError` that suggests the nearest name."""
    if name not in table:
        known = ", ".join(table) or "none"
        raise ValueError(
            f"{owner}: no column {name!r}{nearest(name, table)} (columns of the table: {known})"
        )
    values = np.asarray(table[name])
    if values.ndim != 1:
        raise ValueError(f"{owner}: column {name!r} has shape {values.shape}; allowed is 1-D")
    return values


def numbers(table: Table, name: str, owner: str) -> np.ndarray:
    """One column as float64."""
    values = column(table, name, owner)
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{owner}: column {name!r} holds {values.dtype}, not numbers") from None


def flags(table: Table, name: str, length: int, owner: str) -> np.ndarray:
    """A column of `length` truth values, all False where the table has none."""
    values = numbers(table, name, owner) != 0 if name in table else np.zeros(length, bool)
    if len(values) != length:
        raise ValueError(f"{owner}: column {name!r} has {len(values)} rows, the others {length}")
    return values


def read(
    table: Table, owner: str, *, floats: Iterable[str], names: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """The columns a figure needs: `floats` as float64, `names` as text.

    **Raises:** `ValueError` for a missing column, columns of unequal length, an empty table.
    """
    columns = {name: numbers(table, name, owner) for name in floats}
    columns |= {name: column(table, name, owner).astype(str) for name in names}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{owner}: columns of unequal length {lengths}")
    if not any(lengths.values()):
        raise ValueError(f"{owner}: the table is empty")
    return columns


def drawable(
    columns: dict[str, np.ndarray], positive: Iterable[str], owner: str
) -> tuple[dict[str, np.ndarray], int]:
    """Rows that a logarithmic axis can show, and how many were left out.

    A row with NaN is how a sweep marks a configuration that failed. It must not cost the figure,
    but the figure says how many there were.
    """
    positive = tuple(positive)
    keep = np.all([np.isfinite(columns[name]) & (columns[name] > 0) for name in positive], axis=0)
    if not keep.any():
        raise ValueError(f"{owner}: no row has finite, positive {' and '.join(positive)}")
    return {name: values[keep] for name, values in columns.items()}, int((~keep).sum())


def check_unique(columns: dict[str, np.ndarray], names: tuple[str, ...], owner: str) -> None:
    """Raises `ValueError` where two rows agree in all of `names`."""
    rows = list(zip(*(columns[name].tolist() for name in names)))
    seen = set()
    for row in rows:
        if row in seen:
            where = ", ".join(f"{name}={value}" for name, value in zip(names, row))
            raise ValueError(
                f"{owner}: {rows.count(row)} rows with {where}; select one model and system, "
                "and average over seeds first"
            )
        seen.add(row)


def select(table: Table, **equals: Any) -> dict[str, np.ndarray]:
    """The rows where every named column has the given value.

    **Arguments:**

    - `table`: dict of column name -> 1-D array or list.
    - `equals`: value by column, for example `select(table, model="gpt-oss-120b")`.

    **Returns:** a table with the same columns.

    **Raises:** `ValueError` for an unknown column, and for a value that no row has.
    """
    columns = {name: column(table, name, "select") for name in table}
    keep = np.ones(len(next(iter(columns.values()), ())), dtype=bool)
    for name, value in equals.items():
        values = column(columns, name, "select").tolist()
        if value not in values:
            known = sorted({str(other) for other in values})
            hint = f"{nearest(str(value), known)} (values: {', '.join(known[:20])})"
            raise ValueError(f"select: no row has {name}={value!r}{hint}")
        keep &= np.array([other == value for other in values])
    if not keep.any():
        wanted = " and ".join(f"{name}={value!r}" for name, value in equals.items())
        raise ValueError(f"select: no row has {wanted or 'anything: the table is empty'}")
    return {name: values[keep] for name, values in columns.items()}
