"""Fidelity of the routing: which experts tokens lose, and what those were worth to them."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, Float, FloatScalar, Int, PRNGKeyArray
from moejax.metrics._mask import full_mask, masked_mean


@jax.jit
def top1_retention(
    original_ids: Int[Array, "*tokens top_k"],
    adjusted_ids: Int[Array, "*tokens top_k"],
    mask: Bool[Array, "*tokens"] | None = None,
) -> FloatScalar:
    """Fraction of (layer, token) pairs that keep their favorite expert.

    **Arguments:**

    - `original_ids`: strongest choice first. Leading axes are layers and tokens, in any number.
    - `adjusted_ids`: in any order. Negative ids are padding in both.
    - `mask`: True for tokens that count; tokens without a first choice do not.

    **Returns:** 0 to 1, NaN where nothing counts. Zero gradient, like all metrics of choices.

    **Raises:** `ValueError` for shapes that disagree.
    """
    kept, mask = _kept(original_ids, adjusted_ids, mask)
    return masked_mean(_floats(kept[..., 0]), mask & (jnp.asarray(original_ids)[..., 0] >= 0))


@jax.jit
def top_k_overlap(
    original_ids: Int[Array, "*tokens top_k"],
    adjusted_ids: Int[Array, "*tokens top_k"],
    mask: Bool[Array, "*tokens"] | None = None,
) -> FloatScalar:
    """Mean over tokens of the part of the original choices that was kept, |o and h| / k.

    k counts the choices of a token that are not padding. **Arguments, raises:** as
    `top1_retention`. **Returns:** 0 to 1. Zero gradient.
    """
    kept, mask = _kept(original_ids, adjusted_ids, mask)
    number = (jnp.asarray(original_ids) >= 0).sum(-1)
    return masked_mean(kept.sum(-1) / jnp.maximum(number, 1), mask & (number > 0))


@jax.jit
def changed_ratio(
    original_ids: Int[Array, "*tokens top_k"],
    adjusted_ids: Int[Array, "*tokens top_k"],
    mask: Bool[Array, "*tokens"] | None = None,
) -> FloatScalar:
    """Fraction of tokens that lost at least one original choice.

    **Arguments, raises:** as `top1_retention`. **Returns:** 0 to 1. Zero gradient.
    """
    kept, mask = _kept(original_ids, adjusted_ids, mask)
    chosen = jnp.asarray(original_ids) >= 0
    return masked_mean(_floats(jnp.any(chosen & ~kept, -1)), mask & jnp.any(chosen, -1))


@jax.jit
def replacement_ratio(
    original_ids: Int[Array, "*tokens top_k"],
    adjusted_ids: Int[Array, "*tokens top_k"],
    mask: Bool[Array, "*tokens"] | None = None,
) -> Float[Array, " top_k"]:
    """Fraction of tokens that lost their original choice of each rank, strongest first.

    **Arguments, raises:** as `top1_retention`. **Returns:** [top_k], each 0 to 1. Zero gradient.
    """
    kept, mask = _kept(original_ids, adjusted_ids, mask)
    counted = mask[..., None] & (jnp.asarray(original_ids) >= 0)
    rows = lambda x: jnp.moveaxis(x, -1, 0)
    return jax.vmap(masked_mean)(rows(_floats(~kept)), rows(counted))


@jax.jit
def changed_weight_mass(
    original_ids: Int[Array, "*tokens top_k"],
    original_weights: Float[Array, "*tokens top_k"],
    adjusted_ids: Int[Array, "*tokens top_k"],
    mask: Bool[Array, "*tokens"] | None = None,
) -> FloatScalar:
    """Part of the original combine weight that was on experts which the token lost.

    Mean over tokens of sum_{i in o, not in h} w_i / sum_{i in o} w_i. Exact gradient in weights.

    **Arguments:** as `top1_retention`, and `original_weights` of `original_ids`, normalized or not.

    **Returns:** 0 to 1. **Raises:** as `top1_retention`.
    """
    kept, mask = _kept(original_ids, adjusted_ids, mask)
    weights = jnp.asarray(original_weights)
    if weights.shape != kept.shape:
        raise ValueError(f"original_weights has shape {weights.shape}: allowed is {kept.shape}")
    chosen = mask[..., None] & (jnp.asarray(original_ids) >= 0)
    weights = jnp.where(chosen, weights, 0)
    whole = weights.sum(-1)
    lost = jnp.where(kept, 0, weights).sum(-1)
    return masked_mean(lost / jnp.where(whole > 0, whole, 1), mask & (whole > 0))


def neighbor_sensitivity(
    choose: Callable[[Float[Array, "batch experts"]], Int[Array, "batch top_k"]],
    scores: Float[Array, "tokens experts"],
    *,
    batch: int,
    key: PRNGKeyArray,
    draws: int = 4,
) -> FloatScalar:
    """Share of a token's choices that depend on which tokens are in its batch, and in what order.

    All tokens are dealt to batches at random, twice; each token's choices in one deal are compared
    with those in the other, 1 - |a and b| / k. A gate that looks at one token at a time has 0.

    **Arguments:**

    - `choose`: from the scores of a batch to expert ids, e.g. a gate's `expert_ids`.
    - `scores`: [tokens, experts]. Tokens beyond a multiple of `batch` are left out of a deal.
    - `batch`: tokens in a batch, at most `tokens` (static).
    - `key`, `draws`: of the deals; the mean is over so many pairs of them (static).

    **Returns:** 0 to 1. Zero gradient.

    **Raises:** `ValueError` for a batch that the tokens do not fill, and for no draws.
    """
    if draws < 1:
        raise ValueError(f"draws = {draws}: allowed is 1 or more")
    tokens = scores.shape[0]
    if not 1 <= batch <= tokens:
        raise ValueError(f"batch = {batch}: allowed is 1 to the {tokens} tokens there are")

    return _sensitivity(choose, jnp.asarray(scores), batch, jax.random.split(key, draws))


@eqx.filter_jit
def _sensitivity(choose, scores, batch, keys):
    tokens = scores.shape[0]

    def deal(key):
        order = jax.random.permutation(key, tokens)[: tokens // batch * batch]
        ids = jax.vmap(choose)(scores[order].reshape(-1, batch, scores.shape[1]))
        ids = ids.reshape(-1, ids.shape[-1])
        return jnp.full((tokens, ids.shape[-1]), -1, ids.dtype).at[order].set(ids)

    def pair(key):
        first, second = jax.vmap(deal)(jax.random.split(key))
        both = (first[:, 0] >= 0) & (second[:, 0] >= 0)
        return 1 - top_k_overlap(first, second, both), both.sum()

    changed, counts = jax.vmap(pair)(keys)
    return jnp.where(counts > 0, changed * counts, 0).sum() / counts.sum()


def _kept(original_ids, adjusted_ids, mask):
    """(whether each original choice is among the adjusted ones, mask of tokens)."""
    original, adjusted = jnp.asarray(original_ids), jnp.asarray(adjusted_ids)
    if original.ndim < 1 or original.shape[:-1] != adjusted.shape[:-1]:
        raise ValueError(
            f"original_ids has shape {np.shape(original_ids)}, adjusted_ids "
            f"{np.shape(adjusted_ids)}: allowed are the same tokens"
        )
    same = original[..., :, None] == adjusted[..., None, :]
    kept = jnp.any(same, axis=-1) & (original >= 0)
    return kept, full_mask(mask, original.shape[:-1])


def _floats(x):
    return x.astype(jnp.result_type(float))
