"""A stable argsort by several fields, as few single-word integer sorts as their bits need.

Compilers sort one array of integers about five times faster than several operands at once, so
the fields and the position are packed into 64-bit words. What does not fit into one word is
sorted in passes, least significant word first, as in a radix sort.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Float, Int


WORD_BITS = 64


class Field(NamedTuple):
    """Non-negative whole numbers [items] below 2^bits."""

    value: Int[Array, " items"]
    bits: int


def bits_for(count: int) -> int:
    """Bits that hold the numbers 0 .. count - 1."""
    return max(1, (count - 1).bit_length())


def time_field(time: Float[Array, " items"]) -> Field:
    """Non-negative floats as integers in the same order: their bits, less the sign."""
    bits = 8 * time.dtype.itemsize
    with jax.enable_x64(True):
        unsigned = jnp.uint64 if bits == 64 else jnp.uint32
        # abs, because -0.0 is the largest of all unsigned numbers.
        raw = lax.bitcast_convert_type(jnp.abs(lax.stop_gradient(time)), unsigned)
    return Field(raw, bits - 1)


def stable_order(
    fields: Sequence[Field], start: Int[Array, " items"] | None = None
) -> Int[Array, " items"]:
    """The permutation that sorts by `fields`, the first one first, and by position at last.

    `start` is a permutation to use in place of the position: the order by further fields.
    """
    num_items = fields[0].value.shape[0]
    position_bits = bits_for(num_items)
    # 64-bit words are needed whatever the caller's precision is; nothing but int32 leaves.
    with jax.enable_x64(True):
        position = jnp.arange(num_items, dtype=jnp.uint64)
        mask = jnp.uint64(2**position_bits - 1)
        order = start
        for word in _pack(fields, WORD_BITS - position_bits):
            key = word if order is None else _take(word, order)
            ordered = lax.sort((key << jnp.uint64(position_bits)) | position)
            step = (ordered & mask).astype(jnp.int32)
            order = step if order is None else _take(order, step)
    assert order is not None
    return order


def dense_rank(values: Float[Array, " items"]) -> Field:
    """0 for the smallest value, equal values alike, no gaps."""
    order = stable_order([time_field(values)])
    ordered = _take(lax.stop_gradient(values), order)
    step = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), (ordered[1:] > ordered[:-1]).astype(jnp.int32)]
    )
    rank = jnp.zeros_like(order).at[order].set(jnp.cumsum(step), unique_indices=True)
    return Field(rank, bits_for(values.shape[0]))


def _pack(fields: Sequence[Field], room: int) -> list[Array]:
    """Words of `room` bits, least significant first; a field may straddle two of them."""
    words: list[Array] = []
    used = room
    for value, bits in reversed(fields):
        rest = value.astype(jnp.uint64)
        while bits:
            if used == room:
                words.append(jnp.zeros_like(rest))
                used = 0
            taken = min(bits, room - used)
            part = rest & jnp.uint64(2**taken - 1)
            words[-1] = words[-1] | (part << jnp.uint64(used))
            rest, bits, used = rest >> jnp.uint64(taken), bits - taken, used + taken
    return words


def _take(values: Array, index: Int[Array, " items"]) -> Array:
    return values.at[index].get(mode="promise_in_bounds")
