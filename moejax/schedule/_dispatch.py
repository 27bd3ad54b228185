"""Where broadcast experts run: on the least loaded node that holds an expert of the token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status, merge
from moejax._typing import Array, Bool, Float, Int, IntScalar
from moejax.noc import HOSTING_SHARE
from moejax.schedule._validate import check_ids, check_share, ids_status, share_status


STAYS = -1
"""Node of a slot that is not dispatched: its expert runs where `share` says."""


class Dispatch(NamedTuple):
    """Where the slots of broadcast experts run."""

    node: Int[Array, "tokens top_k"]
    """The node that runs each slot, or `STAYS`."""
    load: Float[Array, " nodes"]
    """Expert-tokens that each node runs, those by `share` included."""
    visits: Bool[Array, "tokens top_k"]
    """Slots whose node runs none of the token's experts that are not broadcast: it gets the token
    and returns a result only for this."""
    status: IntScalar
    """A `moejax.Status`; where it is not okay, loads are NaN."""


def dispatch(
    expert_ids: Int[Array, "tokens top_k"],
    share: Float[Array, "experts nodes"],
    broadcast: Bool[Array, " experts"],
    *,
    only_partners: bool = False,
) -> Dispatch:
    """Runs every (token, broadcast expert) on the least loaded node that holds an expert of the
    token (HDA-MoE, arXiv 2609.08682, section V-C).

    Loads begin with the experts that are not broadcast, `sum_i share_ic n_i`. Tokens come in order,
    and their slots in order: each adds one to the least loaded candidate (ties: lowest node), which
    the next one sees. Candidates are the nodes with a part of any of the token's experts in
    `share`, that is, before the broadcast.

    **Arguments:**

    - `expert_ids`: [tokens, top_k]; slots that are `routing.NOT_ROUTED` run nowhere.
    - `share`: [experts, nodes], rows sum to 1; a node hosts what it has more than
        `noc.HOSTING_SHARE` of.
    - `broadcast`: [experts], True for those that every node has a copy of.
    - `only_partners`: the candidates are only nodes with a part of an expert of the token that is
        *not* broadcast, where there is one: they return a result for it in any case, so that the
        dispatch causes no traffic at all. Static.

    **Raises:** `ValueError` for shapes that disagree, a bad share, or an expert id out of range.
    Under tracing these are a `status`.
    """
    share = check_share("dispatch", share)
    num_experts = share.shape[0]
    ids = check_ids("dispatch", "expert_ids", expert_ids, num_experts, 2)
    chosen = broadcast if isinstance(broadcast, jax.Array) else np.asarray(broadcast)
    if chosen.shape != (num_experts,) or chosen.dtype != bool:
        raise ValueError(
            f"dispatch: broadcast is {chosen.dtype} {chosen.shape}: allowed is bool "
            f"({num_experts},), the experts of share"
        )
    return _dispatch(ids, share, jnp.asarray(chosen), only_partners)


@functools.partial(jax.jit, static_argnames="only_partners")
def _dispatch(ids, share, broadcast, only_partners: bool) -> Dispatch:
    num_experts, num_nodes = share.shape
    status = merge(share_status(share), ids_status(ids, num_experts))
    routed = (ids >= 0) & (ids < num_experts)
    safe = jnp.where(routed, ids, 0)
    moved = routed & broadcast[safe]
    hosts = share > HOSTING_SHARE
    holders = lambda slots: jnp.any(hosts[safe] & slots[..., None], axis=1)
    partners = holders(routed & ~moved)
    candidates = holders(routed)
    if only_partners:
        candidates = jnp.where(partners.any(1, keepdims=True), partners, candidates)

    counts = jnp.zeros(num_experts, share.dtype).at[safe].add(routed & ~moved)
    # On a GPU the default precision of a product is not that of float32.
    static_load = jnp.matmul(counts, share, precision="highest")
    nodes = jnp.arange(num_nodes)

    def run_token(load, token):
        candidate, moves = token

        def run_slot(load, moves):
            node = jnp.argmin(jnp.where(candidate, load, jnp.inf)).astype(jnp.int32)
            load += (moves & (nodes == node)).astype(load.dtype)
            return load, jnp.where(moves, node, STAYS)

        return jax.lax.scan(run_slot, load, moves, unroll=True)

    load, node = jax.lax.scan(run_token, static_load, (candidates, moved))
    own = jnp.take_along_axis(partners, jnp.maximum(node, 0), axis=1)
    load = jnp.where(status == Status.OK, load, jnp.nan)
    return Dispatch(node, load, moved & ~own, status)
