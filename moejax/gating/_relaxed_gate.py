"""The gate with gradients in its coefficients: exact choices forward, soft ones backward."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Float, FloatScalar
from moejax.gating._fidelity import MEASURES
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._resource_loads import HOSTING_SHARE
from moejax.gating._soft_makespan import soft_increase


class Coefficients(NamedTuple):
    """What is tuned, of one layer or with leading axes: `r_comp` score units per s and `r_comm` per
    node, both 0 or less, and `softness` of the makespan in s (`SoftMakespan`), 0 in the published
    form, where the busiest node pays (`ResourceLoads.nodes`)."""

    r_comp: Float[Array, "..."]
    r_comm: Float[Array, "..."]
    softness: Float[Array, "..."]


class GateForm(NamedTuple):
    """What of a gate shapes the program (static): as the arguments of `hardware_aware_top_k`;
    `ahead` is its `include_future_original`, `soft` whether the cost is `SoftMakespan`."""

    protect: int = 0
    chunk: int = 1
    ahead: bool = False
    soft: bool = False


def relaxed_gate(
    scores: Float[Array, "tokens experts"],
    selection: Float[Array, "tokens experts"],
    share: Float[Array, "experts nodes"],
    costs: LayerCosts,
    coefficients: Coefficients,
    form: GateForm,
    temperature: FloatScalar,
    measure: str,
    slopes: Float[Array, "tokens samples experts"] | None = None,
) -> tuple[FloatScalar, FloatScalar]:
    """(loss of fidelity, mean over tokens; layer time with the gate's own in s) of one batch.

    Values are those of the exact gate. Gradient: surrogate; choices move as a soft top-k with
    `temperature` would at the boundary between the last chosen and the first not, the busiest node
    as a subgradient. Cheap in forward mode, for there are few coefficients.
    """
    tokens, experts = selection.shape
    top_k, chunk = costs.top_k, form.chunk
    time = jnp.maximum(share, 0) * costs.token_time
    hosts = share > HOSTING_SHARE
    fixed = -coefficients.r_comm * hosts.sum(-1)
    best = lax.top_k(selection, top_k)[1]
    ones = lambda ids: jax.nn.one_hot(ids, experts, dtype=selection.dtype).sum(-2)
    original = ones(best)
    filled = -tokens % chunk
    split = lambda x: jnp.pad(x, ((0, filled), (0, 0))).reshape(-1, chunk, x.shape[-1])
    add = lambda chosen: jnp.matmul(chosen.sum(-2), time, precision=lax.Precision.HIGHEST)
    real = split(jnp.ones((tokens, 1), selection.dtype))
    later = jnp.zeros((real.shape[0], time.shape[1]), time.dtype)
    if form.ahead:
        load = add(split(original))
        later = jnp.cumsum(load[::-1], axis=0)[::-1] - load

    def step(carry, row):
        load, visits, loss = carry
        scores, score, original, first, kept, real, later, slopes = row
        seen = load + later
        if form.soft:
            slow = soft_increase(seen, time, coefficients.softness)
        else:
            slow = jnp.max(seen + time, axis=-1) - jnp.max(seen)
        adjusted = score - (fixed - coefficients.r_comp * slow)
        chosen = _choose(adjusted, kept > 0, temperature, top_k)
        lost = (MEASURES[measure](chosen, original, first, scores, slopes) * real[:, 0]).sum()
        chosen = chosen * real
        return (load + add(chosen), visits + _visits(chosen, hosts).sum(-2), loss + lost), None

    # Sums are carried: all choices of many batches and settings at once would be gigabytes.
    padded = jnp.pad(scores, ((0, filled), (0, 0)), constant_values=1).reshape(-1, chunk, experts)
    whole = jnp.pad(original, ((0, filled), (0, 0)), constant_values=1).reshape(padded.shape)
    first, kept = (split(ones(best[:, :number])) for number in (1, form.protect))
    if slopes is not None:
        whole_chunks = jnp.pad(slopes, ((0, filled), (0, 0), (0, 0)))
        slopes = whole_chunks.reshape(-1, chunk, *slopes.shape[1:])
    rows = padded, split(selection), whole, first, kept, real, later, slopes
    nothing = jnp.zeros_like(time[0])
    start = nothing, nothing, jnp.zeros((), time.dtype)
    (load, visits, loss), _ = lax.scan(step, start, rows)
    total = load.max() + costs.visit_time * visits.max() + costs.gate_time(tokens, chunk)
    return loss / tokens, total


@jax.custom_jvp
def _visits(chosen, hosts):
    """Whether each token has an expert on each node, for choices of 0 and 1."""
    return jnp.minimum(_on_nodes(chosen, hosts), 1)


@_visits.defjvp
def _visits_jvp(primals, tangents):
    # As of `expected_visits`: what counts is an expert with no other of the token's beside it.
    (chosen, hosts), (change, _) = primals, tangents
    here = _on_nodes(chosen, hosts)
    alone = jnp.where(here == 1, _on_nodes(chosen * change, hosts), 0)
    return jnp.minimum(here, 1), jnp.where(here == 0, _on_nodes(change, hosts), alone)


def _on_nodes(chosen, hosts):
    return jnp.matmul(chosen, hosts.astype(chosen.dtype), precision=lax.Precision.HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _choose(adjusted, kept, temperature, top_k):
    """1 for the kept and then the largest, ties lower id."""
    ranked = jnp.where(kept, jnp.inf, adjusted)
    ids = lax.top_k(ranked, top_k)[1]
    return jax.nn.one_hot(ids, adjusted.shape[-1], dtype=adjusted.dtype).sum(-2)


@_choose.defjvp
def _choose_jvp(top_k, primals, tangents):
    # As `soft_top_k`, but with tau in the middle between the last chosen and the first not: this
    # is a surrogate anyhow, and no root has to be found for each token.
    adjusted, kept, temperature = primals
    ranked = jnp.where(kept, jnp.inf, adjusted)
    value, ids = lax.top_k(ranked, min(top_k + 1, adjusted.shape[-1]))
    chosen = jax.nn.one_hot(ids[..., :top_k], adjusted.shape[-1], dtype=adjusted.dtype).sum(-2)
    tau = (value[..., top_k - 1 : top_k] + value[..., -1:]) / 2
    p = jax.nn.sigmoid((ranked - tau) / temperature)
    give = jnp.where(jnp.isfinite(ranked) & jnp.isfinite(tau), p * (1 - p), 0)
    total = give.sum(-1, keepdims=True)
    mean = (give * tangents[0]).sum(-1, keepdims=True) / jnp.where(total > 0, total, 1)
    return chosen, give / temperature * (tangents[0] - mean)
