"""What Gumbel top-k does on average: inclusion probabilities and expected bimodality.

Differentiable in the log-popularity, which is what `calibrate` descends on.
"""

import math

import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, FloatScalar
from moejax.routing._statistics import Bimodality


def inclusion_probabilities(
    log_popularity: Float[Array, " experts"], top_k: int
) -> Float[Array, " experts"]:
    """How likely a token is to choose each expert.

    Every expert has an exponential clock that runs at its popularity; a token takes the `top_k`
    that ring first. Stopping all clocks at one fixed time, chosen so that `top_k` ring on average,
    gives 1 - exp(-popularity * time). Exact for uniform popularity; otherwise the real stopping
    time differs from token to token, which matters for the hottest experts: against sampling at
    the calibrated popularities of moejax, the worst expert of a layer is off by 0.01 to 0.02.

    **Arguments:**

    - `log_popularity`: any constant may be added to it.
    - `top_k`: static.

    **Returns:** probabilities that add up to `top_k`.

    **Raises:** `ValueError` for `top_k` outside 1 .. experts.
    """
    return -jnp.expm1(-jnp.exp(_log_rings(log_popularity, top_k)))


def expected_bimodality(
    log_popularity: Float[Array, " experts"], top_k: int, batch: int
) -> Bimodality:
    """Expected bimodality of a batch of independent tokens in one layer.

    The number of tokens of an expert is binomial with its inclusion probability, and a share is
    the ratio of two expected numbers of experts, not the expected ratio. Shares are within 0.01 of
    sampled ones for a batch of 16 or more, 0.03 for one of 4 in a layer of few experts.

    **Arguments:**

    - `log_popularity`: as in `inclusion_probabilities`.
    - `top_k`, `batch`: static.
    """
    log_rings = _log_rings(log_popularity, top_k)
    rings = jnp.exp(log_rings)
    log_included = log_rings + _log_first_ring(rings)
    active = -jnp.expm1(-batch * rings).sum()

    def share(count: int):
        # log(1 - inclusion) is -rings, so nothing is lost where inclusion is close to 1.
        log_chance = count * log_included - max(batch - count, 0) * rings
        return math.comb(batch, count) * jnp.exp(log_chance).sum() / active

    one, two, three_four = share(1), share(2), share(3) + share(4)
    more = jnp.maximum(1 - one - two - three_four, 0)
    return Bimodality(one, two, three_four, more, active / log_rings.shape[0])


_MAX_LOG_RINGS = 40.0
"""A clock that rings e^40 times rings for certain; the cap keeps float32 from overflowing."""


def _log_first_ring(rings: Float[Array, " experts"]) -> Float[Array, " experts"]:
    """log((1 - exp(-x)) / x), also where x underflows."""
    small = rings < 1e-3
    safe = jnp.where(small, 1.0, rings)
    return jnp.where(small, -rings / 2, jnp.log(-jnp.expm1(-safe) / safe))


def _log_rings(log_popularity: Float[Array, " experts"], top_k: int) -> Float[Array, " experts"]:
    """Logarithm of the mean number of rings of each clock until `top_k` have rung."""
    num_experts = log_popularity.shape[0]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k = {top_k}: allowed is 1 to {num_experts}")
    if top_k == num_experts:
        return jnp.full_like(log_popularity, _MAX_LOG_RINGS)
    log_popularity = jax.nn.log_softmax(log_popularity)
    log_time = _log_stopping_time(log_popularity, top_k)
    return jnp.minimum(log_popularity + log_time, _MAX_LOG_RINGS)


def _log_stopping_time(log_popularity: Float[Array, " experts"], top_k: int) -> FloatScalar:
    """Root of (expected number of experts that rang) = top_k, with its implicit derivative."""
    fixed = jax.lax.stop_gradient(log_popularity)

    def excess(log_time, log_popularity):
        rings = jnp.exp(jnp.minimum(log_popularity + log_time, _MAX_LOG_RINGS))
        return -jnp.expm1(-rings).sum() - top_k, (rings * jnp.exp(-rings)).sum()

    def bisect(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        short = excess(middle, fixed)[0] < 0
        return jnp.where(short, middle, low), jnp.where(short, high, middle)

    # Popularities add up to 1, so fewer than top_k have rung at time top_k; and if all were as
    # rare as the rarest, the time below would do.
    low = jnp.log(jnp.asarray(top_k, fixed.dtype))
    high = math.log(-math.log1p(-top_k / fixed.shape[0])) - fixed.min() + 1e-3
    low, high = jax.lax.fori_loop(0, 16, bisect, (low, high))
    log_time = (low + high) / 2
    for argument in (fixed, log_popularity):
        # Newton steps polish the root; the last sees the argument, so its derivative is implicit.
        value, slope = excess(log_time, argument)
        log_time = log_time - value / jax.lax.stop_gradient(slope)
    return log_time
