"""What a placement costs by the estimator of HD-MoE: the busiest node, computing and receiving."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, merge
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, Int, IntScalar
from moejax.noc import HOSTING_SHARE
from moejax.placement._costs import (
    NodeCosts,
    check_unbatched,
    check_values,
    cost_status,
    load_time,
    statistics_status,
    traffic_time,
)
from moejax.placement._statistics import Statistics, batch_statistics
from moejax.placement._validate import check_share, share_status


TRANSFERS = 2.0
"""Times that the estimated communication is paid: tokens are dispatched, results gathered."""
MOST_HOST_SETS = 12
"""Experts up to which `host_set_traffic` lists all sets of them."""


class PlacementTimes(NamedTuple):
    """What one layer takes with a placement, in s.

    `comp_time` and `comm_time` are those of the busiest node, for one direction of communication,
    `total = comp_time + 2 comm_time`. `node_comp_time` and `node_comm_time` [nodes] are those of
    each node. Times are NaN unless `status` (see `moejax.Status`) is 0.
    """

    comp_time: FloatScalar
    comm_time: FloatScalar
    total: FloatScalar
    node_comp_time: Float[Array, " nodes"]
    node_comm_time: Float[Array, " nodes"]
    status: IntScalar


def evaluate(
    share: Float[Array, "experts nodes"],
    statistics: Statistics,
    costs: NodeCosts,
    *,
    transfers: FloatLike = TRANSFERS,
) -> PlacementTimes:
    """Expected time of one layer with a placement (HD-MoE, arXiv 2509.09420, Eq. 1, 2 and 8).

        comp = max_c sum_i share_ic f_i * batch * flops_per_token / flops_per_s
        comm = gamma * batch * bytes_per_token / bandwidth * max_c sum_g f_g [g has an expert on c]
        total = comp + 2 comm

    The gradient with respect to `share` is a subgradient: that of the node with the largest
    load, averaged over nodes that tie, and finite where no expert has any load. Communication
    depends on `share` through which entries exceed `HOSTING_SHARE` alone, so its gradient with
    respect to `share` is zero; that with respect to costs and statistics is not.

    **Arguments:**

    - `share`: part of each expert on each node; rows sum to 1.
    - `statistics`: of one layer.
    - `costs`: `NodeCosts`.
    - `transfers`: how often the communication is paid. 2 is dispatch and gather; the tensor
        parallel rows of HDA-MoE (arXiv 2609.08682) pay 4, two all-reduces of two halves each.

    **Returns:** `PlacementTimes`, in s.

    **Raises:** `ValueError` for shapes that disagree and, eagerly, rows that do not sum to 1,
    negative loads, ids that are no experts, rates that are not above zero, costs that are negative
    or not finite. Under tracing these are a `status`.
    """
    share = as_float(share)
    check_share("placement.evaluate", share, statistics.num_experts)
    check_unbatched(statistics, costs)
    check_values("placement.evaluate", statistics, costs)
    return _evaluate(share, statistics, costs, as_float(transfers))


def evaluate_batch(
    share: Float[Array, "experts nodes"],
    expert_ids: Int[Array, "tokens k"],
    costs: NodeCosts,
    *,
    transfers: FloatLike = TRANSFERS,
) -> PlacementTimes:
    """`evaluate` for the tokens of one actual batch instead of the average one.

    The load f_i * batch becomes the number of tokens that chose expert i, and the communication of
    a node counts the tokens with an expert on it; `costs.batch` is not read.

    **Arguments:** `expert_ids` may hold padding (ids below 0); the rest as `evaluate`.

    **Returns**, **Raises:** as `evaluate`. Works under `jax.jit`, and `jax.vmap` over batches.
    """
    share = as_float(share)
    check_share("placement.evaluate_batch", share)
    ids = jnp.asarray(expert_ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"placement.evaluate_batch: expert_ids is {ids.dtype}{list(ids.shape)}: allowed is "
            "whole numbers [tokens, k] (batches: jax.vmap)"
        )
    counted = batch_statistics(ids, share.shape[0])
    one = dataclasses.replace(costs, batch=jnp.ones_like(costs.batch))
    check_unbatched(counted, one)
    check_values("placement.evaluate_batch", counted, one)
    return _evaluate(share, counted, one, as_float(transfers))


@jax.jit
def _evaluate(
    share: Array, statistics: Statistics, costs: NodeCosts, transfers: Array
) -> PlacementTimes:
    status = merge(share_status(share), statistics_status(statistics), cost_status(costs))
    times = times_unchecked(share, statistics, costs, transfers)
    poison = lambda time: jnp.where(status == Status.OK, time, jnp.nan)
    return jax.tree.map(poison, times._replace(status=None))._replace(status=status)


def times_unchecked(
    share: Float[Array, "experts nodes"],
    statistics: Statistics,
    costs: NodeCosts,
    transfers: FloatLike = TRANSFERS,
) -> PlacementTimes:
    """`evaluate` without any check: the kernel that a search calls for every candidate."""
    node_comp = node_load(share, statistics) * load_time(costs)
    node_comm = node_traffic(share > HOSTING_SHARE, statistics) * traffic_time(costs)
    comp, comm = node_comp.max(), node_comm.max()
    total = comp + transfers * comm
    return PlacementTimes(comp, comm, total, node_comp, node_comm, jnp.int32(Status.OK))


def node_load(
    share: Float[Array, "experts nodes"], statistics: Statistics
) -> Float[Array, " nodes"]:
    """Whole expert-tokens that each node computes, per token of the batch: sum_i share_ic f_i."""
    # Not a matrix product: accelerators would round its factors.
    return (share * statistics.frequency[:, None]).sum(0)


def node_traffic(
    hosts: Bool[Array, "experts nodes"], statistics: Statistics
) -> Float[Array, " nodes"]:
    """Share of the tokens that have an expert on each node: sum_g f_g [some expert of g on c].

    A node's traffic depends on its own column of `hosts` alone, so that a search which changes two
    nodes passes these two columns.
    """
    touched = False
    for slot in range(statistics.top_k):
        expert = statistics.groups[:, slot]
        touched |= hosts[jnp.maximum(expert, 0)] & (expert >= 0)[:, None]
    return jnp.where(touched, statistics.group_frequency[:, None], 0.0).sum(0)


def host_set_traffic(statistics: Statistics) -> Float[Array, " host_sets"]:
    """`node_traffic` of every set of experts that a node could host, for few experts.

    **Returns:** [2 ** experts]; bit i of the index says that expert i is hosted.

    **Raises:** `ValueError` for more than 12 experts.
    """
    num_experts = statistics.num_experts
    if num_experts > MOST_HOST_SETS:
        raise ValueError(
            f"host_set_traffic: num_experts = {num_experts}: allowed is at most {MOST_HOST_SETS}"
        )
    sets = np.arange(2**num_experts)
    hosts = (sets >> np.arange(num_experts)[:, None]) & 1
    return node_traffic(jnp.asarray(hosts, bool), statistics)
