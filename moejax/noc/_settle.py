"""Fixed points of a schedule: iterate until nothing changes; derivatives of the result."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, BoolScalar, IntScalar


Step: TypeAlias = Callable[[Array], Array]


def settle(step: Step, guess: Array, max_iterations: int) -> tuple[Array, IntScalar, BoolScalar]:
    """Applies `step` until it changes nothing: the fixed point, rounds taken, whether it is one."""

    def unsettled(state):
        _, rounds, changed = state
        return changed & (rounds < max_iterations)

    def again(state):
        times, rounds, _ = state
        new = step(times)
        return new, rounds + 1, jnp.any(new != times)

    guess = lax.stop_gradient(guess)
    times, rounds, changed = lax.while_loop(
        unsettled, again, (guess, jnp.int32(0), jnp.array(True))
    )
    return times, rounds, ~changed


def follow(step: Step, frozen: Step, times: Array) -> Array:
    """`times`, a fixed point of `step`, with the derivatives of whatever `step` depends on.

    `frozen` is `step` with all it depends on held fixed.

    By the implicit function theorem dt = (I - J)^-1 dstep, where J is the derivative of `step`
    at the fixed point. J is nilpotent, as no event waits for itself, so the series I + J + J^2 +
    ... ends. Works in forward and reverse mode, which a while loop alone does not.
    """
    times = lax.stop_gradient(times)
    # Zero but for its derivative; infinite times, which are those of dead links, have none.
    residual = jnp.where(jnp.isfinite(times), step(times) - times, 0)
    _, push = jax.linearize(frozen, times)
    pull = jax.linear_transpose(push, times)
    correction = lax.custom_linear_solve(
        lambda change: change - push(change),
        residual,
        solve=lambda _, b: _series(push, b),
        transpose_solve=lambda _, b: _series(lambda change: pull(change)[0], b),
    )
    return times + correction


def _series(linear: Step, first: Array) -> Array:
    """first + linear(first) + linear(linear(first)) + ..., until the terms are zero."""

    def more(state):
        term, _, count = state
        return jnp.any(term != 0) & (count < first.size)

    def add(state):
        term, total, count = state
        term = linear(term)
        return term, total + term, count + 1

    return lax.while_loop(more, add, (first, first, jnp.int32(0)))[1]
