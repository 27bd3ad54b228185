"""Batches out of a trace: decode (one token of each of B sequences) and prefill (a run of tokens).

All draws choose ranks in the pool of valid tokens. The token index `num_tokens` stands for a slot
that nothing is left for; gathering turns it into `NOT_ROUTED`.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array, Int, PRNGKeyArray
from moejax.routing._trace import NOT_ROUTED, RoutingTrace


def decode_batch(
    trace: RoutingTrace, batch_size: int, *, key: PRNGKeyArray, reuse: bool = False
) -> Int[Array, "layers batch top_k"]:
    """The experts of one decode step: B different sequences, each at its own random position.

    With one key, the batch of a smaller size is the prefix of the batch of a larger one, so a
    sweep over batch sizes adds requests and changes none.

    **Arguments:**

    - `trace`: only valid tokens are drawn.
    - `batch_size`: B, static.
    - `key`: the draw is a pure function of it; `jax.vmap` over keys gives independent batches.
    - `reuse`: allows more than one token of a sequence: distinct positions, and no sequence is
        used twice before every other with a position left is used as often. Another draw than
        without `reuse`, for equal keys, and slower (it sorts the tokens).

    **Returns:** int32 [layers, B, top_k]. Where the trace itself is traced, so that its valid
    tokens can not be counted ahead, slots that nothing is left for are `NOT_ROUTED`.

    **Raises:** `ValueError` for a batch size below 1, above the sequences with a valid token
    (without `reuse`), or above the valid tokens (with it).
    """
    batch_size = _check_size("batch_size", batch_size)
    pool = _pool(trace)
    if reuse:
        _check_enough("batch_size", batch_size, pool.num_tokens, "valid tokens")
        return _gather(_distinct_ranks, pool, trace.expert_ids, batch_size, key)
    hint = "sequences with a valid token; reuse=True draws more than one token of a sequence"
    _check_enough("batch_size", batch_size, pool.num_sequences, hint)
    return _gather(_one_rank_per_sequence, pool, trace.expert_ids, batch_size, key)


def prefill_batch(
    trace: RoutingTrace, num_tokens: int, *, key: PRNGKeyArray
) -> Int[Array, "layers tokens top_k"]:
    """The experts of `num_tokens` consecutive valid tokens, from a random place in the trace.

    This is a prefill, not a decode step: neighboring tokens share a context and choose similar
    experts, so loads are far more skewed than those of `decode_batch`. The run goes on into the
    next sequence where one ends, as a packed prefill does.

    **Arguments:**

    - `num_tokens`: length of the run, static.
    - `key`: chooses the first token, uniformly.

    **Returns:** int32 [layers, num_tokens, top_k], `NOT_ROUTED` as in `decode_batch`.

    **Raises:** `ValueError` for a length below 1 or above the number of valid tokens.
    """
    num_tokens = _check_size("num_tokens", num_tokens)
    pool = _pool(trace)
    _check_enough("num_tokens", num_tokens, pool.num_tokens, "valid tokens")
    return _gather(_consecutive_ranks, pool, trace.expert_ids, num_tokens, key)


class _Pool(NamedTuple):
    """The valid tokens in order. NumPy where the trace is concrete, however `key` is traced."""

    tokens: Any  # [pool] token index; num_tokens of the trace past the last valid one
    sequence: Any  # [pool] sequence of each; the number of sequences past the last valid one
    first: Any  # [sequences + 1] rank of the first token of each sequence; then the total

    @property
    def num_tokens(self) -> int:
        """Valid tokens, or the most there can be where they are traced."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """Sequences with a valid token, or the most there can be where they are traced."""
        if is_traced(self.first):
            return self.first.shape[0] - 1
        return int(np.count_nonzero(np.diff(self.first)))


def _pool(trace: RoutingTrace) -> _Pool:
    # On the host where it can be: as constants of a jitted caller, XLA would spend seconds
    # folding these scans over all tokens.
    size = trace.num_tokens
    if is_traced(trace.valid, trace.sequence_start):
        xp, tokens = jnp, jnp.nonzero(trace.valid, size=size, fill_value=size)[0]
        starts = trace.sequence_start
    else:
        xp, tokens = np, np.flatnonzero(np.asarray(trace.valid)).astype(np.int32)
        starts = np.asarray(trace.sequence_start)
    first = xp.searchsorted(tokens, xp.append(starts, size)).astype(jnp.int32)
    ranks = xp.arange(tokens.shape[0])
    sequence = xp.searchsorted(first[1:], ranks, side="right").astype(jnp.int32)
    return _Pool(tokens, sequence, first)


@functools.partial(jax.jit, static_argnames=("draw", "size"))
def _gather(draw, pool, expert_ids, size, key):
    tokens = jnp.append(pool.tokens, expert_ids.shape[1])[draw(pool, size, key)]
    return jnp.take(expert_ids, tokens, axis=1, mode="fill", fill_value=NOT_ROUTED)


def _one_rank_per_sequence(pool: _Pool, size: int, key: PRNGKeyArray) -> Int[Array, " size"]:
    order_key, position_key = jax.random.split(key)
    num_valid = jnp.diff(pool.first)
    priority = _uniform(order_key, num_valid.shape)
    order = jnp.argsort(jnp.where(num_valid > 0, priority, jnp.inf))[:size]
    # One position for every sequence, so that it does not depend on how many are drawn.
    position = _below(position_key, jnp.maximum(num_valid, 1))
    return jnp.where(num_valid > 0, pool.first[:-1] + position, pool.num_tokens)[order]


def _distinct_ranks(pool: _Pool, size: int, key: PRNGKeyArray) -> Int[Array, " size"]:
    place_key, order_key = jax.random.split(key)
    rank = jnp.arange(pool.num_tokens, dtype=jnp.int32)
    # Shuffle within each sequence: the place there is the round that a token is drawn in.
    bits = jax.random.bits(place_key, rank.shape, jnp.uint32)
    sequence, _, shuffled = jax.lax.sort((pool.sequence, bits, rank), num_keys=2)
    is_valid = sequence < pool.first.shape[0] - 1
    draw_round = jnp.where(is_valid, rank - pool.first[sequence], pool.num_tokens)
    # Rounds in order, and random order within one. Half, so that no sum rounds up to the next.
    turn = draw_round + 0.5 * _uniform(order_key, rank.shape)
    _, drawn = jax.lax.top_k(-turn, size)
    return shuffled[drawn]


def _consecutive_ranks(pool: _Pool, size: int, key: PRNGKeyArray) -> Int[Array, " size"]:
    start = _below(key, jnp.maximum(pool.first[-1] - size, 0) + 1)
    return start + jnp.arange(size, dtype=jnp.int32)


# 32 bits always, so that one key draws one batch with and without x64.
_uniform = functools.partial(jax.random.uniform, dtype=jnp.float32)


def _below(key: PRNGKeyArray, high: Int[Array, "..."]) -> Int[Array, "..."]:
    return jax.random.randint(key, high.shape, 0, high, dtype=jnp.int32)


def _check_size(name: str, size: int) -> int:
    try:
        size = operator.index(size)
    except TypeError:
        raise ValueError(f"{name} = {size!r}: must be a static whole number") from None
    if size < 1:
        raise ValueError(f"{name} = {size}: allowed is at least 1")
    return size


def _check_enough(name: str, size: int, available: int, what: str) -> None:
    if size > available:
        raise ValueError(f"{name} = {size} is more than the trace's {available} {what}")
