"""Muon for the matrices, Adam for the rest, both with a warm-up and a linear decay to zero."""

import jax
import jax.numpy as jnp
import optax

from moejax._typing import Array, Float


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrix: Float[Array, "*batch rows columns"], steps: int = 5
) -> Float[Array, "*batch rows columns"]:
    """Pushes all singular values towards one by a quintic Newton-Schulz iteration.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = jnp.swapaxes(matrix, -1, -2) if tall else matrix
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    for _ in range(steps):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def scale_by_muon(momentum: float = 0.95) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalized over the last two axes, at Adam's typical update size."""
    trace = optax.trace(momentum, nesterov=True)

    def update(updates, state, params=None):
        updates, state = trace.update(updates, state, params)
        # The scale gives a root mean square of 0.2, so one learning rate serves both optimizers
        # (Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982).
        scale = lambda u: 0.2 * max(u.shape[-2:]) ** 0.5 * orthogonalize(u)
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformation(trace.init, update)


def make_optimizer(
    labels, learning_rate: float, steps: int, *, warmup: int, decay_start: int, weight_decay: float
) -> optax.GradientTransformation:
    """Warm-up, constant, then linear to zero from `decay_start` to `steps`.

    **Arguments:**

    - `labels`: tree of `"muon"`, `"adam"` or `"table"` for each leaf of the parameters.
    - `learning_rate`: peak rate of the matrices and of Adam's leaves; tables take three times it.
    """
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, warmup),
            optax.constant_schedule(learning_rate),
            optax.linear_schedule(learning_rate, 0.0, steps - decay_start),
        ],
        [warmup, decay_start],
    )
    adam = lambda scale: optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.99, eps=1e-10),
        optax.scale_by_learning_rate(lambda step: scale * schedule(step)),
    )
    muon = optax.chain(
        scale_by_muon(),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.multi_transform({"muon": muon, "adam": adam(1.0), "table": adam(3.0)}, labels)
