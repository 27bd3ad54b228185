"""Placements to start a search from, each the work of a moment."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._checks import as_float
from moejax._typing import Array, Float, FloatLike, Int, PRNGKeyArray
from moejax.placement._validate import check_count, check_load, check_memory_factor


def wrap_around(
    order: Int[Array, " experts"],
    frequency: Float[Array, " experts"],
    num_nodes: int,
    *,
    memory_factor: FloatLike = jnp.inf,
) -> Float[Array, "experts nodes"]:
    """Experts in `order` poured into nodes one after the other: McNaughton's wrap-around rule.

    Each expert has a length, its part of all load mixed with an equal part: 1 / `memory_factor`
    of the latter. Laid end to end and cut into equal pieces, one for each node, no node holds more
    than `memory_factor` times its equal share of the weights; without a cap all loads are equal.

    **Arguments:**

    - `order`: a permutation of the experts.
    - `frequency`: load of each expert, any unit; may be traced, as may `memory_factor`.
    - `num_nodes`: static.

    **Returns:** share; at most nodes - 1 cuts, rows sum to 1.

    **Raises:** `ValueError` for no nodes, a load that is negative or not finite, or a cap below 1.
    """
    check_count("wrap_around", "num_nodes", num_nodes)
    check_load("wrap_around", frequency, name="frequency")
    check_memory_factor("wrap_around", memory_factor)
    return pour(order, as_float(frequency), num_nodes, memory_factor)


def pour(
    order: Array, frequency: Array, num_nodes: int, memory_factor: FloatLike
) -> Float[Array, "experts nodes"]:
    """`wrap_around` without checks."""
    num_experts = frequency.shape[0]
    total = frequency.sum()
    load = jnp.where(total > 0, frequency / jnp.where(total > 0, total, 1.0), 1 / num_experts)
    equal = 1 / jnp.asarray(memory_factor, frequency.dtype)
    # Without load an expert would have no length; it then lies whole where it would begin.
    length = jnp.maximum((1 - equal) * load + equal / num_experts, 1e-6 / num_experts)
    end = jnp.cumsum(length[order])
    end = end / end[-1] * num_nodes
    begin = jnp.concatenate([jnp.zeros(1, end.dtype), end[:-1]])
    node = jnp.arange(num_nodes)
    inside = jnp.minimum(end[:, None], node + 1) - jnp.maximum(begin[:, None], node)
    inside = jnp.maximum(inside, 0.0)
    poured = inside / inside.sum(1, keepdims=True)
    return jnp.zeros_like(poured).at[order].set(poured)


def whole_experts(
    frequency: Float[Array, " experts"], num_nodes: int
) -> Float[Array, "experts nodes"]:
    """No node more than it needs: nothing is cut that can stay whole.

    With nodes to spare, each expert has nodes of its own, one more to the largest load per node in
    turn, and is split evenly over them. Otherwise whole experts go to the least loaded node, the
    heaviest first.
    """
    num_experts = frequency.shape[0]
    if num_nodes < num_experts:
        order = jnp.argsort(-frequency)

        def pack(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            share, load = state
            expert = order[i]
            # Experts without load spread by count.
            node = jnp.argmin(load)
            added = jnp.maximum(frequency[expert], 1e-6 * frequency.max())
            return share.at[expert, node].set(1.0), load.at[node].add(added)

        start = jnp.zeros((num_experts, num_nodes), frequency.dtype), jnp.zeros(num_nodes)
        return lax.fori_loop(0, num_experts, pack, start)[0]
    more = lambda _, count: count.at[jnp.argmax(frequency / count)].add(1)
    count = lax.fori_loop(0, num_nodes - num_experts, more, jnp.ones(num_experts, frequency.dtype))
    end = jnp.cumsum(count)
    node = jnp.arange(num_nodes)
    own = (node >= (end - count)[:, None]) & (node < end[:, None])
    return own / count[:, None]


def regions(
    frequency: Float[Array, " experts"], num_nodes: int, num_regions: int
) -> Float[Array, "experts nodes"]:
    """Whole experts to regions of nodes, each split evenly over its region: between tensor
    parallelism, which is one region, and `whole_experts`."""
    region = np.arange(num_nodes) * num_regions // num_nodes
    size = np.bincount(region, minlength=num_regions)
    return whole_experts(frequency, num_regions)[:, region] / size[region]


def together_order(
    together: Float[Array, "experts experts"], first: Int[Array, ""]
) -> Int[Array, " experts"]:
    """An order in which each expert follows the one that it is most often chosen with."""
    num_experts = together.shape[0]

    def follow(i: Array, order: Array) -> Array:
        used = jnp.zeros(num_experts, bool).at[order].set(True, mode="drop")
        best = jnp.argmax(jnp.where(used, -1.0, together[order[i - 1]]))
        return order.at[i].set(best.astype(order.dtype))

    order = jnp.full(num_experts, num_experts, jnp.int32).at[0].set(first.astype(jnp.int32))
    return lax.fori_loop(1, num_experts, follow, order)


def starts(
    frequency: Float[Array, " experts"],
    together: Float[Array, "experts experts"],
    num_nodes: int,
    num_chains: int,
    *,
    memory_factor: FloatLike,
    key: PRNGKeyArray,
) -> Float[Array, "chains experts nodes"]:
    """`num_chains` different starts: whole experts, then wrap-around in one order after another.

    The orders are by load, by who is chosen together, and random ones. Every third start is whole
    experts again where no memory cap stands against it.
    """
    capped = jnp.isfinite(jnp.asarray(memory_factor))
    num_experts = frequency.shape[0]
    by_load = jnp.argsort(-frequency).astype(jnp.int32)
    whole = whole_experts(frequency, num_nodes)

    def one(chain: Array, dice: Float[Array, " experts"]) -> Array:
        # Sorted by load, then in chains from the busiest and from other experts, then at random.
        first = jnp.where(chain < 3, by_load[0], (dice[0] * num_experts).astype(jnp.int32))
        chained, shuffled = together_order(together, first), jnp.argsort(dice)
        order = jnp.where(chain % 2 == 0, chained, shuffled)
        order = jnp.where(chain == 1, by_load, order)
        poured = pour(order, frequency, num_nodes, memory_factor)
        return jnp.where((chain % 3 == 0) & ~capped, whole, poured)

    dice = jax.random.uniform(key, (num_chains, num_experts))
    return jax.vmap(one)(jnp.arange(num_chains), dice)
