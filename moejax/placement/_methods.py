"""Placements of whole models by name: what `moejax eval --placement` and sweeps choose from."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from moejax._checks import lookup
from moejax._status import is_traced
from moejax._typing import Array, Float, PRNGKeyArray
from moejax.noc import Topology
from moejax.placement._costs import NodeCosts
from moejax.placement._eplb import replica_share, replicate_and_pack
from moejax.placement._hybrid import hybrid
from moejax.placement._link_balance import link_balance
from moejax.placement._link_traffic import message_room
from moejax.placement._node_balance import node_balance
from moejax.placement._parallel import expert_parallel, tensor_parallel
from moejax.placement._placement import Placement
from moejax.placement._statistics import Statistics


Method: TypeAlias = Callable[[Statistics, Topology, NodeCosts, PRNGKeyArray], Placement]

MOST_REGIONS = 8
"""Regions of the hybrid placement, as published for models of 64 experts; 2 for those of 8."""


def place(
    method: str, statistics: Statistics, topology: Topology, costs: NodeCosts, *, key: PRNGKeyArray
) -> Placement:
    """Fits the placement of all layers of a model by one of `METHODS`.

    - `"tensor_parallel"`: every expert on every node, all-reduces in place of gathers.
    - `"expert_parallel"`: whole experts, or even parts where there are more nodes; random.
    - `"hybrid"`: experts balanced over regions of nodes, split evenly inside one.
    - `"eplb"`: copies of busy experts, packed into two slots a node or more.
    - `"node"`: `node_balance`, its logical nodes at random endpoints.
    - `"node_link"`: the same on the endpoints that `link_balance` finds.

    **Arguments:**

    - `statistics`: stacked, [layers] first in every field (`trace_statistics`).
    - `topology`, `costs`: of one layer.
    - `key`: of all random choices.

    **Raises:** `ValueError` for an unknown method, and as the method.
    """
    if statistics.frequency.ndim != 2:
        raise ValueError(
            f"place: statistics.frequency has shape {statistics.frequency.shape}, expected "
            "[layers, experts] (trace_statistics)"
        )
    return lookup("placement", method, METHODS)(statistics, topology, costs, key)


def _tensor_parallel(statistics, topology, costs, key) -> Placement:
    del costs, key
    share = tensor_parallel(statistics.num_experts, topology.num_nodes)
    return Placement(_everywhere(share, statistics), all_reduce=True, name="tensor_parallel")


def _expert_parallel(statistics, topology, costs, key) -> Placement:
    del costs
    split, scatter = jax.random.split(key)
    share = expert_parallel(statistics.num_experts, topology.num_nodes, key=split)
    position = _scattered(statistics, topology, scatter)
    return Placement(_everywhere(share, statistics), position, name="expert_parallel")


def _hybrid(statistics, topology, costs, key) -> Placement:
    del costs
    experts, nodes = statistics.num_experts, topology.num_nodes
    regions = max(1, min(experts // 4, nodes, MOST_REGIONS))
    share = jax.vmap(lambda load: hybrid(load, nodes, regions))(statistics.frequency)
    return Placement(share, _scattered(statistics, topology, key), name="hybrid")


def _eplb(statistics, topology, costs, key) -> Placement:
    del costs
    experts, nodes = statistics.num_experts, topology.num_nodes
    slots = nodes * max(2, -(-(experts + nodes) // nodes))
    plan = replicate_and_pack(statistics.frequency, slots, 1, 1, nodes)
    position = _scattered(statistics, topology, key)
    return Placement(replica_share(plan, nodes), position, name="eplb")


def _node(statistics, topology, costs, key) -> Placement:
    share, scatter = _balanced(statistics, topology, costs, key)
    return Placement(share, _scattered(statistics, topology, scatter), name="node")


def _node_link(statistics, topology, costs, key) -> Placement:
    share, scatter = _balanced(statistics, topology, costs, key)
    keys = jax.random.split(scatter, share.shape[0])
    room = _room(share, statistics, costs)
    find = lambda share, layer, key: link_balance(
        share, topology, layer, costs, key=key, max_messages=room
    )
    position = jax.vmap(find)(share, statistics, keys).node_position
    return Placement(share, position, name="node_link")


METHODS: dict[str, Method] = {
    "tensor_parallel": _tensor_parallel,
    "expert_parallel": _expert_parallel,
    "hybrid": _hybrid,
    "eplb": _eplb,
    "node": _node,
    "node_link": _node_link,
}


def _balanced(statistics, topology, costs, key) -> tuple[Array, PRNGKeyArray]:
    """Shares by Node Balance [layers, experts, nodes], and a key for what comes after."""
    search, after = jax.random.split(key)
    keys = jax.random.split(search, statistics.frequency.shape[0])
    tree = topology if topology.kind == "fat_tree" else None
    share = jax.vmap(
        lambda layer, key: (
            node_balance(layer, costs, topology.num_nodes, key=key, topology=tree).share
        )
    )(statistics, keys)
    return share, after


def _room(share: Array, statistics: Statistics, costs: NodeCosts) -> int | None:
    """What the messages of a drawn batch need, a third of the room for all that there could be."""
    if is_traced(share, statistics, costs):
        return None
    return message_room(share, statistics, max(1, round(float(costs.batch))))


def _everywhere(share: Array, statistics: Statistics) -> Float[Array, "layers experts nodes"]:
    return jnp.broadcast_to(share, (statistics.frequency.shape[0], *share.shape))


def _scattered(statistics: Statistics, topology: Topology, key: PRNGKeyArray) -> Array:
    """A random permutation of the endpoints for each layer."""
    keys = jax.random.split(key, statistics.frequency.shape[0])
    return jax.vmap(lambda k: jax.random.permutation(k, topology.num_nodes))(keys)
