"""Placements of whole models by name: what `moejax eval --placement` and sweeps choose from."""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

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


Progress: TypeAlias = Callable[[int, int], None]
Method: TypeAlias = Callable[[Statistics, Topology, NodeCosts, PRNGKeyArray, Progress], Placement]

MOST_REGIONS = 8
"""Regions of the hybrid placement, as published for models of 64 experts; 2 for those of 8."""

LAYERS_AT_ONCE = 8
"""Layers that are searched together: enough to fill a machine, and one can watch the others."""


def place(
    method: str,
    statistics: Statistics,
    topology: Topology,
    costs: NodeCosts,
    *,
    key: PRNGKeyArray,
    progress: Progress | None = None,
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
    - `progress`: called with (searches of a layer done, searches) by the methods that search.

    **Raises:** `ValueError` for an unknown method, and as the method.
    """
    if statistics.frequency.ndim != 2:
        raise ValueError(
            f"place: statistics.frequency has shape {statistics.frequency.shape}, expected "
            "[layers, experts] (trace_statistics)"
        )
    find = lookup("placement", method, METHODS)
    return find(statistics, topology, costs, key, progress or (lambda done, total: None))


def _tensor_parallel(statistics, topology, costs, key, progress) -> Placement:
    del costs, key, progress
    share = tensor_parallel(statistics.num_experts, topology.num_nodes)
    return Placement(_everywhere(share, statistics), all_reduce=True, name="tensor_parallel")


def _expert_parallel(statistics, topology, costs, key, progress) -> Placement:
    del costs, progress
    split, scatter = jax.random.split(key)
    share = expert_parallel(statistics.num_experts, topology.num_nodes, key=split)
    position = _scattered(statistics, topology, scatter)
    return Placement(_everywhere(share, statistics), position, name="expert_parallel")


def _hybrid(statistics, topology, costs, key, progress) -> Placement:
    del costs, progress
    experts, nodes = statistics.num_experts, topology.num_nodes
    regions = max(1, min(experts // 4, nodes, MOST_REGIONS))
    share = jax.vmap(lambda load: hybrid(load, nodes, regions))(statistics.frequency)
    return Placement(share, _scattered(statistics, topology, key), name="hybrid")


def _eplb(statistics, topology, costs, key, progress) -> Placement:
    del costs, progress
    experts, nodes = statistics.num_experts, topology.num_nodes
    slots = nodes * max(2, -(-(experts + nodes) // nodes))
    plan = replicate_and_pack(statistics.frequency, slots, 1, 1, nodes)
    position = _scattered(statistics, topology, key)
    return Placement(replica_share(plan, nodes), position, name="eplb")


def _node(statistics, topology, costs, key, progress) -> Placement:
    share, scatter = _balanced(statistics, topology, costs, key, progress)
    return Placement(share, _scattered(statistics, topology, scatter), name="node")


def _node_link(statistics, topology, costs, key, progress) -> Placement:
    layers = statistics.frequency.shape[0]
    first = lambda done, total: progress(done, 2 * total)
    second = lambda done, total: progress(total + done, 2 * total)
    share, scatter = _balanced(statistics, topology, costs, key, first)
    room = _room(share, statistics, costs)

    def find(share, layer, key) -> Array:
        found = link_balance(share, topology, layer, costs, key=key, max_messages=room)
        return found.node_position

    keys = jax.random.split(scatter, layers)
    return Placement(share, _by_layer(find, (share, statistics, keys), second), name="node_link")


METHODS: dict[str, Method] = {
    "tensor_parallel": _tensor_parallel,
    "expert_parallel": _expert_parallel,
    "hybrid": _hybrid,
    "eplb": _eplb,
    "node": _node,
    "node_link": _node_link,
}


def _balanced(statistics, topology, costs, key, progress) -> tuple[Array, PRNGKeyArray]:
    """Shares by Node Balance [layers, experts, nodes], and a key for what comes after."""
    search, after = jax.random.split(key)
    keys = jax.random.split(search, statistics.frequency.shape[0])
    tree = topology if topology.kind == "fat_tree" else None
    find = lambda layer, key: (
        node_balance(layer, costs, topology.num_nodes, key=key, topology=tree).share
    )
    return _by_layer(find, (statistics, keys), progress), after


def _by_layer(find: Callable[..., Array], arguments: Any, progress: Progress) -> Array:
    """`find` of every layer, some at once, while somebody watches."""
    layers = jax.tree.leaves(arguments)[0].shape[0]
    if is_traced(arguments):
        return jax.vmap(find)(*arguments)
    found, size = [], min(LAYERS_AT_ONCE, layers)
    for first in range(0, layers, size):
        # The last group goes on with layer 0: one size, one compilation.
        group = np.arange(first, first + size) % layers
        of_group = jax.tree.map(operator.itemgetter(group), arguments)
        found.append(jax.block_until_ready(jax.vmap(find)(*of_group)))
        progress(min(first + size, layers), layers)
    return jnp.concatenate(found)[:layers]


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
