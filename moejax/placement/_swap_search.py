"""Annealing over swaps of two nodes, on the time that the busiest link is in use.

On expert traffic this time is 0.95 to 1 of the simulated makespan, and what a swap does to it is
one small matrix product: only messages from or to the two nodes change their routes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Float, FloatScalar, Int, PRNGKeyArray
from moejax.noc import HOSTING_SHARE, NO_LINK, Topology
from moejax.placement._link_traffic import heat, random_pairs


ROUND = 250
"""Swaps after which loads are added up anew, so that rounding does not build up."""
DEAD = 1e6
"""A link of no bandwidth counts as this much slower than the slowest other one: to be avoided,
and where it can not be, the less is sent over it the better."""


class SwapProblem(NamedTuple):
    """What the links carry under a map.

    - `traffic`: B from each logical node to the owner of each slot, for each batch.
    - `owner`: logical node that a slot belongs to. Only nodes that aggregate need one.
    - `route_time`: s for 1 B from one endpoint (pair = source * nodes + destination) to another, on
        each resource, in each phase: the gather, and maybe the dispatch.
    """

    traffic: Float[Array, "batches nodes slots"]
    owner: Int[Array, " slots"]
    route_time: Float[Array, "pairs phases resources"]


def swap_problem(
    topology: Topology,
    share: Float[Array, "experts nodes"],
    traffic: Float[Array, "batches nodes nodes"],
    *,
    mirrored: bool,
) -> SwapProblem:
    """The problem with as few slots as share allows: one for each expert, or for each node."""
    num_experts, num_nodes = share.shape
    times = route_time(topology)
    ends = times.reshape(num_nodes, num_nodes, -1)
    phases = [ends, ends.swapaxes(0, 1)] if mirrored else [ends]
    stacked = jnp.stack(phases, axis=2).reshape(num_nodes**2, len(phases), -1)
    if num_experts >= num_nodes:
        return SwapProblem(traffic, jnp.arange(num_nodes), stacked)
    # The lowest node that hosts an expert aggregates for it; one of several experts counts.
    owner = jnp.argmax(share > HOSTING_SHARE, axis=1)
    repeated = jnp.tril(owner[:, None] == owner, -1).any(1)
    return SwapProblem(jnp.where(repeated, 0, traffic[:, :, owner]), owner, stacked)


def route_time(topology: Topology) -> Float[Array, "pairs resources"]:
    """s for 1 B between two endpoints on each resource, averaged over equal-cost routes."""
    _, num_choices, num_pairs = topology.route_resource.shape
    bandwidth, last = topology.resource_bandwidth, topology.num_resources
    exists = jnp.arange(num_choices)[:, None] < topology.num_routes
    used = (topology.route_resource != NO_LINK) & exists
    pair = jnp.broadcast_to(jnp.arange(num_pairs), used.shape)
    part = jnp.where(used, 1 / topology.num_routes, 0).astype(bandwidth.dtype)
    routes = jnp.zeros((num_pairs, last + 1), bandwidth.dtype)
    routes = routes.at[pair, jnp.where(used, topology.route_resource, last)].add(part)[:, :last]
    alive = bandwidth > 0
    slowest = jnp.min(jnp.where(alive, bandwidth, jnp.inf), initial=jnp.inf)
    slowest = jnp.where(jnp.isfinite(slowest), slowest, 1)
    return routes * jnp.where(alive, 1 / jnp.where(alive, bandwidth, 1), DEAD / slowest)


def load(problem: SwapProblem, position: Int[Array, " nodes"]) -> Float[Array, "batches phases r"]:
    """s that each resource is in use, in each batch."""
    num_nodes = position.shape[0]
    pair = position[:, None] * num_nodes + position[problem.owner]
    return _spread(problem, problem.traffic, problem.route_time[pair])


def score(load: Float[Array, "batches phases r"]) -> FloatScalar:
    """s of the busiest link, added over phases, the mean over batches."""
    return load.max(-1, initial=0).sum(-1).mean()


def load_change(
    problem: SwapProblem,
    position: Int[Array, " nodes"],
    swapped: Int[Array, " nodes"],
    two: Int[Array, "2"],
) -> Float[Array, "batches phases r"]:
    """What `load` gains when the `two` nodes change places and so `position` becomes `swapped`."""
    num_nodes = position.shape[0]
    others = (jnp.arange(num_nodes)[:, None] != two).all(1)
    sent = problem.traffic[:, two]
    # Between the two it is sent already.
    mine = (problem.owner[:, None] == two).astype(sent.dtype)
    received = _product("bns,st->bnt", problem.traffic, mine) * others[:, None]

    def routes(position):
        to = position[two][:, None] * num_nodes + position[problem.owner]
        back = position[:, None] * num_nodes + position[two]
        return problem.route_time[jnp.concatenate([to.ravel(), back.ravel()])]

    num_batches = sent.shape[0]
    moved = [part.reshape(num_batches, -1) for part in (sent, received)]
    return _spread(problem, jnp.concatenate(moved, 1), routes(swapped) - routes(position))


def anneal(
    problem: SwapProblem,
    start: Int[Array, " nodes"],
    scale: FloatScalar,
    rounds: int,
    key: PRNGKeyArray,
) -> tuple[Int[Array, " nodes"], Float[Array, " rounds"]]:
    """One chain of `rounds` times `ROUND` swaps: its best map at the end of a round or within one,
    and the best score so far after each round, in s.

    Worse maps are accepted with probability exp(-loss / temperature), where the temperature falls
    geometrically, as `heat` says, in units of `scale`.
    """
    num_nodes = start.shape[0]

    def one_round(state, item):
        position, best, best_score = state
        number, key = item
        chance = jax.random.uniform(key, (ROUND, 3), scale.dtype, minval=1e-30)
        two = random_pairs(chance[:, :2], num_nodes)
        now = load(problem, position)
        allowed = -jnp.log(chance[:, 2]) * heat(number / max(rounds - 1, 1)) * scale
        state = (position, now, score(now), best, best_score)
        state, _ = lax.scan(_swap(problem), state, (two, allowed))
        position, *_, best, best_score = state
        return (position, best, best_score), best_score

    state = (start, start, score(load(problem, start)))
    items = (jnp.arange(rounds), jax.random.split(key, rounds))
    (_, best, _), curve = lax.scan(one_round, state, items)
    return best, curve


def _swap(problem: SwapProblem):
    def swap(state, proposal):
        position, now, value, best, best_score = state
        two, allowed = proposal
        swapped = position.at[two].set(position[two[::-1]])
        after = now + load_change(problem, position, swapped, two)
        new = score(after)
        accepted = new <= value + allowed
        take = lambda new, old: jnp.where(accepted, new, old)
        position, now, value = take(swapped, position), take(after, now), take(new, value)
        better = value < best_score
        best, best_score = jnp.where(better, position, best), jnp.minimum(value, best_score)
        return (position, now, value, best, best_score), None

    return swap


def _spread(problem: SwapProblem, sent: Array, routes: Array) -> Float[Array, "batches phases r"]:
    """Bytes [batches, ...] over routes [..., phases, resources], added up."""
    shape = (sent.shape[0], *routes.shape[-2:])
    flat = routes.reshape(-1, shape[1] * shape[2])
    return _product("bm,mr->br", sent.reshape(shape[0], -1), flat).reshape(shape)


def _product(axes: str, left: Array, right: Array) -> Array:
    return jnp.einsum(axes, left, right, precision=lax.Precision.HIGHEST)
