"""Placements that look at no trace: tensor parallel and expert parallel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, PRNGKeyArray
from moejax.placement._validate import check_count


def tensor_parallel(num_experts: int, num_nodes: int) -> Float[Array, "experts nodes"]:
    """Every expert split evenly over all nodes.

    **Returns:** [experts, nodes], 1 / nodes everywhere.

    **Raises:** `ValueError` for no experts or no nodes.
    """
    check_count("tensor_parallel", "num_experts", num_experts)
    check_count("tensor_parallel", "num_nodes", num_nodes)
    return jnp.full((num_experts, num_nodes), 1 / num_nodes)


def expert_parallel(
    num_experts: int, num_nodes: int, *, key: PRNGKeyArray
) -> Float[Array, "experts nodes"]:
    """Experts dealt to nodes at random, as evenly as they divide.

    With nodes to spare, every expert gets floor(nodes / experts) nodes and some one more, and is
    split evenly over them; no node holds parts of two. Otherwise every node gets
    floor(experts / nodes) whole experts and some one more. As the baseline of HD-MoE (arXiv
    2509.09420, section VI).

    **Arguments:** sizes are static, `key` may be traced.

    **Returns:** [experts, nodes]; rows sum to 1.

    **Raises:** `ValueError` for no experts or no nodes.
    """
    check_count("expert_parallel", "num_experts", num_experts)
    check_count("expert_parallel", "num_nodes", num_nodes)
    return _expert_parallel(num_experts, num_nodes, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _expert_parallel(
    num_experts: int, num_nodes: int, key: PRNGKeyArray
) -> Float[Array, "experts nodes"]:
    if num_nodes >= num_experts:
        expert, size = deal(num_nodes, num_experts)
        node = jax.random.permutation(key, num_nodes)
        part = 1 / size[expert]
    else:
        node, _ = deal(num_experts, num_nodes)
        expert = jax.random.permutation(key, num_experts)
        part = np.ones(num_experts)
    share = jnp.zeros((num_experts, num_nodes))
    return share.at[expert, node].set(jnp.asarray(part, share.dtype))


def deal(num_items: int, num_owners: int) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive items to owners, the first owners one more: (owner of item, items of owner)."""
    least, more = divmod(num_items, num_owners)
    size = np.full(num_owners, least)
    size[:more] += 1
    return np.repeat(np.arange(num_owners), size), size
