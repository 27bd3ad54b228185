"""`ResourceLoads` for many problems at once: the arithmetic of one, laid out for the processor.

Every array has a trailing axis, of all lanes or of one that they share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, Int


# Below, gathering single entries takes longer than looking at all.
_FEW_LANES = 8


def resource_lanes(
    time: Float[Array, "experts resources lanes"],
    weight: Float[Array, " lanes"],
    fixed: Float[Array, "experts lanes"],
    busy: Int[Array, "experts most lanes"] | None,
    lanes: int,
) -> tuple[Callable[[Array], Array], Callable[[Array, Any], Array]]:
    """`cost(load)` [experts, lanes] and `update(load, chosen)` [resources, lanes]."""
    highest, add = _dense(time, lanes)
    if lanes >= _FEW_LANES:
        # Nodes that hold experts whole are common enough to be asked for, once for all lanes.
        is_sparse = None if busy is not None else jnp.all((time > 0).sum(1) <= 1)
        busy = jnp.argmax(time, axis=1, keepdims=True) if busy is None else busy
        highest, add = map(_either(is_sparse), _sparse(time, busy, lanes), (highest, add))

    def cost(load):
        current = jnp.max(load, axis=0)
        return weight * (highest(load, current) - current) + fixed

    def update(load, chosen):
        num_chosen = chosen.expert_ids.shape[0] * chosen.expert_ids.shape[1]
        if time.shape[-1] == 1 or 2 * num_chosen > time.shape[0]:
            rows = chosen.counts.T.astype(time.dtype)[:, None]
            matrices = jnp.moveaxis(time, -1, 0)
            # A carried load has to be exact whatever precision a platform likes for its products.
            exact = jax.lax.Precision.HIGHEST
            if time.shape[-1] == 1:
                return load + jnp.matmul(rows[:, 0], matrices[0], precision=exact).T
            return load + jnp.matmul(rows, matrices, precision=exact)[:, 0].T
        # Few choices: reading what they add is less traffic than reading all of the matrices.
        return load + add(chosen.expert_ids, chosen.valid)

    return cost, update


def _either(is_first):
    """Of two functions the one that applies: the first, or a branch for all lanes together."""
    if is_first is None:
        return lambda first, second: first
    return lambda first, second: lambda *given: jax.lax.cond(is_first, first, second, *given)


def _dense(time, lanes):
    bits = jnp.dtype(f"int{8 * time.dtype.itemsize}")
    # For `add`: rows of one lane next to each other, [lanes * experts, resources].
    by_lane = jnp.moveaxis(time, -1, 0).reshape(-1, time.shape[1])

    def highest(load, current):
        # Floats of 0 or more order like their bits, and whole numbers reduce several times faster
        # than floats, whose maximum has to mind NaN.
        after = jax.lax.bitcast_convert_type(load + time, bits)
        return jax.lax.bitcast_convert_type(jnp.max(after, axis=1), time.dtype)

    def add(expert_ids, valid):
        rows = by_lane.at[expert_ids + time.shape[0] * jnp.arange(lanes)]
        return (rows.get(mode="promise_in_bounds") * valid[..., None]).sum((0, 1)).T

    return highest, add


def _sparse(time, busy, lanes):
    busy_time = jnp.take_along_axis(time, busy, axis=1)
    busy = jnp.broadcast_to(busy, busy_time.shape)
    most, num_resources = busy.shape[1], time.shape[1]

    def highest(load, current):
        # The others stay at their load, of which the current maximum is the largest.
        if busy.shape[-1] == 1:
            at_busy = load[busy[..., 0]]
        else:
            at_busy = load.reshape(-1).at[busy * lanes + jnp.arange(lanes)]
            at_busy = at_busy.get(mode="promise_in_bounds")
        after = at_busy + busy_time
        for column in range(most):
            current = jnp.maximum(current, after[:, column])
        return current

    def add(expert_ids, valid):
        entry = expert_ids[:, :, None] * most + jnp.arange(most)[:, None]
        entry = entry * lanes + jnp.arange(lanes)  # [top_k, chunk, most, lanes]
        at = lambda x: x.reshape(-1).at[entry].get(mode="promise_in_bounds")
        added = at(busy_time) * valid[:, None]
        here = at(busy)[..., None, :] == jnp.arange(num_resources)[:, None]
        return jnp.where(here, added[..., None, :], 0).sum((0, 1, 2))

    return highest, add
