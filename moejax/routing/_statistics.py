"""What a batch or a trace looks like: loads, bimodality, pairs, groups, transitions."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array, Float, Int
from moejax.routing._trace import NOT_ROUTED, RoutingTrace, as_expert_ids


INVALID_COUNT = -1
"""Count of every expert of a batch that holds an expert id out of range."""


def tokens_per_expert(
    expert_ids: Int[Array, "... tokens top_k"], num_experts: int, valid: Any = None
) -> Int[Array, "... experts"]:
    """How many tokens each expert gets: the n_e that all costs and partitions start from.

    **Arguments:**

    - `expert_ids`: slots that are `NOT_ROUTED` count for no expert.
    - `num_experts`: routed experts of a layer, static.
    - `valid`: bool, broadcast against [..., tokens]; tokens where it is False are not counted.

    **Returns:** int32 [..., experts]. Under tracing, a batch with an expert id out of range has
    `INVALID_COUNT` (-1) in every entry, which whatever decides on these counts reports.

    **Raises:** `ValueError` for an empty tokens axis, more choices than experts, or (called
    eagerly) an expert id out of range.
    """
    ids = _checked_ids("tokens_per_expert", expert_ids, num_experts)
    if valid is not None:
        ids = jnp.where(jnp.asarray(valid, bool)[..., None], ids, NOT_ROUTED)
    bad = (ids < NOT_ROUTED) | (ids >= num_experts)
    if not is_traced(bad) and bool(bad.any()):
        culprit = int(ids[bad][0])
        raise ValueError(
            f"tokens_per_expert: expert id {culprit}, allowed is 0 to {num_experts - 1}"
        )
    counts = _histogram(ids, num_experts)
    return jnp.where(bad.any((-2, -1))[..., None], INVALID_COUNT, counts)


class Bimodality(NamedTuple):
    """How the active experts of a batch divide by their number of tokens N.

    The bins of Sieve (arXiv 2605.11277), Fig. 5: an expert with N = 1 is a GEMV, with N <= 4 it is
    memory-bound. Shares are of the active experts and add up to 1; 0 where no expert is active.
    """

    share_1: Float[Array, "..."]
    """Share with N = 1."""
    share_2: Float[Array, "..."]
    """Share with N = 2."""
    share_3_4: Float[Array, "..."]
    """Share with N = 3 or 4."""
    share_more: Float[Array, "..."]
    """Share with N > 4."""
    active: Float[Array, "..."]
    """Experts with N >= 1, as a fraction of all experts."""


def bimodality(counts: Int[Array, "... experts"]) -> Bimodality:
    """The `Bimodality` of batches, from their tokens per expert.

    **Returns:** shares of shape [...]. NaN, under tracing, for a batch with a negative count.

    **Raises:** `ValueError` for no experts, counts that are not whole numbers by type, or (called
    eagerly) a negative count.
    """
    counts = jnp.asarray(counts)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"bimodality: counts is {counts.dtype}: allowed is an integer type")
    if counts.ndim == 0 or counts.shape[-1] == 0:
        raise ValueError(f"bimodality: counts has shape {counts.shape}: allowed is [..., experts]")
    if not is_traced(counts) and bool((counts < 0).any()):
        raise ValueError(f"bimodality: count {int(counts.min())} is negative")
    return _shares(counts)


@jax.jit
def _shares(counts: Int[Array, "... experts"]) -> Bimodality:
    bad = (counts < 0).any(-1)
    num_active = (counts > 0).sum(-1)
    of_active = lambda those: jnp.where(bad, jnp.nan, those.sum(-1) / jnp.maximum(num_active, 1))
    return Bimodality(
        share_1=of_active(counts == 1),
        share_2=of_active(counts == 2),
        share_3_4=of_active((counts == 3) | (counts == 4)),
        share_more=of_active(counts > 4),
        active=jnp.where(bad, jnp.nan, num_active / counts.shape[-1]),
    )


def co_activation(
    expert_ids: Int[Array, "... tokens top_k"], num_experts: int
) -> Int[Array, "experts experts"]:
    """How many tokens chose both of two experts; on the diagonal, how many chose the expert.

    **Arguments:**

    - `expert_ids`: leading axes are pooled. Slots that are `NOT_ROUTED` or out of range count for
        no pair.
    - `num_experts`: static.

    **Returns:** int32 [experts, experts], symmetric.
    """
    ids = _checked_ids("co_activation", expert_ids, num_experts)
    ids = ids.reshape(-1, ids.shape[-1])
    return _pair_counts(ids, ids, num_experts)


def co_activation_groups(
    expert_ids: Int[Array, "... tokens top_k"],
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct sets of experts that tokens chose, and how often (host only).

    **Arguments:**

    - `expert_ids`: leading axes are pooled; pass one layer for the groups of that layer. Tokens
        that are not routed at all are left out.

    **Returns:** int32 [groups, top_k], each sorted ascending, in lexicographic order; and their
    relative frequency, float64 [groups], which adds up to 1. A token with fewer than top_k experts
    keeps `NOT_ROUTED` in front.

    **Raises:** `ValueError` where no token is routed.
    """
    ids = np.asarray(expert_ids)
    ids = np.sort(ids.reshape(-1, ids.shape[-1]).astype(np.int32), axis=-1)
    ids = ids[ids[:, -1] != NOT_ROUTED]
    if len(ids) == 0:
        raise ValueError("co_activation_groups: no token is routed")
    groups, counts = np.unique(ids, axis=0, return_counts=True)
    return groups, counts / len(ids)


