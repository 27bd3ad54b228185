"""Bytes of expert weights that a placement puts on each node."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, check_positive
from moejax._status import is_traced
from moejax._typing import Array, Bool, BoolScalar, Float, FloatLike, FloatScalar
from moejax.noc import HOSTING_SHARE
from moejax.placement._validate import SHARE_TOLERANCE


class MemoryUse(NamedTuple):
    """Expert weights on each node, over all layers given.

    Fields: `node_bytes` [nodes] in bytes; `max_over_mean`, that of the fullest node over the mean
    (the rho of HDA-MoE, arXiv 2609.08682); `fits` bool [nodes], whether they are within the
    capacity; `all_fit`; `free_bytes` [nodes], what is left of it, infinite without a capacity.
    """

    node_bytes: Float[Array, " nodes"]
    max_over_mean: FloatScalar
    fits: Bool[Array, " nodes"]
    all_fit: BoolScalar
    free_bytes: Float[Array, " nodes"]


def memory_use(
    share: Float[Array, "*layers experts nodes"],
    expert_bytes: Float[Array, " experts"] | FloatLike,
    *,
    capacity: Float[Array, " nodes"] | FloatLike | None = None,
    whole_copies: bool = False,
) -> MemoryUse:
    """What a placement stores on each node.

    **Arguments:**

    - `share`: leading axes are layers, whose weights lie on the nodes together.
    - `expert_bytes`: weights of one expert in bytes, one number or one for each expert.
    - `capacity`: bytes of one node that experts may take, one number or one for each node.
    - `whole_copies`: a node that hosts an expert stores all of it, as `replicate_and_pack` means,
        and not its share.

    **Returns:** `MemoryUse`.

    **Raises:** `ValueError` for shapes that disagree, shares below 0, negative sizes.
    """
    share = as_float(share)
    _check(share, expert_bytes, capacity)
    stored = (share > HOSTING_SHARE).astype(share.dtype) if whole_copies else share
    each = (stored * as_float(expert_bytes).reshape(-1, 1)).sum(-2)
    node_bytes = each.reshape(-1, share.shape[-1]).sum(0)
    room = as_float(jnp.inf if capacity is None else capacity)
    free = jnp.broadcast_to(room, node_bytes.shape) - node_bytes
    mean = node_bytes.mean()
    ratio = jnp.where(mean > 0, node_bytes.max() / jnp.where(mean > 0, mean, 1.0), 1.0)
    return MemoryUse(node_bytes, ratio, free >= 0, jnp.all(free >= 0), free)


def published_expert_bytes(
    hidden_size: FloatLike,
    intermediate_size: FloatLike,
    *,
    matrices: FloatLike = 2,
    bytes_per_weight: FloatLike = 1,
) -> FloatLike:
    """Bytes of one expert; 2 h IS by default, as HD-MoE (arXiv 2509.09420) counts.

    A SwiGLU expert has three matrices.
    """
    for name, value in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        check_positive("published_expert_bytes", name, value)
    check_positive("published_expert_bytes", "matrices", matrices)
    check_positive("published_expert_bytes", "bytes_per_weight", bytes_per_weight)
    return matrices * bytes_per_weight * hidden_size * intermediate_size


def _check(share: Array, expert_bytes: Any, capacity: Any) -> None:
    if share.ndim < 2 or 0 in share.shape:
        raise ValueError(
            f"memory_use: share has shape {share.shape}: allowed is [..., experts, nodes]"
        )
    for name, value, axis in (("expert_bytes", expert_bytes, -2), ("capacity", capacity, -1)):
        shape = np.shape(value)
        if value is not None and shape not in ((), (share.shape[axis],)):
            raise ValueError(
                f"memory_use: {name} has shape {shape}: allowed is () or ({share.shape[axis]},)"
            )
        if value is not None:
            check_non_negative("memory_use", name, value)
    if not is_traced(share) and not bool(jnp.all(share >= -SHARE_TOLERANCE)):
        raise ValueError(f"memory_use: share has an entry of {share.min():g}: allowed is 0 to 1")
