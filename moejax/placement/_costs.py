"""What a placement costs by the estimator of HD-MoE: the busiest node, computing and receiving."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import (
    Array,
    Bool,
    Float,
    FloatLike,
    FloatScalar,
    Int,
    IntScalar,
)
from moejax.noc import HOSTING_SHARE
from moejax.placement._statistics import Statistics
from moejax.placement._validate import check_count, check_share, load_status, share_status


TRANSFERS = 2.0
"""Times that the estimated communication is paid: tokens are dispatched, results gathered."""
MOST_HOST_SETS = 12
"""Experts up to which `host_set_traffic` lists all sets of them."""
RATES = ("flops_per_s", "bandwidth")


class NodeCosts(eqx.Module):
    """What one MoE layer costs a node (HD-MoE, arXiv 2509.09420, Eq. 1-3). All fields are traced.

    **Arguments:**

    - `flops_per_token`: FLOP of one token in one whole expert (2 h IS as published).
    - `flops_per_s`: rate of one node, FLOP/s.
    - `bytes_per_token`: bytes that a node which holds an expert of a token moves for it (4 h as
        published: partial sums of 4 bytes).
    - `bandwidth`: of a link of the network, bytes/s.
    - `batch`: tokens of a step.
    - `gamma`: ratio of simulated to estimated communication.
    """

    flops_per_token: FloatScalar = eqx.field(converter=as_float)
    flops_per_s: FloatScalar = eqx.field(converter=as_float)
    bytes_per_token: FloatScalar = eqx.field(converter=as_float)
    bandwidth: FloatScalar = eqx.field(converter=as_float)
    batch: FloatScalar = eqx.field(converter=as_float)
    gamma: FloatScalar = eqx.field(converter=as_float)

    @classmethod
    def published(
        cls,
        hidden_size: FloatLike,
        intermediate_size: FloatLike,
        *,
        flops_per_s: FloatLike,
        bandwidth: FloatLike,
        batch: FloatLike,
        gamma: FloatLike = 1.0,
    ) -> "NodeCosts":
        """The units of the papers: 2 h IS FLOP for one token in one expert and 4 h bytes.

        A SwiGLU expert really takes 6 h IS FLOP.
        """
        work = 2 * hidden_size * intermediate_size
        return cls(work, flops_per_s, 4 * hidden_size, bandwidth, batch, gamma)


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
    _check_unbatched(statistics, costs)
    _check_values("placement.evaluate", statistics, costs)
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
    _check_unbatched(counted, one)
    _check_values("placement.evaluate_batch", counted, one)
    return _evaluate(share, counted, one, as_float(transfers))


def batch_statistics(expert_ids: Int[Array, "tokens k"], num_experts: int) -> Statistics:
    """Every token of a batch as a group of frequency 1, so that `batch` = 1 counts tokens."""
    ids = jnp.asarray(expert_ids).astype(jnp.int32)
    index = jnp.where(ids < 0, num_experts, ids).ravel()
    zeros = jnp.zeros(num_experts, jnp.result_type(float))
    counts = zeros.at[index].add(1.0, mode="drop")
    return Statistics(counts, ids, (ids >= 0).any(-1).astype(counts.dtype))


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


def load_time(costs: NodeCosts) -> FloatScalar:
    """Time of a node for a load of 1, in s: batch * flops_per_token / flops_per_s."""
    return costs.batch * (costs.flops_per_token / costs.flops_per_s)


def traffic_time(costs: NodeCosts) -> FloatScalar:
    """Time of a node for all tokens, one direction, in s: gamma * batch * bytes / bandwidth."""
    return costs.gamma * costs.batch * (costs.bytes_per_token / costs.bandwidth)


def compute_comm_ratio(costs: NodeCosts, num_nodes: int, top_k: int) -> FloatScalar:
    """R_cc: compute over communication time of tensor parallelism (HD-MoE, Eq. 12), gamma = 1.

    Equal to BW IS k / (2 D C) in the published units.

    **Raises:** `ValueError` for no nodes or experts.
    """
    nodes = check_count("compute_comm_ratio", "num_nodes", num_nodes)
    share = check_count("compute_comm_ratio", "top_k", top_k) / nodes
    work = share * (costs.flops_per_token / costs.flops_per_s)
    return work / (costs.bytes_per_token / costs.bandwidth)


def compute_bound(costs: NodeCosts, num_nodes: int, top_k: int) -> FloatScalar:
    """Largest `node_load` that HD-MoE allows (its Eq. 11): (1 / R_cc + 1) k / D.

    A node may then cost one tensor parallel computation and one of its communications.
    """
    return (1 / compute_comm_ratio(costs, num_nodes, top_k) + 1) * (top_k / num_nodes)


def statistics_status(statistics: Statistics) -> IntScalar:
    """What is wrong with the values of one layer's statistics."""
    groups = statistics.groups
    return merge(
        load_status(statistics.frequency),
        load_status(statistics.group_frequency),
        flag(jnp.any(groups >= statistics.num_experts), Status.INVALID_ROUTING),
    )


def cost_status(costs: NodeCosts) -> IntScalar:
    """Rates that are not above zero, and other costs that are negative or not finite."""
    codes = []
    for name, value in vars(costs).items():
        rate = name in RATES
        sane = value > 0 if rate else (value >= 0) & (value < jnp.inf)
        codes.append(flag(~jnp.all(sane), Status.BAD_RATE if rate else Status.BAD_COST))
    return merge(*codes)


def _check_unbatched(statistics: Statistics, costs: NodeCosts) -> None:
    if statistics.frequency.ndim != 1:
        raise ValueError(
            f"placement: statistics.frequency has shape {statistics.frequency.shape}: allowed is "
            "[experts] (layers: jax.vmap)"
        )
    for name, value in vars(costs).items():
        if value.shape != ():
            raise ValueError(f"placement: costs.{name} has shape {value.shape}: allowed is ()")


def _check_values(where: str, statistics: Statistics, costs: NodeCosts) -> None:
    """The eager half of `statistics_status` and `cost_status`. Tracers pass."""
    named: list[tuple[str, Any]] = [(f"costs.{name}", value) for name, value in vars(costs).items()]
    named += [("statistics.frequency", statistics.frequency)]
    named += [("statistics.group_frequency", statistics.group_frequency)]
    for name, value in named:
        if is_traced(value):
            continue
        rate = name.removeprefix("costs.") in RATES
        array = np.asarray(value)
        sane = array > 0 if rate else (array >= 0) & (array < np.inf)
        if not sane.all():
            allowed = "above 0" if rate else "finite, 0 or more"
            raise ValueError(f"{where}: {name} = {array[~sane].flat[0]:g}: allowed is {allowed}")
    if not is_traced(statistics.groups):
        highest = np.asarray(statistics.groups).max()
        if highest >= statistics.num_experts:
            last = statistics.num_experts - 1
            raise ValueError(f"{where}: expert id {highest} in groups: allowed is 0 to {last}")
