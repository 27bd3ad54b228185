"""The compiled program of a group: one tile on each device, every tile of the same width.

A launch runs one tile on each local device, sharded over them and without communication. What a
device computes is `jax.vmap` over the calls of its tile and nothing else, so the rows are those of
any other number of devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.sweep._host import SEED
from moejax.sweep._layout import Layout, Rows, config_from
from moejax.sweep._values import join


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
        mapped = _shard_map(tile, mesh, (same, split_up), split_up)
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


def _shard_map(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map`, which older versions of JAX have elsewhere; nothing is replicated."""
    if hasattr(jax, "shard_map"):
        make, options = jax.shard_map, {"check_vma": False}
    else:
        from jax.experimental.shard_map import shard_map as make

        options = {"check_rep": False}
    found: Any = make
    return found(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


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
        config = config_from(values, read)
        config.host = layout.host
        result = fn(config, jax.random.key(whole[SEED]))
        layout.order[:] = result if isinstance(result, dict) else []
        return _checked(result)

    return jax.vmap(call)(rows.floats, rows.ints, rows.trees)


def _checked(result: Any) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"fn gave {name} = {leaf!r:.60}: allowed are numbers (text: about=)")
    return jax.tree.map(jnp.asarray, result)


def one_line(error: Exception) -> str:
    """What an error says, for a cell of a table."""
    return " ".join(str(error).split()) or type(error).__name__
