"""The traced part of Node Balance: from statistics to the best placement that a search finds."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, FloatScalar, PRNGKeyArray
from moejax.noc import Topology
from moejax.placement import _host_sets as host_sets
from moejax.placement._construct import pour, regions, starts, whole_experts
from moejax.placement._costs import NodeCosts
from moejax.placement._estimate import TRANSFERS
from moejax.placement._fat_tree import arrange
from moejax.placement._node_bound import bound_of
from moejax.placement._node_problem import (
    Problem,
    count_hosted,
    evaluated,
    problem_of,
)
from moejax.placement._search import search
from moejax.placement._shares import best_share
from moejax.placement._statistics import Statistics


SPREAD = 0.05
"""Highest floor of traffic of a chain above the busiest expert, relative, in a search by moves."""
WIDE_SPREAD = 0.8
"""The same with a node or more for every expert, where any second expert is much traffic, and on a
fat-tree, whose rows may be what counts."""
ARRANGING_STEPS = 200


class Effort(NamedTuple):
    """Static sizes of a search."""

    num_chains: int
    num_steps: int
    num_rounds: int

    def resized(self, num_chains: int | None, num_steps: int | None) -> "Effort":
        chains, steps = num_chains or self.num_chains, num_steps or self.num_steps
        return Effort(chains, steps, self.num_rounds)


HOST_SET_EFFORT = Effort(32, 60, host_sets.ROUNDS)
MOVE_EFFORT = Effort(8, 150, 3)


class Caps(NamedTuple):
    """Options of a problem that may be traced; infinite caps are none, a NaN quantile the mean."""

    memory_factor: FloatScalar
    load_cap: FloatScalar
    quantile: FloatScalar


class Searched(NamedTuple):
    """The best placement, its times, a lower bound of `total`, and the best total by step, in s.

    Compute and communication, the latter one way, are means over scenarios.
    """

    share: Float[Array, "experts nodes"]
    comp: FloatScalar
    comm: FloatScalar
    total: FloatScalar
    bound: FloatScalar
    curve: Float[Array, " steps"]


@functools.partial(jax.jit, static_argnames=("num_nodes", "num_chains", "num_steps", "capped"))
def node_search(
    statistics: Statistics,
    costs: NodeCosts,
    caps: Caps,
    topology: Topology | None,
    *,
    num_nodes: int,
    num_chains: int | None,
    num_steps: int | None,
    capped: bool,
    key: PRNGKeyArray,
) -> Searched:
    """The best placement found; `statistics` has a leading scenario axis.

    `num_chains` and `num_steps` replace the default size of the search. `capped` says whether
    there is a cap on memory at all.
    """
    problem = problem_of(statistics, costs, num_nodes, *caps, topology)
    base_key, refine_key, arrange_key = jax.random.split(key, 3)
    asked = num_chains, num_steps
    average = _averaged(problem)
    if problem.num_experts <= host_sets.MOST_EXPERTS and not capped:
        share, curve = _by_host_sets(average, num_nodes, HOST_SET_EFFORT.resized(*asked), base_key)
    else:
        effort = MOVE_EFFORT.resized(*asked)
        share, curve = _by_moves(average, num_nodes, effort, caps.memory_factor, capped, base_key)
    spare = simple_placements(problem.mean_frequency, num_nodes, caps.memory_factor)
    shares = jnp.stack([share, *spare])
    if problem.tree is not None:
        shares = _arranged(problem, shares, arrange_key)
    if problem.frequency.shape[0] > 1 or problem.tree is not None:
        effort = MOVE_EFFORT.resized(*asked)
        refined, curve = _refined(problem, shares[0], num_nodes, effort, capped, refine_key)
        shares = jnp.concatenate([refined[None], shares])
    found = jax.vmap(lambda share: _reported(problem, share, curve))(shares)
    return jax.tree.map(lambda part: part[jnp.argmin(found.total)], found)


@jax.jit
def node_price(
    share: Float[Array, "experts nodes"],
    statistics: Statistics,
    costs: NodeCosts,
    caps: Caps,
    topology: Topology | None,
) -> Searched:
    """A given placement as `node_search` would report it."""
    problem = problem_of(statistics, costs, share.shape[1], *caps, topology)
    return _reported(problem, share, jnp.zeros(1, share.dtype))


def simple_placements(
    frequency: Float[Array, " experts"], num_nodes: int, memory_factor: FloatScalar
) -> list[Float[Array, "experts nodes"]]:
    """What one has without searching; the last meets every cap that can be met."""
    order = jnp.argsort(-frequency)
    poured = pour(order, frequency, num_nodes, memory_factor)
    return [whole_experts(frequency, num_nodes), poured, regions(frequency, num_nodes, 1)]


def _reported(problem: Problem, share: Array, curve: Array) -> Searched:
    times = evaluated(problem, share)
    bound = bound_of(problem, share.shape[1])
    # A simple placement may be better than what the search came to.
    curve = jnp.maximum(curve, times.total).at[-1].set(times.total)
    parts = times.comp.mean(), times.comm.mean() / TRANSFERS, times.total, bound, curve
    return Searched(share, *jax.tree.map(lambda part: part * problem.scale, parts))


def _averaged(problem: Problem) -> Problem:
    """All scenarios as one, without the rows of a tree: the average traffic."""
    num_scenarios, num_experts = problem.frequency.shape
    member = problem.member.swapaxes(0, 1).reshape(1, num_experts, -1)
    return problem._replace(
        frequency=problem.mean_frequency[None],
        member=member,
        weight=problem.weight.reshape(1, -1) / num_scenarios,
        quantile=jnp.full_like(problem.quantile, jnp.nan),
        tree=None,
    )


def _by_host_sets(
    problem: Problem, num_nodes: int, effort: Effort, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Share and curve of a problem with one scenario and no cap on memory."""
    frequency, member, weight = (part[0] for part in problem[:3])
    sets = np.arange(2**problem.num_experts)
    hosts = jnp.asarray((sets[:, None] >> np.arange(problem.num_experts)) & 1, member.dtype)
    traffic = jnp.where(hosts @ member > 0, weight, 0.0).sum(-1)
    mean_load = frequency.sum() / num_nodes
    found = host_sets.search(
        host_sets.tables_of(traffic, frequency, num_nodes),
        host_sets.Prices(problem.load_cost, problem.traffic_cost, problem.load_cap, mean_load),
        num_nodes,
        num_chains=effort.num_chains,
        num_steps=effort.num_steps,
        key=key,
    )
    # Nodes in the order of their sets: a good start for the leaves of a tree.
    best = jnp.sort(found.host_set[jnp.argmin(found.total)])
    return best_share(host_sets.host_bits(best, problem.num_experts), frequency), found.curve


