"""What a change of combine weights does to a model's text, to second order."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moejax._typing import Array, Bool, Float, PRNGKeyArray
from moejax.gating._validate import check_whole


def weight_slopes(
    logits: Callable[[Float[Array, "layers tokens experts"]], Float[Array, "positions vocabulary"]],
    shape: tuple[int, int, int],
    *,
    key: PRNGKeyArray,
    samples: int = 2,
    mask: Bool[Array, " positions"] | None = None,
) -> Float[Array, "samples layers tokens experts"]:
    """Slopes of the log likelihood of what a model itself would say, in the combine weights.

    With tokens y drawn from the model's distribution at every position, g = d log p(y) / d weights.
    Changed weights dw then move the model's text by about KL = 1/2 E (g . dw)^2 nats, summed over
    positions: half the Fisher form (Martens, arXiv 1412.1193). Different layers and tokens add up,
    since the mean of g is zero. So the price of any swap of experts is known from a few backward
    passes, and `tune` and `judge` count nats with the measure `"model_kl"`.

    **Arguments:**

    - `logits`: the model's next-token logits when `extra` [layers, tokens, experts] is added to the
        combine weights of all experts, also of those not chosen. At 0 it is the model as it is.
        Choices may depend on `extra`; they have no gradient.
    - `shape`: (layers, tokens, experts).
    - `samples`: draws of y (static); two or four are enough for means over a thousand tokens.
    - `mask`: True for positions whose text counts; all by default.

    **Returns:** slopes. The loss of a token is its part of the sum over positions, so the mean over
    tokens is the KL of a position where as many positions count as there are tokens.

    **Raises:** `ValueError` for no samples or a mask of another shape. Zero gradient.
    """
    check_whole("samples", samples, 1, float("inf"))
    found, back = jax.vjp(logits, jnp.zeros(shape))
    if mask is not None and mask.shape != found.shape[:1]:
        raise ValueError(f"mask has shape {mask.shape}: allowed is {found.shape[:1]}")
    found = jax.lax.stop_gradient(found)
    p = jax.nn.softmax(found, axis=-1)

    def one(key):
        said = jax.nn.one_hot(jax.random.categorical(key, found), found.shape[-1])
        slope = said - p
        return back(slope if mask is None else jnp.where(mask[:, None], slope, 0))[0]

    return jax.lax.map(one, jax.random.split(key, samples))
