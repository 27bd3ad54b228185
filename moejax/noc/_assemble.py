"""From routes as vertex sequences to the tables of a `Topology`, on the host and once per shape.

A message may start on a resource only when the one before it on its route let go of it, so every
two consecutive resources of a route are an edge of the *dependency graph*. Its strongly connected
components, layered by the longest path to them, are the columns: resources of one layer never
wait for each other unless they are on a common cycle.
"""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_array, csgraph

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import Array, Float, Int
from moejax.noc._topology import NO_LINK, Stage, Topology


class Tables(NamedTuple):
    """All of a `Topology` but its rates."""

    links: Int[Array, "links 2"]
    num_routes: Int[Array, " pairs"]
    route_resource: Int[Array, "columns choices pairs"]
    route_rank: Int[Array, "columns choices pairs"]
    segment: Int[Array, " resources"]
    coordinates: Float[Array, "vertices 2"]
    kind: str
    shape: tuple[int, ...]
    num_nodes: int
    num_vertices: int
    stages: tuple[Stage, ...]
    segment_bits: int
    rank_bits: int


def assemble(
    kind: str,
    shape: tuple[int, ...],
    links: np.ndarray,
    paths: np.ndarray,
    *,
    coordinates: Any,
    ports: bool,
    num_routes: np.ndarray | None = None,
) -> Tables:
    """The tables of a network.

    **Arguments:**

    - `links`: [links, 2], all different.
    - `paths`: [steps, choices, pairs] vertices from source to destination, -1 after the end.
    - `coordinates`: [vertices, 2].
    - `ports`: whether routes start and end with the port of a node.
    - `num_routes`: [pairs], default 1.
    """
    _, choices, pairs = paths.shape
    num_nodes, num_vertices = math.isqrt(pairs), len(coordinates)
    if num_routes is None:
        num_routes = np.ones(pairs, np.int32)
    hops = resources_of(links, paths, num_vertices, num_nodes, ports)
    rank = remaining_rank(hops, resource_order(links, num_nodes, ports))
    column, segment, stages = columns_of(hops, len(links) + 2 * num_nodes * ports)
    width = stages[-1].stop if stages else 0
    hop, route = np.nonzero(hops != NO_LINK)
    table = np.full((2, width, choices * pairs), NO_LINK, np.int32)
    table[1] = 0
    table[:, column[hop, route], route] = hops[hop, route], rank[hop, route]
    table = table.reshape(2, width, choices, pairs)
    with jax.ensure_compile_time_eval():  # the tables are kept, so they may not belong to a trace
        return Tables(
            links=jnp.asarray(links.reshape(-1, 2), jnp.int32),
            num_routes=jnp.asarray(num_routes, jnp.int32),
            route_resource=jnp.asarray(table[0]),
            route_rank=jnp.asarray(table[1]),
            segment=jnp.asarray(segment, jnp.int32),
            coordinates=jnp.asarray(coordinates, jnp.float32),
            kind=kind,
            shape=shape,
            num_nodes=num_nodes,
            num_vertices=num_vertices,
            stages=stages,
            segment_bits=(int(segment.max(initial=0)) + 1).bit_length(),
            rank_bits=int(rank.max(initial=0)).bit_length(),
        )


def topology_of(tables: Tables, bandwidth: Any, hop_latency: Any, port_bandwidth: Any) -> Topology:
    """The topology with these tables; rates are scalars or [links], [nodes] for the ports."""
    kind, links = tables.kind, len(tables.links)
    ports = None
    if port_bandwidth is not None:
        ports = spread(kind, "port_bandwidth", port_bandwidth, "nodes", tables.num_nodes)
    return Topology(
        link_bandwidth=spread(kind, "bandwidth", bandwidth, "links", links),
        hop_latency=spread(kind, "hop_latency", hop_latency, "links", links),
        injection_bandwidth=ports,
        ejection_bandwidth=ports,
        **tables._asdict(),
    )


def spread(kind: str, name: str, value: Any, axis: str, length: int) -> Array:
    """A scalar or an array as the array. Raises `ValueError` for one of another shape."""
    value = as_float(value)
    if value.shape not in ((), (length,)):
        raise ValueError(
            f"{kind}: {name} has shape {value.shape}, expected a scalar or [{axis}] = ({length},)"
        )
    if is_traced(value):
        return jnp.broadcast_to(value, (length,))
    return jnp.asarray(np.broadcast_to(value, (length,)))  # without a compilation per length


