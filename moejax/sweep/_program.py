"""The compiled program of a group: one tile on each device, every tile of the same width.

A launch runs one tile on each local device, sharded over them and without communication. What a
device computes is `jax.vmap` over the calls of its tile and nothing else, so the rows are those of
any other number of devices.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax._checks import nearest
from moejax.sweep._host import SEED, with_fields
from moejax.sweep._plan import Plan
from moejax.sweep._sweep import Sweep
from moejax.sweep._values import Structure, join, split, stack


class Config(dict):
    """What `fn` gets: a dict that knows what has been read and suggests names."""

    read: set[str]
    host: tuple[str, ...] = ()

    def __missing__(self, name: str) -> Any:
        if name in self.host:
            raise ValueError(f"axis {name!r} is text, which fn gets with static=True or inner=True")
        raise ValueError(
            f"config has no {name!r}{nearest(str(name), self)} (known: {', '.join(self)})"
        )

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        self.read.update(super().keys())
        return super().values()


def _config_of(names: tuple[str, ...], values: Any) -> Config:
    config = Config(zip(names, values))
    config.read = set()
    return config


# So that it may be an argument of a jitted function.
jax.tree_util.register_pytree_node(
    Config, lambda config: (tuple(config.values()), tuple(config)), _config_of
)


class Rows(NamedTuple):
    """What changes from call to call, of the calls of a launch.

    Fields: `floats`, `ints`: numbers, one column an axis; `trees`: arrays of what is prepared for
    every call; `shared`: [devices, ...], arrays that the calls of a tile share.
    """

    floats: np.ndarray
    ints: np.ndarray
    trees: tuple[Any, ...]
    shared: tuple[Any, ...]


class Layout(NamedTuple):
    """Where in `Rows` and in the tables each value of the config is; `truths` are in `ints`.

    `order` are the keys of what `fn` returns, as it has them: trees of dicts are sorted.
    `host` are axes that it does not get.
    """

    floats: list[str]
    ints: list[str]
    truths: list[str]
    trees: dict[str, tuple[Structure, slice]]
    shared: dict[str, tuple[Structure, slice]]
    tables: dict[str, tuple[Structure, slice]]
    constants: dict[str, Any]
    order: list[str]
    host: tuple[str, ...]


class Program:
    """A compiled tile, for all devices.

    Fields: `layout`, `read` (names that `fn` asked for), `num_bytes` of memory that a launch takes
    on a device besides its results, `out_bytes` of those.
    """

    def __init__(
        self, fn: Callable, layout: Layout, tables: tuple[Any, ...], rows: Rows, devices: Sequence
    ):
        self.layout, self.read = layout, set()
        mesh = Mesh(np.array(devices), ("devices",))
        split_up, same = PartitionSpec("devices"), PartitionSpec()
        tile = functools.partial(_tile, fn, layout, self.read)
        mapped = jax.shard_map(
            tile, mesh=mesh, in_specs=(same, split_up), out_specs=split_up, check_vma=False
        )
        place = lambda spec: NamedSharding(mesh, spec)
        self._tables = jax.device_put(tables, place(same))
        jitted = jax.jit(mapped, in_shardings=(place(same), place(split_up)))
        self._compiled = jitted.lower(self._tables, rows).compile()
        memory = self._compiled.memory_analysis()
        # Not every backend knows.
        size = lambda name: int(getattr(memory, f"{name}_size_in_bytes", 0) or 0)
        self.num_bytes = size("temp") + size("argument") + size("generated_code")
        self.out_bytes = size("output")

    def launch(self, rows: Rows) -> Any:
        """Starts a launch and returns its results, which may not be there yet."""
        return self._compiled(self._tables, rows)


def _tile(fn: Callable, layout: Layout, read: set[str], tables: tuple, rows: Rows) -> Any:
    """All calls of one tile."""
    shared = [leaf[0] for leaf in rows.shared]

    def call(floats, ints, trees):
        values: dict[str, Any] = dict(zip(layout.floats, floats))
        whole = dict(zip(layout.ints, ints))
        values |= {
            name: join(structure, [table[whole[name]] for table in tables[at]])
            if name in whole
            else join(structure, tables[at])
            for name, (structure, at) in layout.tables.items()
        }
        values |= {
            name: join(structure, trees[at]) for name, (structure, at) in layout.trees.items()
        }
        values |= {
            name: join(structure, shared[at]) for name, (structure, at) in layout.shared.items()
        }
        values = whole | {name: whole[name] != 0 for name in layout.truths} | values
        values |= layout.constants
        config = _config(values, read)
        config.host = layout.host
        result = fn(config, jax.random.key(whole[SEED]))
        layout.order[:] = result if isinstance(result, dict) else []
        return _checked(result)

    return jax.vmap(call)(rows.floats, rows.ints, rows.trees)


def _config(values: dict[str, Any], read: set[str]) -> Config:
    """Nested fields go into their modules."""
    values.pop(SEED)
    nested = {name: values.pop(name) for name in list(values) if "." in name}
    for owner in {name.split(".")[0] for name in nested}:
        own = {name: value for name, value in nested.items() if name.split(".")[0] == owner}
        values[owner] = with_fields(values[owner], own)
    config = Config(values)
    config.read = read
    return config


def _checked(result: Any) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise TypeError(f"fn gave {name} = {leaf!r:.60}: allowed are numbers (text: about=)")
    return jax.tree.map(jnp.asarray, result)


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

    def _inner(self, axis, layout: Layout, tables: list) -> None:
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
            np.stack(ints, axis=1).astype(np.int32),
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

    def usable(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
        """Calls of tiles, those that `prepare` refused replaced by others.

        **Returns:** calls [tiles, width], own [tiles, width] as `Plan.calls_of`, and why by call.
        A tile in which no call is left keeps its own.
        """
        calls, own = self._plan.calls_of(tiles)
        refused: dict[int, str] = {}
        if not self._plan.prepared.steps:
            return calls, own, refused
        for call in np.unique(calls):
            try:
                self._plan.prepared.make(int(call))
            except ValueError as error:
                refused[int(call)] = one_line(error)
        if refused:
            bad = np.isin(calls, list(refused))
            first = np.argmin(bad, axis=1)
            calls = np.where(bad, calls[np.arange(len(calls)), first][:, None], calls)
        return calls, own, refused


def _place(where: dict, name: str, structure: Structure) -> None:
    start = sum(at.stop - at.start for _, at in where.values())
    where[name] = structure, slice(start, start + len(structure.shapes))


def one_line(error: Exception) -> str:
    """What an error says, for a cell of a table."""
    return " ".join(str(error).split()) or type(error).__name__
