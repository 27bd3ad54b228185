"""A vector from one node to all others, in chunks that follow each other down a tree."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moejax._checks import as_float, check_non_negative
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Float, FloatLike, Int, IntLike
from moejax.noc._messages import Messages
from moejax.noc._topology import NO_LINK, Topology


def broadcast(topology: Topology, root: IntLike, bytes: FloatLike, *, chunks: int) -> Messages:
    """Sends `bytes` B from `root` to every node, cut into equal chunks that are passed on.

    The routes from the root form a tree. Each node gets every chunk from the last node before it
    on its route. On a mesh, torus or ring that is a neighbor, so that each link of the tree carries
    each chunk once; behind switches, which do not copy, it is the root. A node passes a chunk on
    when it has all of it.

    `start_time` is when a chunk can leave its node in a network that is idle otherwise, under
    store-and-forward switching and with the bandwidths, latencies and ports of `topology`. So
    `simulate` alone gives the broadcast's time. Beside other traffic it is a lower bound: a chunk
    delayed on one link does not delay those that set out further down the tree.

    **Arguments:**

    - `root`: node id. May be traced.
    - `bytes`: B in all.
    - `chunks`: static. More of them fill the pipeline sooner; each pays the hop latency.

    **Returns:** `chunks * (nodes - 1)` messages, chunk by chunk, nodes ordered by their distance in
    links from the root, then by id. Start times are differentiable in bandwidths and bytes.

    **Raises:** `ValueError` for a root outside the topology, negative bytes or fewer than one
    chunk. Under tracing `INVALID_NODE` and `NEGATIVE_BYTES`.
    """
    if chunks < 1:
        raise ValueError(f"chunks = {chunks}: allowed is 1 or more")
    check_non_negative("broadcast", "bytes", bytes)
    if not is_traced(root) and not 0 <= int(root) < topology.num_nodes:
        raise ValueError(f"root = {root}: allowed is 0 .. {topology.num_nodes - 1}")
    return _broadcast(topology, jnp.asarray(root, jnp.int32), as_float(bytes), chunks)


@functools.partial(jax.jit, static_argnames="chunks")
def _broadcast(topology: Topology, root, size, chunks: int) -> Messages:
    num_nodes = topology.num_nodes
    inside = (root >= 0) & (root < num_nodes)
    fine = (size >= 0) & (size < jnp.inf)
    safe_root, part = jnp.where(inside, root, 0), jnp.where(fine, size, 0) / chunks
    parent, child = _tree(topology, safe_root)
    parents, children = jnp.tile(parent, chunks), jnp.tile(child, chunks)
    sent = jnp.where(inside & fine, part, jnp.nan)
    return Messages(
        source=parents,
        destination=children,
        bytes=jnp.broadcast_to(sent, parents.shape),
        valid=jnp.ones(parents.shape, bool),
        start_time=_departures(topology, safe_root, part, parents, children),
        status=merge(flag(~inside, Status.INVALID_NODE), flag(~fine, Status.NEGATIVE_BYTES)),
    )


def _tree(topology: Topology, root) -> tuple[Int[Array, " others"], Int[Array, " others"]]:
    """From whom each node but the root receives; nearer nodes first, so parents before children."""
    num_nodes = topology.num_nodes
    if num_nodes == 1:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    # [columns, nodes]; the columns of a route stand in hop order.
    route = topology.route_resource[:, 0, root * num_nodes + jnp.arange(num_nodes)]
    on_link = (route != NO_LINK) & (route < topology.num_links)
    leaves = topology.links[jnp.where(on_link, route, 0), 0]
    from_node = on_link & (leaves < num_nodes)
    last = route.shape[0] - 1 - jnp.argmax(from_node[::-1], axis=0)
    parent = jnp.take_along_axis(leaves, last[None], axis=0)[0]
    hops = jnp.sum(on_link, axis=0)
    child = jnp.argsort(hops, stable=True)[1:].astype(jnp.int32)
    return parent[child].astype(jnp.int32), child


def _departures(topology, root, part, parents, children) -> Float[Array, " messages"]:
    """Start of every message on its first resource, serving messages in their order."""
    num_nodes = topology.num_nodes
    if num_nodes == 1:
        return jnp.zeros(0, part.dtype)
    time = part / topology.resource_bandwidth
    # Nothing takes no time, even over a link that carries nothing.
    time, latency = jnp.where(part > 0, time, 0), topology.resource_latency
    routes = topology.route_resource[:, 0].T[parents * num_nodes + children]

    def hop(state, resource):
        free, ready, start = state
        used = resource != NO_LINK
        start_here = jnp.maximum(ready, free[resource])
        end = start_here + time[resource]
        free = free.at[resource].set(jnp.where(used, end, free[resource]))
        ready = jnp.where(used, end + latency[resource], ready)
        return (free, ready, jnp.where(used & jnp.isnan(start), start_here, start)), None

    def message(state, item):
        free, held = state
        source, destination, route = item
        begin = (free, held[source], jnp.array(jnp.nan, time.dtype))
        (free, ready, start), _ = lax.scan(hop, begin, route)
        return (free, held.at[destination].set(ready)), start

    # A node's latest chunk is all that matters: its messages are those of the same chunk.
    state = (jnp.zeros_like(time), jnp.zeros(num_nodes, time.dtype))
    start = lax.scan(message, state, (parents, children, routes))[1]
    # What waits behind a dead link never leaves. That link is in use, which tells the simulator.
    return jnp.where(jnp.isfinite(start), start, 0)
