"""Fat-tree of endpoints, leaf, aggregation and core switches, with up-down routes."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_positive
from moejax._typing import FloatLike
from moejax.noc._assemble import Tables, assemble, spread, topology_of, whole_sizes
from moejax.noc._topology import Topology


def fat_tree(
    *,
    bandwidth: Any,
    pods: int = 4,
    leaves_per_pod: int = 4,
    endpoints_per_leaf: int = 2,
    aggregations_per_pod: int = 2,
    cores: int = 4,
    endpoint_bandwidth: Any = None,
    leaf_bandwidth: Any = None,
    core_bandwidth: Any = None,
    oversubscription: FloatLike = 1.0,
    hop_latency: Any = 0.0,
    port_bandwidth: Any = None,
) -> Topology:
    """A three-tier fat-tree, by default of 32 endpoints; HDA-MoE (arXiv 2609.08682), section IV-B.

    Vertices: endpoints, leaves, aggregations, cores, each pod by pod. Every aggregation reaches
    all leaves of its pod and has a link up to all cores. A core has one link down to each pod, to
    aggregation `core mod aggregations_per_pod`, as in the authors' published code (up-links full
    bipartite, down-links not). Links are sorted by (from, to): 176 by default.

    Equal-cost routes, in order: within a leaf one; within a pod one per aggregation; between pods
    one per (aggregation of the source's pod, core), the core varying fastest.

    **Arguments:**

    - `bandwidth`: B/s, scalar or [links].
    - `endpoint_bandwidth`, `leaf_bandwidth`, `core_bandwidth`: B/s of the links endpoint-leaf,
        leaf-aggregation and aggregation-core, instead of `bandwidth`.
    - `oversubscription`: divides the bandwidth of aggregation-core links; above 0.
    - `hop_latency`, `port_bandwidth`: as for `mesh`.

    **Raises:** `ValueError` for sizes below 1, rates that are negative or NaN, or wrong shapes.
    """
    sizes = whole_sizes(
        "fat_tree",
        pods=pods,
        leaves_per_pod=leaves_per_pod,
        endpoints_per_leaf=endpoints_per_leaf,
        aggregations_per_pod=aggregations_per_pod,
        cores=cores,
    )
    check_positive("fat_tree", "oversubscription", oversubscription)
    tables, tier = _tables(*sizes, port_bandwidth is not None)
    rates = [spread("fat_tree", "bandwidth", bandwidth, "links", len(tier))] * 3
    given = dict(endpoint_bandwidth=endpoint_bandwidth, leaf_bandwidth=leaf_bandwidth)
    for i, (name, value) in enumerate((given | dict(core_bandwidth=core_bandwidth)).items()):
        if value is not None:
            rates[i] = spread("fat_tree", name, value, "links", len(tier))
    rates[2] = rates[2] / as_float(oversubscription)
    return topology_of(tables, jnp.choose(tier, rates, mode="clip"), hop_latency, port_bandwidth)


@functools.lru_cache(maxsize=32)
def _tables(
    pods: int, leaves: int, endpoints: int, aggregations: int, cores: int, ports: bool
) -> tuple[Tables, np.ndarray]:
    """The tables, and the tier of each link: 0 at an endpoint, 2 at a core, 1 between."""
    counts = (pods * leaves * endpoints, pods * leaves, pods * aggregations, cores)
    vertices = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    node, leaf, aggregation, core = vertices
    leaf_of, in_pod = np.repeat(leaf, endpoints), aggregation.reshape(pods, aggregations)
    under = in_pod[:, np.arange(cores) % aggregations]
    links = np.concatenate(
        [
            both_ways(node, leaf_of),
            both_ways(np.repeat(leaf, aggregations), np.repeat(in_pod, leaves, axis=0).ravel()),
            np.stack([np.repeat(aggregation, cores), np.tile(core, len(aggregation))], axis=1),
            np.stack([np.tile(core, pods), under.ravel()], axis=1),
        ]
    )
    links = links[np.lexsort(links.T[::-1])]
    tier = np.where(links.min(axis=1) < leaf[0], 0, np.where(links.max(axis=1) < core[0], 1, 2))
    paths, num_routes = up_down(leaf_of, np.repeat(in_pod, leaves * endpoints, axis=0), core)
    tables = assemble(
        "fat_tree",
        (pods, leaves, endpoints, aggregations, cores),
        links,
        paths,
        coordinates=_layout(counts),
        ports=ports,
        num_routes=num_routes,
    )
    return tables, tier


def up_down(
    leaf: np.ndarray, aggregations: np.ndarray, core: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Paths [steps, choices, pairs] and their number [pairs], from the `leaf` [nodes] and the
    `aggregations` [nodes, per pod] above each node and the ids of the cores."""
    nodes, per_pod = aggregations.shape
    source, goal = np.divmod(np.arange(nodes**2), nodes)
    near = leaf[source] == leaf[goal]
    far = aggregations[source, 0] != aggregations[goal, 0]
    num_routes = np.where(near, 1, np.where(far, per_pod * len(core), per_pod))
    paths = np.full((7, num_routes.max(), nodes**2), -1)

    def put(choice: int, where: np.ndarray, *steps: Any) -> None:
        paths[: len(steps), choice, where] = np.stack(np.broadcast_arrays(*steps))[:, where]

    up, down = leaf[source], leaf[goal]
    put(0, source == goal, source)
    put(0, near & (source != goal), source, up, goal)
    for choice in range(num_routes.max()):
        if choice < per_pod:
            put(choice, ~near & ~far, source, up, aggregations[source, choice], down, goal)
        above, i = divmod(choice, len(core))
        if above < per_pod:
            over = aggregations[source, above], core[i], aggregations[goal, i % per_pod]
            put(choice, far, source, up, *over, down, goal)
    return paths, num_routes


def both_ways(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.concatenate([np.stack([one, other], 1), np.stack([other, one], 1)])


def _layout(counts: tuple[int, ...]) -> np.ndarray:
    """Tiers as rows, the cores on top, each spread over the width of the endpoints."""
    rows = [(np.arange(count) + 0.5) * counts[0] / count - 0.5 for count in counts]
    levels = np.repeat(np.arange(len(counts))[::-1], counts)
    return np.stack([np.concatenate(rows), levels * counts[0] / 8], axis=1)
