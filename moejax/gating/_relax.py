"""Choices and makespans with a temperature, for gradients that the exact ones do not have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._checks import as_float, check_non_negative
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatLike
from moejax.gating._validate import check_whole


# Safeguarded Newton steps: quadratic near the root, so float64 needs hardly more than float32.
_STEPS = 16
# Scores further from the boundary than so many temperatures are as good as infinitely far.
_FAR = 1e15


def soft_top_k(
    scores: Float[Array, "*batch experts"],
    k: int,
    temperature: FloatLike,
    *,
    straight_through: bool = False,
) -> Float[Array, "*batch experts"]:
    """How much each of the `k` largest scores is chosen, softly: Fermi-Dirac occupation.

    p_i = 1 / (1 + exp((tau - s_i) / temperature)), with tau such that sum_i p_i = k. Towards
    temperature 0 it is `hard_top_k`: 1 above the k-th largest score, 0 below, and scores that tie
    there share what is left.

    **Arguments:**

    - `scores`: chosen along the last axis. -inf is never chosen. Half precision is computed in
        float32.
    - `k`: static, 1 to experts. Where no more than `k` scores are above -inf they are 1 each, and
        the sum is their number.
    - `temperature`: in units of the scores, 0 or more, may be traced.
    - `straight_through`: return a real choice, exactly `k` ones with ties to the lower id, with the
        gradient of the soft one.

    **Returns:** 0 to 1, in the dtype of `scores`; NaN for rows with NaN or +inf.

    **Raises:** `ValueError` for `k` out of range, and for scores with NaN or +inf and negative
    temperatures where values are known.

    Gradient: exact (implicit, through tau) in scores and temperature; zero at temperature 0; a
    surrogate with `straight_through`.
    """
    scores = _checked("soft_top_k", scores, k)
    check_non_negative("soft_top_k", "temperature", temperature)
    if np.shape(temperature) != ():
        raise ValueError(
            f"soft_top_k: temperature has shape {np.shape(temperature)}: allowed is one number"
        )
    return _soft_top_k(scores, as_float(temperature), k, bool(straight_through))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _soft_top_k(scores, temperature, k, straight_through):
    wide = _widened(scores)
    occupation = _occupation(wide, temperature.astype(wide.dtype), k)
    if straight_through:
        choice = jax.nn.one_hot(lax.top_k(wide, k)[1], wide.shape[-1], dtype=wide.dtype).sum(-2)
        choice = jnp.where(wide > -jnp.inf, choice, 0)
        # The soft value taken from itself is exactly 0, or NaN where it is.
        occupation = choice + (occupation - lax.stop_gradient(occupation))
    return occupation.astype(scores.dtype)


def hard_top_k(scores: Float[Array, "*batch experts"], k: int) -> Float[Array, "*batch experts"]:
    """The limit of `soft_top_k` at temperature 0: scores that tie for the last places share them.

    **Arguments, returns, raises:** as `soft_top_k`. Zero gradient.
    """
    return _hard_top_k(_checked("hard_top_k", scores, k), k)


@functools.partial(jax.jit, static_argnums=1)
def _hard_top_k(scores, k):
    wide = lax.stop_gradient(_widened(scores))
    last = lax.top_k(wide, k)[0][..., -1:]
    above, tied = wide > last, wide == last
    left = k - above.sum(-1, keepdims=True)
    share = jnp.where(above, 1, jnp.where(tied, left / tied.sum(-1, keepdims=True), 0))
    # With too few scores above -inf, the k-th largest is -inf.
    share = jnp.where(wide > -jnp.inf, share, 0)
    return jnp.where(_lost(wide), jnp.nan, share).astype(scores.dtype)


def smooth_makespan(
    load: Float[Array, "*batch nodes"], temperature: FloatLike
) -> Float[Array, "*batch"]:
    """A smooth maximum along the last axis: T log mean_c exp(load_c / T).

    At most the maximum, at least the maximum - T log(nodes), and exact for even loads. Temperature
    0 is the maximum.

    **Arguments:**

    - `load`: in s, or any unit. Half precision is computed in float32.
    - `temperature`: in the unit of the load, 0 or more, may be traced.

    **Raises:** `ValueError` for a load without nodes or a negative temperature.

    Gradient: exact, softmax(load / T), so finite for any load; at temperature 0 a subgradient that
    nodes with the largest load share evenly.
    """
    load = jnp.asarray(load)
    if load.ndim == 0 or load.shape[-1] == 0 or not jnp.issubdtype(load.dtype, jnp.floating):
        raise ValueError(
            f"smooth_makespan: load is {load.dtype}{list(load.shape)}: allowed is floating "
            "[..., nodes], not empty"
        )
    check_non_negative("smooth_makespan", "temperature", temperature)
    return _smooth_makespan(load, as_float(temperature))


@jax.jit
def _smooth_makespan(load, temperature):
    wide = _widened(load)
    return _makespan(wide, temperature.astype(wide.dtype)).astype(load.dtype)


def _checked(owner: str, scores, k: int) -> Array:
    scores = jnp.asarray(scores)
    if scores.ndim == 0 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"{owner}: scores is {scores.dtype}{list(scores.shape)}: allowed is floating "
            "[..., experts]"
        )
    check_whole("k", k, 1, scores.shape[-1], " (experts)")
    if not is_traced(scores):
        values = np.asarray(scores, np.float64)
        bad = np.isnan(values) | (values == np.inf)
        if bad.any():
            raise ValueError(f"{owner}: scores hold {values[bad][0]:g}: allowed is finite or -inf")
    return scores


def _widened(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _lost(scores):
    return jnp.any(jnp.isnan(scores) | (scores == jnp.inf), axis=-1, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _occupation(scores, temperature, k):
    finite = scores > -jnp.inf
    lost = _lost(scores)
    # Rows without a boundary between chosen and not are overwritten; until then, any numbers do.
    settled = lost | (finite.sum(-1, keepdims=True) <= k)
    experts = scores.shape[-1]
    safe = jnp.where(settled, jnp.arange(experts, dtype=scores.dtype), scores)
    filled = finite.astype(scores.dtype)
    if k < experts:
        ordered = lax.top_k(safe, experts)[0]
        tiny = jnp.finfo(scores.dtype).tiny
        # Exactly 0 for the k-th largest and what ties with it.
        apart = lambda s: (s - ordered[..., k - 1 : k]) / jnp.maximum(temperature, tiny)
        far = lambda s: jnp.clip(apart(s), -_FAR, _FAR)
        filled = jnp.where(settled, filled, jax.nn.sigmoid(far(safe) - _boundary(far(ordered), k)))
    return jnp.where(lost, jnp.nan, jnp.where(finite, filled, 0))


@_occupation.defjvp
def _occupation_jvp(k, primals, tangents):
    scores, temperature = primals
    p = _occupation(scores, temperature, k)
    # p_i changes with s_i - tau, and tau so that the sum stays: what is common to all drops out.
    give = p * (1 - p)
    total = give.sum(-1, keepdims=True)
    weight = give / jnp.where(total > 0, total, 1)
    inside = give > 0
    height = jnp.where(inside, jax.scipy.special.logit(jnp.where(inside, p, 0.5)), 0)
    warm = temperature > jnp.finfo(p.dtype).tiny
    rate = jnp.where(warm, 1 / jnp.where(warm, temperature, 1), 0)
    change = jnp.where(inside, rate * (tangents[0] - height * tangents[1]), 0)
    return p, give * (change - (weight * change).sum(-1, keepdims=True))


def _boundary(x, k):
    """theta with sum_i sigmoid(x_i - theta) = k, of x in falling order, k below their number.

    What the k largest lack must equal what the others have. Both sides as logarithms: neither can
    vanish in the other or in rounding, however far apart the scores are.
    """
    inner, outer = x[..., :k], x[..., k:]
    spare = float(np.log(x.shape[-1]))

    def step(_, state):
        theta, low, high = state
        lack = jax.nn.log_sigmoid(theta[..., None] - inner)
        have = jax.nn.log_sigmoid(outer - theta[..., None])
        excess = jax.nn.logsumexp(lack, axis=-1) - jax.nn.logsumexp(have, axis=-1)
        mean = lambda row: (jax.nn.softmax(row, axis=-1) * -jnp.expm1(row)).sum(-1)
        low, high = jnp.where(excess < 0, theta, low), jnp.where(excess < 0, high, theta)
        newton = theta - excess / (mean(lack) + mean(have))
        inside = (newton >= low) & (newton <= high)
        return jnp.where(inside, newton, (low + high) / 2), low, high

    low, high = outer[..., 0] - spare, inner[..., -1] + spare
    return lax.fori_loop(0, _STEPS, step, ((low + high) / 2, low, high))[0][..., None]


@jax.custom_jvp
def _makespan(load, temperature):
    highest, level, _ = _levels(load, temperature)
    return highest + temperature * level


@_makespan.defjvp
def _makespan_jvp(primals, tangents):
    highest, level, weight = _levels(*primals)
    # The derivative in T is what the weights have less entropy than even ones.
    entropy = -jnp.where(weight > 0, weight * jnp.log(jnp.where(weight > 0, weight, 1)), 0).sum(-1)
    by_temperature = entropy - np.log(weight.shape[-1])
    change = (weight * tangents[0]).sum(-1) + by_temperature * tangents[1]
    return highest + primals[1] * level, change


def _levels(load, temperature):
    """(maximum, log mean exp of what is below it in temperatures, weights of the nodes)."""
    highest = load.max(-1, keepdims=True)
    tiny = jnp.finfo(load.dtype).tiny
    x = jnp.maximum((load - highest) / jnp.maximum(temperature, tiny), -_FAR)
    level = jax.nn.logsumexp(x, axis=-1) - np.log(load.shape[-1])
    return highest[..., 0], level, jax.nn.softmax(x, axis=-1)
