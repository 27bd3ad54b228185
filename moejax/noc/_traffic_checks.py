"""What `expert_traffic` raises eagerly, with the offender's name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import check_non_negative
from moejax._status import is_traced


SHARE_TOLERANCE = 1e-4
"""How far a row of `share` may sum from 1: room for tables stored in single precision."""


def share_is_bad(share: Any) -> Any:
    """[experts] rows with an entry below 0, or that do not sum to 1. numpy or JAX arrays."""
    near = abs(share.sum(axis=1) - 1) <= SHARE_TOLERANCE
    return ~(near & (share >= 0).all(axis=1))


def check_traffic(expert_ids, share, node_position, bytes_per_token, weight) -> None:
    """Shapes always; values where they can be looked at here and now."""
    _check_shapes(expert_ids, share, node_position, bytes_per_token, weight)
    check_share(share)
    check_ids(expert_ids, np.shape(share)[0])
    check_position(node_position)
    check_non_negative("expert_traffic", "bytes_per_token", bytes_per_token)
    check_weight(weight)


def check_ids(expert_ids, num_experts: int) -> None:
    """Raises `ValueError` naming the first id that `share` has no row for."""
    if is_traced(expert_ids):
        return
    ids = np.asarray(expert_ids).astype(np.int64)
    if np.any(ids >= num_experts):
        token = int(np.argmax(np.any(ids >= num_experts, axis=1)))
        offender = int(ids[token].max())
        raise ValueError(
            f"expert_ids: token {token} names expert {offender}: allowed is 0 .. "
            f"{num_experts - 1} (the rows of share), or below 0 for padding"
        )


def check_share(share) -> None:
    """Raises `ValueError` naming the first row that is no split of one expert."""
    if is_traced(share):
        return
    bad = share_is_bad(np.asarray(share, np.float64))
    if np.any(bad):
        expert = int(np.argmax(bad))
        row = np.asarray(share, np.float64)[expert]
        raise ValueError(
            f"share: the row of expert {expert} sums to {row.sum():.6g} with a smallest entry of "
            f"{row.min():.6g}: allowed are entries of 0 or more that sum to 1"
        )


def check_weight(weight) -> None:
    """Raises `ValueError` naming the first token whose weight is negative or not finite."""
    if weight is None or is_traced(weight):
        return
    value = np.asarray(weight, np.float64)
    bad = ~((value >= 0) & (value < np.inf))
    if np.any(bad):
        token = int(np.argmax(bad))
        raise ValueError(
            f"weight: token {token} has {value[token]:g}: allowed is finite, 0 or more"
        )


def check_position(node_position) -> None:
    """Raises `ValueError` naming a node without a cell of its own."""
    if is_traced(node_position):
        return
    position = np.asarray(node_position)
    owner: dict[int, int] = {}
    for node, cell in enumerate(position.tolist()):
        if not -1 <= cell < len(position):
            raise ValueError(
                f"node_position: node {node} has cell {cell}: allowed is 0 .. "
                f"{len(position) - 1}, or -1 for a node without a cell"
            )
        if cell >= 0 and cell in owner:
            raise ValueError(
                f"node_position: nodes {owner[cell]} and {node} both have cell {cell}: allowed "
                "is a permutation"
            )
        owner[cell] = node


def check_matrices(expert_ids, share, weight) -> None:
    """Raises `ValueError` for the shapes and kinds of what every function here takes."""
    wanted = dict(expert_ids=(expert_ids, "[tokens, top_k]"), share=(share, "[experts, nodes]"))
    for name, (value, axes) in wanted.items():
        if np.ndim(value) != 2 or 0 in np.shape(value):
            raise ValueError(
                f"{name} has shape {np.shape(value)}, expected {axes} without an empty axis "
                "(batches: jax.vmap)"
            )
    _check_integer("expert_ids", expert_ids)
    if weight is not None:
        _check_shape("weight", weight, np.shape(expert_ids)[:1])


def _check_shapes(expert_ids, share, node_position, bytes_per_token, weight) -> None:
    check_matrices(expert_ids, share, weight)
    _check_integer("node_position", node_position)
    _check_shape("node_position", node_position, np.shape(share)[1:])
    _check_shape("bytes_per_token", bytes_per_token, ())


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    if np.shape(value) != shape:
        raise ValueError(
            f"{name} has shape {np.shape(value)}, expected {shape} (batches: jax.vmap)"
        )


def _check_integer(name: str, value: Any) -> None:
    dtype = value.dtype if isinstance(value, jax.Array | np.ndarray) else np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} is {dtype}, not an integer")
