"""Impossible gate inputs: a `ValueError` naming the value eagerly, a status under tracing."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax._status import Status, flag, is_traced
from moejax._typing import Array, BoolScalar, Float, IntScalar


SHARE_TOLERANCE = 1e-4
"""How far a row of share may be from 1, and an entry below 0: solvers stop at such tolerances."""


def check_whole(name: str, value: Any, low: int, high: float, why: str = "") -> None:
    """Raises `ValueError` unless `value` is a static whole number in low .. high."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        upper = f" to {high}" if high < np.inf else " or more"
        raise ValueError(f"{name} = {value!r}: allowed is a whole number, {low}{upper}{why}")


def check_limit(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is None or one whole number, 0 or more. Tracers pass."""
    check_shape(name, value, ())
    if value is None or is_traced(value):
        return
    if not np.issubdtype(np.asarray(value).dtype, np.integer) or value < 0:
        raise ValueError(f"{name} = {value!r}: allowed is a whole number, 0 or more, or None")


def check_share(share: Any) -> None:
    """Raises `ValueError` unless `share` is [experts, nodes] and every row distributes 1."""
    shape = np.shape(share)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"share has shape {shape}: allowed is [experts, nodes], not empty (layers: jax.vmap)"
        )
    if is_traced(share):
        return
    values = np.asarray(share, np.float64)
    bad = ~(values >= -SHARE_TOLERANCE)
    if bad.any():
        expert, node = np.argwhere(bad)[0]
        value = values[expert, node]
        raise ValueError(f"share[{expert}, {node}] = {value:g}: allowed is 0 to 1")
    sums = values.sum(-1)
    bad = ~(np.abs(sums - 1) <= SHARE_TOLERANCE)
    if bad.any():
        expert = np.flatnonzero(bad)[0]
        raise ValueError(f"row {expert} of share sums to {sums[expert]:g}: allowed is 1")


def share_status(share: Float[Array, "experts nodes"]) -> IntScalar:
    """`Status.BAD_SHARE` for what `check_share` raises for."""
    fine = jnp.all(share >= -SHARE_TOLERANCE)
    fine &= jnp.all(jnp.abs(share.sum(-1) - 1) <= SHARE_TOLERANCE)
    return flag(~fine, Status.BAD_SHARE)


def check_times(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` for another shape, and for what is not finite, 0 or more."""
    if np.shape(value) != shape:
        raise ValueError(f"{name} has shape {np.shape(value)}: allowed is {shape}")
    if is_traced(value):
        return
    values = np.asarray(value, np.float64).ravel()
    bad = ~((values >= 0) & (values < np.inf))
    if bad.any():
        raise ValueError(f"{name} = {values[bad][0]:g}: allowed is finite, 0 or more")


def check_coefficient(name: str, value: Any) -> None:
    """Raises `ValueError` for a coefficient that would reward load: those are 0 or less."""
    if np.shape(value) != ():
        raise ValueError(
            f"{name} has shape {np.shape(value)}: allowed is one number (layers: jax.vmap)"
        )
    if not is_traced(value) and not -np.inf < float(value) <= 0:
        raise ValueError(f"{name} = {float(value):g}: allowed is finite, 0 or less")


def check_scores(scores: Any, num_experts: int | None = None) -> tuple[int, int]:
    """(tokens, experts) of a score matrix, or a `ValueError`."""
    shape = np.shape(scores)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"scores has shape {shape}: allowed is [tokens, experts], not empty (batches: jax.vmap)"
        )
    if not jnp.issubdtype(jnp.result_type(scores), jnp.floating):
        raise ValueError(f"scores is {jnp.result_type(scores)}: allowed is floating")
    if num_experts is not None and shape[1] != num_experts:
        raise ValueError(f"scores has {shape[1]} experts, the cost source {num_experts}")
    return shape


def check_shape(name: str, value: Any, *allowed: tuple[int, ...]) -> None:
    """Raises `ValueError` unless the shape of `value` is one of `allowed`. None passes."""
    if value is not None and np.shape(value) not in allowed:
        raise ValueError(
            f"{name} has shape {np.shape(value)}: allowed is {' or '.join(map(str, allowed))}"
        )


def score_status(is_bad: BoolScalar) -> IntScalar:
    """The code of scores that no choice can be made from."""
    return flag(is_bad, Status.BAD_SCORE)


def describe_scores(named: dict[str, Any], valid: Any, top_k: int) -> str:
    """The first value among `named` arrays that a gate can not choose by, for people."""
    rows = None if valid is None else np.asarray(valid)
    for name, value in named.items():
        if value is None:
            continue
        values = np.asarray(value, np.float64)
        allowed = np.isfinite(values) | (values == (np.inf if "cost" in name else -np.inf))
        if rows is not None and values.ndim == 2:
            allowed |= ~rows[:, None]
        if not allowed.all():
            index = tuple(int(i) for i in np.argwhere(~allowed)[0])
            return f"{name}{list(index)} = {values[index]:g}: allowed is finite"
    return f"a token has fewer than top_k = {top_k} experts with a score above -inf"
