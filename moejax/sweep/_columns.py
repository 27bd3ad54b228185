"""From the results of calls to columns of rows: what a part file holds.

A call gives one row for each point of the grid of inner axes. Text that repeats is kept as codes
and the texts themselves, so that a million rows of one policy hold its name once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax._status import Status
from moejax.sweep._host import SEED, HostFunction
from moejax.sweep._sweep import Sweep


OK = "ok"
FAILED = "failed: "
ROW, STATUS = "row", "status"


class Text(NamedTuple):
    """A column of text: `words[codes]`."""

    codes: np.ndarray
    words: np.ndarray

    def plain(self) -> np.ndarray:
        """The text itself."""
        return self.words[self.codes] if len(self.words) else np.array([], str)


Columns = dict[str, "np.ndarray | Text"]


def plain(column: "np.ndarray | Text") -> np.ndarray:
    """A column as one array."""
    return column.plain() if isinstance(column, Text) else column


class Maker:
    """Makes the columns of calls."""

    def __init__(self, sweep: Sweep, about: HostFunction | None):
        self._sweep, self._calls, self._about = sweep, sweep.calls, about
        self._grid = sweep.inner_shape

    def fixed(self, calls: np.ndarray) -> Columns:
        """The row number, every axis, the seed, and what `about` says."""
        size, made = self._sweep.inner_size, {}
        made[ROW] = (calls[:, None] * size + np.arange(size)).reshape(-1)
        for name in self._sweep.names:
            made[name] = self._axis(name, calls)
        return made | self._told(calls)

    def _axis(self, name: str, calls: np.ndarray) -> "np.ndarray | Text":
        if name == SEED:
            return np.repeat(
                self._calls.seeds[self._calls.codes[SEED][calls]], self._sweep.inner_size
            )
        axis = self._calls.axes[name]
        if axis.inner:
            at = list(self._calls.inner).index(name)
            codes = np.indices(self._grid, dtype=np.int32)[at].reshape(-1)
            codes = np.tile(codes, len(calls))
        else:
            codes = np.repeat(self._calls.codes[name][calls], self._sweep.inner_size)
        return Text(codes, axis.labels) if axis.labels.dtype.kind == "U" else axis.labels[codes]

    def _told(self, calls: np.ndarray) -> Columns:
        """Columns of `about`: one call of it for all calls that are alike to it."""
        if self._about is None:
            return {}
        unique, inverse = np.unique(self._about.ids[calls], return_inverse=True)
        told = [self._about(int(self._about.first[at])) for at in unique]
        for found in told:
            if not isinstance(found, dict) or set(found) != set(told[0]):
                raise ValueError(
                    f"about gave {found!r:.60}: allowed are dicts with the same columns"
                )
        for name in told[0]:
            if len({np.asarray(of[name]).dtype.kind in "UO" for of in told}) > 1:
                raise ValueError(f"column {name!r} holds text for some configurations only")
        spread = lambda name: np.stack([self._broadcast(name, of[name]) for of in told])
        return {name: compact(spread(name)[inverse.reshape(-1)].reshape(-1)) for name in told[0]}

    def results(self, results: Any, calls: int, order: Sequence[str]) -> Columns:
        """Columns of what `fn` returned, with a leading axis of calls; keys in this order."""
        if isinstance(results, dict):
            results = {name: results[name] for name in order}
        found = self._sweep.columns(results) if self._sweep.columns else _by_path(results)
        if not isinstance(found, Mapping) or not found:
            raise ValueError(f"columns gave {found!r:.60}: allowed is a dict of columns")
        made: Columns = {}
        for name, column in found.items():
            column = np.asarray(column)
            if column.dtype.kind == "V":  # half precision of a kind that files do not know
                column = column.astype(np.float32)
            if column.shape[:1] != (calls,):
                raise ValueError(
                    f"column {name!r} has shape {column.shape}, not {calls} calls first"
                )
            made[name] = compact(self._broadcast(name, column, 1).reshape(-1))
        made[STATUS] = _status(made.pop(STATUS, None), calls * self._sweep.inner_size)
        return made

    def _broadcast(self, name: str, column: Any, lead: int = 0) -> np.ndarray:
        """To the grid of inner axes; `lead` axes stand before it."""
        column = np.asarray(column)
        shape = column.shape[lead:] or (1,) * len(self._grid)
        fits = len(shape) == len(self._grid)
        if not fits or any(have not in (1, want) for have, want in zip(shape, self._grid)):
            raise ValueError(
                f"column {name!r} has shape {shape} for one call: allowed is one number"
                + (f", or {self._grid} (each or 1) for the inner axes" if self._grid else "")
            )
        column = column.reshape((*column.shape[:lead], *shape))
        return np.broadcast_to(column, (*column.shape[:lead], *self._grid))


def failed(schema: Mapping[str, str], why: Sequence[str]) -> Columns:
    """Columns of rows that were refused: nothing but why."""
    empty = {"f": np.nan, "i": 0, "u": 0, "b": False}
    made: Columns = {}
    for name, dtype in schema.items():
        if dtype == "text":
            made[name] = Text(np.zeros(len(why), np.int32), np.array([""]))
        else:
            made[name] = np.full(len(why), empty[np.dtype(dtype).kind], dtype)
    return made | {STATUS: compact(np.array([FAILED + text for text in why]))}


def overruled(made: Columns, at: np.ndarray, schema: Mapping[str, str], why: list[str]) -> Columns:
    """The columns with some rows failed."""
    other, changed = failed(schema, why), dict(made)
    for name in schema.keys() | {STATUS}:
        column = np.array(plain(made[name]), copy=True)
        new = plain(other[name])
        column = column.astype(np.result_type(column, new))
        column[at] = new
        changed[name] = compact(column)
    return changed


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Columns one after the other."""
    made: Columns = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        if isinstance(columns[0], Text):
            made[name] = _joined([column for column in columns if isinstance(column, Text)])
        else:
            made[name] = np.concatenate([plain(column) for column in columns])
    return made


