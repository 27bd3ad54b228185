"""The prefixes of the greedy order, without sorting: a ladder with one rung for each token count.

Sieve moves experts to the GPU in descending order of their token count. Counts are small integers,
so a histogram replaces the sort: all experts with the same count are one rung, and the state after
j moves inside a rung is linear in j. Every term of the total is then linear in j too, so along a
rung the total is convex, and the first move that does not lower it is found by bisection.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Bool, Float, Int, IntScalar
from moejax.partition._base import Load, PartitionCosts, times


BLOCK = 32


class Ladder(eqx.Module):
    """Sums over the experts above and below each rung; index = token count, 0 to max_tokens.

    Fields, all [max_tokens + 1]: `size` experts on the rung (0 for rung 0: they have no tokens),
    `experts_above`, `tokens_above`, `tokens_below` and `pim_time_below` in s.
    """

    size: Int[Array, " counts"]
    experts_above: Float[Array, " counts"]
    tokens_above: Float[Array, " counts"]
    tokens_below: Float[Array, " counts"]
    pim_time_below: Float[Array, " counts"]

    def load(
        self, rung: Int[Array, "..."], moved: Int[Array, "..."], costs: PartitionCosts
    ) -> Load:
        """The load with all higher rungs and `moved` experts of `rung` on the GPU."""
        size, dtype = self.size[rung], self.tokens_above.dtype
        tokens, left = rung.astype(dtype), (size - moved).astype(dtype)
        return Load(
            gpu_experts=self.experts_above[rung] + moved.astype(dtype),
            gpu_tokens=self.tokens_above[rung] + moved.astype(dtype) * tokens,
            pim_tokens=self.tokens_below[rung] + left * tokens,
            pim_expert_time=self.pim_time_below[rung] + left * costs.pim_time_by_tokens[rung],
        )


def build(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> Ladder:
    """The ladder of one layer. Counts must lie within 0 .. max_tokens."""
    dtype = costs.pim_time_by_tokens.dtype
    rungs = jnp.arange(costs.max_tokens + 1)
    size = jnp.zeros_like(rungs, dtype=jnp.int32)
    size = size.at[tokens_per_expert].add(1, mode="promise_in_bounds").at[0].set(0)
    experts = size.astype(dtype)
    tokens = experts * rungs.astype(dtype)
    # Summed upwards from the smallest terms, so that no time is found as a total minus a part;
    # for counts that difference is exact. A scan: under vmap every step is one wide addition.
    steps = (experts, tokens, experts * costs.pim_time_by_tokens)
    zeros = jax.tree.map(lambda step: jnp.zeros_like(step[0]), steps)
    all_of, below = lax.scan(lambda s, x: (jax.tree.map(jnp.add, s, x), s), zeros, steps)
    experts_below, tokens_below, pim_time_below = below
    return Ladder(
        size=size,
        experts_above=all_of[0] - experts_below - experts,
        tokens_above=all_of[1] - tokens_below - tokens,
        tokens_below=tokens_below,
        pim_time_below=pim_time_below,
    )


def first_stop(
    ladder: Ladder, rung: IntScalar, num_experts: int, costs: PartitionCosts
) -> IntScalar:
    """How many experts of `rung` move before one does not lower the total (all of them if none).

    Bisection on a convex sequence, so this is also the first minimum along the rung.
    """
    total = lambda moved: times(ladder.load(rung, moved, costs), costs).total

    def halve(_: int, bounds: tuple[IntScalar, IntScalar]) -> tuple[IntScalar, IntScalar]:
        low, high = bounds
        middle = (low + high) // 2
        stops = _not_lower(total(middle + 1), total(middle))
        live = low < high
        return jnp.where(live & ~stops, middle + 1, low), jnp.where(live & stops, middle, high)

    steps = num_experts.bit_length()
    start = jnp.zeros((), jnp.int32), ladder.size[rung]
    return lax.fori_loop(0, steps, halve, start)[0]


def stopping_rung(ladder: Ladder, costs: PartitionCosts) -> IntScalar:
    """The highest rung whose last move does not lower the total; 0 if every move does."""
    rungs = jnp.arange(ladder.size.shape[0])
    total = lambda moved: times(jax.vmap(ladder.load, (0, 0, None))(rungs, moved, costs), costs)
    stops = _not_lower(total(ladder.size).total, total(ladder.size - 1).total)
    return jnp.max(jnp.where(stops & (ladder.size > 0), rungs, 0))


def _not_lower(after: Float[Array, "..."], before: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether a move does not lower the total. On a plateau the last bits are noise, which would
    send the bisection anywhere along it."""
    return after >= before * (1 - 4 * jnp.finfo(before.dtype).eps)


def take_prefix(
    tokens_per_expert: Int[Array, " experts"], rung: IntScalar, moved: IntScalar
) -> Bool[Array, " experts"]:
    """Experts above `rung` and the first `moved` of it, lower ids first."""
    level = tokens_per_expert == rung
    last = _position_of(level, moved)
    ids = jnp.arange(tokens_per_expert.shape[0])
    return (tokens_per_expert > rung) | (level & (ids <= last))


def _position_of(mask: Bool[Array, " experts"], nth: IntScalar) -> IntScalar:
    """Index of the `nth` true entry (from 1), -1 for the zeroth.

    Counts whole blocks before it looks inside one: a cumulative sum over all experts would cost
    more than everything else in a partition.
    """
    num_blocks = -(-mask.shape[0] // BLOCK)
    blocks = jnp.pad(mask, (0, num_blocks * BLOCK - mask.shape[0])).reshape(num_blocks, BLOCK)
    until = jnp.cumsum(jnp.sum(blocks, axis=1, dtype=jnp.int32))
    block = jnp.minimum(jnp.sum(until < nth, dtype=jnp.int32), num_blocks - 1)
    within = jnp.cumsum(blocks[block].astype(jnp.int32))
    missing = nth - (until[block] - within[-1])
    return jnp.where(nth > 0, block * BLOCK + jnp.sum(within < missing, dtype=jnp.int32), -1)
