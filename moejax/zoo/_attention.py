"""Causal attention over a sliding window, in blocks, so that cost is linear in length."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, PRNGKeyArray


def rms_norm(x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
    """`x` scaled to root mean square one. Gains live in the matrices that follow."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _rotate(x: Float[Array, "batch heads length dim"]) -> Float[Array, "batch heads length dim"]:
    """Rotary positions on half of each head's pairs; the other half carries content only."""
    length, dim = x.shape[-2:]
    pairs = dim // 2
    turning = -(-pairs // 2)
    rate = jnp.concatenate(
        [1000.0 ** -(jnp.arange(turning) / turning), jnp.zeros(pairs - turning)]
    ).astype(x.dtype)
    angle = jnp.arange(length, dtype=x.dtype)[:, None] * rate
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = x[..., :pairs], x[..., pairs:]
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


CHUNK = 128  # queries at a time: its scores stay within the cache


class Attention(eqx.Module):
    """Multi-head attention in which a token sees itself and the `window - 1` before it."""

    query_key_value: Float[Array, "hidden three_hidden"]
    out: Float[Array, "hidden hidden"]
    heads: int = eqx.field(static=True)
    window: int = eqx.field(static=True)

    def __init__(self, hidden: int, heads: int, window: int, *, key: PRNGKeyArray):
        in_key, out_key = jax.random.split(key)
        self.query_key_value = jax.random.normal(in_key, (hidden, 3 * hidden)) * hidden**-0.5
        self.out = 0.1 * hidden**-0.5 * jax.random.normal(out_key, (hidden, hidden))
        self.heads, self.window = heads, window

    def __call__(
        self, x: Float[Array, "batch length hidden"]
    ) -> Float[Array, "batch length hidden"]:
        batch, length, hidden = x.shape
        dim = hidden // self.heads
        projected = (x @ self.query_key_value).reshape(batch, length, 3, self.heads, dim)
        query, key, value = jnp.moveaxis(projected, (2, 3), (0, 2))
        query, key = _rotate(rms_norm(query)), _rotate(rms_norm(key))
        mixed = _attend(query, key, value, self.window)
        return jnp.moveaxis(mixed, 1, 2).reshape(batch, length, hidden) @ self.out


def _attend(query, key, value, window):
    """Chunk by chunk of queries, each against the slice of keys it may see: static slices, so
    work above the diagonal and outside the window is never done."""
    length, dim = query.shape[-2:]
    # Queries and keys have unit root mean square, so scores stay below 4 sqrt(dim) and their
    # exponentials finite without subtracting the maximum. The denominator comes out of the same
    # product as the sum, through a column of ones: no reduction over the large score array.
    query = query * (4 * dim**-0.5)
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    chunks = []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        first = max(0, start - window + 1)
        scores = jnp.einsum("bhqd,bhkd->bhqk", query[:, :, start:stop], key[:, :, first:stop])
        distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
        weights = jnp.where((distance >= 0) & (distance < window), jnp.exp(scores), 0)
        chunks.append(jnp.einsum("bhqk,bhkd->bhqd", weights, value[:, :, first:stop]))
    mixed = jnp.concatenate(chunks, axis=2)
    return mixed[..., :-1] / mixed[..., -1:]
