"""Batches out of a trace: decode (one token of each of B sequences) and prefill (a run of tokens).

All draws work on token indices. The index `num_tokens` stands for a slot that could not be filled;
gathering turns it into `NOT_ROUTED`.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array, Bool, Int, PRNGKeyArray
from moejax.routing._trace import NOT_ROUTED, RoutingTrace, sequence_ids


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
    if reuse:
        _check_enough("batch_size", batch_size, _count_valid(trace), "valid tokens")
    else:
        hint = "sequences with a valid token; reuse=True draws more than one token of a sequence"
        _check_enough("batch_size", batch_size, _count_usable_sequences(trace), hint)
    draw = _distinct_tokens if reuse else _one_token_per_sequence
    return _gather(draw, trace.expert_ids, trace.valid, trace.sequence_start, batch_size, key)


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
    _check_enough("num_tokens", num_tokens, _count_valid(trace), "valid tokens")
    arrays = trace.expert_ids, trace.valid, trace.sequence_start
    return _gather(_consecutive_tokens, *arrays, num_tokens, key)


@functools.partial(jax.jit, static_argnames=("draw", "size"))
def _gather(draw, expert_ids, valid, sequence_start, size, key):
    tokens = draw(valid, sequence_start, size, key)
    return jnp.take(expert_ids, tokens, axis=1, mode="fill", fill_value=NOT_ROUTED)


def _one_token_per_sequence(valid, sequence_start, size, key) -> Int[Array, " size"]:
    order_key, position_key = jax.random.split(key)
    num_valid, first, rank_after = _valid_by_sequence(valid, sequence_start)
    priority = jax.random.uniform(order_key, num_valid.shape)
    order = jnp.argsort(jnp.where(num_valid > 0, priority, jnp.inf))[:size]
    # One position for every sequence, so that it does not depend on how many are drawn.
    position = jax.random.randint(position_key, num_valid.shape, 0, jnp.maximum(num_valid, 1))
    tokens = _token_of_rank(rank_after, (first + position)[order])
    return jnp.where(num_valid[order] > 0, tokens, valid.shape[0])


def _distinct_tokens(valid, sequence_start, size, key) -> Int[Array, " size"]:
    round_key, order_key = jax.random.split(key)
    num_tokens, num_sequences = valid.shape[0], sequence_start.shape[0]
    _, first, _ = _valid_by_sequence(valid, sequence_start)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # Shuffle within each sequence; a token's place there is the round that it is drawn in.
    sequence = jnp.where(valid, sequence_ids(sequence_start, num_tokens), num_sequences)
    bits = jax.random.bits(round_key, (num_tokens,))
    sequence, _, shuffled = jax.lax.sort((sequence, bits, token), num_keys=2)
    place = token - first.at[sequence].get(mode="fill", fill_value=0)
    draw_round = jnp.where(sequence < num_sequences, place, num_tokens)
    bits = jax.random.bits(order_key, (num_tokens,))
    draw_round, _, drawn = jax.lax.sort((draw_round, bits, shuffled), num_keys=2)
    return jnp.where(draw_round < num_tokens, drawn, num_tokens)[:size]


def _consecutive_tokens(valid, sequence_start, size, key) -> Int[Array, " size"]:
    del sequence_start
    rank_after = jnp.cumsum(valid, dtype=jnp.int32)
    start = jax.random.randint(key, (), 0, jnp.maximum(rank_after[-1] - size, 0) + 1)
    return _token_of_rank(rank_after, start + jnp.arange(size))


def _valid_by_sequence(
    valid: Bool[Array, " tokens"], sequence_start: Int[Array, " sequences"]
) -> tuple[Int[Array, " sequences"], Int[Array, " sequences"], Int[Array, " tokens"]]:
    """Valid tokens of each sequence, those before it, and the running count over tokens."""
    rank_after = jnp.cumsum(valid, dtype=jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), rank_after])[sequence_start]
    return jnp.diff(first, append=rank_after[-1:]), first, rank_after


def _token_of_rank(rank_after: Int[Array, " tokens"], rank: Array) -> Array:
    """The index of the valid token before which there are `rank` others; `tokens` past the end."""
    return jnp.searchsorted(rank_after, rank + 1).astype(jnp.int32)


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


def _count_valid(trace: RoutingTrace) -> int:
    """Valid tokens; under tracing, where they can not be counted, all tokens."""
    return trace.num_tokens if is_traced(trace.valid) else int(np.asarray(trace.valid).sum())


def _count_usable_sequences(trace: RoutingTrace) -> int:
    """Sequences with a valid token; under tracing all sequences."""
    if is_traced(trace.valid, trace.sequence_start):
        return trace.num_sequences
    rank_before = np.concatenate([[0], np.cumsum(np.asarray(trace.valid))])
    first = rank_before[np.asarray(trace.sequence_start)]
    return int(np.count_nonzero(np.diff(first, append=rank_before[-1])))
