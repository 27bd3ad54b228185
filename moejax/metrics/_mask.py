"""Means over the positions that count."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, Float, FloatScalar


def full_mask(mask: Any, shape: tuple[int, ...]) -> Bool[Array, "*positions"]:
    """`mask` as bool of `shape`, all True for None. **Raises:** `ValueError` for another shape."""
    if mask is None:
        return jnp.ones(shape, bool)
    if np.shape(mask) != shape:
        raise ValueError(f"mask has shape {np.shape(mask)}: allowed is {shape}")
    return jnp.asarray(mask, bool)


def masked_mean(value: Float[Array, "*positions"], mask: Bool[Array, "*positions"]) -> FloatScalar:
    """Mean of `value` where `mask`; NaN where nothing counts, zero gradient where it does not."""
    count = mask.sum()
    total = jnp.where(mask, value, 0).sum()
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)


def safe_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Square root whose gradient at 0 is 0; NaN of NaN."""
    zero = x == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, x)))


def check_same(name: str, first: Array, second: Array) -> None:
    """Raises `ValueError` unless both arrays have one shape."""
    if first.shape != second.shape:
        raise ValueError(f"{name}: shapes {first.shape} and {second.shape} differ")
