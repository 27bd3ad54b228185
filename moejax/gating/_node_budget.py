"""A limit for every node instead of a price for the busiest: what lies above it costs."""

import jax
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import Status, flag, merge
from moejax._typing import Array, Float, FloatLike, FloatScalar, IntScalar
from moejax.gating._cost_sources import AbstractCostSource
from moejax.gating._resource_loads import HOSTING_SHARE
from moejax.gating._validate import check_coefficient, check_share, check_times, share_status


class NodeBudget(AbstractCostSource):
    """Nodes that have a time budget for a batch; choices that exceed it pay for the excess.

    cost_i = -r_comp * sum_c (excess_c with one more token of i - excess_c) - r_comm * N_i, where
    excess_c = max(0, load_c - budget) and N_i is the number of nodes that hold a part of i.

    The published cost (`ResourceLoads.nodes`) is blind where two nodes tie for the busiest, and
    counts the first tokens of a batch as if their load were the last. Here every node above budget
    pushes, and with `include_future_original` only nodes that would end above it do.

    Fields: `time` [experts, nodes] in s of one token; `price` score units per s above `budget`;
    `budget` in s; `fixed` [experts] score units; `input_status`.
    """

    time: Float[Array, "experts nodes"]
    price: FloatScalar
    budget: FloatScalar
    fixed: Float[Array, " experts"]
    input_status: IntScalar

    @classmethod
    def of(
        cls,
        share: Float[Array, "experts nodes"],
        *,
        token_time: FloatLike,
        budget: FloatLike,
        r_comp: FloatLike,
        r_comm: FloatLike = 0.0,
    ) -> "NodeBudget":
        """**Arguments:** as `ResourceLoads.nodes`, and

        - `budget`: s of computation that a node may have without paying; the even load
            top_k * tokens * token_time / nodes is the least that all nodes can keep.
        - `r_comp`: score units per s above it, 0 or less.

        **Raises:** `ValueError` for shares that do not sum to 1, negative times, positive
        coefficients; a status under tracing.
        """
        check_share(share)
        check_times("token_time", token_time, ())
        check_times("budget", budget, ())
        check_coefficient("r_comp", r_comp)
        check_coefficient("r_comm", r_comm)
        values = (as_float(x) for x in (share, token_time, budget, r_comp, r_comm))
        return _of(*values)

    def initial_load(self) -> Float[Array, " nodes"]:
        return jnp.zeros(self.time.shape[1], self.time.dtype)

    def cost(self, load: Float[Array, " nodes"]) -> Float[Array, " experts"]:
        return self.price * excess(load, self.time, self.budget) + self.fixed

    def update(
        self, load: Float[Array, " nodes"], counts: Float[Array, " experts"]
    ) -> Float[Array, " nodes"]:
        added = jnp.matmul(
            counts.astype(load.dtype), self.time, precision=jax.lax.Precision.HIGHEST
        )
        return load + added

    def status(self, load: Float[Array, " nodes"]) -> IntScalar:
        bad = ~jnp.all((load >= 0) & (load < jnp.inf))
        return merge(self.input_status, flag(bad, Status.BAD_COST))


def excess(
    load: Float[Array, " nodes"], time: Float[Array, "experts nodes"], budget: FloatScalar
) -> Float[Array, " experts"]:
    """s that one more token of each expert adds above the budget, over all nodes."""
    room = budget - load
    return (jnp.maximum(time - room, 0) - jnp.maximum(-room, 0)).sum(-1)


@jax.jit
def _of(share, token_time, budget, r_comp, r_comm) -> NodeBudget:
    time = jnp.maximum(share, 0) * token_time
    hosts = (share > HOSTING_SHARE).sum(-1).astype(time.dtype)
    sane = lambda x: jnp.all((x >= 0) & (x < jnp.inf))
    bad = ~(sane(time) & sane(-r_comp) & sane(-r_comm) & sane(budget))
    status = merge(share_status(share), flag(bad, Status.BAD_COST))
    return NodeBudget(time, -r_comp, budget, -r_comm * hosts, status)
