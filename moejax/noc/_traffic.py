"""Messages from expert choices and a placement, and the traffic matrix that they add up to."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Bool, Float, FloatLike, Int, IntScalar, PRNGKeyArray
from moejax.noc._messages import Messages
from moejax.noc._traffic_checks import check_traffic, share_is_bad


HOSTING_SHARE = 1e-6
"""A node hosts an expert when it holds more than this share: smaller ones are solver dust."""

UNPLACED = -1
"""In `node_position`: this logical node has no cell, so it sends and aggregates nothing."""


def expert_traffic(
    expert_ids: Int[Array, "tokens top_k"],
    share: Float[Array, "experts nodes"],
    node_position: Int[Array, " nodes"],
    *,
    bytes_per_token: FloatLike,
    key: PRNGKeyArray | None = None,
    max_messages: int | None = None,
    weight: Float[Array, " tokens"] | None = None,
    expected: bool = False,
) -> Messages:
    """The gather of one MoE layer: each node with a part of a token's result sends it to the
    token's aggregator (HD-MoE, arXiv 2509.09420, Alg. 1; HDA-MoE, arXiv 2609.08682, section V).

    A node takes part in a token when it hosts one of its experts, with a share above
    `HOSTING_SHARE`, however many of them. The aggregator is the lowest placed node that hosts an
    expert of the token: the first one listed (`key=None`), or one drawn for each token, all its
    experts being equally likely. Experts without a placed node neither send nor aggregate. The
    aggregator's own part is a message that stays at home.

    **Arguments:**

    - `expert_ids`: int [tokens, top_k]; below 0 is padding. An expert listed twice sends once and
        counts twice in the choice of the aggregator. Co-activation groups are rows too.
    - `share`: [experts, nodes], the fraction of each expert that a logical node holds; rows sum
        to 1.
    - `node_position`: int [nodes], the cell (endpoint id) of each logical node, a permutation in
        which some entries may be `UNPLACED`.
    - `bytes_per_token`: B, one partial result of one token (`token_bytes`).
    - `key`: draws the aggregators; a token's draw depends on the key and the token's index only.
    - `max_messages`: static. Packs the valid messages to the front, in their order, in this much
        room. Default: tokens * nodes unpacked, node n of token t being message t * nodes + n.
    - `weight`: [tokens], scales the bytes of a token (a group: its frequency times the batch).
    - `expected`: static. The mean over aggregators instead of one: each of the m listed experts
        aggregates with 1/m of the bytes, message (t * top_k + i) * nodes + n for the i-th.

    **Returns:** `Messages`, all starting at 0. `flow` is a hash of the token and the sending cell.

    **Raises:** `ValueError` naming the offender for expert ids beyond `share`, rows of `share` that
    are negative or do not sum to 1 (within 1e-4), positions that are no permutation, weights or
    bytes that are negative, or more messages than `max_messages`. Under tracing: `INVALID_ROUTING`,
    `BAD_SHARE`, `BAD_POSITION`, `NEGATIVE_BYTES`, `TOO_MANY_MESSAGES`, and NaN bytes.
    """
    check_traffic(expert_ids, share, node_position, bytes_per_token, weight)
    if expected and key is not None:
        raise ValueError("key draws one aggregator, expected=True averages over all: give one")
    if max_messages is not None and max_messages < 1:
        raise ValueError(f"max_messages = {max_messages}: allowed is 1 or more")
    scale = as_float(bytes_per_token)
    scale = scale if weight is None else scale * as_float(weight)
    tables = (jnp.asarray(expert_ids), jnp.asarray(share), jnp.asarray(node_position))
    messages = _expert_traffic(*tables, scale, key, max_messages, bool(expected))
    if not is_traced(messages) and int(messages.status) == Status.TOO_MANY_MESSAGES:
        needed = int(_expert_traffic(*tables, scale, key, None, bool(expected)).valid.sum())
        raise ValueError(
            f"max_messages = {max_messages}: this traffic has {needed} messages, allowed is "
            f"{needed} or more"
        )
    return messages


def mirror(messages: Messages) -> Messages:
    """The same messages in the other direction: the dispatch that belongs to a gather.

    Its routes are not the reverse ones: dimension-order routes turn at another corner.
    """
    # Swapped in place, so that stacked batches pass as they are.
    ends = lambda m: (m.source, m.destination)
    return eqx.tree_at(ends, messages, (messages.destination, messages.source))


def traffic_matrix(messages: Messages, num_nodes: int) -> Float[Array, "nodes nodes"]:
    """Bytes from each node (row) to each node (column), its own included.

    `num_nodes` is static. Ids outside 0 .. num_nodes - 1 of valid messages give NaN everywhere.
    """
    return _traffic_matrix(messages, num_nodes)


def pair_messages(matrix: Float[Array, "nodes nodes"]) -> Messages:
    """One message for each ordered pair of nodes, `nodes * nodes` in all, source by source.

    **Arguments:**

    - `matrix`: [nodes, nodes] B; entries of zero and the diagonal are not sent (not valid).

    **Raises:** `ValueError` for another shape.
    """
    matrix = as_float(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix has shape {matrix.shape}, expected [nodes, nodes]")
    source, destination = jnp.indices(matrix.shape, jnp.int32).reshape(2, -1)
    sent = matrix.reshape(-1)
    return Messages(source, destination, sent, (sent != 0) & (source != destination))


@functools.partial(jax.jit, static_argnames="num_nodes")
def _traffic_matrix(messages: Messages, num_nodes: int) -> Float[Array, "nodes nodes"]:
    ends = (messages.source, messages.destination)
    outside = functools.reduce(jnp.logical_or, [(e < 0) | (e >= num_nodes) for e in ends])
    sent = jnp.where(messages.valid, messages.bytes, 0)
    sent = jnp.where(messages.valid & outside, jnp.nan, sent)
    pair = jnp.where(messages.valid & ~outside, ends[0] * num_nodes + ends[1], 0)
    matrix = jax.ops.segment_sum(sent, pair, num_nodes**2).reshape(num_nodes, num_nodes)
    return jnp.where(jnp.isnan(matrix[0, 0]), jnp.nan, matrix)


@functools.partial(jax.jit, static_argnames=("max_messages", "expected"))
def _expert_traffic(expert_ids, share, node_position, scale, key, max_messages, expected):
    num_tokens, top_k = expert_ids.shape
    num_experts, num_nodes = share.shape
    # Traces come in unsigned bytes, in which 256 experts or a padding of -1 would wrap around.
    expert_ids, position = expert_ids.astype(jnp.int32), node_position.astype(jnp.int32)
    hosts = (share > HOSTING_SHARE) & (position >= 0)
    listed = (expert_ids >= 0) & (expert_ids < num_experts)
    safe_ids = jnp.where(listed, expert_ids, 0)
    # The aggregator that each expert would choose; without one the expert does not count.
    aggregator_of = jnp.argmax(hosts, axis=1).astype(jnp.int32)
    listed &= jnp.any(hosts, axis=1)[safe_ids]
    touched = jnp.any(hosts[safe_ids] & listed[..., None], axis=1)
    bytes_of_token = jnp.broadcast_to(scale, (num_tokens,))

    if expected:
        chosen, sends = safe_ids, listed
        bytes_of_token /= jnp.maximum(jnp.sum(listed, axis=1), 1)
    else:
        slot = _chosen_slot(listed, key)
        chosen = jnp.take_along_axis(safe_ids, slot[:, None], axis=1)
        sends = jnp.any(listed, axis=1, keepdims=True)
    shape = (*chosen.shape, num_nodes)
    fields = dict(
        source=jnp.broadcast_to(position, shape),
        destination=jnp.broadcast_to(position[aggregator_of[chosen]][..., None], shape),
        bytes=jnp.broadcast_to(bytes_of_token[:, None, None], shape),
        valid=jnp.broadcast_to(touched[:, None, :] & sends[..., None], shape),
        flow=_flow(num_tokens, position, shape),
    )
    fields = {name: field.reshape(-1) for name, field in fields.items()}
    status = _status(expert_ids, share, position, scale)
    if max_messages is not None:
        fields, overfull = _packed(fields, max_messages)
        status = merge(status, overfull)
    return _marked(fields, status)


def _chosen_slot(listed: Bool[Array, "tokens top_k"], key) -> Int[Array, " tokens"]:
    """Which listed expert aggregates: the first that counts, or any of those with one chance."""
    if key is None:
        return jnp.argmax(listed, axis=1)
    tokens = jnp.arange(listed.shape[0])
    draw = lambda token: jax.random.uniform(jax.random.fold_in(key, token), dtype=jnp.float32)
    rank = jnp.cumsum(listed, axis=1)
    wanted = jnp.floor(jax.vmap(draw)(tokens) * rank[:, -1]).astype(jnp.int32)
    # A product that float32 rounds up to the count would be one too far.
    wanted = jnp.minimum(wanted, rank[:, -1] - 1)
    return jnp.argmax(listed & (rank == wanted[:, None] + 1), axis=1)


def _flow(num_tokens: int, position: Int[Array, " nodes"], shape) -> Int[Array, "..."]:
    """A 31-bit hash of token and cell (the finalizer of MurmurHash3): equal on every machine."""
    token = jnp.arange(num_tokens, dtype=jnp.uint32)[:, None]
    mixed = token * jnp.uint32(0x9E3779B1) + position.astype(jnp.uint32) + jnp.uint32(1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    mixed = (mixed ^ (mixed >> 16)) >> 1
    return jnp.broadcast_to(mixed.astype(jnp.int32)[:, None, :], shape)


def _packed(fields: dict[str, Array], room: int) -> tuple[dict[str, Array], IntScalar]:
    """The valid messages moved to the front, and whether there are more than room for them."""
    reached = jnp.cumsum(fields["valid"].astype(jnp.int32))
    slots = jnp.arange(room, dtype=jnp.int32)
    # Message j of the packed ones is the first at which j + 1 valid ones have been passed.
    index = jnp.searchsorted(reached, slots + 1)
    packed = {name: field.at[index].get(mode="clip") for name, field in fields.items()}
    packed["valid"] = slots < reached[-1]
    return packed, flag(reached[-1] > room, Status.TOO_MANY_MESSAGES)


def _status(expert_ids, share, position, scale) -> IntScalar:
    num_experts, num_nodes = share.shape
    seen = jnp.sum(position[:, None] == jnp.arange(num_nodes), axis=0)
    lost = (position < UNPLACED) | (position >= num_nodes)
    bad_bytes = ~((scale >= 0) & (scale < jnp.inf))
    return merge(
        flag(jnp.any(expert_ids >= num_experts), Status.INVALID_ROUTING),
        flag(jnp.any(bad_bytes), Status.NEGATIVE_BYTES),
        flag(jnp.any(share_is_bad(share)), Status.BAD_SHARE),
        flag(jnp.any(seen > 1) | jnp.any(lost), Status.BAD_POSITION),
    )


def _marked(fields: dict[str, Array], status: IntScalar) -> Messages:
    """Bad input is in every sum of the bytes: all messages count, and their bytes are NaN."""
    bad = status != Status.OK
    fields["bytes"] = jnp.where(bad, jnp.nan, fields["bytes"])
    fields["valid"] |= bad
    return Messages(**fields, status=status)