def next_layer_transitions(
    trace: RoutingTrace, *, first_choice: bool = False
) -> Int[Array, "pairs experts experts"]:
    """How many valid tokens chose expert i in one layer and expert j in the next.

    **Arguments:**

    - `first_choice`: counts only the first slot of each token, its strongest choice in the traces
        that order them, instead of all top_k x top_k pairs.

    **Returns:** int32 [layers - 1, experts, experts], entry [l, i, j] for layers l and l + 1.

    **Raises:** `ValueError` for a trace of one layer.
    """
    if trace.num_layers < 2:
        raise ValueError("next_layer_transitions: the trace has one layer only")
    ids = jnp.where(trace.valid[:, None], trace.expert_ids, NOT_ROUTED)
    ids = ids[..., :1] if first_choice else ids
    return _pair_counts_by_layer(ids, trace.num_experts)


@functools.partial(jax.jit, static_argnames="num_experts")
def _pair_counts_by_layer(ids: Array, num_experts: int) -> Int[Array, "pairs experts experts"]:
    # One layer at a time: the pairs of all layers at once are top_k times the trace.
    pairs = lambda layers: _pair_counts(layers[0], layers[1], num_experts)
    return jax.lax.map(pairs, (ids[:-1], ids[1:]))


@functools.partial(jax.jit, static_argnames="num_experts")
def _pair_counts(one: Array, other: Array, num_experts: int) -> Int[Array, "experts experts"]:
    """Counts of (i, j) over tokens, every slot of `one` against every slot of `other`."""
    inside = lambda ids: (ids >= 0) & (ids < num_experts)
    both = inside(one)[..., :, None] & inside(other)[..., None, :]
    pair = one[..., :, None] * num_experts + other[..., None, :]
    pair = jnp.where(both, pair, NOT_ROUTED).reshape(-1, other.shape[-1])
    counts = _histogram(pair, num_experts**2)
    return counts.reshape(num_experts, num_experts)


@functools.partial(jax.jit, static_argnames="length")
def _histogram(ids: Int[Array, "... tokens top_k"], length: int) -> Int[Array, "... length"]:
    """Occurrences of 0 .. length - 1 in the last two axes; ids outside are dropped.

    A scatter: a comparison matrix costs `length` operations for each id.
    """

    def count(flat):
        # A negative index would count from the end, so move it past the end, where it is dropped.
        index = jnp.where(flat < 0, length, flat)
        return jnp.zeros(length, jnp.int32).at[index].add(1, mode="drop")

    batch = ids.shape[:-2]
    return jax.vmap(count)(ids.reshape(-1, ids.shape[-2] * ids.shape[-1])).reshape(*batch, length)


def _checked_ids(where: str, expert_ids: Any, num_experts: int) -> Int[Array, "... tokens top_k"]:
    ids = as_expert_ids(where, expert_ids)
    if ids.ndim < 2 or 0 in ids.shape[-2:]:
        raise ValueError(
            f"{where}: expert_ids has shape {ids.shape}: allowed is [..., tokens, top_k], not empty"
        )
    if ids.shape[-1] > num_experts:
        top_k = ids.shape[-1]
        raise ValueError(f"{where}: top_k = {top_k} is more than num_experts = {num_experts}")
    return ids
