"""How long a broadcast of expert weights takes, in the best chunks, and how many fit a budget."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import check_non_negative, check_positive
from moejax._status import is_traced
from moejax._typing import Array, FloatLike, FloatScalar, IntLike, IntScalar


NO_COUNT = -1
"""Number of experts that fit a budget, under tracing, where an input is out of range."""


class Broadcast(NamedTuple):
    """The chunk size that ends a pipelined broadcast soonest, and when that is."""

    chunk: FloatScalar
    """c*, bytes; not rounded."""
    time: FloatScalar
    """T*, s."""


def broadcast_time(
    chunk: FloatLike,
    payload: FloatLike,
    alpha: FloatLike,
    bandwidth: FloatLike,
    num_broadcast: IntLike,
    num_nodes: IntLike,
) -> FloatScalar:
    """Time of a broadcast that is pipelined over `2 sqrt(D)` hops (HD-MoE, arXiv 2509.09420,
    Eq. 14-17): `T(c) = alpha (2 sqrt(D) + m / c) + k_b (m + 2 c sqrt(D)) / bandwidth`.

    **Arguments:** as `broadcast_chunk`; `chunk`: bytes sent at a time, above 0.

    **Returns:** s, elementwise. NaN under tracing where an input is out of range.

    **Raises:** `ValueError` naming the argument that is out of range.
    """
    check_positive("broadcast_time", "chunk", chunk)
    _check("broadcast_time", payload, alpha, bandwidth, num_broadcast, num_nodes)
    return _time(chunk, payload, alpha, bandwidth, num_broadcast, num_nodes)


def broadcast_chunk(
    payload: FloatLike,
    alpha: FloatLike,
    bandwidth: FloatLike,
    num_broadcast: IntLike,
    num_nodes: IntLike,
) -> Broadcast:
    """The chunk that minimizes `broadcast_time`, in closed form (HD-MoE, arXiv 2509.09420, Eq. 18):
    `c* = sqrt(alpha m bandwidth / (2 k_b sqrt(D)))` and
    `T* = k_b m / bandwidth + 2 alpha sqrt(D) + 2 sqrt(2 alpha k_b m sqrt(D) / bandwidth)`.

    **Arguments:**

    - `payload`: m, bytes of one expert's weights.
    - `alpha`: s to start a chunk at each hop.
    - `bandwidth`: B/s of a link.
    - `num_broadcast`: k_b, experts sent; at least 1.
    - `num_nodes`: D.

    **Returns:** `Broadcast(chunk, time)`, elementwise. NaN under tracing where an input is out of
    range.

    **Raises:** `ValueError` naming the argument that is out of range.
    """
    _check("broadcast_chunk", payload, alpha, bandwidth, num_broadcast, num_nodes)
    return _chunk(payload, alpha, bandwidth, num_broadcast, num_nodes)


def prebroadcast_count(
    payload: FloatLike,
    alpha: FloatLike,
    bandwidth: FloatLike,
    num_nodes: IntLike,
    budget: FloatLike,
    *,
    max_broadcast: int = 64,
) -> IntScalar:
    """The most experts whose broadcast ends within `budget`: the largest k_b with
    `T*(k_b) < budget` (HD-MoE, arXiv 2509.09420, section IV-C).

    **Arguments:**

    - `payload`, `alpha`, `bandwidth`, `num_nodes`: as `broadcast_chunk`.
    - `budget`: s, usually the time of the previous layer; see `broadcast_budget`.
    - `max_broadcast`: at most this many, for example all experts of a layer. Static.

    **Returns:** int32, elementwise; 0 where not one fits. Under tracing `NO_COUNT` (-1) where an
    input is out of range.

    **Raises:** `ValueError` naming the argument that is out of range.
    """
    _check("prebroadcast_count", payload, alpha, bandwidth, 1, num_nodes)
    check_non_negative("prebroadcast_count", "budget", budget)
    if not isinstance(max_broadcast, int) or max_broadcast < 0:
        raise ValueError(
            f"prebroadcast_count.max_broadcast = {max_broadcast!r}: allowed is a whole number >= 0"
        )
    return _count(payload, alpha, bandwidth, num_nodes, budget, max_broadcast)


def broadcast_budget(
    hidden: IntLike,
    intermediate: IntLike,
    num_experts: IntLike,
    top_k: IntLike,
    batch: FloatLike,
    context: FloatLike,
    *,
    num_nodes: IntLike,
    flops_per_s: FloatLike,
    dram_bandwidth: FloatLike,
) -> FloatScalar:
    """What the previous layer takes if all nodes share it evenly: the time a broadcast may hide in.

    With h, r = IS / h, B and L as in the authors' public code of HD-MoE (arXiv 2509.09420), which
    counts one operation a weight in attention, two matrices an expert and one byte a value:
    `(4 B h^2 + 2 B L h + 2 k B r h^2) / (D C)
    + (2 B h L + 4 h (B + h) + 2 E r h^2 + B h (r + 1)) / (D BW_mem)`.

    **Arguments:**

    - `hidden`, `intermediate`, `num_experts`, `top_k`: h, IS, E and k of the model. With a `top_k`
        of 0 the arithmetic of the routed experts is left out: `ScheduleCosts.other_time`.
    - `batch`, `context`: B tokens, each over L cached ones.
    - `num_nodes`, `flops_per_s`, `dram_bandwidth`: D nodes of C FLOP/s and BW_mem B/s each.

    **Returns:** s, elementwise. NaN under tracing where an input is out of range.

    **Raises:** `ValueError` naming the argument that is out of range.
    """
    positive = dict(hidden=hidden, intermediate=intermediate, num_experts=num_experts)
    positive |= dict(num_nodes=num_nodes, flops_per_s=flops_per_s, dram_bandwidth=dram_bandwidth)
    others = dict(top_k=top_k, batch=batch, context=context)
    for name, value in positive.items():
        check_positive("broadcast_budget", name, value)
    for name, value in others.items():
        check_non_negative("broadcast_budget", name, value)
    return _budget(positive, others)


@jax.jit
def _time(chunk, payload, alpha, bandwidth, num_broadcast, num_nodes) -> Array:
    hops = 2 * jnp.sqrt(num_nodes)
    started = alpha * (hops + payload / chunk)
    moved = num_broadcast * (payload + chunk * hops) / bandwidth
    inside = _inside(payload, alpha, bandwidth, num_broadcast, num_nodes)
    return jnp.where(inside & (chunk > 0), started + moved, jnp.nan)


@jax.jit
def _chunk(payload, alpha, bandwidth, num_broadcast, num_nodes) -> Broadcast:
    inside = _inside(payload, alpha, bandwidth, num_broadcast, num_nodes)
    # Root by root: the product of payload and bandwidth is near the largest float32.
    per_start = jnp.sqrt(alpha / (2 * num_broadcast * jnp.sqrt(num_nodes)))
    chunk = jnp.sqrt(payload) * jnp.sqrt(bandwidth) * per_start
    time = _best_time(num_broadcast, payload, alpha, bandwidth, num_nodes)
    return Broadcast(jnp.where(inside, chunk, jnp.nan), jnp.where(inside, time, jnp.nan))


@functools.partial(jax.jit, static_argnums=5)
def _count(payload, alpha, bandwidth, num_nodes, budget, max_broadcast: int) -> Array:
    # T* rises with k_b, so the count of those that fit is the largest that does.
    counts = jnp.arange(1, max_broadcast + 1)
    inputs = (payload, alpha, bandwidth, num_nodes)
    time = _best_time(counts, *(jnp.asarray(value)[..., None] for value in inputs))
    fits = (time < jnp.asarray(budget)[..., None]).sum(-1).astype(jnp.int32)
    inside = _inside(payload, alpha, bandwidth, 1, num_nodes) & (budget >= 0)
    return jnp.where(inside, fits, NO_COUNT)


@jax.jit
def _budget(positive, others) -> Array:
    sizes = positive | others
    # As floats: products of these sizes pass 2^31.
    h, inner, experts, top_k, batch, context = (
        1.0 * sizes[name]
        for name in ("hidden", "intermediate", "num_experts", "top_k", "batch", "context")
    )
    flops = batch * h * (4 * h + 2 * context + 2 * top_k * inner)
    moved = 2 * batch * h * context + 4 * h * (batch + h)
    moved += 2 * experts * h * inner + batch * (inner + h)
    time = flops / sizes["flops_per_s"] + moved / sizes["dram_bandwidth"]
    inside = jnp.asarray(True)
    for value in positive.values():
        inside &= value > 0
    for value in others.values():
        inside &= value >= 0
    return jnp.where(inside, time / sizes["num_nodes"], jnp.nan)


def _best_time(num_broadcast, payload, alpha, bandwidth, num_nodes) -> Array:
    moved = num_broadcast * (payload / bandwidth)
    hops = 2 * jnp.sqrt(num_nodes)
    return moved + alpha * hops + 2 * jnp.sqrt(alpha * moved * hops)


def _check(owner, payload, alpha, bandwidth, num_broadcast, num_nodes) -> None:
    check_non_negative(owner, "payload", payload)
    check_non_negative(owner, "alpha", alpha)
    check_positive(owner, "bandwidth", bandwidth)
    for name, value in (("num_broadcast", num_broadcast), ("num_nodes", num_nodes)):
        check_positive(owner, name, value)
        # NumPy, because inside jit even jnp operations on concrete arrays are traced.
        if not is_traced(value) and np.any(np.asarray(value) != np.round(value)):
            raise ValueError(f"{owner}.{name} = {value}: allowed is a whole number")


def _inside(payload, alpha, bandwidth, num_broadcast, num_nodes) -> Array:
    inside = (jnp.asarray(payload) >= 0) & (alpha >= 0) & (bandwidth > 0)
    return inside & (num_broadcast >= 1) & (num_nodes >= 1)
