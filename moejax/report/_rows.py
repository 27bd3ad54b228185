"""The rows of a sweep as what comes after needs them: columns, and which of them were varied."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax._checks import lookup
from moejax.sweep import load


STATUS, SEED, OK = "status", "seed", "ok"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Columns of equal length. Of them, `axes` were varied and `values` came out; the others say
    what was the same or where it comes from. `name`, `manifest`, `config` and `complete` are of
    the folder that they were read from."""

    columns: dict[str, np.ndarray]
    axes: tuple[str, ...]
    values: tuple[str, ...]
    name: str = "sweep"
    manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    complete: bool = True

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        return lookup("column", name, self.columns)

    @property
    def about(self) -> tuple[str, ...]:
        """Columns that are neither varied nor results: provenance."""
        return tuple(c for c in self.columns if c not in (*self.axes, *self.values, STATUS))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Results that are numbers."""
        return tuple(name for name in self.values if self.columns[name].dtype.kind in "iuf")

    @property
    def varied(self) -> tuple[str, ...]:
        """Axes with more than one value."""
        columns = {name: self.columns[name] for name in self.axes}
        return tuple(name for name, column in columns.items() if np.any(column != column[:1]))

    def take(self, which: np.ndarray) -> "Rows":
        """Some of the rows: a mask or an order."""
        columns = {name: column[which] for name, column in self.columns.items()}
        return dataclasses.replace(self, columns=columns)

    def with_column(self, name: str, column: np.ndarray) -> "Rows":
        """One more result, in place of one of that name."""
        if name in self.axes:
            raise ValueError(f"column {name!r} is an axis of the sweep: choose another name")
        values = self.values if name in self.values else (*self.values, name)
        return dataclasses.replace(self, columns=self.columns | {name: column}, values=values)

    @property
    def okay(self) -> np.ndarray:
        """Where nothing failed."""
        if STATUS not in self.columns:
            return np.ones(len(self), bool)
        return self.columns[STATUS] == OK


def rows_of(table: Mapping[str, Any], axes: Sequence[str], name: str = "sweep") -> Rows:
    """Rows from columns in memory; what is not an axis is a result.

    **Raises:** `ValueError` for an axis that is no column, and for columns of unequal length.
    """
    columns = {key: np.asarray(column) for key, column in table.items()}
    for axis in axes:
        lookup("column", axis, columns)
    lengths = {key: column.shape for key, column in columns.items()}
    if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
        raise ValueError(f"columns of shapes {lengths}: allowed is one length")
    values = tuple(key for key in columns if key not in (*axes, STATUS))
    return Rows(columns, tuple(axes), values, name)


def read(path: str | Path, *more: str | Path) -> Rows:
    """Rows of the folder of a sweep, or of its shards' folders, as far as they are there.

    **Raises:** `ValueError` for a folder without results, and for shards of different sweeps.
    """
    result = load(path, *more, partial=True)
    columns = dict(result.columns)
    if not result.num_rows:
        raise ValueError(f"{path}: no rows yet")
    roles = {name: about["role"] for name, about in result.manifest["columns"].items()}
    values = tuple(name for name in columns if roles.get(name) == "value" and name != STATUS)
    axes = tuple(axis for axis in result.axes if axis in columns)
    name = Path(path).resolve().name
    return Rows(columns, axes, values, name, result.manifest, result.complete)
