"""Which rows of a sweep no other row beats: the Pareto front."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._status import is_traced
from moejax._typing import Array, Bool


BLOCK = 256
"""Rows compared at once with three objectives or more."""


def pareto_mask(
    values: Any,
    *,
    maximize: bool | Sequence[bool] | Bool[Array, " objectives"] = False,
    valid: Any = None,
) -> Bool[Array, " rows"]:
    """True for rows that no other row dominates.

    A row dominates another that is nowhere better and somewhere worse. Rows that are equal in all
    objectives do not dominate each other: all of them are on the front, or none.

    Two objectives take one sort, O(rows log rows). More take a sort and a comparison of every row
    with the front so far, O(rows x front), in blocks, whatever the number of rows.

    **Arguments:**

    - `values`: [rows, objectives], one objective or more. Whole numbers and 64-bit floats outside
        of `jax.jit` are compared exactly, whatever the precision of JAX. Infinity is a value.
    - `maximize`: whether more is better, for each objective or for all.
    - `valid`: bool [rows]; what it leaves out is not on the front and dominates nothing, and so
        are rows with NaN (which is how a sweep marks a failed one).

    **Returns:** bool [rows]. Runs under `jax.jit` and `jax.vmap`; batches by `jax.vmap`.

    **Raises:** `ValueError` for another shape of an argument.
    """
    shape = np.shape(values)
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"values has shape {shape}: allowed is [rows, objectives]")
    maximize = jnp.asarray(maximize)
    if maximize.shape not in ((), shape[1:]):
        raise ValueError(f"maximize has shape {maximize.shape}: allowed is {shape[1:]} or one")
    valid = jnp.ones(shape[:1], bool) if valid is None else jnp.asarray(valid, bool)
    if valid.shape != shape[:1]:
        raise ValueError(f"valid has shape {valid.shape}: allowed is {shape[:1]}")
    if not is_traced(values):
        values, numbers = _ranks(np.asarray(values))
        valid = valid & jnp.asarray(numbers)
    return _front(jnp.asarray(values), jnp.broadcast_to(maximize, shape[1:]), valid)


def _ranks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each column as ranks among its own values, int32, and where rows are numbers. JAX would cut
    64-bit numbers to 32 bits, and make ties of what differs."""
    ranks = np.empty(values.shape, np.int32)
    for objective, column in enumerate(values.T):
        ranks[:, objective] = np.unique(column, return_inverse=True)[1]
    if values.dtype.kind != "f":
        return ranks, np.ones(len(values), bool)
    return ranks, np.asarray(~np.isnan(values).any(axis=1))


@jax.jit
def _front(values: Array, maximize: Array, valid: Array) -> Array:
    if values.dtype == bool:
        values = values.astype(jnp.int32)
    floating = jnp.issubdtype(values.dtype, jnp.floating)
    if floating:
        valid = valid & ~jnp.any(jnp.isnan(values), axis=1)
    # Less is better from here on. ~x is -x - 1, which does not overflow.
    values = jnp.where(maximize, -values if floating else ~values, values)
    worst = jnp.asarray(jnp.inf if floating else jnp.iinfo(values.dtype).max, values.dtype)
    values = jnp.where(valid[:, None], values, worst)
    if not values.shape[0]:
        return valid
    if values.shape[1] == 1:
        return valid & (values[:, 0] == jnp.min(values))
    front = _front_of_two if values.shape[1] == 2 else _front_of_many
    return valid & front(values)


def _sorted(values: Array) -> tuple[list[Array], Array]:
    """Columns in lexicographic order, where no row dominates an earlier one, and that order."""
    rows, objectives = values.shape
    index = jnp.arange(rows, dtype=jnp.int32)
    *columns, order = lax.sort((*values.T, index), num_keys=objectives, is_stable=False)
    return columns, order


def _front_of_two(values: Array) -> Bool[Array, " rows"]:
    (x, y), order = _sorted(values)
    # Rows of one x stand together, the least y first; all before them have less x.
    first = jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])
    start = lax.cummax(jnp.where(first, jnp.arange(len(x)), 0))
    least_before = lax.cummin(y)[jnp.maximum(start - 1, 0)]
    dominated = (start > 0) & (least_before <= y) | (y[start] < y)
    return jnp.zeros(len(x), bool).at[order].set(~dominated)


def _front_of_many(values: Array) -> Bool[Array, " rows"]:
    """Block by block in sorted order: against the front so far, then within the block."""
    columns, order = _sorted(values)
    rows, objectives = values.shape
    block = min(BLOCK, rows)
    blocks = -(-rows // block)
    worst = jnp.max(values, axis=0)
    padding = jnp.broadcast_to(worst, (blocks * block - rows, objectives))
    ordered = jnp.concatenate([jnp.stack(columns, axis=1), padding])
    # What stands behind the front so far is as bad as can be, and so dominates nothing.
    room = jnp.broadcast_to(worst, (blocks * block + block, objectives))

    def step(carry, candidates):
        front, count = carry

        def compare(i, dominated):
            some = lax.dynamic_slice_in_dim(front, i * block, block)
            return dominated | _dominated(candidates, some)

        within = _dominated(candidates, candidates)
        dominated = lax.fori_loop(0, -(-count // block), compare, within)
        # Its survivors first. What follows them is overwritten by the next block, or cleared.
        kept = jnp.argsort(dominated, stable=True)
        number = jnp.sum(~dominated)
        fresh = jnp.where((jnp.arange(block) < number)[:, None], candidates[kept], worst)
        front = lax.dynamic_update_slice_in_dim(front, fresh, count, axis=0)
        return (front, count + number), ~dominated

    start = room, jnp.int32(0)
    _, kept = lax.scan(step, start, ordered.reshape(blocks, block, objectives))
    return jnp.zeros(rows, bool).at[order].set(kept.reshape(-1)[:rows])


def _dominated(rows: Array, others: Array) -> Bool[Array, " rows"]:
    """Which of the rows some other dominates."""
    columns = list(zip(rows.T, others.T))
    no_worse = functools.reduce(jnp.logical_and, [b[None, :] <= a[:, None] for a, b in columns])
    better = functools.reduce(jnp.logical_or, [b[None, :] < a[:, None] for a, b in columns])
    return jnp.any(no_worse & better, axis=1)