def _by_moves(
    problem: Problem,
    num_nodes: int,
    effort: Effort,
    memory_factor: FloatScalar,
    capped: bool,
    key: PRNGKeyArray,
) -> tuple[Array, Array]:
    """Share and curve of a problem with one scenario."""
    start_key, search_key = jax.random.split(key)
    member, weight = problem.member[0], problem.weight[0]
    together = jnp.einsum("eg,g,fg->ef", member, weight, member)
    first = starts(
        problem.frequency[0],
        together,
        num_nodes,
        effort.num_chains,
        memory_factor=memory_factor,
        key=start_key,
    )
    wide = problem.num_experts <= num_nodes
    return _best_of_chains(problem, first, effort, wide, capped, search_key)


def _refined(
    problem: Problem,
    share: Array,
    num_nodes: int,
    effort: Effort,
    capped: bool,
    key: PRNGKeyArray,
) -> tuple[Array, Array]:
    """Share and curve of a search that begins at what is best on average and without a tree, and
    at regions of all sizes: loads of a region fluctuate the less, and a token leaves it the
    rarer, the larger it is."""
    size_of = lambda chain: min(2 ** (chain // 2), num_nodes)
    first = [
        regions(problem.mean_frequency, num_nodes, size_of(chain)) if chain % 2 else share
        for chain in range(effort.num_chains)
    ]
    wide = problem.num_experts <= num_nodes or problem.tree is not None
    return _best_of_chains(problem, jnp.stack(first), effort, wide, capped, key)


def _best_of_chains(
    problem: Problem, first: Array, effort: Effort, wide: bool, capped: bool, key: PRNGKeyArray
) -> tuple[Array, Array]:
    # Neighbors have different floors, half of the chains the same ones again.
    length = max(effort.num_chains // 2, min(effort.num_chains, 4))
    ramp = jnp.arange(effort.num_chains) % length / max(length - 1, 1)
    floors = 1 + (WIDE_SPREAD if wide else SPREAD) * ramp
    found = search(
        problem,
        first,
        floors * problem.mean_frequency.max(),
        num_steps=effort.num_steps,
        num_rounds=effort.num_rounds,
        capped=capped,
        key=key,
    )
    return found.share[jnp.argmin(found.total)], found.curve


def _arranged(problem: Problem, shares: Array, key: PRNGKeyArray) -> Array:
    """Each placement with its nodes where the rows of the tree are shortest."""
    tree = problem.tree
    assert tree is not None

    def one(share: Array, key: PRNGKeyArray) -> Array:
        count = count_hosted(problem, share)
        node = arrange(tree, count > 0, problem.weight, ARRANGING_STEPS, key=key)
        return share[:, node]

    return jax.vmap(one)(shares, jax.random.split(key, len(shares)))
