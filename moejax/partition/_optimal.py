"""The exact optimum over all subsets of experts, by dynamic programming."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Bool, Int
from moejax.partition._base import Load, Partition, PartitionCosts, times
from moejax.partition._score import scored
from moejax.partition._validate import checked, eager_errors


def optimal(
    tokens_per_expert: Int[Array, " experts"],
    costs: PartitionCosts,
    *,
    max_total_tokens: int | None = None,
) -> Partition:
    """The partition with the smallest total over all 2^experts subsets.

    The GPU's time depends on a subset only through its number of experts and its number of
    tokens, and the total never falls when PIM's time rises. So for each such pair it is enough to
    know the largest PIM time that the subset takes away: a table of
    `(experts + 1) * (max_total_tokens + 1)` entries, filled expert by expert.

    **Arguments:** as `sieve`, and

    - `max_total_tokens`: static bound on the sum of all counts. `None` reads the counts on the
        host, which does not work under `jax.jit`; memory is about
        `experts^2 * max_total_tokens` bytes.

    **Returns:** `Partition`, one of the optima.

    **Raises:** as `sieve`; `ValueError` if the counts add up to more than `max_total_tokens`
    (`status` under tracing) or if it is `None` under tracing.
    """
    if max_total_tokens is None:
        if is_traced(tokens_per_expert):
            raise ValueError("optimal: give max_total_tokens (static) under jit, vmap or grad")
        # The next power of two, so that calls with other counts share a compilation.
        inside = np.clip(np.asarray(tokens_per_expert), 0, costs.max_tokens)
        total = int(np.sum(inside, dtype=np.int64))
        max_total_tokens = 1 << max(total - 1, 0).bit_length()
    if max_total_tokens < 0:
        raise ValueError(f"max_total_tokens = {max_total_tokens}: allowed is 0 or more")
    return _optimal(tokens_per_expert, costs, max_total_tokens=max_total_tokens)


@eager_errors
def _optimal(
    tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts, *, max_total_tokens: int
) -> Partition:
    counts, status = checked(tokens_per_expert, costs)
    too_many = flag(jnp.sum(counts) > max_total_tokens, Status.TOO_MANY_TOKENS)
    on_gpu = _search(counts, lax.stop_gradient(costs), max_total_tokens)
    return scored(on_gpu, counts, costs, merge(status, too_many))


def _search(
    counts: Int[Array, " experts"], costs: PartitionCosts, max_total_tokens: int
) -> Bool[Array, " experts"]:
    num_experts, dtype = counts.shape[0], costs.pim_time_by_tokens.dtype
    experts = jnp.arange(num_experts + 1, dtype=dtype)[:, None]
    tokens = jnp.arange(max_total_tokens + 1, dtype=dtype)[None, :]
    unreachable = -jnp.inf
    none_moved = jnp.full((num_experts + 1, max_total_tokens + 1), unreachable, dtype)
    none_moved = none_moved.at[0, 0].set(0)
    time = costs.pim_time_by_tokens[counts]

    def consider(removed, expert):
        n, pim_time = expert
        source = jnp.roll(removed, 1, axis=0)
        source = jnp.roll(source, n, axis=1) + pim_time
        legal = (experts >= 1) & (tokens >= n) & (n > 0)
        moved = jnp.where(legal, source, unreachable)
        return jnp.maximum(removed, moved), moved > removed

    removed, took = lax.scan(consider, none_moved, (counts, time))
    all_tokens = jnp.sum(counts).astype(dtype)
    active_time = jnp.sum(jnp.where(counts > 0, time, 0))
    load = Load(experts, tokens, all_tokens - tokens, jnp.maximum(active_time - removed, 0))
    reachable = removed > unreachable
    total = jnp.where(reachable, times(load, costs).total, jnp.inf)
    best = jnp.unravel_index(jnp.argmin(total), total.shape)

    def trace_back(state, step):
        num_left, tokens_left = state
        n, took_here = step
        taken = took_here[num_left, tokens_left]
        return (num_left - taken, tokens_left - jnp.where(taken, n, 0)), taken

    _, on_gpu = lax.scan(trace_back, best, (counts, took), reverse=True)
    return on_gpu
