"""The token loop: a `lax.scan` over chunks of tokens, each scored against the running load.

All arrays here have a trailing axis of lanes (see `_lanes.py`). Scores are compared as whole
numbers of the same order, because only those reductions are vectorized whatever stands before them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax._typing import Array, Bool, BoolScalar, Float, Int
from moejax.gating._cost_sources import AbstractCostSource, Chosen


class Problem(NamedTuple):
    """What the loop reads. `first` are the choices that are kept whatever they cost, `original`
    the choices without costs (None unless the load looks ahead)."""

    score: Float[Array, "tokens experts"]
    valid: Bool[Array, " tokens"]
    first: Int[Array, "tokens protected"]
    original: Int[Array, "tokens top_k"] | None
    penalized: BoolScalar
    source: AbstractCostSource
    load: Any


class Choice(NamedTuple):
    """Experts by falling `key` (a whole number that orders like the adjusted score), lower id
    first; `first` stand in front until `in_order` sorts them in."""

    expert_ids: Int[Array, "tokens top_k"]
    key: Int[Array, "tokens top_k"]
    load: Any


def greedy(problem: Problem, top_k: int, chunk: int) -> Choice:
    """Chooses for chunk after chunk, and adds each chunk's choices to the load."""
    lanes = max(leaf.shape[-1] for leaf in jax.tree.leaves(problem))
    source = problem.source.in_lanes(lanes)
    num_tokens, num_experts = problem.score.shape[:2]
    split = lambda x: _chunks(x, chunk)
    valid, first = split(problem.valid), split(problem.first)
    # Experts last until a step turns them round, in cache: as a whole, the copy would be strided.
    score = split(jnp.swapaxes(problem.score, 1, 2))
    expert = jnp.arange(num_experts, dtype=jnp.int32)[:, None, None]

    # Zeros of the inputs' kind, so that under shard_map the carry varies as its updates will.
    zero = jnp.zeros(())
    for leaf in jax.tree.leaves(problem):
        zero += jnp.sum(leaf.ravel()[:0])
    spread = lambda x: jnp.broadcast_to(x, (*x.shape[:-1], lanes)) + zero.astype(x.dtype)
    start = jax.tree.map(spread, problem.load)

    def add(load, expert_ids, valid):
        members = jnp.any(expert_ids[:, None] == expert, axis=0)
        return source.update(load, Chosen(expert_ids, valid, members))

    ahead = None
    if problem.original is not None:
        none = jax.tree.map(jnp.zeros_like, start)
        rows = split(problem.original), valid
        ahead = lax.scan(lambda load, row: (add(load, *row), load), none, rows, reverse=True)[1]

    def step(load, row):
        score, valid, first, ahead = row
        seen = load if ahead is None else jax.tree.map(jnp.add, load, ahead)
        score = score.T  # [experts, chunk, lanes]
        cost = jnp.where(problem.penalized, source.cost(seen), 0)
        expert_ids, key, members = _largest(score - cost[:, None], first, expert, top_k)
        return source.update(load, Chosen(expert_ids, valid, members)), (expert_ids, key)

    load, (expert_ids, key) = lax.scan(step, start, (score, valid, first, ahead))
    unsplit = lambda x: jnp.moveaxis(x, 2, 1).reshape(-1, top_k, lanes)[:num_tokens]
    return Choice(unsplit(expert_ids), unsplit(key), load)


def unchoosable(choice: Choice, dtype: DTypeLike) -> Bool[Array, " tokens"]:
    """Tokens that took an expert whose score was +inf (or NaN, made so before), or -inf."""
    high, low = (order_key(jnp.asarray(x, dtype)) for x in (jnp.inf, -jnp.inf))
    return jnp.any((choice.key >= high) | (choice.key <= low), axis=1)


def in_order(choice: Choice) -> Int[Array, "tokens top_k"]:
    """Expert ids by falling key, ties lower id."""
    # ~ turns the order round without the one value whose negative does not exist.
    _, expert_ids = lax.sort((~choice.key, choice.expert_ids), dimension=1, num_keys=2)
    return expert_ids


def _chunks(x: Array, chunk: int) -> Array:
    """[tokens, ..., last] to [chunks, ..., chunk, last], the last chunk filled with zeros."""
    fill = -x.shape[0] % chunk
    padded = jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)) if fill else x
    return jnp.moveaxis(padded.reshape(len(padded) // chunk, chunk, *x.shape[1:]), 1, -2)


def _largest(score, first, expert, top_k):
    """The `first` experts and then the largest scores: (ids, keys, members [experts, ...])."""
    key = order_key(score)
    lowest = jnp.iinfo(key.dtype).min
    last = key.shape[0]
    ids, keys = [], []
    left = key
    for kept in first:
        hit = expert == kept
        ids.append(jnp.broadcast_to(kept, key.shape[1:]))
        keys.append(jnp.max(jnp.where(hit, key, lowest), axis=0))
        left = jnp.where(hit, lowest, left)
    # Value first, then the lowest id that has it: XLA's argmax carries both and runs unvectorized.
    for _ in range(top_k - len(ids)):
        value = jnp.max(left, axis=0)
        index = jnp.min(jnp.where(left == value, expert, last), axis=0)
        left = jnp.where(expert == index, lowest, left)
        ids.append(index)
        keys.append(value)
    return jnp.stack(ids), jnp.stack(keys), left == lowest


def order_key(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Whole numbers that compare as the finite or infinite `x` do; both zeros are one.

    The lowest whole number is never among them.
    """
    x = jnp.where(x == 0, 0, x)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    # Positive floats order like their bits, negative ones the other way round.
    return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & jnp.iinfo(bits.dtype).max)
