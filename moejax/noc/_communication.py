"""Communication time of one MoE layer: simulated, estimated, and that of tensor parallelism.

The papers count bytes in two ways. Their event simulation moves 1 byte for each element of a
token's vector, their linear estimate and the all-reduce of tensor parallelism 4 bytes (partial sums
in single precision). Much of the gap between tensor parallelism and the rest is this factor, so it
is a parameter here, with both conventions by name.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from moejax._checks import as_float, check_non_negative, check_positive, lookup
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int
from moejax.noc._messages import Messages
from moejax.noc._simulate import simulate
from moejax.noc._topology import Topology
from moejax.noc._traffic import HOSTING_SHARE, mirror
from moejax.noc._traffic_checks import (
    check_ids,
    check_matrices,
    check_share,
    check_weight,
    share_is_bad,
)


SIMULATED_BYTES_PER_ELEMENT = 1.0
"""What the papers' event simulation moves: outputs of experts, quantized."""

ESTIMATED_BYTES_PER_ELEMENT = 4.0
"""What their linear estimate and tensor parallelism move: partial sums in single precision."""

TP_ESTIMATES_CONFERENCE = 2.0
"""Tensor parallelism in units of the estimate, in the scripts of HD-MoE (arXiv 2509.09420): gather
and dispatch."""

TP_ESTIMATES_JOURNAL = 4.0
"""The same in the scripts of HDA-MoE (arXiv 2609.08682): an all-reduce, that is a reduce-scatter
and an all-gather, in each of the two directions."""

DISPATCH = {"double": False, "mirror": True}


def token_bytes(
    hidden_size: FloatLike, bytes_per_element: FloatLike = SIMULATED_BYTES_PER_ELEMENT
) -> FloatScalar:
    """Bytes of one token's vector, the `bytes_per_token` of `expert_traffic`."""
    check_non_negative("token_bytes", "hidden_size", hidden_size)
    check_non_negative("token_bytes", "bytes_per_element", bytes_per_element)
    return as_float(hidden_size) * as_float(bytes_per_element)


def communication_time(
    topology: Topology,
    messages: Messages,
    *,
    dispatch: Literal["double", "mirror"] = "double",
    **options: Any,
) -> FloatScalar:
    """Seconds for the gather of a layer and for the dispatch before it.

    **Arguments:**

    - `messages`: the gather, from `expert_traffic`.
    - `dispatch`: ``"double"`` takes the dispatch to be as long as the gather, as both papers do;
        ``"mirror"`` simulates it, every message going the other way on a route of its own.
    - `options`: of `simulate`.

    **Raises:** as `simulate`.
    """
    mirrored = lookup("dispatch", dispatch, DISPATCH)
    gather = simulate(topology, messages, **options).makespan
    if not mirrored:
        return 2 * gather
    return gather + simulate(topology, mirror(messages), **options).makespan


def estimate(
    expert_ids: Int[Array, "tokens top_k"],
    share: Float[Array, "experts nodes"],
    *,
    hidden_size: FloatLike,
    bandwidth: FloatLike,
    bytes_per_element: FloatLike = ESTIMATED_BYTES_PER_ELEMENT,
    weight: Float[Array, " tokens"] | None = None,
) -> FloatScalar:
    """The linear estimate of one gather (HD-MoE, arXiv 2509.09420, Eq. 2): the node that takes part
    in most tokens sends one vector for each of them over one link.

    max over nodes of the tokens with an expert there, times bytes per token / bandwidth. Where
    nodes lie on the network does not count; `calibrate_gamma` finds the factor that makes up for
    it. Under tensor parallelism every node takes part in all tokens.

    **Arguments:**

    - `expert_ids`, `share`: as in `expert_traffic`.
    - `hidden_size`, `bytes_per_element`: elements of a vector and B of each.
    - `bandwidth`: B/s of the link between an endpoint and the network.
    - `weight`: [tokens], how often each row counts. For co-activation groups (a row is a set of
        experts) the frequency of the group times the batch. Default 1.

    **Returns:** seconds. Differentiable in all but ids and share. Under tracing, expert ids beyond
    `share`, bad shares and bad weights give NaN.

    **Raises:** `ValueError` naming the offender, as `expert_traffic`.
    """
    check_matrices(expert_ids, share, weight)
    check_share(share)
    check_ids(expert_ids, jnp.shape(share)[0])
    check_weight(weight)
    check_positive("estimate", "bandwidth", bandwidth)
    vector = token_bytes(hidden_size, bytes_per_element)
    tables = jnp.asarray(expert_ids), jnp.asarray(share)
    counts = jnp.ones(tables[0].shape[0]) if weight is None else as_float(weight)
    return busiest_node(*tables, counts) * vector / as_float(bandwidth)


def tensor_parallel_time(
    batch: FloatLike,
    hidden_size: FloatLike,
    *,
    bandwidth: FloatLike,
    estimates: FloatLike = TP_ESTIMATES_JOURNAL,
    bytes_per_element: FloatLike = ESTIMATED_BYTES_PER_ELEMENT,
) -> FloatScalar:
    """Communication of one layer under tensor parallelism, as the papers charge it, in s.

    `estimates` * batch * hidden_size * bytes_per_element / bandwidth, where `estimates` is
    `TP_ESTIMATES_JOURNAL` or `TP_ESTIMATES_CONFERENCE`. `collective_time` simulates an all-reduce
    instead of charging it.
    """
    check_positive("tensor_parallel_time", "bandwidth", bandwidth)
    check_non_negative("tensor_parallel_time", "batch", batch)
    vector = token_bytes(hidden_size, bytes_per_element)
    return as_float(estimates) * as_float(batch) * vector / as_float(bandwidth)


@jax.jit
def busiest_node(
    expert_ids: Int[Array, "tokens top_k"],
    share: Float[Array, "experts nodes"],
    weight: Float[Array, " tokens"],
) -> FloatScalar:
    """Weighted number of tokens in which the busiest node takes part. NaN for impossible input."""
    expert_ids, num_experts = expert_ids.astype(jnp.int32), share.shape[0]
    listed = (expert_ids >= 0) & (expert_ids < num_experts)
    hosts = share > HOSTING_SHARE
    touched = jnp.any(hosts[jnp.where(listed, expert_ids, 0)] & listed[..., None], axis=1)
    busiest = jnp.max(jnp.sum(jnp.where(touched, weight[:, None], 0), axis=0))
    bad = jnp.any(expert_ids >= num_experts) | jnp.any(share_is_bad(share))
    bad |= ~jnp.all((weight >= 0) & (weight < jnp.inf))
    return jnp.where(bad, jnp.nan, busiest)
