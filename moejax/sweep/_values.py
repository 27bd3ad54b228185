"""Values of axes: which part of one is arrays, which part is structure, and what it is by content.

Arrays are traced; everything else (tree, shapes, dtypes, static fields, text) is the structure, and
values of one structure share a compilation.
"""

import hashlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


LARGE = 1 << 16
"""Bytes of arrays from which a value is not copied for every row: the rows of a tile share it."""


class Structure(NamedTuple):
    """What a value is apart from the numbers in its arrays; hashable."""

    tree: Any
    constants: tuple[tuple[int, Any], ...]
    shapes: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        size = lambda shape, dtype: np.prod(shape, dtype=np.int64) * _item_size(dtype)
        return int(sum(size(shape, dtype) for shape, dtype in self.shapes))


class Value(NamedTuple):
    """A value in two parts: `join` puts them together again."""

    structure: Structure
    arrays: tuple[Any, ...]


def is_number(value: Any) -> bool:
    """Whether it is one number or truth value."""
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return True
    is_array = isinstance(value, np.ndarray | jax.Array) and not _is_key(value)
    return is_array and value.ndim == 0 and value.dtype.kind in "biuf"


def split(value: Any) -> Value:
    """Arrays and numbers apart from the rest."""
    leaves, tree = jax.tree.flatten(value)
    arrays, constants = [], []
    for at, leaf in enumerate(leaves):
        if is_number(leaf) or isinstance(leaf, np.ndarray | jax.Array):
            arrays.append(leaf if isinstance(leaf, jax.Array) else _host(leaf))
        else:
            constants.append((at, _hashable(leaf)))
    shapes = tuple((tuple(np.shape(leaf)), str(leaf.dtype)) for leaf in arrays)
    return Value(Structure(tree, tuple(constants), shapes), tuple(arrays))


def join(structure: Structure, arrays: Any) -> Any:
    """The value of these arrays, which may be tracers."""
    given, constants = iter(arrays), dict(structure.constants)
    leaves = [
        constants[at] if at in constants else next(given) for at in range(structure.tree.num_leaves)
    ]
    return jax.tree.unflatten(structure.tree, leaves)


def stack(values: list[Value]) -> tuple[Any, ...]:
    """Arrays [values, ...] of values of one structure."""
    columns = zip(*(value.arrays for value in values))
    # NumPy where it can: stacking on the device would compile a program for each shape.
    plain = lambda leaves: all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return tuple(
        np.stack(column) if plain(column) else jnp.stack(column)
        for column in (tuple(_to_host(leaf) for leaf in leaves) for leaves in columns)
    )


def digest(value: Any) -> str:
    """SHA-256 of the content, the same in every process."""
    found = hashlib.sha256()
    structure, arrays = split(value)
    # Functions in static fields are named by their address.
    plain = re.sub(r" at 0x[0-9a-f]+", "", f"{structure.tree} {structure.constants}")
    found.update(plain.encode())
    for array in arrays:
        data = np.ascontiguousarray(jax.random.key_data(array) if _is_key(array) else array)
        found.update(f"{data.dtype} {data.shape}".encode())
        # As it lies in memory: a copy of a trace of some GB would be one too many.
        found.update(data.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        kind = type(leaf).__name__
        raise ValueError(f"{leaf!r:.60} is a {kind}: allowed are arrays, numbers, text") from None
    return leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(leaf: Any) -> Any:
    return leaf if _is_key(leaf) else np.asarray(leaf)


def _host(leaf: Any) -> np.ndarray:
    """In the precision that the device has, or a large integer would be cut without a word."""
    array = np.asarray(leaf)
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(kept)
        if array.max() > limits.max or array.min() < limits.min:
            raise ValueError(f"{leaf!r:.60} does not fit {kept}: write it as a float")
    return array.astype(kept)


def _item_size(dtype: str) -> int:
    return 8 if dtype.startswith("key") else jnp.dtype(dtype).itemsize
