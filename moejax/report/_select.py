"""Columns of the user's own, and the rows that meet conditions."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moejax.report._average import average, group_ids
from moejax.report._expressions import evaluate, names_in
from moejax.report._rows import SEED, Rows


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is asked of rows before anything is made of them.

    - `columns`: `NAME=EXPRESSION` each, one after another; see `evaluate`.
    - `join`: CSV or Parquet files, whose columns are added where the shared ones agree.
    - `where`: conditions, all of which hold.
    - `over`: axes to average over; None is the seed, where there is one.
    """

    columns: Sequence[str] = ()
    join: Sequence[str | Path] = ()
    where: Sequence[str] = ()
    over: Sequence[str] | None = None


def select(rows: Rows, asked: Selection, *, means: bool = True) -> Rows:
    """The rows that are left, averaged.

    Conditions on an axis that is averaged over choose what goes into the means; the others are
    about the means themselves. So `--where tbt_ms<20` is about the mean over seeds.

    **Arguments:** `means=False` leaves averages to whoever draws them, conditions come first.

    **Raises:** `ValueError` for an unknown column, an expression that is none, a file that does
    not fit, or where no row is left, naming the condition that took the last.
    """
    for path in asked.join:
        rows = join(rows, path)
    rows = _derived(rows, asked.columns)
    over = averaged_axes(rows, asked.over)
    before = [c for c in asked.where if not means or set(names_in(c, rows.columns)) & set(over)]
    rows = _keep(rows, before)
    if not means:
        return rows
    if over:
        failed = int(np.count_nonzero(~rows.okay))
        if failed == len(rows):
            raise ValueError(f"all {failed} rows failed")
        rows = average(rows, over)
    # Area per throughput of means, not the mean of what single rows say.
    rows = _derived(rows, asked.columns)
    return _keep(rows, [condition for condition in asked.where if condition not in before])


def averaged_axes(rows: Rows, over: Sequence[str] | None) -> tuple[str, ...]:
    """The axes to average over. **Raises:** `ValueError` for a name that is no axis."""
    if over is None:
        return (SEED,) if SEED in rows.axes else ()
    for name in over:
        rows[name]
        if name not in rows.axes:
            raise ValueError(f"{name!r} is no axis (axes: {', '.join(rows.axes)})")
    return tuple(over)


def _derived(rows: Rows, columns: Sequence[str]) -> Rows:
    for column in columns:
        name, equals, text = column.partition("=")
        if not equals or not name.strip() or text.startswith("="):
            raise ValueError(f"--column {column}: allowed is NAME=EXPRESSION")
        rows = rows.with_column(name.strip(), evaluate(text, rows.columns, len(rows)))
    return rows


def _keep(rows: Rows, conditions: Sequence[str]) -> Rows:
    for condition in conditions:
        value = evaluate(condition, rows.columns, len(rows))
        if value.dtype != bool:
            raise ValueError(f"--where {condition}: is no condition, such as 'tbt_ms < 20'")
        if not value.any():
            raise ValueError(f"no row is left by {condition!r} ({len(rows)} rows before it)")
        rows = rows.take(value)
    return rows


def join(rows: Rows, path: str | Path) -> Rows:
    """The columns of a file beside those of the sweep, where all shared columns agree.

    **Raises:** `ValueError` naming file and columns: where nothing is shared, nothing is new, a
    combination is there twice, or a row of the sweep has none.
    """
    table = _read(Path(path))
    shared = [name for name in table if name in rows.columns]
    fresh = [name for name in table if name not in rows.columns]
    if not shared or not fresh:
        what = "no column of the sweep" if not shared else "nothing but columns of the sweep"
        raise ValueError(f"{path} has {what} (it has {', '.join(table)})")
    number = len(table[fresh[0]])
    keys = []
    for name in shared:
        ours, theirs = rows.columns[name], table[name]
        if (ours.dtype.kind == "U") != (theirs.dtype.kind == "U"):
            kinds = ["text" if x.dtype.kind == "U" else "numbers" for x in (theirs, ours)]
            raise ValueError(
                f"{path}: column {name!r} holds {kinds[0]}, that of the sweep {kinds[1]}"
            )
        keys.append(np.concatenate([theirs, ours]))
    group = group_ids(keys, number + len(rows))
    at = np.full(group.max() + 1, -1)
    at[group[:number]] = np.arange(number)
    said = lambda table, i: ", ".join(f"{name}={table[name][i]}" for name in shared)
    if (twice := np.flatnonzero(at[group[:number]] != np.arange(number))).size:
        raise ValueError(f"{path}: two rows with {said(table, twice[0])}")
    place = at[group[number:]]
    if (absent := np.flatnonzero(place < 0)).size:
        raise ValueError(f"{path}: no row with {said(rows.columns, absent[0])}")
    for name in fresh:
        rows = rows.with_column(name, table[name][place])
    return rows


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path}: needs pyarrow (pip install moejax[parquet])") from None
        table = pyarrow.parquet.read_table(path)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        return {k: v.astype(str) if v.dtype == object else v for k, v in columns.items()}
    with open(path, newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file, skipinitialspace=True) if line]
    if len(lines) < 2:
        raise ValueError(f"{path}: no rows below a line of names")
    header = [name.strip() for name in lines[0]]
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise ValueError(f"{path}, row {number}: {len(line)} cells for {len(header)} columns")
    return {name: _column(cells) for name, cells in zip(header, zip(*lines[1:]))}


def _column(cells: Sequence[str]) -> np.ndarray:
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError:
        return np.array([cell.strip() for cell in cells])
