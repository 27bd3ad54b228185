"""All programs of a sweep, and the arguments to launch them with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.sweep._axes import Axis
from moejax.sweep._host import SEED
from moejax.sweep._layout import Layout, Rows
from moejax.sweep._plan import Plan
from moejax.sweep._program import Program, one_line
from moejax.sweep._sweep import Sweep
from moejax.sweep._values import Structure, split, stack


class Programs:
    """Programs by group, compiled when they are first needed, and the rows to launch them with."""

    def __init__(self, sweep: Sweep, plan: Plan, devices: Sequence):
        self._sweep, self._plan, self._devices = sweep, plan, list(devices)
        self._programs: dict[Any, Program] = {}
        self._refused: dict[Any, ValueError] = {}
        mesh = Mesh(np.array(self._devices), ("devices",))
        self._split_up = NamedSharding(mesh, PartitionSpec("devices"))
        self._kept: tuple[Any, tuple[Any, ...]] = (None, ())
        self._labels = {
            axis.name: split(axis.labels).arrays[0]
            for axis in sweep.axes
            if axis.is_number and not (axis.static or axis.inner)
        }
        self._columns = {
            name: traced.position for name, traced in plan.traced.items() if not traced.shared
        } | {SEED: plan.calls.seeds.astype(np.int32)}

    @property
    def compiled(self) -> int:
        """How many there are."""
        return len(self._programs)

    @property
    def read(self) -> set[str]:
        """Names that any program has asked for."""
        return set().union(*(program.read for program in self._programs.values()))

    def launch(self, tiles: np.ndarray, calls: np.ndarray) -> tuple[Program, Any]:
        """Starts one tile on each device.

        **Arguments:** `tiles`: [devices], of one group; `calls`: [devices, width].

        **Raises:** `ValueError` where `fn`, or what it calls, refuses the group.
        """
        made = self._prepared(calls)
        group = int(self._plan.group[tiles[0]])
        key = group, tuple(structure for _, structure, _ in made)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._programs:
            try:
                self._programs[key] = self._build(int(calls[0, 0]), calls, made)
            except ValueError as error:
                self._refused[key] = error
                raise
        program = self._programs[key]
        return program, program.launch(self._rows(program.layout, calls, made))

    def _prepared(self, calls: np.ndarray) -> list[tuple[str, Structure, list]]:
        """(name, structure, values [devices] or [devices * width]) of everything prepared."""
        found = []
        for name, step in self._plan.prepared.made.items():
            large = name in self._plan.large
            needed = calls[:, 0] if large else calls.reshape(-1)
            unique, inverse = np.unique(step.ids[needed], return_inverse=True)
            values = [split(step(int(step.first[at]))[name]) for at in unique]
            if len({value.structure for value in values}) > 1:
                raise ValueError(
                    f"prepare gave {name!r} of several shapes in one tile: make an axis that "
                    "decides the shape static"
                )
            found.append((name, values[0].structure, [values[at] for at in inverse.reshape(-1)]))
        return found

    def _build(self, call: int, calls: np.ndarray, made: list) -> Program:
        host = tuple(axis.name for axis in self._sweep.axes if axis.kind == "host")
        plan, layout, tables = self._plan, Layout([], [SEED], [], {}, {}, {}, {}, [], host), []
        for name, labels in self._labels.items():
            (layout.floats if labels.dtype.kind == "f" else layout.ints).append(name)
            layout.truths.extend([name] if labels.dtype.kind == "b" else [])
        for axis in self._sweep.axes:
            if axis.inner:
                self._inner(axis, layout, tables)
            elif axis.static:
                layout.constants[axis.name] = plan.calls.raw(axis.name, call)
            elif axis.name in plan.traced:
                traced = plan.traced[axis.name]
                bucket = int(traced.bucket[plan.calls.codes[axis.name][call]])
                structure = traced.structure(bucket)
                if traced.shared:
                    _place(layout.shared, axis.name, structure)
                else:
                    layout.ints.append(axis.name)
                    _place(layout.tables, axis.name, structure)
                    tables += traced.table(bucket)
        for name, structure, _ in made:
            _place(layout.shared if name in plan.large else layout.trees, name, structure)
        rows = self._rows(layout, calls, made)
        return Program(self._sweep.fn, layout, tuple(tables), rows, self._devices)

    def _inner(self, axis: Axis, layout: Layout, tables: list) -> None:
        if axis.labels.dtype.kind == "U" and axis.resolve is None and axis.named is None:
            layout.constants[axis.name] = tuple(axis.labels.tolist())
            return
        if axis.static:
            layout.constants[axis.name] = axis.labels if axis.is_number else tuple(axis.seen)
            return
        values = [split(value) for value in axis.seen]
        if any(value.structure != values[0].structure for value in values):
            raise ValueError(f"axis {axis.name!r} is inner: allowed are values of one structure")
        if axis.is_number:
            values, whole = [], split(axis.labels)
            _place(layout.tables, axis.name, whole.structure)
            tables += whole.arrays
            return
        _place(layout.tables, axis.name, values[0].structure)
        tables += stack(values)

    def _rows(self, layout: Layout, calls: np.ndarray, made: list) -> Rows:
        plan, flat = self._plan, calls.reshape(-1)
        codes = plan.calls.codes

        def column(name: str) -> np.ndarray:
            values = self._labels.get(name, self._columns.get(name))
            return values[codes[name][flat]]

        floats = [column(name) for name in layout.floats]
        ints = [column(name) for name in layout.ints]
        kind = jnp.result_type(float)
        trees = [
            leaf for name, _, values in made if name not in plan.large for leaf in stack(values)
        ]
        width = len(flat)
        return Rows(
            np.stack(floats, axis=1).astype(kind) if floats else np.zeros((width, 0), kind),
            np.stack(ints, axis=1).astype(jnp.result_type(int)),
            tuple(trees),
            self._shared(calls, made),
        )

    def _shared(self, calls: np.ndarray, made: list) -> tuple[Any, ...]:
        """[devices, ...] of everything large; it stays on the devices while tiles share it."""
        plan, first = self._plan, calls[:, 0]
        traced = {name: of for name, of in plan.traced.items() if of.shared}
        ids = [plan.calls.codes[name][first] for name in traced]
        ids += [plan.prepared.made[name].ids[first] for name in plan.large]
        key = tuple(tuple(part.tolist()) for part in ids)
        if key != self._kept[0]:
            found: list[Any] = []
            for (name, of), codes in zip(traced.items(), ids):
                del name
                found += stack([of.values[at] for at in codes])
            for name, _, values in made:
                found += stack(values) if name in plan.large else ()
            self._kept = key, jax.device_put(tuple(found), self._split_up)
        return self._kept[1]

    def usable(self, calls: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """Calls [tiles, width], those that `prepare` refuses replaced by others of their tile.

        **Returns:** the calls, and why by call. A tile in which no call is left keeps its own.
        """
        refused: dict[int, str] = {}
        for step in self._plan.prepared.steps:
            needed = step.ids[calls]
            for at in np.unique(needed):
                try:
                    step(int(step.first[at]))
                except ValueError as error:
                    bad = calls[needed == at].tolist()
                    refused = dict.fromkeys(bad, one_line(error)) | refused
        if refused:
            bad = np.isin(calls, list(refused))
            first = calls[np.arange(len(calls)), np.argmin(bad, axis=1)]
            calls = np.where(bad, first[:, None], calls)
        return calls, refused


def _place(where: dict[str, tuple[Structure, slice]], name: str, structure: Structure) -> None:
    """Gives a value the next arrays."""
    start = sum(at.stop - at.start for _, at in where.values())
    where[name] = structure, slice(start, start + len(structure.shapes))
