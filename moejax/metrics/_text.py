"""Fidelity of the model's text: its next-token distributions before and after."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, Float, FloatScalar, Int
from moejax.metrics._mask import check_same, full_mask, masked_mean, safe_sqrt


@jax.jit
def kl(
    original_logits: Float[Array, "*positions vocabulary"],
    adjusted_logits: Float[Array, "*positions vocabulary"],
    mask: Bool[Array, "*positions"] | None = None,
) -> FloatScalar:
    """Kullback-Leibler divergence of the adjusted from the original next-token distribution.

    Mean over positions of sum_v p_a(v) (log p_a(v) - log p_b(v)), a the original, b the adjusted.
    Exact gradient, finite also where logits are -inf in both.

    **Arguments:**

    - `original_logits`, `adjusted_logits`: over the vocabulary; half precision is widened.
    - `mask`: True for positions that count; all by default. What it leaves out may be anything.

    **Returns:** nats, NaN where no position counts.

    **Raises:** `ValueError` for shapes that disagree.
    """
    log_a, log_b, mask = _log_probabilities("kl", original_logits, adjusted_logits, mask)
    present = log_a > -jnp.inf
    gap = jnp.where(present, log_a, 0) - jnp.where(present, log_b, 0)
    return masked_mean((jnp.exp(log_a) * gap).sum(-1), mask)


@jax.jit
def top1_agreement(
    original_logits: Float[Array, "*positions vocabulary"],
    adjusted_logits: Float[Array, "*positions vocabulary"],
    mask: Bool[Array, "*positions"] | None = None,
) -> FloatScalar:
    """Percentage of positions where both predict the same token (the lowest of equal ones).

    **Arguments:** as `kl`. **Returns:** 0 to 100; zero gradient. **Raises:** as `kl`.
    """
    log_a, log_b, mask = _log_probabilities(
        "top1_agreement", original_logits, adjusted_logits, mask
    )
    same = jnp.argmax(log_a, -1) == jnp.argmax(log_b, -1)
    return 100 * masked_mean(same.astype(log_a.dtype), mask)


@jax.jit
def ppl_ratio(
    original_logits: Float[Array, "*positions vocabulary"],
    adjusted_logits: Float[Array, "*positions vocabulary"],
    targets: Int[Array, "*positions"],
    mask: Bool[Array, "*positions"] | None = None,
) -> FloatScalar:
    """Perplexity of the adjusted over that of the original model: exp(NLL_b - NLL_a).

    NLL is the mean cross-entropy of `targets`, over all positions that count in all windows. Exact
    gradient.

    **Arguments:** as `kl`, and `targets`, the tokens that came next.

    **Returns:** 1 where nothing is lost. **Raises:** as `kl`.
    """
    log_a, log_b, mask = _of_targets("ppl_ratio", original_logits, adjusted_logits, targets, mask)
    return jnp.exp(masked_mean(jnp.where(mask, log_a - log_b, 0), mask))


@jax.jit
def rms_shift(
    original_logits: Float[Array, "*positions vocabulary"],
    adjusted_logits: Float[Array, "*positions vocabulary"],
    targets: Int[Array, "*positions"],
    mask: Bool[Array, "*positions"] | None = None,
) -> FloatScalar:
    """How far the probability of the true next token moves: 100 sqrt(mean (p_b(y) - p_a(y))^2).

    **Arguments:** as `ppl_ratio`. **Returns:** percentage points; exact gradient, 0 at 0.
    **Raises:** as `kl`.
    """
    log_a, log_b, mask = _of_targets("rms_shift", original_logits, adjusted_logits, targets, mask)
    return 100 * safe_sqrt(masked_mean(jnp.square(jnp.exp(log_b) - jnp.exp(log_a)), mask))


@jax.jit
def merge_ppl_ratios(
    ratios: Float[Array, " windows"], counts: Int[Array, " windows"]
) -> FloatScalar:
    """Perplexity ratio over windows that were measured one by one, weighted by their tokens: the
    mean is of the logarithms."""
    return jnp.exp(_weighted(jnp.log(ratios), counts))


@jax.jit
def merge_rms_shifts(
    shifts: Float[Array, " windows"], counts: Int[Array, " windows"]
) -> FloatScalar:
    """RMS shift over windows that were measured one by one, weighted by their tokens: the mean is
    of the squares."""
    return safe_sqrt(_weighted(jnp.square(shifts), counts))


def _weighted(values, counts):
    return (values * counts).sum() / counts.sum()


def _log_probabilities(name, original_logits, adjusted_logits, mask):
    a, b = jnp.asarray(original_logits), jnp.asarray(adjusted_logits)
    check_same(name, a, b)
    mask = full_mask(mask, a.shape[:-1])
    wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    # Cleared before the softmax, or the gradient of what is masked would be NaN times 0.
    clear = lambda x: jnp.where(mask[..., None], x.astype(wide), 0)
    return jax.nn.log_softmax(clear(a), -1), jax.nn.log_softmax(clear(b), -1), mask


def _of_targets(name, original_logits, adjusted_logits, targets, mask):
    log_a, log_b, mask = _log_probabilities(name, original_logits, adjusted_logits, mask)
    if np.shape(targets) != mask.shape:
        raise ValueError(f"targets has shape {np.shape(targets)}: allowed is {mask.shape}")
    index = jnp.where(mask, targets, 0)[..., None]
    pick = lambda x: jnp.take_along_axis(x, index, axis=-1)[..., 0]
    return pick(log_a), pick(log_b), mask
