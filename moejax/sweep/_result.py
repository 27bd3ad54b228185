"""Results of a sweep: columns of NumPy arrays, in the order of its definition."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moejax._checks import lookup
from moejax.sweep import _parts
from moejax.sweep._columns import ROW, Columns, concatenate, plain
from moejax.sweep._folder import read_manifest


class Result:
    """Rows of a sweep, read when they are first asked for.

    Fields: `manifest` (see `docs/storage.md`), `complete` (whether all rows are there).
    """

    def __init__(self, manifest: dict[str, Any], complete: bool, read: Callable[[], Columns]):
        self.manifest, self.complete, self._read = manifest, complete, read

    @functools.cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Arrays [rows] by name: axes, seed, what `about` says, numbers, status."""
        found = self._read()
        row = plain(found.pop(ROW)) if ROW in found else np.zeros(0, np.int64)
        table = {name: plain(column) for name, column in found.items()}
        if np.all(row[1:] > row[:-1]):
            return table
        order = np.argsort(row, kind="stable")
        return {name: column[order] for name, column in table.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return lookup("column", name, self.columns)

    def __repr__(self) -> str:
        missing = "" if self.complete else " of " + str(self.manifest["rows"])
        return f"Result({self.num_rows}{missing} rows, {len(self.columns)} columns)"

    @property
    def num_rows(self) -> int:
        """Rows that are there."""
        return len(next(iter(self.columns.values()), ()))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, `seed` among them, the slowest first."""
        return tuple(axis["name"] for axis in self.manifest["axes"])

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`.

        **Raises:** `ValueError` where pandas is not installed.
        """
        pandas = _imported("pandas")
        return pandas.DataFrame(self.columns)

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` with a dimension for each axis.

        **Raises:** `ValueError` where xarray is not installed, and for a sweep that is not a full
        product of its axes, or not complete.
        """
        xarray = _imported("xarray")
        shape = self.manifest["shape"]
        if shape is None or not self.complete:
            raise ValueError("to_xarray: not all combinations of the axes are there: to_pandas()")
        table, coordinates = self.columns, {}
        for at, name in enumerate(self.axes):
            lead = tuple(slice(None) if axis == at else 0 for axis in range(len(shape)))
            coordinates[name] = table[name].reshape(shape)[lead]
        values = {
            name: (self.axes, column.reshape(shape))
            for name, column in table.items()
            if name not in self.axes
        }
        return xarray.Dataset(
            values, coords=coordinates, attrs={"config": self.manifest["config_hash"]}
        )


def load(path: str | Path, *more: str | Path, partial: bool = False) -> Result:
    """The rows of a folder, or of the folders of several shards together.

    **Arguments:**

    - `path`, `more`: folders that `run` wrote.
    - `partial`: take what is there of a sweep that has not finished.

    **Raises:** `ValueError` for a folder without results, folders of different sweeps, or missing
    rows unless `partial`.
    """
    folders = [Path(path), *map(Path, more)]
    manifests = [read_manifest(folder) for folder in folders]
    first = manifests[0]
    for folder, manifest in zip(folders, manifests):
        if manifest["config_hash"] != first["config_hash"]:
            raise ValueError(f"{folder} holds another sweep than {folders[0]}")
    described = next((found for found in manifests if found["columns"]), first)
    there: dict[int, _parts.Part] = {}
    parts = [part for folder in folders for part in _parts.whole(folder, first["config_hash"])]
    chosen = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        tiles = range(part.first, part.last + 1)
        if not all(tile in there for tile in tiles):
            chosen.append(part)
            there |= dict.fromkeys(tiles, part)
    missing = described["tiles"] - len(there)
    if missing and not partial:
        raise ValueError(
            f"{folders[0]}: {missing} of {described['tiles']} tiles are not there yet: run it "
            "again to go on, or load with partial=True"
        )
    return Result(described, not missing, lambda: _rows(chosen, described))


def _rows(parts: list[_parts.Part], manifest: dict[str, Any]) -> Columns:
    if not parts:
        return {name: np.zeros(0) for name in manifest["columns"]}
    found = concatenate([_parts.read(part) for part in parts])
    # Shards of different numbers may overlap.
    row = plain(found[ROW])
    unique, first = np.unique(row, return_index=True)
    if len(unique) == len(row):
        return found
    return {name: plain(column)[first] for name, column in found.items()}


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{name} is not installed (pip install 'moejax[frames]')") from None
