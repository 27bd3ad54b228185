"""Any graph from its edges, with shortest paths; ring, complete graph and 3-D mesh as examples."""

import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_array, csgraph

from moejax._checks import as_float
from moejax._typing import Array
from moejax.noc._assemble import Tables, assemble, follow, topology_of, whole_sizes
from moejax.noc._topology import Topology


Edges = tuple[tuple[int, int], ...]


def custom(
    edges: Any,
    *,
    bandwidth: Any,
    num_nodes: int | None = None,
    directed: bool = False,
    hop_latency: Any = 0.0,
    port_bandwidth: Any = None,
) -> Topology:
    """A network from its edges. A route is a path of fewest links, and among those the one whose
    sequence of vertex ids is lexicographically smallest.

    **Arguments:**

    - `edges`: [edges, 2] vertex ids. An edge is a link in both directions unless `directed`, or
        its reverse is listed too. Links are the edges in the order given, then the reverses
        that were not listed, in the same order.
    - `bandwidth`: B/s, scalar or [links]; or [edges], then the same for both directions.
    - `num_nodes`: vertices 0 .. `num_nodes - 1` are endpoints, those above are switches. Default:
        all are endpoints.
    - `hop_latency`: s, shaped like `bandwidth`.
    - `port_bandwidth`: scalar or [nodes], B/s into and out of every endpoint; `None` for no ports.

    **Raises:** `ValueError` naming an edge that is repeated, leads to itself or has a negative
    id, a pair of endpoints without a path between them, and for rates as `mesh`.
    """
    listed = _listed(edges)
    count = max((max(edge) + 1 for edge in listed), default=1)
    nodes = count if num_nodes is None else whole_sizes("custom", num_nodes=num_nodes)[0]
    links = listed if directed else listed + _reverses(listed)
    tables = _tables("custom", (nodes,), links, nodes, port_bandwidth is not None)
    bandwidth = _both_ways(bandwidth, listed, links)
    hop_latency = _both_ways(hop_latency, listed, links)
    return topology_of(tables, bandwidth, hop_latency, port_bandwidth)


def ring(n: int, *, bandwidth: Any, hop_latency: Any = 0.0, port_bandwidth: Any = None) -> Topology:
    """`n` nodes in a circle, linked both ways. Links are sorted by (from, to)."""
    whole_sizes("ring", n=n)
    edges = _symmetric((i, (i + 1) % n) for i in range(n))
    tables = _tables("ring", (n,), edges, n, port_bandwidth is not None)
    return topology_of(tables, bandwidth, hop_latency, port_bandwidth)


def fully_connected(
    n: int, *, bandwidth: Any, hop_latency: Any = 0.0, port_bandwidth: Any = None
) -> Topology:
    """A link from each of `n` nodes to each other. Links are sorted by (from, to)."""
    whole_sizes("fully_connected", n=n)
    edges = _symmetric((u, v) for u in range(n) for v in range(u))
    tables = _tables("fully_connected", (n,), edges, n, port_bandwidth is not None)
    return topology_of(tables, bandwidth, hop_latency, port_bandwidth)


def mesh_3d(
    x: int, y: int, z: int, *, bandwidth: Any, hop_latency: Any = 0.0, port_bandwidth: Any = None
) -> Topology:
    """A mesh of three axes, id (i * y + j) * z + k. Links are sorted by (from, to).

    Routes are those of `custom`: the smallest ids first means down along x, y and z, then up along
    z, y and x, so no two routes wait for each other in a circle.
    """
    sizes = whole_sizes("mesh_3d", x=x, y=y, z=z)
    ids = np.arange(x * y * z).reshape(sizes)
    along = [np.stack([ids[:-1], ids[1:]]), np.stack([ids[:, :-1], ids[:, 1:]])]
    along.append(np.stack([ids[:, :, :-1], ids[:, :, 1:]]))
    edges = _symmetric((u, v) for pairs in along for u, v in pairs.reshape(2, -1).T.tolist())
    tables = _tables("mesh_3d", sizes, edges, x * y * z, port_bandwidth is not None)
    return topology_of(tables, bandwidth, hop_latency, port_bandwidth)


