"""A loss for training a router: the expected time of its layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_positive
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._relax import smooth_makespan, soft_top_k
from moejax.gating._resource_loads import HOSTING_SHARE
from moejax.gating._validate import check_scores, check_share


class PenaltyAux(NamedTuple):
    """What `hardware_penalty` saw. Fields: `layer_time` in s, the expected time with hard maxima;
    `node_load` [nodes] in s and `node_visits` [nodes] in tokens, both expected; `imbalance`,
    largest over mean node load; all without a gradient."""

    layer_time: FloatScalar
    node_load: Float[Array, " nodes"]
    node_visits: Float[Array, " nodes"]
    imbalance: FloatScalar


def hardware_penalty(
    logits: Float[Array, "tokens experts"],
    share: Float[Array, "experts nodes"],
    costs: LayerCosts,
    mask: Bool[Array, " tokens"] | None = None,
    *,
    temperature: FloatLike = 1.0,
    sharpness: FloatLike = 10.0,
) -> tuple[FloatScalar, PenaltyAux]:
    """Expected time of a layer over its ideal time: an auxiliary loss in place of load balance.

    Each token is expected to choose expert i with p_i = `soft_top_k` of its logits. The busiest
    node's expected computation plus the most visited node's expected communication, with smooth
    maxima, is divided by what an even layer takes (`LayerCosts.ideal_time`). The loss is 1 where
    every node has the same load and each choice visits one node, whatever the units, batch and
    machine; without communication it is at least 1, and at most the number of nodes.

    **Arguments:**

    - `logits`: of the router; half precision is computed in float32. -inf is never chosen.
    - `share`: part of each expert on each node; rows sum to 1.
    - `costs`: unbatched (settings: `jax.vmap`). `gate_step_time` is not part of it.
    - `mask`: True for tokens that count. Without any the loss is 0.
    - `temperature`: of the soft choice, in units of the logits, above 0.
    - `sharpness`: the smooth maximum's temperature is the even load over this, above 0.

    **Returns:** the loss, and `PenaltyAux`.

    **Raises:** `ValueError` for shapes that disagree, `top_k` above the number of experts, and
    shares and options out of range where values are known. NaN logits give NaN.

    Gradient: exact, of a smooth surrogate of the layer time; finite also at zero and at even load,
    where each expert's pull cancels. Gradient in `share` through computation only: which nodes
    hold an expert is counted.
    """
    tokens, experts = check_scores(logits, np.shape(share)[0] if np.ndim(share) else None)
    check_share(share)
    if costs.token_time.shape or costs.visit_time.shape:
        raise ValueError("hardware_penalty: costs of several settings: map over them (jax.vmap)")
    if not costs.top_k <= experts:
        raise ValueError(f"costs.top_k = {costs.top_k}: allowed is at most {experts} experts")
    if mask is not None and np.shape(mask) != (tokens,):
        raise ValueError(f"mask has shape {np.shape(mask)}: allowed is {(tokens,)}")
    check_positive("hardware_penalty", "temperature", temperature)
    check_positive("hardware_penalty", "sharpness", sharpness)
    counted = jnp.ones(tokens, bool) if mask is None else jnp.asarray(mask, bool)
    logits, share = jnp.asarray(logits), as_float(share)
    return _penalty(logits, share, costs, counted, as_float(temperature), as_float(sharpness))


@jax.jit
def _penalty(logits, share, costs, counted, temperature, sharpness):
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    p = soft_top_k(jnp.where(counted[:, None], wide, 0), costs.top_k, temperature)
    p = jnp.where(counted[:, None], p, 0)
    tokens, nodes = counted.sum(), share.shape[1]
    load, visits = expected_load(p, share), expected_visits(p, share > HOSTING_SHARE)
    # In even loads, so that neither the sharpness nor rounding knows the units.
    even = costs.top_k * jnp.maximum(tokens, 1) / nodes
    highest = lambda x: smooth_makespan(x / even, 1 / sharpness)
    whole = costs.token_time + costs.visit_time
    comp, comm = costs.token_time / whole, costs.visit_time / whole
    loss = comp * highest(load) + comm * highest(visits)
    time = costs.token_time * load.max() + costs.visit_time * visits.max()
    imbalance = load.max() / jnp.where(tokens > 0, load.mean(), 1)
    aux = PenaltyAux(time, costs.token_time * load, visits, imbalance)
    return loss, jax.lax.stop_gradient(aux)


def expected_load(
    chosen: Float[Array, "tokens experts"], share: Float[Array, "experts nodes"]
) -> Float[Array, " nodes"]:
    """Whole expert-tokens on each node, for experts chosen in these parts."""
    return jnp.matmul(chosen.sum(0), share, precision=jax.lax.Precision.HIGHEST)


def expected_visits(
    chosen: Float[Array, "tokens experts"], hosts: Bool[Array, "experts nodes"]
) -> Float[Array, " nodes"]:
    """Tokens with an expert on each node, where each is chosen by itself with this probability.

    sum_t (1 - prod_{i on c} (1 - p_ti)), exact for choices of 0 and 1.
    """
    missed = jnp.where(hosts, 1 - chosen[:, :, None], 1)
    return (1 - _product(missed)).sum(0)


def _product(x):
    """Product over axis 1. By halves, so that its gradient never divides by a factor of 0."""
    while x.shape[1] > 1:
        even, odd = x[:, 0::2], x[:, 1::2]
        rest = jnp.pad(odd, ((0, 0), (0, even.shape[1] - odd.shape[1]), (0, 0)), constant_values=1)
        x = even * rest
    return x[:, 0]
