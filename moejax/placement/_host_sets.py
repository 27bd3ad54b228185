"""Node Balance of few experts: a search over how many nodes host which set of experts.

With up to `MOST_EXPERTS` experts every set that a node could host has an entry in a table. What a
choice of one set for each node costs is then exact without solving for shares: by Hall's condition
(`_shares.py`) the smallest possible load of the busiest node is

    T = max over sets A of experts of f(A) / number of nodes that host an expert of A.

Traffic is a threshold: a chain may use the sets whose traffic stays below its own, lowers T by
exchanging the set of one node at a time, and the chains of all thresholds together trace the
trade-off between T and traffic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._typing import Array, Float, FloatScalar, Int, IntScalar, PRNGKeyArray


MOST_EXPERTS = 10
SHARPNESS = 20.0
"""Of the soft minimum over sets A that guides the exchange."""
LEAVING, ENTERING = 4, 8
"""Nodes and sets among which an exchange is chosen exactly."""
ROUNDS = 2


class Tables(NamedTuple):
    """What depends on statistics and costs only; index = bit set of experts."""

    traffic: Float[Array, " sets"]
    share_needed: Float[Array, " sets"]
    meets: Float[Array, "sets sets"]


class Chain(NamedTuple):
    """One threshold: the sets of all nodes, how many nodes host an expert of A, the best so far.

    `level` is min_A nodes(A) / nodes needed(A) at the mean load: 1 is perfect balance.
    """

    host_set: Int[Array, " nodes"]
    hosting_nodes: Float[Array, " sets"]
    best_level: FloatScalar
    best_host_set: Int[Array, " nodes"]


def tables_of(
    traffic: Float[Array, " sets"], frequency: Float[Array, " experts"], num_nodes: int
) -> Tables:
    """Tables of `host_set_traffic` and the load of each expert."""
    num_experts = frequency.shape[0]
    sets = np.arange(2**num_experts)
    bits = (sets[:, None] >> np.arange(num_experts)) & 1
    total = frequency.sum()
    # An expert without load needs a host all the same.
    needed = jnp.maximum(frequency, 1e-6 * total) / jnp.where(total > 0, total, 1.0)
    needed = jnp.where(total > 0, needed, 1 / num_experts) * num_nodes
    meets = (sets[:, None] & sets) > 0
    dtype = needed.dtype
    return Tables(traffic, jnp.asarray(bits, dtype) @ needed, jnp.asarray(meets, dtype))


def host_bits(host_set: Int[Array, " nodes"], num_experts: int) -> Array:
    """The sets of all nodes as bool [experts, nodes]."""
    return ((host_set >> jnp.arange(num_experts)[:, None]) & 1).astype(bool)


def level_of(tables: Tables, hosting_nodes: Float[Array, "... sets"]) -> Array:
    return _ratios(tables, hosting_nodes).min(-1)


def _ratios(tables: Tables, hosting_nodes: Array) -> Array:
    """Nodes that a set of experts has over nodes it needs; infinite for the empty set."""
    needed = jnp.maximum(tables.share_needed, 1e-12)
    return jnp.where(tables.share_needed > 0, hosting_nodes / needed, jnp.inf)


def _soft_level(tables: Tables, hosting_nodes: Array) -> Array:
    ratios = _ratios(tables, hosting_nodes)
    return -jax.nn.logsumexp(-SHARPNESS * ratios, axis=-1) / SHARPNESS


def _worth(tables: Tables, ratios: Float[Array, " sets"]) -> Float[Array, " sets"]:
    """First-order gain of one more node with each set: how short are the A that it serves?"""
    inverse = jnp.where(tables.share_needed > 0, 1 / jnp.maximum(tables.share_needed, 1e-12), 0.0)
    return tables.meets @ (jax.nn.softmax(-SHARPNESS * ratios) * inverse)


def run_chain(
    tables: Tables,
    threshold: FloatScalar,
    num_nodes: int,
    num_steps: int,
    *,
    key: PRNGKeyArray,
) -> tuple[Chain, Float[Array, " steps"]]:
    """Raises the level with sets whose traffic is at most `threshold`.

    **Returns:** the last state and the best level after every step.
    """
    allowed = (tables.traffic <= threshold).at[0].set(False)
    chain = _greedy(tables, allowed, num_nodes)
    sizes = min(LEAVING, num_nodes), min(ENTERING, len(allowed))
    dice = jax.random.uniform(
        key, (num_steps, num_nodes + sizes[0] * sizes[1]), tables.traffic.dtype, minval=1e-6
    )

    def step(chain: Chain, now: tuple[Array, Array]) -> tuple[Chain, Array]:
        progress, dice = now
        cooling = 0.3 * (1 - progress) / SHARPNESS
        chain = _exchange(tables, allowed, chain, sizes, cooling, dice)
        return chain, chain.best_level

    return lax.scan(step, chain, (jnp.arange(num_steps) / num_steps, dice))


def _greedy(tables: Tables, allowed: Array, num_nodes: int) -> Chain:
    """Node after node takes the set that serves best what is behind schedule."""

    def add(node: IntScalar, state: tuple[Array, Array]) -> tuple[Array, Array]:
        host_set, hosting_nodes = state
        behind = _ratios(tables, hosting_nodes) - (node + 1) / num_nodes
        chosen = jnp.argmax(jnp.where(allowed, _worth(tables, behind), -1.0)).astype(jnp.int32)
        return host_set.at[node].set(chosen), hosting_nodes + tables.meets[chosen]

    start = jnp.zeros(num_nodes, jnp.int32), jnp.zeros_like(tables.traffic)
    host_set, hosting_nodes = lax.fori_loop(0, num_nodes, add, start)
    return Chain(host_set, hosting_nodes, level_of(tables, hosting_nodes), host_set)


def _exchange(
    tables: Tables,
    allowed: Array,
    chain: Chain,
    sizes: tuple[int, int],
    cooling: Array,
    dice: Array,
) -> Chain:
    """Gives one node another set: the best of a few promising pairs, with some noise."""
    host_set, hosting_nodes = chain.host_set, chain.hosting_nodes
    num_nodes = host_set.shape[0]
    worth = _worth(tables, _ratios(tables, hosting_nodes))
    blur = 1 + 0.3 * dice[:num_nodes]
    node = lax.top_k(-worth[host_set] * blur, sizes[0])[1]
    new = lax.top_k(jnp.where(allowed, worth, -1.0), sizes[1])[1].astype(jnp.int32)
    after = hosting_nodes - tables.meets[host_set[node]][:, None] + tables.meets[new]
    score = _soft_level(tables, after)
    score -= cooling * jnp.log(-jnp.log(dice[num_nodes:].reshape(score.shape)))
    pointless = ~allowed[new] | (new == host_set[node][:, None])
    score = jnp.where(pointless, -jnp.inf, score)
    row, column = jnp.unravel_index(jnp.argmax(score), score.shape)
    accepted = score[row, column] > _soft_level(tables, hosting_nodes) - cooling
    host_set = jnp.where(accepted, host_set.at[node[row]].set(new[column]), host_set)
    hosting_nodes = jnp.where(accepted, after[row, column], hosting_nodes)
    level = level_of(tables, hosting_nodes)
    better = level > chain.best_level
    return Chain(
        host_set,
        hosting_nodes,
        jnp.where(better, level, chain.best_level),
        jnp.where(better, host_set, chain.best_host_set),
    )


class Candidates(NamedTuple):
    """The best choice of sets of every chain, its load and traffic, and how the search went."""

    host_set: Int[Array, "chains nodes"]
    load: Float[Array, " chains"]
    traffic: Float[Array, " chains"]
    total: Float[Array, " chains"]
    curve: Float[Array, " steps"]


class Prices(NamedTuple):
    """total = load_cost * load + traffic_cost * traffic, infinite above `load_cap`."""

    load_cost: FloatScalar
    traffic_cost: FloatScalar
    load_cap: FloatScalar
    mean_load: FloatScalar


def search(
    tables: Tables,
    prices: Prices,
    num_nodes: int,
    *,
    num_chains: int,
    num_steps: int,
    key: PRNGKeyArray,
) -> Candidates:
    """Two rounds of chains: spread over all thresholds, then over those that can still win.

    A threshold t costs at least `load_cost * mean_load + traffic_cost * t`; whatever exceeds the
    best total of the first round is left out of the second.
    """
    ladder = jnp.sort(tables.traffic)
    # Every expert lies somewhere, so no threshold below the busiest expert's traffic will do.
    busiest = tables.traffic[1 << np.arange(_num_experts(tables))].max()
    first, last = (ladder < busiest).sum(), (ladder < tables.traffic[-1]).sum()
    floor = prices.load_cost * prices.mean_load + prices.traffic_cost * ladder

    def one_round(last: Array, key: PRNGKeyArray) -> tuple[Array, Candidates]:
        spread = (last - first) * jnp.arange(num_chains) / max(num_chains - 1, 1)
        threshold = ladder[first + jnp.round(spread).astype(first.dtype)]
        found = _chains(tables, prices, threshold, num_nodes, num_steps, key)
        best = found.total.min()
        still_open = (floor <= best).sum() - 1
        narrowed = jnp.where(jnp.isfinite(best), jnp.clip(still_open, first, last), last)
        return narrowed, found

    rounds = lax.scan(one_round, last, jax.random.split(key, ROUNDS))[1]
    found = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), rounds)
    return found._replace(curve=lax.cummin(found.curve))


def _num_experts(tables: Tables) -> int:
    return tables.traffic.shape[0].bit_length() - 1


def _chains(
    tables: Tables,
    prices: Prices,
    threshold: Float[Array, " chains"],
    num_nodes: int,
    num_steps: int,
    key: PRNGKeyArray,
) -> Candidates:
    run = lambda threshold, key: run_chain(tables, threshold, num_nodes, num_steps, key=key)
    chain, level = jax.vmap(run)(threshold, key=jax.random.split(key, threshold.shape[0]))
    traffic = tables.traffic[chain.best_host_set].max(-1)
    total, load = _total(prices, chain.best_level, traffic)
    # The level of a step was reached with sets that may have had less traffic than the last ones.
    curve, _ = _total(prices, level, threshold[:, None])
    return Candidates(chain.best_host_set, load, traffic, total, curve.min(0))


def _total(prices: Prices, level: Array, traffic: Array) -> tuple[Array, Array]:
    load = prices.mean_load / jnp.maximum(level, 1e-12)
    total = prices.load_cost * load + prices.traffic_cost * traffic
    fits = (level > 0) & (load <= prices.load_cap * (1 + 1e-5))
    return jnp.where(fits, total, jnp.inf), load