@functools.lru_cache(maxsize=32)
def _tables(kind: str, shape: tuple[int, ...], links: Edges, num_nodes: int, ports: bool) -> Tables:
    array = np.array(links, np.int64).reshape(-1, 2)
    num_vertices = max(num_nodes, int(array.max(initial=0)) + 1)
    next_vertex = shortest_next(kind, array, num_vertices, num_nodes)
    coordinates = _oblique(shape) if kind == "mesh_3d" else _circle(num_vertices)
    return assemble(kind, shape, array, follow(next_vertex), coordinates=coordinates, ports=ports)


def shortest_next(kind: str, links: np.ndarray, num_vertices: int, num_nodes: int) -> np.ndarray:
    """[vertices, nodes], the smallest neighbor that is one link closer to the node.

    Raises `ValueError` naming a pair of nodes without a path.
    """
    ones = np.ones(len(links))
    backward = coo_array((ones, links.T[::-1]), shape=(num_vertices, num_vertices)).tocsr()
    distance = csgraph.dijkstra(backward, unweighted=True, indices=np.arange(num_nodes)).T
    if len(apart := np.argwhere(np.isinf(distance[:num_nodes]))):
        u, v = apart[0]
        raise ValueError(f"{kind}: no path leads from node {u} to node {v}")
    next_vertex = np.zeros((num_vertices, num_nodes), np.int64)
    for vertex in range(num_vertices):
        neighbors = np.sort(links[links[:, 0] == vertex, 1])
        if len(neighbors):
            closer = distance[neighbors] < distance[vertex]
            next_vertex[vertex] = neighbors[closer.argmax(axis=0)]
    return next_vertex


def _listed(edges: Any) -> Edges:
    """The edges as pairs of ints, checked one by one."""
    array = np.asarray(edges)
    if array.size == 0:
        return ()
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"custom: edges has shape {array.shape} and dtype {array.dtype}, expected whole "
            "numbers of shape [edges, 2]"
        )
    listed = tuple((u, v) for u, v in array.tolist())
    seen = set()
    for u, v in listed:
        if u < 0 or v < 0:
            raise ValueError(f"custom: edge ({u}, {v}) has a negative vertex id")
        if u == v:
            raise ValueError(f"custom: edge ({u}, {v}) leads from a vertex to itself")
        if (u, v) in seen:
            raise ValueError(f"custom: edge ({u}, {v}) is listed twice")
        seen.add((u, v))
    return listed


def _reverses(listed: Edges) -> Edges:
    known = set(listed)
    return tuple((v, u) for u, v in listed if (v, u) not in known)


def _symmetric(edges: Iterable[tuple[int, int]]) -> Edges:
    """Both directions of every edge, sorted, each once and without loops."""
    return tuple(sorted({pair for u, v in edges if u != v for pair in ((u, v), (v, u))}))


def _both_ways(value: Any, listed: Edges, links: Edges) -> Array:
    """A value per edge repeated for the reverse links that were added; others as they are."""
    value = as_float(value)
    if value.shape != (len(listed),) or len(listed) == len(links):
        return value
    place = {edge: i for i, edge in enumerate(listed)}
    return value[jnp.array([place.get((u, v), place.get((v, u))) for u, v in links])]


def _circle(count: int) -> np.ndarray:
    """Vertices clockwise from the top, about one unit apart."""
    angle = 2 * np.pi * np.arange(count) / count
    return np.stack([np.sin(angle), -np.cos(angle)], axis=1) * count / (2 * np.pi)


def _oblique(shape: tuple[int, ...]) -> np.ndarray:
    """Axes z and y as in a mesh, x into the depth of the picture."""
    depth, row, col = np.indices(shape).reshape(3, -1)
    return np.stack([col + 0.37 * depth, row - 0.29 * depth], axis=1)
