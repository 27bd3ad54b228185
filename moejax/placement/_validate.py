"""Impossible placements: a `ValueError` naming the value eagerly, a status under tracing."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Float, Int, IntScalar
from moejax.noc import UNPLACED


SHARE_TOLERANCE = 1e-4
"""How far a row of share may be from 1, and an entry below 0: solvers stop at such tolerances."""


def check_count(where: str, name: str, value: Any, low: int = 1) -> int:
    """A whole number of at least `low`, as an int. **Raises:** `ValueError` naming it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{where}: {name} = {value!r}: allowed is a whole number from {low}")
    return int(value)


def check_load(where: str, load: Any, *, name: str = "load", ndim: int = 1) -> None:
    """Raises `ValueError` unless `load` has `ndim` axes, none empty, finite and 0 or more."""
    shape = np.shape(load)
    if len(shape) != ndim or 0 in shape:
        wanted = "[experts]" if ndim == 1 else "[layers, experts]"
        raise ValueError(f"{where}: {name} has shape {shape}: allowed is {wanted}, not empty")
    if is_traced(load):
        return
    values = np.asarray(load)
    bad = ~((values >= 0) & (values < np.inf))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        entry = index[0] if ndim == 1 else index
        value = values[index]
        raise ValueError(f"{where}: {name}[{entry}] = {value:g}: allowed is finite, 0 or more")


def check_share(where: str, share: Any, num_experts: int | None = None) -> None:
    """Raises `ValueError` unless `share` is [experts, nodes] and every row distributes 1."""
    shape = np.shape(share)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{where}: share has shape {shape}: allowed is [experts, nodes], not empty "
            "(layers: jax.vmap)"
        )
    if num_experts is not None and shape[0] != num_experts:
        raise ValueError(f"{where}: share has {shape[0]} experts, the statistics {num_experts}")
    if is_traced(share):
        return
    values = np.asarray(share, dtype=np.float64)
    bad = ~(values >= -SHARE_TOLERANCE)
    if bad.any():
        expert, node = np.argwhere(bad)[0]
        raise ValueError(
            f"{where}: share[{expert}, {node}] = {values[expert, node]:g}: allowed is 0 to 1"
        )
    sums = values.sum(-1)
    bad = ~(np.abs(sums - 1) <= SHARE_TOLERANCE)
    if bad.any():
        expert = np.flatnonzero(bad)[0]
        raise ValueError(f"{where}: row {expert} of share sums to {sums[expert]:g}: allowed is 1")


def share_status(share: Float[Array, "experts nodes"]) -> IntScalar:
    """`Status.BAD_SHARE` for what `check_share` raises for."""
    negative = ~jnp.all(share >= -SHARE_TOLERANCE)
    unequal = ~jnp.all(jnp.abs(share.sum(-1) - 1) <= SHARE_TOLERANCE)
    return flag(negative | unequal, Status.BAD_SHARE)


def load_status(load: Float[Array, "..."]) -> IntScalar:
    """`Status.NEGATIVE_COUNT` for a load that is negative or not finite."""
    return flag(~jnp.all((load >= 0) & (load < jnp.inf)), Status.NEGATIVE_COUNT)


def check_position(
    where: str, node_position: Any, num_nodes: int, num_places: int | None = None
) -> None:
    """Raises `ValueError` unless each node has a place of its own in 0 .. num_places - 1.

    `UNPLACED` (-1) may come any number of times. `num_places` is `num_nodes` by default.
    """
    shape = np.shape(node_position)
    if shape != (num_nodes,):
        raise ValueError(f"{where}: node_position has shape {shape}: allowed is ({num_nodes},)")
    if is_traced(node_position):
        return
    places = num_nodes if num_places is None else num_places
    values = np.asarray(node_position)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{where}: node_position is {values.dtype}: allowed is whole numbers")
    bad = (values < UNPLACED) | (values >= places)
    if bad.any():
        node = np.flatnonzero(bad)[0]
        raise ValueError(
            f"{where}: node_position[{node}] = {values[node]}: allowed is 0 to {places - 1}"
        )
    placed, times = np.unique(values[values != UNPLACED], return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"{where}: place {placed[times > 1][0]} is given to more than one node in node_position"
        )


def position_status(
    node_position: Int[Array, " nodes"], num_places: int | None = None
) -> IntScalar:
    """`Status.BAD_POSITION` for what `check_position` raises for."""
    places = node_position.shape[0] if num_places is None else num_places
    outside = jnp.any((node_position < UNPLACED) | (node_position >= places))
    ordered = jnp.sort(node_position)
    twice = jnp.any((ordered[1:] == ordered[:-1]) & (ordered[1:] != UNPLACED))
    return merge(flag(outside, Status.BAD_POSITION), flag(twice, Status.BAD_POSITION))


def check_memory_factor(where: str, memory_factor: Any) -> None:
    """Raises `ValueError` for a cap below 1: all nodes together could not hold all experts."""
    if memory_factor is None or is_traced(memory_factor):
        return
    bad = ~(np.asarray(memory_factor) >= 1)
    if bad.any():
        raise ValueError(
            f"{where}: memory_factor = {memory_factor}: allowed is 1 or more (1 = every node holds "
            "its equal share of the experts)"
        )


def check_time_limit(where: str, time_limit: Any) -> None:
    """Raises `ValueError` unless a solver is given time."""
    if not time_limit > 0:
        raise ValueError(f"{where}: time_limit = {time_limit}: allowed is above 0 s")
