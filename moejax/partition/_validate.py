"""Impossible counts and costs: a status under tracing, a `ValueError` that names them otherwise."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status, flag, is_traced, merge, raise_if_bad
from moejax._typing import Array, Int, IntScalar
from moejax.partition._base import Partition, PartitionCosts


P = ParamSpec("P")
RATES = ("hbm_bandwidth", "flops_per_s")


def status_of(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> IntScalar:
    """What is wrong with the counts or costs of one layer, as every policy would report it."""
    return checked(tokens_per_expert, costs)[1]


def checked(
    tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts
) -> tuple[Int[Array, " experts"], IntScalar]:
    """Counts that are safe to use as table indices, and the status that says whether they were."""
    counts = jnp.asarray(tokens_per_expert)
    _check_shapes(counts, costs)
    if counts.dtype.itemsize < 4 or counts.dtype.kind == "u":
        counts = counts.astype(jnp.int32)
    status = merge(count_status(counts, costs.max_tokens), cost_status(costs))
    return jnp.clip(counts, 0, costs.max_tokens), status


def eager_errors(policy: Callable[P, Partition]) -> Callable[P, Partition]:
    """Compiles a policy, keyword-only arguments static, and turns its status into a `ValueError`
    where the call is eager."""
    signature = inspect.signature(policy)
    options = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    kernel = jax.jit(policy, static_argnames=options)

    @functools.wraps(policy)
    def call(*args: P.args, **kwargs: P.kwargs) -> Partition:
        given = signature.bind(*args, **kwargs).arguments
        _check_width(given["tokens_per_expert"])
        partition = kernel(*args, **kwargs)
        if not is_traced(partition) and int(partition.status) != Status.OK:
            detail = _offenders(given["tokens_per_expert"], given["costs"])
            raise_if_bad(policy.__name__.lstrip("_"), partition.status, detail)
        return partition

    return call


def _check_width(tokens_per_expert: Any) -> None:
    """Raises for counts that a jitted function would wrap around to 32 bits unseen."""
    if isinstance(tokens_per_expert, jax.Array):
        return
    counts = np.asarray(tokens_per_expert)
    if counts.dtype.kind in "iu" and counts.size and np.max(counts) > np.iinfo(np.int32).max:
        raise ValueError(f"tokens_per_expert = {np.max(counts)}: allowed is less than 2^31")


def _offenders(tokens_per_expert: Array, costs: PartitionCosts) -> str:
    """The values that a status was about, for people."""
    counts = np.asarray(tokens_per_expert)
    said = [
        f"tokens_per_expert = {counts.min()} .. {counts.max()} (table: 0 .. {costs.max_tokens})"
    ]
    for name, value in _given(costs):
        entries = np.asarray(value).ravel()
        sane, allowed = _sane(name, entries)
        said += [f"{name} = {entry:g} (allowed: {allowed})" for entry in entries[~sane][:1]]
    return ", ".join(said)


def _given(costs: PartitionCosts) -> list[tuple[str, Array]]:
    named = [(field.name, getattr(costs, field.name)) for field in dataclasses.fields(costs)]
    return [(name, value) for name, value in named if value is not None]


def _sane(name: str, value):
    """Where an array of one field holds usable values, and which those are."""
    if name in RATES:
        return value > 0, "above 0"
    if name == "contention":
        return (value >= 0) & (value <= 1), "0 to 1"
    return (value >= 0) & (value < np.inf), "finite, 0 or more"


def _check_shapes(tokens_per_expert: Array, costs: PartitionCosts) -> None:
    if tokens_per_expert.ndim != 1 or tokens_per_expert.shape[0] == 0:
        raise ValueError(
            f"tokens_per_expert has shape {tokens_per_expert.shape}, expected [experts] with at "
            "least one expert (use jax.vmap for batches)"
        )
    if not jnp.issubdtype(tokens_per_expert.dtype, jnp.integer):
        raise ValueError(f"tokens_per_expert is {tokens_per_expert.dtype}, not an integer")
    if costs.pim_time_by_tokens.ndim != 1 or costs.max_tokens < 0:
        raise ValueError(
            f"pim_time_by_tokens has shape {costs.pim_time_by_tokens.shape}, expected "
            "[max_tokens + 1] (use jax.vmap for batches)"
        )
    for name, value in _given(costs):
        wanted = costs.pim_time_by_tokens.shape if name.endswith("_by_tokens") else ()
        if value.shape != wanted:
            raise ValueError(
                f"costs.{name} has shape {value.shape}, expected {wanted} (batches: jax.vmap)"
            )


def count_status(tokens_per_expert: Int[Array, " experts"], max_tokens: int) -> IntScalar:
    """Negative counts, and counts that the table does not cover."""
    return merge(
        flag(jnp.any(tokens_per_expert < 0), Status.NEGATIVE_COUNT),
        flag(jnp.any(tokens_per_expert > max_tokens), Status.COUNT_BEYOND_TABLE),
    )


def cost_status(costs: PartitionCosts) -> IntScalar:
    """Rates that are not above zero, and times or sizes that are negative or not finite."""
    codes = []
    for name, value in _given(costs):
        bad = ~jnp.all(_sane(name, value)[0])
        codes.append(flag(bad, Status.BAD_RATE if name in RATES else Status.BAD_COST))
    return merge(*codes)