def whole_sizes(kind: str, **sizes: Any) -> tuple[int, ...]:
    """The sizes of a builder as ints. Raises `ValueError` naming one that is not 1 or more."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{kind}: {name} = {value!r}: allowed is a whole number from 1")
    return tuple(operator.index(value) for value in sizes.values())


def follow(next_vertex: np.ndarray) -> np.ndarray:
    """Paths [steps, 1, pairs] between all nodes from [vertices, nodes], the vertex that follows on
    the way to a node (any at the node itself)."""
    nodes = next_vertex.shape[1]
    here, goal = np.divmod(np.arange(nodes * nodes), nodes)
    paths = [here]
    while np.any(moving := here != goal):
        if len(paths) > len(next_vertex):
            raise AssertionError("the next vertices lead round in a circle")
        here = np.where(moving, next_vertex[here, goal], here)
        paths.append(np.where(moving, here, -1))
    return np.stack(paths)[:, None, :]


def resources_of(
    links: np.ndarray, paths: np.ndarray, num_vertices: int, num_nodes: int, ports: bool
) -> np.ndarray:
    """Resources [hops, choices * pairs] of the paths in hop order, `NO_LINK` after the end."""
    link_at = np.full((num_vertices, num_vertices), NO_LINK, np.int32)
    if len(links):
        link_at[links[:, 0], links[:, 1]] = np.arange(len(links))
    flat = paths.reshape(len(paths), -1)
    there = flat[1:] >= 0
    hops = np.where(there, link_at[flat[:-1], flat[1:]], NO_LINK)
    if np.any(hops[there] < 0):
        raise AssertionError("a path takes a link that does not exist")
    if not ports:
        return hops
    length = there.sum(axis=0)
    moves = length > 0
    hops = np.concatenate([np.full_like(flat[:1], NO_LINK), hops, np.full_like(flat[:1], NO_LINK)])
    hops[0, moves] = len(links) + flat[0, moves]
    last = flat[length, np.arange(flat.shape[1])]
    hops[length[moves] + 1, np.flatnonzero(moves)] = (len(links) + num_nodes + last)[moves]
    return hops


def resource_order(links: np.ndarray, num_nodes: int, ports: bool) -> np.ndarray:
    """[resources] from 1, how two paths compare at the first hop where they differ: links by
    (from, to). Ejection ports come first, because a path that ends comes before its extensions."""
    order = np.empty(len(links), np.int64)
    order[np.lexsort(links.reshape(-1, 2).T[::-1])] = np.arange(len(links))
    if not ports:
        return order + 1
    node = np.arange(num_nodes)
    return np.concatenate([order + 2 * num_nodes, num_nodes + node, node]) + 1


def remaining_rank(hops: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rank of the path from each hop on among all that cross its resource, dense from 0.

    Prefix doubling: with the order by the next k hops known, that by the next 2k is the order of
    pairs (rank here, rank k hops further on), where 0 stands for the end of the path.
    """
    there = hops != NO_LINK
    rank = np.where(there, order[hops] if len(order) else 0, 0)
    step = 1
    while step < len(hops):
        further = np.zeros_like(rank)
        further[:-step] = rank[step:]
        pairs = rank[there] * (rank.max() + 1) + further[there]
        rank[there] = np.unique(pairs, return_inverse=True)[1] + 1
        step *= 2
    base = rank.max(initial=0) + 1
    distinct, index = np.unique(hops[there] * base + rank[there], return_inverse=True)
    first = np.searchsorted(distinct, distinct // base * base)
    rank[there] = (np.arange(len(distinct)) - first)[index]
    return rank


def columns_of(
    hops: np.ndarray, num_resources: int
) -> tuple[np.ndarray, np.ndarray, tuple[Stage, ...]]:
    """Column of each hop [hops, routes], segment of each resource, and the stages."""
    layer, on_cycle = dependency_layers(hops, num_resources)
    used = np.unique(hops[hops != NO_LINK])
    num_layers = layer[used].max(initial=-1) + 1
    there = hops != NO_LINK
    at = np.where(there, layer[hops] if num_resources else 0, -1)
    run = np.zeros_like(at)  # how many hops of the route came before in the same layer
    for hop in range(1, len(hops)):
        run[hop] = np.where(at[hop] == at[hop - 1], run[hop - 1] + 1, 0)
    width = np.zeros(num_layers, np.int64)
    np.maximum.at(width, at[there], run[there] + 1)
    start = np.concatenate([[0], np.cumsum(width)]).astype(int)
    segment = np.zeros(num_resources, np.int64)
    stages: list[Stage] = []
    for i in range(num_layers):
        members = used[layer[used] == i]
        segment[members] = np.arange(len(members))
        stage = Stage(int(start[i]), int(start[i + 1]), bool(on_cycle[members].any()))
        if stages and not (stage.cyclic or stages[-1].cyclic):
            stage = stage._replace(start=stages.pop().start)
        stages.append(stage)
    return start[at] + run, segment, tuple(stages)


def dependency_layers(hops: np.ndarray, num_resources: int) -> tuple[np.ndarray, np.ndarray]:
    """Layer of each resource in the dependency graph, and whether it is on a cycle of it."""
    follows = (hops[1:] != NO_LINK) if len(hops) else np.zeros((0, 0), bool)
    edges = hops[:-1][follows].astype(np.int64) * num_resources + hops[1:][follows]
    here, there = np.divmod(np.unique(edges), max(num_resources, 1))
    graph = coo_array((np.ones(len(here)), (here, there)), shape=(num_resources,) * 2)
    _, part = csgraph.connected_components(graph, connection="strong")
    on_cycle = np.bincount(part, minlength=1)[part] > 1 if num_resources else np.zeros(0, bool)
    here, there = part[here], part[there]
    here, there = here[here != there], there[here != there]
    layer = np.zeros(num_resources, np.int64)
    while True:
        later = layer.copy()
        np.maximum.at(later, there, layer[here] + 1)
        if np.array_equal(later, layer):
            return layer[part], on_cycle
        layer = later
