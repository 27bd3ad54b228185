"""Which experts are worth copying to every node before a layer begins."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax._status import Status, flag, merge
from moejax._typing import Array, Bool, Float, Int, IntLike, IntScalar
from moejax.routing import NOT_ROUTED
from moejax.schedule._validate import check_load, check_share, share_status


class Priority(NamedTuple):
    """The experts to broadcast before a layer."""

    experts: Int[Array, " broadcasts"]
    """Expert ids, most urgent first; `routing.NOT_ROUTED` where there are no more."""
    chosen: Bool[Array, " experts"]
    """Whether each expert is among them."""
    status: IntScalar
    """A `moejax.Status`; where it is not okay, nothing is chosen."""


def priority(
    share: Float[Array, "experts nodes"],
    predicted_load: Float[Array, " experts"],
    *,
    max_broadcast: int,
    num_broadcast: IntLike | None = None,
) -> Priority:
    """The experts that relieve the busiest node most (HD-MoE, arXiv 2509.09420, Eq. 13).

    The congested node is the one with the largest `sum_i share_ic load_i` (ties: lowest node). Its
    expert with the largest `share_ic load_i` comes first (ties: larger id). With that expert on
    every node, the rest is looked at again, until `num_broadcast` are found or no node has
    predicted load left.

    **Arguments:**

    - `share`: [experts, nodes], rows sum to 1.
    - `predicted_load`: [experts] tokens, counts or fractions, 0 or more.
    - `max_broadcast`: the static length of the answer, at most the number of experts.
    - `num_broadcast`: how many to choose, at most `max_broadcast`; may be traced. All by default.

    **Raises:** `ValueError` for shapes that disagree, a bad share, or a load that is negative or
    not finite. Under tracing these are a `status`.
    """
    share, load = check_share("priority", share), check_load("priority", predicted_load)
    num_experts = share.shape[0]
    if load.shape != (num_experts,):
        raise ValueError(
            f"priority: predicted_load has shape {load.shape}: allowed is ({num_experts},), the "
            "experts of share (batches: jax.vmap)"
        )
    if not isinstance(max_broadcast, int) or not 0 <= max_broadcast <= num_experts:
        raise ValueError(
            f"priority.max_broadcast = {max_broadcast!r}: allowed is 0 to {num_experts}"
        )
    count = max_broadcast if num_broadcast is None else num_broadcast
    return _priority(share, load, jnp.asarray(count), max_broadcast)


@functools.partial(jax.jit, static_argnames="max_broadcast")
def _priority(share, load, count, max_broadcast: int) -> Priority:
    num_experts = share.shape[0]
    bad_load = ~jnp.all((load >= 0) & (load < jnp.inf))
    status = merge(share_status(share), flag(bad_load, Status.BAD_COST))
    load = jnp.where(status == Status.OK, load, 0)

    def choose(chosen, turn):
        remaining = jnp.where(chosen, 0, load)
        congested = jnp.argmax(jnp.matmul(remaining, share, precision="highest"))
        relief = share[:, congested] * remaining
        expert = num_experts - 1 - jnp.argmax(relief[::-1]).astype(jnp.int32)
        helps = (relief[expert] > 0) & (turn < count)
        chosen = chosen.at[expert].set(chosen[expert] | helps)
        return chosen, jnp.where(helps, expert, NOT_ROUTED)

    none = jnp.zeros(num_experts, bool)
    chosen, experts = jax.lax.scan(choose, none, jnp.arange(max_broadcast))
    return Priority(experts, chosen, status)
