"""The rows that a fat-tree adds to Node Balance: what crosses its leaves, pods and core."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, Int, PRNGKeyArray
from moejax.noc import Topology


PROPOSALS = 32


class Tree(NamedTuple):
    """Bandwidth of a node's link over that of what a row shares: the load of a row times this is
    what a node would have to carry to take as long. Nodes are leaf by leaf, leaves pod by pod."""

    leaf_endpoints: Float[Array, " leaves"]
    leaf_uplinks: Float[Array, " leaves"]
    pod_leaves: Float[Array, " pods"]
    pod_cores: Float[Array, " pods"]
    core: FloatScalar


def tree_of(topology: Topology | None, bandwidth: FloatLike) -> Tree | None:
    """The rows of a `moejax.noc.fat_tree`; `None` for any other network."""
    if topology is None or topology.kind != "fat_tree":
        return None
    pods, leaves, endpoints, aggregations, cores = topology.shape
    # Vertices stand tier by tier: endpoints, leaves, aggregations, cores.
    sizes = (topology.num_nodes, pods * leaves, pods * aggregations, cores)
    first = np.concatenate([[0], np.cumsum(sizes)])
    start, end = topology.links[:, 0], topology.links[:, 1]
    tier = lambda vertex: (vertex[:, None] >= first[1:]).sum(1)

    def capacity(low: int, high: int, per: int, count: int) -> Array:
        """Of links between two tiers, summed for each `per` vertices of the first."""
        between = (tier(start) == low) & (tier(end) == high)
        group = jnp.where(between, (start - first[low]) // per, count)
        total = jnp.zeros(count, topology.link_bandwidth.dtype)
        return total.at[group].add(topology.link_bandwidth, mode="drop")

    return Tree(
        bandwidth / capacity(0, 1, endpoints, pods * leaves),
        bandwidth / capacity(1, 2, 1, pods * leaves),
        bandwidth / capacity(1, 2, leaves, pods),
        bandwidth / capacity(2, 3, aggregations, pods),
        bandwidth / capacity(3, 2, cores, 1)[0],
    )


def tree_rows(
    tree: Tree,
    touched: Bool[Array, "nodes scenarios groups"],
    weight: Float[Array, "scenarios groups"],
) -> Float[Array, "rows scenarios"]:
    """What every row takes, as the mass of a node that takes as long.

    HDA-MoE (arXiv 2609.08682), section V-B, as in the authors' published code: a leaf's endpoint
    side carries the groups that touch it, its uplinks those that also touch another leaf; a pod's
    leaf side carries the groups that touch several of its leaves, its core side those that also
    touch another pod, and the core their sum over pods.
    """
    mass = lambda groups: jnp.where(groups, weight, 0.0).sum(-1)
    per_leaf = touched.shape[0] // tree.leaf_endpoints.shape[0]
    leaf = touched.reshape(-1, per_leaf, *touched.shape[1:]).any(1)
    leaf_count = leaf.sum(0)
    pods = tree.pod_leaves.shape[0]
    in_pod = leaf.reshape(pods, -1, *leaf.shape[1:]).sum(1)
    pod_count = (in_pod > 0).sum(0)
    crossing = mass((in_pod > 0) & (pod_count > 1))
    return jnp.concatenate(
        [
            mass(leaf) * tree.leaf_endpoints[:, None],
            mass(leaf & (leaf_count > 1)) * tree.leaf_uplinks[:, None],
            mass(in_pod > 1) * tree.pod_leaves[:, None],
            crossing * tree.pod_cores[:, None],
            crossing.sum(0, keepdims=True) * tree.core,
        ]
    )


def row_price(rows: Float[Array, "rows *scenarios"]) -> Float[Array, "*scenarios"]:
    """The busiest row, and a little of the mean: a slope where several rows are busiest."""
    return rows.max(0) + 0.1 * rows.mean(0)


def arrange(
    tree: Tree,
    touched: Bool[Array, "nodes scenarios groups"],
    weight: Float[Array, "scenarios groups"],
    num_steps: int,
    *,
    key: PRNGKeyArray,
) -> Int[Array, " nodes"]:
    """Which node should lie at each endpoint so that the busiest row is short.

    Tries `PROPOSALS` exchanges of two endpoints at a time and does the best if it helps.

    **Returns:** the node for each endpoint, a permutation.
    """
    num_nodes = touched.shape[0]

    def cost(node: Array) -> Array:
        return row_price(tree_rows(tree, touched[node], weight)).mean()

    def step(carry: tuple[Array, Array], key: PRNGKeyArray):
        node, best = carry
        pair = (jax.random.uniform(key, (PROPOSALS, 2)) * num_nodes).astype(jnp.int32)
        swapped = jax.vmap(lambda ends: node.at[ends].set(node[ends[::-1]]))(pair)
        costs = lax.map(cost, swapped)
        chosen = jnp.argmin(costs)
        better = costs[chosen] < best
        node = jnp.where(better, swapped[chosen], node)
        return (node, jnp.where(better, costs[chosen], best)), None

    start = jnp.arange(num_nodes)
    keys = jax.random.split(key, num_steps)
    return lax.scan(step, (start, cost(start)), keys)[0][0]
