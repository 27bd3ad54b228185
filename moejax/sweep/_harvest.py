"""From launches to the columns of a part, with the rows that were refused among them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.sweep._columns import (
    ROW,
    STATUS,
    Columns,
    Maker,
    Text,
    concatenate,
    failed,
    overruled,
    schema_of,
)
from moejax.sweep._host import HostFunction
from moejax.sweep._program import Program
from moejax.sweep._sweep import Sweep


class Launch(NamedTuple):
    """A tile on each device: calls [tiles, width], which are their own, why some were refused, and
    what comes of them; `program` is `None` where all were."""

    calls: np.ndarray
    own: np.ndarray
    refused: dict[int, str]
    program: Program | None
    results: Any


class Harvest:
    """Makes columns of launches.

    Fields: `schema`, what columns there are (for the manifest), once some are.
    """

    def __init__(self, sweep: Sweep, num_devices: int, schema: dict[str, dict[str, str]]):
        about = HostFunction("about", sweep.about, sweep.calls, {}) if sweep.about else None
        self._sweep, self._num_devices = sweep, num_devices
        self._maker = Maker(sweep, about)
        self.schema = schema

    def columns(self, launches: Sequence[Launch], fetched: Sequence[Any]) -> Columns | None:
        """Of launches with their results; `None` where nothing has said yet what columns there are.

        **Arguments:** `fetched`: results on the host, of those that have a program.

        **Raises:** `ValueError` for columns that do not fit.
        """
        done = [launch for launch in launches if launch.program is not None]
        made = [self._made(launch, results) for launch, results in self._together(done, fetched)]
        if not self.schema:
            return None
        refused = [self._refused(launch) for launch in launches if launch.program is None]
        return concatenate([*made, *refused])

    def _together(
        self, launches: Sequence[Launch], fetched: Sequence[Any]
    ) -> list[tuple[Launch, Any]]:
        """Launches of one program as one, so that columns are made once for all of them."""
        found = []
        for program in dict.fromkeys(launch.program for launch in launches):
            at = [i for i, launch in enumerate(launches) if launch.program is program]
            own = np.concatenate([self._padded(launches[i].own).reshape(-1) for i in at])
            pick = lambda *leaves, own=own: np.concatenate(leaves)[own]
            results = jax.tree.map(pick, *(fetched[i] for i in at))
            why = {call: text for i in at for call, text in launches[i].refused.items()}
            calls = np.concatenate([launches[i].calls[launches[i].own] for i in at])
            found.append((Launch(calls, own, why, program, None), results))
        return found

    def _padded(self, own: np.ndarray) -> np.ndarray:
        """[devices, width]: what a device without a tile of its own computed is nobody's."""
        missing = self._num_devices - len(own)
        return np.pad(own, ((0, missing), (0, 0))) if missing else own

    def _made(self, launch: Launch, results: Any) -> Columns:
        fixed = self._maker.fixed(launch.calls)
        order = launch.program.layout.order if launch.program else ()
        found = self._maker.results(results, len(launch.calls), order)
        if twice := found.keys() & fixed.keys():
            raise ValueError(f"column {sorted(twice)[0]!r} is there twice: fn, an axis, or about")
        if launch.refused:
            at = np.flatnonzero(np.isin(launch.calls, list(launch.refused)))
            size = self._sweep.inner_size
            rows = (at[:, None] * size + np.arange(size)).reshape(-1)
            why = [launch.refused[int(launch.calls[i])] for i in np.repeat(at, size)]
            values = {name: of for name, of in schema_of(found).items() if name != STATUS}
            found = overruled(found, rows, values, why)
        if not self.schema:
            self.schema = self._described(fixed, found)
        if odd := (fixed | found).keys() ^ self.schema.keys():
            raise ValueError(f"fn gives column {sorted(odd)[0]!r} for some configurations only")
        return self._of_one_kind(fixed | found)

    def _of_one_kind(self, columns: Columns) -> Columns:
        """Text and numbers are no column together, whatever part they are in."""
        for name, column in columns.items():
            if isinstance(column, Text) != (self.schema[name]["dtype"] == "text"):
                raise ValueError(f"column {name!r} holds text for some configurations only")
        return columns

    def _refused(self, launch: Launch) -> Columns:
        calls, size = launch.calls[launch.own], self._sweep.inner_size
        why = [launch.refused[int(call)] for call in np.repeat(calls, size)]
        values = {
            name: of["dtype"]
            for name, of in self.schema.items()
            if of["role"] == "value" and name != STATUS
        }
        return self._of_one_kind(self._maker.fixed(calls) | failed(values, why))

    def _described(self, fixed: Columns, found: Columns) -> dict[str, dict[str, str]]:
        axes = {ROW: "row"} | dict.fromkeys(self._sweep.names, "axis")
        role = lambda name: "value" if name in found else axes.get(name, "about")
        return {
            name: {"dtype": dtype, "role": role(name)}
            for name, dtype in schema_of(fixed | found).items()
        }
