"""Families of expert popularity: how unequal the experts of one MoE layer are.

A family draws log-popularity, one number per expert, independently for every layer. A token then
takes the `top_k` experts with the largest log-popularity plus Gumbel noise (`synthesize`), so a
popularity is the share of first choices an expert gets. Every field is positive, which lets
`calibrate` fit any family by gradient in the logarithm of its fields.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float, check_positive
from moejax._typing import Float, FloatScalar, PRNGKeyArray


class AbstractPopularity(eqx.Module):
    """One layer's draw of expert popularity. Fields are positive, differentiable scalars."""

    def __check_init__(self):
        for name, value in vars(self).items():
            check_positive(type(self).__name__, name, value)

    @abc.abstractmethod
    def log_popularity(
        self, num_experts: int, *, key: PRNGKeyArray
    ) -> Float[jax.Array, " experts"]:
        """Draws one layer.

        **Arguments:**

        - `num_experts`: routed experts of the layer.
        - `key`: names the layer.

        **Returns:** log-popularity; its exponentials add up to 1. Differentiable in the fields.
        """


class Dirichlet(AbstractPopularity):
    """Popularity from a symmetric Dirichlet distribution.

    **Arguments:**

    - `concentration`: small = few hot experts, large = uniform.
    """

    concentration: FloatScalar = eqx.field(converter=as_float)

    def log_popularity(self, num_experts, *, key):
        # Gamma draws of a small concentration underflow, their logarithms do not.
        concentration = jnp.broadcast_to(self.concentration, (num_experts,))
        return jax.nn.log_softmax(jax.random.loggamma(key, concentration))


class LogitNormal(AbstractPopularity):
    """Router logits that differ between experts by a normal offset: log p = sigma * N(0, 1).

    **Arguments:**

    - `sigma`: spread of log-popularity; 0.1 is nearly uniform, 2 is GPT-OSS-like.
    """

    sigma: FloatScalar = eqx.field(converter=as_float)

    def log_popularity(self, num_experts, *, key):
        return jax.nn.log_softmax(self.sigma * jax.random.normal(key, (num_experts,)))


class LambdaTails(AbstractPopularity):
    """Log-popularity with one shape for the cold experts and another for the hot ones.

    A generalized lambda distribution (Freimer, Kollia, Mudholkar and Lin, 1988) given by its
    quantile function at a uniform u per expert,
    log p = scale * [(u^left - 1) / left - ((1 - u)^right - 1) / right] + constant.

    **Arguments:**

    - `scale`: spread of log-popularity.
    - `left`, `right`: shape of the cold and of the hot tail. Towards 0 a tail is exponential
        (popularity follows a power law), near 0.13 it is like a normal tail, at 1 log-popularity
        is uniform and above it ends ever more abruptly.
    """

    scale: FloatScalar = eqx.field(converter=as_float)
    left: FloatScalar = eqx.field(converter=as_float)
    right: FloatScalar = eqx.field(converter=as_float)

    def log_popularity(self, num_experts, *, key):
        # The logistic function of a logistic draw: uniform, and exact logarithms of u and 1 - u.
        draw = jax.random.logistic(key, (num_experts,))
        cold = jnp.expm1(self.left * jax.nn.log_sigmoid(draw)) / self.left
        hot = jnp.expm1(self.right * jax.nn.log_sigmoid(-draw)) / self.right
        return jax.nn.log_softmax(self.scale * (cold - hot))
