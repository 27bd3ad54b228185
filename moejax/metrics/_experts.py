"""Fidelity inside the layer: outputs of changed expert sets, and how alike experts are."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax._typing import Array, Bool, Float, FloatScalar, PRNGKeyArray
from moejax.metrics._mask import check_same, full_mask, masked_mean, safe_sqrt


class OutputChange(NamedTuple):
    """Relative change of a layer's output over tokens. Fields: `mean`, `p95` (the 95th percentile,
    linearly interpolated), `maximum`."""

    mean: FloatScalar
    p95: FloatScalar
    maximum: FloatScalar


@jax.jit
def moe_output_change(
    original_output: Float[Array, "*tokens hidden"],
    adjusted_output: Float[Array, "*tokens hidden"],
    mask: Bool[Array, "*tokens"] | None = None,
) -> OutputChange:
    """2 |y_o - y_h| / |y_o| of each token, in Euclidean norm (HDA-MoE, arXiv 2609.08682).

    The outputs are those of the routed experts, shared ones left out.

    **Arguments:** `mask` is True for tokens that count; tokens without any output do not.

    **Returns:** `OutputChange`, NaN where nothing counts. Exact gradient, 0 where nothing changed.

    **Raises:** `ValueError` for shapes that disagree.
    """
    original, adjusted = jnp.asarray(original_output), jnp.asarray(adjusted_output)
    check_same("moe_output_change", original, adjusted)
    mask = full_mask(mask, original.shape[:-1])
    original, adjusted = (jnp.where(mask[..., None], x, 0) for x in (original, adjusted))
    size = _norm(original)
    mask = mask & (size > 0)
    change = jnp.where(mask, 2 * _norm(original - adjusted) / jnp.where(size > 0, size, 1), jnp.nan)
    p95 = jnp.nanquantile(jnp.where(jnp.any(mask), change, 0), 0.95)
    highest = jnp.max(jnp.where(mask, change, -jnp.inf), initial=-jnp.inf)
    nothing = ~jnp.any(mask)
    spoil = lambda x: jnp.where(nothing, jnp.nan, x)
    return OutputChange(masked_mean(change, mask), spoil(p95), spoil(highest))


@functools.partial(jax.jit, static_argnames=("top_k", "num_replacements"))
def substitutability(
    scores: Float[Array, "tokens experts"],
    expert_outputs: Float[Array, "tokens experts hidden"],
    *,
    top_k: int,
    num_replacements: int | None = None,
    mask: Bool[Array, " tokens"] | None = None,
) -> Float[Array, "top_k replacements"]:
    """How little a layer's output turns when one chosen expert gives way to one below the choice.

    With contributions v_i = s_i expert_i(x), ranked by score, and full = sum of the first k:
    sim(i, j) = cos(full, full - v_(i) + v_(k+j)), mean over tokens (HDA-MoE, arXiv 2609.08682).

    **Arguments:**

    - `scores`: raw router scores, not renormalized.
    - `expert_outputs`: of all experts for each token, unweighted.
    - `top_k`: static. `num_replacements`: experts below it, k by default (static).
    - `mask`: True for tokens that count (the authors take up to 64 of a layer).

    **Returns:** [top_k, replacements], each -1 to 1. The published number is the mean over ranks
    i >= 2, that is `[1:].mean()`, of all layers. Exact gradient at fixed ranks.

    **Raises:** `ValueError` for shapes that disagree or more replacements than experts.
    """
    replacements = top_k if num_replacements is None else num_replacements
    value, mask = _ranked("substitutability", scores, expert_outputs, top_k + replacements, mask)
    full = value[:, :top_k].sum(1)
    swapped = full[:, None, None] - value[:, :top_k, None] + value[:, None, top_k:]
    similar = _cosine(full[:, None, None], swapped)
    over = lambda x: masked_mean(x, mask)
    return jax.vmap(jax.vmap(over, 1), 2, 1)(similar)


class RandomControl(NamedTuple):
    """Fields: `sets`, similarity of the output to that of random sets of k experts from below the
    choice; `single` [top_k], the same with one random replacement of each rank."""

    sets: FloatScalar
    single: Float[Array, " top_k"]


@functools.partial(jax.jit, static_argnames=("top_k", "num_sets"))
def substitutability_control(
    scores: Float[Array, "tokens experts"],
    expert_outputs: Float[Array, "tokens experts hidden"],
    *,
    top_k: int,
    key: PRNGKeyArray,
    num_sets: int = 4,
    mask: Bool[Array, " tokens"] | None = None,
) -> RandomControl:
    """What `substitutability` is worth: the same cosine with experts drawn at random.

    Sets and replacements are drawn for each token, evenly, from the experts that it did not choose.

    **Arguments:** as `substitutability`; `num_sets` random sets for each token (static).

    **Returns:** `RandomControl`. **Raises:** `ValueError` as there, and where fewer than `top_k`
    experts are left over.
    """
    experts = scores.shape[-1]
    if 2 * top_k > experts:
        raise ValueError(f"top_k = {top_k}: allowed is at most half of {experts} experts")
    value, mask = _ranked("substitutability_control", scores, expert_outputs, experts, mask)
    full, below = value[:, :top_k].sum(1), value[:, top_k:]

    def drawn(key, below):
        set_key, single_key = jax.random.split(key)
        shuffle = lambda k: jax.random.permutation(k, below.shape[0])[:top_k]
        sets = below[jax.vmap(shuffle)(jax.random.split(set_key, num_sets))].sum(1)
        return sets, below[jax.random.randint(single_key, (top_k,), 0, below.shape[0])]

    sets, single = jax.vmap(drawn)(jax.random.split(key, len(full)), below)
    swapped = full[:, None] - value[:, :top_k] + single
    over = lambda x: masked_mean(x, mask)
    similar = _cosine(full[:, None], swapped)
    return RandomControl(over(_cosine(full[:, None], sets).mean(1)), jax.vmap(over, 1)(similar))


def _ranked(name, scores, expert_outputs, count, mask):
    """Contributions of the `count` strongest experts of each token, in order."""
    scores, outputs = jnp.asarray(scores), jnp.asarray(expert_outputs)
    if scores.ndim != 2 or outputs.shape[:-1] != scores.shape:
        raise ValueError(
            f"{name}: scores has shape {scores.shape}, expert_outputs {outputs.shape}: allowed is "
            "[tokens, experts] and [tokens, experts, hidden]"
        )
    if not 1 <= count <= scores.shape[1]:
        raise ValueError(f"{name}: {count} ranks are more than the {scores.shape[1]} experts")
    mask = full_mask(mask, scores.shape[:1])
    scores = jnp.where(mask[:, None], scores, 0)
    outputs = jnp.where(mask[:, None, None], outputs, 0)
    best, ids = jax.lax.top_k(scores, count)
    return best[..., None] * jnp.take_along_axis(outputs, ids[..., None], axis=1), mask


def _cosine(a, b):
    """Cosine along the last axis, 0 where a vector is zero."""
    size = _norm(a) * _norm(b)
    return jnp.where(size > 0, (a * b).sum(-1) / jnp.where(size > 0, size, 1), 0)


def _norm(x):
    return safe_sqrt(jnp.square(x).sum(-1))
