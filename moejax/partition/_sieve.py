"""Sieve's greedy partition and the best prefix of its order."""

import jax
import jax.numpy as jnp

from moejax._typing import Array, Int
from moejax.partition import _ladder as ladder_lib
from moejax.partition._base import Partition, PartitionCosts, partition_from, times
from moejax.partition._validate import checked, eager_errors


@eager_errors
def sieve(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> Partition:
    """Sieve's greedy partition (Sieve, arXiv 2605.11277, scheduling algorithm).

    Starts with every active expert on PIM, moves them to the GPU in descending order of their
    token count (ties: lower id first) and stops at the first move that does not lower the total.

    **Arguments:**

    - `tokens_per_expert`: int [experts], 0 to `costs.max_tokens`; 0 = not active.
    - `costs`: `PartitionCosts`.

    **Returns:** `Partition`. Times are differentiable in the costs, at the partition chosen.

    **Raises:** `ValueError` for negative counts, counts beyond the table, rates that are not above
    zero, costs that are negative or not finite. Under tracing these are a `status`.
    """
    counts, status = checked(tokens_per_expert, costs)
    ladder = ladder_lib.build(counts, costs)
    rung = ladder_lib.stopping_rung(ladder, costs)
    moved = ladder_lib.first_stop(ladder, rung, counts.shape[0], costs)
    return _prefix_partition(counts, costs, ladder, rung, moved, status)


@eager_errors
def best_prefix(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> Partition:
    """The prefix of Sieve's order with the smallest total, the shortest one on a tie.

    Equal to `sieve` wherever the total falls and then rises, as it does with
    `pim_token_bytes = contention = 0`; elsewhere Sieve may stop at a local minimum.
    Arguments, returns and errors as `sieve`.
    """
    counts, status = checked(tokens_per_expert, costs)
    ladder = ladder_lib.build(counts, costs)
    rungs = jnp.arange(costs.max_tokens + 1)
    stop = lambda rung: ladder_lib.first_stop(ladder, rung, counts.shape[0], costs)
    moved = jax.vmap(stop)(rungs)
    load = jax.vmap(ladder.load, (0, 0, None))(rungs, moved, costs)
    # Rung 0 is empty: it stands for everything on the GPU, the longest prefix.
    candidate = (ladder.size > 0) | (rungs == 0)
    total = jnp.where(candidate, times(load, costs).total, jnp.inf)
    rung = costs.max_tokens - jnp.argmin(total[::-1])
    return _prefix_partition(counts, costs, ladder, rung, moved[rung], status)


def _prefix_partition(counts, costs, ladder, rung, moved, status) -> Partition:
    component = times(ladder.load(rung, moved, costs), costs)
    on_gpu = ladder_lib.take_prefix(counts, rung, moved)
    num_gpu = ladder.experts_above[rung].astype(jnp.int32) + moved
    return partition_from(on_gpu, num_gpu, component, status)
