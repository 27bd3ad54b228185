"""How long the contexts of a batch are, where they are not all alike."""

import jax
import jax.numpy as jnp

from moejax._checks import check_non_negative, check_range, lookup
from moejax._typing import Array, Float, FloatLike, PRNGKeyArray


def _fixed(key, shape, median, spread):
    del key, spread
    return jnp.full(shape, median)


def _log_normal(key, shape, median, spread):
    return median * jnp.exp(spread * jax.random.normal(key, shape))


def _uniform(key, shape, median, spread):
    return median * (1 + spread * jax.random.uniform(key, shape, minval=-1.0))


CONTEXTS = {"fixed": _fixed, "log_normal": _log_normal, "uniform": _uniform}


def context_lengths(
    max_batch: int,
    median: FloatLike,
    *,
    kind: str = "log_normal",
    spread: FloatLike = 1.0,
    longest: FloatLike = jnp.inf,
    key: PRNGKeyArray,
) -> Float[Array, " requests"]:
    """Draws the context of every request, in whole tokens, for `Workload`.

    A batch is a prefix of any larger one drawn with the same key.

    **Arguments:**

    - `max_batch`: requests, static.
    - `median`: tokens.
    - `kind`: `"log_normal"` with `spread` as the standard deviation of the logarithm (lengths of
        conversations), `"uniform"` from `(1 - spread)` to `(1 + spread)` times the median, or
        `"fixed"`.
    - `longest`: cut off above.

    **Raises:** `ValueError` for an unknown kind, a negative median or spread, a spread above 1 of
    uniform lengths, or no request.
    """
    draw = lookup("kind of contexts", kind, CONTEXTS)
    if not isinstance(max_batch, int) or max_batch < 1:
        raise ValueError(f"context_lengths: max_batch = {max_batch!r}: allowed is an int from 1")
    for name, value in (("median", median), ("spread", spread)):
        check_non_negative("context_lengths", name, value)
    if kind == "uniform":
        check_range("context_lengths", "spread", spread, 0.0, 1.0, open_low=False)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(max_batch))
    median = jnp.asarray(median, jnp.result_type(float))
    lengths = jax.vmap(lambda key: draw(key, (), median, spread))(keys)
    return jnp.clip(jnp.round(lengths), 0, longest)
