"""What Node Balance minimizes: scaled costs, sets of experts chosen together, caps of a node."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax._typing import Array, BoolScalar, Float, FloatScalar
from moejax.noc import HOSTING_SHARE, Topology
from moejax.placement._costs import NodeCosts, load_time, traffic_time
from moejax.placement._estimate import TRANSFERS
from moejax.placement._fat_tree import Tree, tree_of, tree_rows
from moejax.placement._statistics import Statistics


OVERLOAD = 10.0
"""Price of a load beyond its cap, in units of the load itself."""
SLACK = 1e-5
"""Relative excess over a cap that is rounding."""


class Problem(NamedTuple):
    """One layer on a number of nodes, or several scenarios of it, divided by `scale`.

    A scenario is one guess at the traffic: a trace, or a drawn batch. Times are in units of `scale`
    seconds, about the time of the layer, so that one annealing schedule fits all hardware.
    """

    frequency: Float[Array, "scenarios experts"]
    member: Float[Array, "scenarios experts groups"]
    weight: Float[Array, "scenarios groups"]
    load_cost: FloatScalar
    traffic_cost: FloatScalar
    memory_cap: FloatScalar
    load_cap: FloatScalar
    quantile: FloatScalar
    scale: FloatScalar
    tree: Tree | None

    @property
    def num_experts(self) -> int:
        return self.frequency.shape[-1]

    @property
    def mean_frequency(self) -> Float[Array, " experts"]:
        return self.frequency.mean(0)


def problem_of(
    statistics: Statistics,
    costs: NodeCosts,
    num_nodes: int,
    memory_factor: FloatScalar,
    load_cap: FloatScalar,
    quantile: FloatScalar,
    topology: Topology | None = None,
) -> Problem:
    """The problem of `statistics` with a leading scenario axis. Infinite caps are none."""
    num_experts = statistics.num_experts
    load_cost, traffic_cost = load_time(costs), TRANSFERS * traffic_time(costs)
    load = statistics.frequency.sum(-1).mean() / num_nodes
    least = load_cost * load + traffic_cost * statistics.frequency.max(-1).mean()
    scale = jnp.where(least > 0, least, 1.0)
    chosen = statistics.groups[:, None] == jnp.arange(num_experts)[:, None, None]
    dtype = statistics.frequency.dtype
    return Problem(
        statistics.frequency,
        chosen.any(-1).astype(dtype),
        statistics.group_frequency.astype(dtype),
        load_cost / scale,
        traffic_cost / scale,
        jnp.asarray(memory_factor * num_experts / num_nodes, dtype),
        jnp.asarray(load_cap, dtype),
        jnp.asarray(quantile, dtype),
        scale,
        tree_of(topology, costs.bandwidth),
    )


def hosting(share: Float[Array, "experts nodes"]) -> Array:
    """Which node hosts which expert."""
    return share > HOSTING_SHARE


def node_loads(problem: Problem, share: Array) -> Float[Array, "nodes scenarios"]:
    """Expert-tokens of every node per token of the batch."""
    return share.T @ problem.frequency.T


def touched_mass(problem: Problem, count: Array) -> Array:
    """[..., scenarios] of how many experts of each group are hosted, [..., scenarios, groups]."""
    return jnp.where(count > 0, problem.weight, 0.0).sum(-1)


def priced_load(problem: Problem, load: Float[Array, "... scenarios"]) -> Array:
    """Compute time of nodes, with what exceeds the cap on the expected load made dear."""
    excess = jnp.maximum(load.mean(-1, keepdims=True) - problem.load_cap, 0.0)
    return problem.load_cost * (load + OVERLOAD * excess)


def over_scenarios(problem: Problem, total: Float[Array, "... scenarios"]) -> Array:
    """The mean over scenarios, or the quantile where one is asked for (the next larger total)."""
    if total.shape[-1] == 1:
        return total[..., 0]
    ordered = jnp.sort(total, axis=-1)
    last = total.shape[-1] - 1
    index = jnp.ceil(jnp.nan_to_num(problem.quantile) * last - 1e-4).astype(jnp.int32)
    chosen = ordered[..., jnp.clip(index, 0, last)]
    return jnp.where(jnp.isnan(problem.quantile), total.mean(-1), chosen)


def scenario_weights(problem: Problem, total: Float[Array, " scenarios"]) -> Array:
    """How much each scenario matters to `over_scenarios` at this placement; sums to 1."""
    if total.shape[0] == 1:
        return jnp.ones_like(total)
    rank = jnp.argsort(jnp.argsort(total))
    last = total.shape[0] - 1
    far = jnp.abs(rank - jnp.nan_to_num(problem.quantile) * last)
    near = jax.nn.softmax(-far)
    return jnp.where(jnp.isnan(problem.quantile), 1 / (last + 1), near)


def count_hosted(
    problem: Problem, share: Float[Array, "experts nodes"]
) -> Float[Array, "nodes scenarios groups"]:
    """How many experts of each group every node hosts."""
    return jnp.einsum("ed,seg->dsg", hosting(share).astype(share.dtype), problem.member)


def busiest_mass(
    problem: Problem,
    mass: Float[Array, "nodes scenarios"],
    count: Float[Array, "nodes scenarios groups"],
) -> Float[Array, " scenarios"]:
    """Mass of the busiest node, or of the busiest row of a fat-tree if it takes longer."""
    if problem.tree is None:
        return mass.max(0)
    return jnp.maximum(mass.max(0), tree_rows(problem.tree, count > 0, problem.weight).max(0))


class Times(NamedTuple):
    """Scaled times of a placement; `total` is infinite where a cap is broken."""

    comp: Float[Array, " scenarios"]
    comm: Float[Array, " scenarios"]
    total: FloatScalar


def times_of(
    problem: Problem,
    share: Float[Array, "experts nodes"],
    mass: Float[Array, "nodes scenarios"],
    count: Float[Array, "nodes scenarios groups"],
) -> Times:
    """What a placement takes whose counts and masses are known; `comm` is that of both ways."""
    load = node_loads(problem, share)
    comp = problem.load_cost * load.max(0)
    comm = problem.traffic_cost * busiest_mass(problem, mass, count)
    total = over_scenarios(problem, comp + comm)
    return Times(comp, comm, jnp.where(within_caps(problem, share, load), total, jnp.inf))


def evaluated(problem: Problem, share: Float[Array, "experts nodes"]) -> Times:
    """`times_of` a share."""
    count = count_hosted(problem, share)
    return times_of(problem, share, touched_mass(problem, count), count)


def within_caps(problem: Problem, share: Array, load: Array) -> BoolScalar:
    """Whether the memory and the expected load of every node stay below their caps."""
    return (load.mean(-1).max() <= problem.load_cap * (1 + SLACK)) & (
        share.sum(0).max() <= problem.memory_cap * (1 + SLACK)
    )
