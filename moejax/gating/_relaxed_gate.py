"""The gate with gradients in its coefficients: exact choices forward, soft ones backward."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Float, FloatScalar
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._node_budget import excess
from moejax.gating._penalty import expected_visits
from moejax.gating._resource_loads import HOSTING_SHARE


class Coefficients(NamedTuple):
    """What is tuned, of one layer or with leading axes: `r_comp` score units per s and `r_comm` per
    node, both 0 or less, and `budget`, s of a node before `r_comp` is paid; an infinite budget
    stands for the published form, where the busiest node pays (`ResourceLoads.nodes`)."""

    r_comp: Float[Array, "..."]
    r_comm: Float[Array, "..."]
    budget: Float[Array, "..."]


class GateForm(NamedTuple):
    """What of a gate shapes the program (static): as the arguments of `hardware_aware_top_k`;
    `ahead` is its `include_future_original`, `budgeted` whether the cost is `NodeBudget`."""

    protect: int = 0
    chunk: int = 1
    ahead: bool = False
    budgeted: bool = False


def relaxed_gate(
    selection: Float[Array, "tokens experts"],
    share: Float[Array, "experts nodes"],
    costs: LayerCosts,
    coefficients: Coefficients,
    form: GateForm,
    temperature: FloatScalar,
) -> tuple[Float[Array, "tokens experts"], FloatScalar]:
    """(choices of 0 and 1, layer time with the gate's own in s) of one batch.

    Values are those of the exact gate. Gradient: surrogate; choices move as a soft top-k with
    `temperature` would at the boundary between the last chosen and the first not, the busiest node
    as a subgradient.
    """
    tokens, experts = selection.shape
    top_k, chunk = costs.top_k, form.chunk
    time = jnp.maximum(share, 0) * costs.token_time
    hosts = share > HOSTING_SHARE
    fixed = -coefficients.r_comm * hosts.sum(-1)
    best = lax.top_k(selection, top_k)[1]
    ones = lambda ids: jax.nn.one_hot(ids, experts, dtype=selection.dtype).sum(-2)
    kept = ones(best[:, : form.protect]) > 0
    filled = -tokens % chunk
    split = lambda x: jnp.pad(x, ((0, filled), (0, 0))).reshape(-1, chunk, x.shape[-1])
    real = split(jnp.ones((tokens, 1), selection.dtype))
    add = lambda chosen: jnp.matmul(chosen.sum(-2), time, precision=lax.Precision.HIGHEST)
    later = jnp.zeros((real.shape[0], time.shape[1]), time.dtype)
    if form.ahead:
        original = add(split(ones(best)))
        later = jnp.cumsum(original[::-1], axis=0)[::-1] - original

    @jax.checkpoint
    def step(load, row):
        score, kept, real, later = row
        seen = load + later
        if form.budgeted:
            slow = excess(seen, time, coefficients.budget)
        else:
            slow = jnp.max(seen + time, axis=-1) - jnp.max(seen)
        adjusted = score - (fixed - coefficients.r_comp * slow)
        chosen = _choose(adjusted, kept, temperature, top_k) * real
        return load + add(chosen), chosen

    rows = split(selection), split(kept), real, later
    load, chosen = lax.scan(step, jnp.zeros_like(time[0]), rows)
    chosen = chosen.reshape(-1, experts)[:tokens]
    visited = costs.visit_time * expected_visits(chosen, hosts).max()
    return chosen, load.max() + visited + costs.gate_time(tokens, chunk)


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
