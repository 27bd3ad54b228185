"""What a changed choice costs in fidelity, as losses that a relaxed gate can be tuned by."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._checks import lookup
from moejax._typing import Array, Float, Int
from moejax.gating._validate import check_whole


def _mass(chosen, original, first, scores, slopes):
    held = jnp.where(original > 0, scores, 0)
    return 1 - (held * chosen).sum(-1) / held.sum(-1)


def _overlap(chosen, original, first, scores, slopes):
    return 1 - (original * chosen).sum(-1) / original.sum(-1)


def _retention(chosen, original, first, scores, slopes):
    return 1 - (first * chosen).sum(-1)


def _kl(chosen, original, first, scores, slopes):
    held = jnp.where(scores > 0, scores, 0)
    return jnp.log((held * original).sum(-1) / (held * chosen).sum(-1))


def _model_kl(chosen, original, first, scores, slopes):
    weights = lambda part: scores * part / (scores * part).sum(-1, keepdims=True)
    change = (weights(chosen) - weights(original))[..., None, :] * slopes
    return jnp.square(change.sum(-1)).mean(-1) / 2


MEASURES: dict[str, Callable[..., Array]] = {
    "mass": _mass,
    "overlap": _overlap,
    "retention": _retention,
    "kl": _kl,
    "model_kl": _model_kl,
}


def fidelity_loss(
    measure: str,
    chosen: Float[Array, "*tokens experts"],
    scores: Float[Array, "*tokens experts"],
    selection: Float[Array, "*tokens experts"],
    top_k: int,
    slopes: Float[Array, "*tokens samples experts"] | None = None,
) -> Float[Array, "*tokens"]:
    """Loss of each token for experts `chosen` in these parts, 0 where its choices stay.

    `"mass"`: part of its combine weight that it lost; `"overlap"`: part of its choices;
    `"retention"`: whether its favorite; `"kl"`: nats, log of the probability that it chose before
    over the one it chooses now, which is how much further the renormalized choice is from the
    router's distribution; `"model_kl"`: nats of the model's own text, to second order, with
    renormalized combine weights and the `slopes` of `weight_slopes`. Exact gradient in `chosen`.

    **Raises:** `ValueError` for an unknown measure, `top_k` out of range, and missing slopes.
    """
    lookup("measure", measure, MEASURES)
    check_whole("top_k", top_k, 1, np.shape(scores)[-1])
    if measure == "model_kl" and slopes is None:
        raise ValueError("slopes are needed for the measure 'model_kl' (see weight_slopes)")
    ids = lax.top_k(selection, top_k)[1]
    ones = lambda ids: jax.nn.one_hot(ids, scores.shape[-1], dtype=scores.dtype).sum(-2)
    return MEASURES[measure](chosen, ones(ids), ones(ids[..., :1]), scores, slopes)


def squared_weights(
    scores: Float[Array, "*tokens experts"], top_k: int
) -> Float[Array, "*tokens experts"]:
    """Scores to select by, where a swap is judged by what it does to the layer's output.

    (s_i / sum of the `top_k` largest)^2, in the order of the scores. To first order the output
    moves by the weight that is swapped, and the loss by its square: an expert of little weight
    costs less to lose than the gap between its score and the next one's says, and one of large
    weight more.

    **Arguments:** `scores` are not negative; `top_k` is static. Exact gradient.
    """
    whole = lax.top_k(scores, top_k)[0].sum(-1, keepdims=True)
    return jnp.square(scores / jnp.where(whole > 0, whole, 1))


def lost_weights(
    scores: Float[Array, "*tokens experts"], top_k: int
) -> Float[Array, "*tokens experts"]:
    """Scores to select by, where a swap is judged by the combine weight that it gives up.

    s_i / sum of the `top_k` largest for those, and a thousandth of that for the others, which only
    keeps their order: a choice is worth its weight, however close the next expert's score is. This
    is what the loss `"mass"` of `tune` counts.

    **Arguments:** `scores` are not negative; `top_k` is static. Exact gradient.
    """
    best = lax.top_k(scores, top_k)[0]
    whole = best.sum(-1, keepdims=True)
    weight = scores / jnp.where(whole > 0, whole, 1)
    return jnp.where(scores >= best[..., -1:], weight, 1e-3 * weight)


def deal(order: Int[Array, " tokens"], x: Array, batch: int) -> Array:
    """[layers, tokens, ...] to [layers, batches, batch, ...] in this order, the rest left out."""
    whole = order.shape[0] // batch * batch
    return x[:, order[:whole]].reshape(x.shape[0], -1, batch, *x.shape[2:])
