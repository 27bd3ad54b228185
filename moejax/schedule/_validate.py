"""Placements, loads and expert ids that make no sense: named eagerly, a status under tracing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, IntScalar
from moejax.noc import UNPLACED
from moejax.routing import NOT_ROUTED


SHARE_TOLERANCE = 1e-4
"""How far the shares of one expert may be from adding up to 1."""


def check_share(owner: str, share: Any) -> Array:
    """`share` as floats. Raises `ValueError` for a wrong shape, or the first row that is bad."""
    share = as_float(share)
    if share.ndim != 2 or 0 in share.shape:
        raise ValueError(
            f"{owner}: share has shape {share.shape}: allowed is [experts, nodes] (batches: "
            "jax.vmap)"
        )
    if not is_traced(share):
        bad = np.flatnonzero(_is_bad(np.asarray(share)))
        if bad.size:
            row = np.asarray(share)[bad[0]]
            raise ValueError(
                f"{owner}: share of expert {bad[0]} adds up to {row.sum():g} with {row.min():g} as "
                "its least: allowed is 0 or more, adding up to 1"
            )
    return share


def check_shares(owner: str, share: Any, node_position: Any, num_nodes: int):
    """`share` [layers, experts, nodes] as floats and `node_position` [layers, nodes] as int32.

    Raises `ValueError` for shapes that do not fit `num_nodes`, a bad share, or a node without a
    place of its own.
    """
    share = as_float(share)
    if share.ndim != 3 or 0 in share.shape or share.shape[2] != num_nodes:
        raise ValueError(
            f"{owner}: share has shape {share.shape}: allowed is [layers, experts, {num_nodes}], "
            "the nodes of the topology"
        )
    position = node_position if is_traced(node_position) else np.asarray(node_position)
    if position.shape != (share.shape[0], num_nodes):
        raise ValueError(
            f"{owner}: node_position has shape {position.shape}: allowed is "
            f"{(share.shape[0], num_nodes)}"
        )
    for layer in range(0 if is_traced(share) else share.shape[0]):
        check_share(f"{owner}, layer {layer}", share[layer])
    if not is_traced(position):
        for layer, places in enumerate(np.asarray(position)):
            placed = np.sort(places[places != UNPLACED])
            if np.any((placed < 0) | (placed >= num_nodes)) or np.any(np.diff(placed) == 0):
                raise ValueError(
                    f"{owner}: node_position of layer {layer} = {places.tolist()}: allowed is a "
                    f"place of its own in 0 .. {num_nodes - 1} for each node, or {UNPLACED}"
                )
    return share, jnp.asarray(position, jnp.int32)


def check_load(owner: str, load: Any) -> Array:
    """`load` as floats. Raises `ValueError` for an entry that is negative or not finite."""
    load = as_float(load)
    if not is_traced(load):
        values = np.asarray(load)
        bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
        if bad.size:
            raise ValueError(
                f"{owner}: load of expert {bad[0]} = {values.ravel()[bad[0]]:g}: allowed is 0 or "
                "more, finite"
            )
    return load


def check_ids(owner: str, name: str, expert_ids: Any, num_experts: int, ndim: int) -> Array:
    """`expert_ids` as int32. Raises `ValueError` for a wrong shape, or the first id that is bad."""
    ids = expert_ids if isinstance(expert_ids, jax.Array) else np.asarray(expert_ids)
    axes = "[layers, tokens, top_k]" if ndim == 3 else "[tokens, top_k]"
    if ids.ndim != ndim or 0 in ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{owner}: {name} is {ids.dtype} {ids.shape}: allowed is whole numbers {axes}"
        )
    if not is_traced(ids):
        values = np.asarray(ids)
        bad = values[(values < NOT_ROUTED) | (values >= num_experts)]
        if bad.size:
            raise ValueError(
                f"{owner}: {name} holds {bad[0]}: allowed is 0 to {num_experts - 1}, or "
                f"{NOT_ROUTED} for no expert"
            )
    return jnp.asarray(ids, jnp.int32)


def share_status(share: Array) -> IntScalar:
    """`Status.BAD_SHARE` where an expert's shares are negative or do not add up to 1."""
    return flag(jnp.any(_is_bad(share)), Status.BAD_SHARE)


def ids_status(expert_ids: Array, num_experts: int) -> IntScalar:
    """`Status.INVALID_ROUTING` where an id has no expert."""
    outside = (expert_ids < NOT_ROUTED) | (expert_ids >= num_experts)
    return merge(flag(jnp.any(outside), Status.INVALID_ROUTING))


def _is_bad(share):
    near = abs(share.sum(-1) - 1) <= SHARE_TOLERANCE
    return ~(near & (share >= 0).all(-1))