def schema_of(columns: Mapping[str, "np.ndarray | Text"]) -> dict[str, str]:
    """dtype by name; `"text"` for text."""
    return {
        name: "text" if isinstance(column, Text) else str(column.dtype)
        for name, column in columns.items()
    }


def compact(column: np.ndarray) -> "np.ndarray | Text":
    """Text as codes; numbers as they are."""
    if column.dtype.kind == "O":
        column = column.astype(str)
    if column.dtype.kind != "U":
        return column
    words, codes = np.unique(column, return_inverse=True)
    return Text(codes.astype(np.int32).reshape(-1), words)


def _joined(columns: list[Text]) -> Text:
    words, place = np.unique(
        np.concatenate([column.words for column in columns]), return_inverse=True
    )
    place, start, codes = place.reshape(-1), 0, []
    for column in columns:
        codes.append(place[start : start + len(column.words)][column.codes])
        start += len(column.words)
    return Text(np.concatenate(codes).astype(np.int32), words)


def _by_path(results: Any, name: str = "") -> dict[str, Any]:
    """Leaves by their path; of a dict in its order, where trees would be sorted."""
    if isinstance(results, dict):
        inner = [_by_path(of, f"{name}.{key}" if name else key) for key, of in results.items()]
        return {path: leaf for found in inner for path, leaf in found.items()}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        below = jax.tree_util.keystr(path, simple=True, separator=".")
        found[".".join(filter(None, (name, below))) or "result"] = leaf
    return found


def _status(given: "np.ndarray | Text | None", rows: int) -> Text:
    """Names of status codes; text stays; okay where there is none."""
    if given is None:
        return Text(np.zeros(rows, np.int32), np.array([OK]))
    if isinstance(given, Text):
        return given
    names = {int(status): status.name.lower() for status in Status}
    codes, inverse = np.unique(given, return_inverse=True)
    words = np.array([names.get(int(code), f"status {code}") for code in codes])
    return Text(inverse.astype(np.int32).reshape(-1), words)
