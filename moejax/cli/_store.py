"""Rows to a file: Parquet, or npz where pyarrow is not installed."""

import importlib.util
import numbers
import os
from pathlib import Path
from typing import Any

import numpy as np


def check_row(row: Any, first: dict[str, Any], where: str) -> None:
    """Raises `ValueError` unless a row has the columns of the first, each of its kind."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {row!r:.60} is no dict of column to value")
    if set(row) != set(first):
        odd = ", ".join(sorted(map(repr, set(row) ^ set(first))))
        raise ValueError(f"{where}: in this row or in row 0 only: {odd}")
    for name, value in row.items():
        kind, expected = _kind(value), _kind(first[name])
        if kind is None or kind != expected:
            allowed = expected or "a number, a truth value or text"
            raise ValueError(f"{where}: column {name!r} = {value!r:.60}: allowed is {allowed}")


def _kind(value: Any) -> str | None:
    if isinstance(value, bool | np.bool_):
        return "a truth value"
    if isinstance(value, numbers.Real):
        return "a number"
    return "text" if isinstance(value, str) else None


def save_rows(rows: list[dict[str, Any]], folder: Path, *, complete: bool = True) -> Path:
    """Writes `rows.parquet` or `rows.npz` under a temporary name, then renames it.

    **Arguments:**

    - `rows`: at least one, each past `check_row`.
    - `folder`: made where it is absent.
    - `complete`: rows of a sweep that stopped early go to `partial_rows`, so that they do not
        replace those of an earlier run.
    """
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    folder.mkdir(parents=True, exist_ok=True)
    parquet = importlib.util.find_spec("pyarrow") is not None
    stem = "rows" if complete else "partial_rows"
    path = folder / (f"{stem}.parquet" if parquet else f"{stem}.npz")
    partial = folder / f".{path.name}.{os.getpid()}"
    if parquet:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), partial)
    else:
        with partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **columns)
    os.replace(partial, path)
    return path
