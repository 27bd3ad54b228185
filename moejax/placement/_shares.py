"""The best shares for given hosts: a maximum flow, whose minimum cut says how low the load can go.

Hall's condition: nodes of capacity T can serve all experts if and only if no set A of experts asks
for more than T times the number of nodes that host one of A. So T starts at a lower bound, a flow
is grown along augmenting paths, and where it gets stuck the experts that it reached are a set A
that proves a larger T.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Bool, BoolScalar, Float, FloatScalar, Int, IntScalar
from moejax.noc import HOSTING_SHARE


DUST = 2.0
"""Flows and gaps below this part of the mean load, in units of the last place, are rounding."""


class _Flow(NamedTuple):
    flow: Float[Array, "experts nodes"]
    capacity: FloatScalar
    done: BoolScalar
    steps: IntScalar


class _Reach(NamedTuple):
    """A breadth-first search from experts with load to place: who was reached, and from where."""

    expert: Bool[Array, " experts"]
    node: Bool[Array, " nodes"]
    into_expert: Int[Array, " experts"]
    into_node: Int[Array, " nodes"]
    grew: BoolScalar


def best_share(
    hosts: Bool[Array, "experts nodes"], frequency: Float[Array, " experts"]
) -> Float[Array, "experts nodes"]:
    """Shares that minimize the largest `node_load` when experts may only lie where `hosts` says.

    Every expert needs a host. An expert without load is split evenly over its hosts.

    **Returns:** share; rows sum to 1, zero outside `hosts`.
    """
    num_experts, num_nodes = hosts.shape
    dust = _rounding(frequency.dtype) * frequency.sum() / num_nodes
    count = jnp.maximum(hosts.sum(1), 1)
    lowest = jnp.maximum(frequency.sum() / num_nodes, (frequency / count).max())
    start = jnp.zeros(hosts.shape, frequency.dtype)
    most = 20 * (num_experts + num_nodes)
    state = lax.while_loop(
        lambda state: ~state.done & (state.steps < most),
        lambda state: _augment(state, hosts, frequency, dust),
        _Flow(start, lowest, jnp.bool_(False), jnp.int32(0)),
    )
    # What is left after too many steps goes where the rest of the expert lies, or to any host.
    flow = jnp.maximum(state.flow, 0.0)
    placed = flow.sum(1, keepdims=True)
    even = hosts / count[:, None]
    share = jnp.where(placed > dust, flow / jnp.maximum(placed, dust), even)
    share = jnp.where(share <= 2 * HOSTING_SHARE, 0.0, share)
    return share / share.sum(1, keepdims=True)


def _rounding(dtype: Any) -> float:
    return DUST * float(jnp.finfo(dtype).eps)


def _augment(state: _Flow, hosts: Array, frequency: Array, dust: Array) -> _Flow:
    """One augmenting path, or a larger capacity where there is none."""
    flow, capacity = state.flow, state.capacity
    unmet, room = frequency - flow.sum(1), capacity - flow.sum(0)
    reach = _search(hosts, flow, unmet, room, dust)
    open_nodes = reach.node & (room > dust)
    found = open_nodes.any()
    flow = _push(flow, reach, jnp.argmax(open_nodes), unmet, room, found)
    # Without a path, the nodes that were reached are full: the experts reached need more.
    reached_hosts = (hosts & reach.expert[:, None]).any(0).sum()
    cut = jnp.where(reach.expert, frequency, 0.0).sum() / jnp.maximum(reached_hosts, 1)
    done = ~(unmet > dust).any()
    raised = jnp.where(
        found | done, capacity, jnp.maximum(cut, capacity * (1 + _rounding(frequency.dtype)))
    )
    return _Flow(flow, raised, done, state.steps + 1)


def _search(hosts: Array, flow: Array, unmet: Array, room: Array, dust: Array) -> _Reach:
    num_experts, num_nodes = hosts.shape

    def spread(reach: _Reach) -> _Reach:
        to_node = hosts & reach.expert[:, None]
        new_node = to_node.any(0) & ~reach.node
        node = reach.node | new_node
        # A full node passes on what it holds of another expert.
        to_expert = (flow > dust) & node
        new_expert = to_expert.any(1) & ~reach.expert
        return _Reach(
            reach.expert | new_expert,
            node,
            jnp.where(new_expert, to_expert.argmax(1), reach.into_expert),
            jnp.where(new_node, to_node.argmax(0), reach.into_node),
            new_node.any() | new_expert.any(),
        )

    start = _Reach(
        unmet > dust,
        jnp.zeros(num_nodes, bool),
        jnp.full(num_experts, num_nodes),
        jnp.full(num_nodes, num_experts),
        jnp.bool_(True),
    )
    return lax.while_loop(
        lambda reach: reach.grew & ~(reach.node & (room > dust)).any(), spread, start
    )


def _push(flow: Array, reach: _Reach, end: Array, unmet: Array, room: Array, found: Array) -> Array:
    """`flow` with as much more as the path to the node `end` carries."""
    num_nodes = flow.shape[1]

    def back(node):
        """The expert before a node, the node before that, and whether the path starts there."""
        expert = reach.into_node[node]
        before = reach.into_expert[expert]
        return expert, jnp.minimum(before, num_nodes - 1), before == num_nodes

    def narrow(state):
        node, amount, _ = state
        expert, before, first = back(node)
        carried = jnp.where(first, unmet[expert], flow[expert, before])
        return before, jnp.minimum(amount, carried), ~first

    def move(state):
        node, moved, _ = state
        expert, before, first = back(node)
        moved = moved.at[expert, node].add(amount)
        moved = moved.at[expert, before].add(jnp.where(first, 0.0, -amount))
        return before, moved, ~first

    going = lambda state: state[2]
    _, amount, _ = lax.while_loop(going, narrow, (end, room[end], found))
    return lax.while_loop(going, move, (end, flow, found))[1]


def share_batch(hosts: Bool[Array, "chains experts nodes"], frequency: Array) -> Array:
    """`best_share` of several candidates, [chains, experts, nodes]."""
    return jax.vmap(lambda one: best_share(one, frequency))(hosts)
