"""Rows to a file: Parquet, or npz where pyarrow is not installed."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np


def save_rows(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Writes `rows.parquet` or `rows.npz` under a temporary name, then renames it.

    **Raises:** `ValueError` for rows with different columns.
    """
    names = list(rows[0])
    for i, row in enumerate(rows):
        if list(row) != names:
            odd = sorted(set(row) ^ set(names)) or "their order"
            raise ValueError(f"row {i} differs from row 0 in columns: {odd}")
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    parquet = importlib.util.find_spec("pyarrow") is not None
    path = folder / ("rows.parquet" if parquet else "rows.npz")
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
