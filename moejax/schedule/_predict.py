"""Guesses at the experts of a layer, made one layer earlier, and how good they are."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, Int
from moejax.routing import NOT_ROUTED, RoutingTrace, next_layer_transitions


class Transitions(eqx.Module):
    """Which experts follow which, from the counts of a trace.

    Built by `fit_transitions`.
    """

    log_lift: Float[Array, "pairs experts experts"]
    """[l, i, j]: log of how much likelier expert j of layer l + 1 is after expert i of layer l."""
    log_chance: Float[Array, "pairs experts"]
    """[l, j]: log of the share of layer l + 1's choices that fall on expert j."""


def fit_transitions(trace: RoutingTrace, *, smoothing: float = 1.0) -> Transitions:
    """Transition counts of a trace as a predictor of the next layer's experts.

    **Arguments:**

    - `trace`: at least two layers; only valid tokens count.
    - `smoothing`: how many choices of average taste are added to every row. Above 0: an expert
        never seen says nothing rather than everything.

    **Raises:** `ValueError` for a trace of one layer, or a smoothing that is not finite, above 0.
    """
    if not 0 < smoothing < np.inf:
        raise ValueError(f"fit_transitions.smoothing = {smoothing}: allowed is finite, above 0")
    counts = next_layer_transitions(trace).astype(jnp.result_type(float))
    total = counts.sum(-2)
    chance = (total + 1) / (total + 1).sum(-1, keepdims=True)
    rows = counts + smoothing * chance[:, None]
    likely = rows / rows.sum(-1, keepdims=True)
    return Transitions(jnp.log(likely) - jnp.log(chance)[:, None], jnp.log(chance))


@functools.partial(jax.jit, static_argnames="top_k")
def predict_transitions(
    transitions: Transitions, expert_ids: Int[Array, "layers tokens top_k"], *, top_k: int
) -> Int[Array, "layers tokens top_k"]:
    """The most likely experts of each layer given those of the layer before.

    The evidence of a token's present experts i is taken as independent: the score of expert j is
    `log P(j) + sum_i log(P(j | i) / P(j))`.

    **Arguments:**

    - `expert_ids`: what the tokens chose; slots that are `NOT_ROUTED` say nothing.
    - `top_k`: how many to name, static.

    **Returns:** int32 [layers, tokens, top_k], likeliest first; layer 0, which nothing precedes, is
    `NOT_ROUTED`.

    **Raises:** `ValueError` for another number of layers than the trace had, or more choices than
    experts.
    """
    pairs, num_experts = transitions.log_chance.shape
    if expert_ids.ndim != 3 or expert_ids.shape[0] != pairs + 1:
        raise ValueError(
            f"predict_transitions: expert_ids has shape {expert_ids.shape}: allowed is "
            f"[{pairs + 1}, tokens, top_k]"
        )
    _check_top_k("predict_transitions", top_k, num_experts)

    def scores(log_lift, log_chance, ids):
        routed = (ids >= 0) & (ids < num_experts)
        lift = jnp.where(routed[..., None], log_lift[jnp.clip(ids, 0, num_experts - 1)], 0.0)
        return log_chance + lift.sum(-2)

    found = jax.vmap(scores)(transitions.log_lift, transitions.log_chance, expert_ids[:-1])
    return _from_scores(found, top_k)


@functools.partial(jax.jit, static_argnames="top_k")
def predict_next_gate(
    gate_inputs: Float[Array, "layers tokens hidden"],
    routers: Float[Array, "layers hidden experts"],
    *,
    top_k: int,
) -> Int[Array, "layers tokens top_k"]:
    """The experts that each layer's gate picks on what the gate of the layer before it was given
    (HDA-MoE, arXiv 2609.08682, section V-C).

    **Arguments:**

    - `gate_inputs`: the hidden states that the gates multiply.
    - `routers`: the gates.
    - `top_k`: how many experts to name, static.

    **Returns:** int32 [layers, tokens, top_k], best first; layer 0 is `NOT_ROUTED`.

    **Raises:** `ValueError` for shapes that disagree, or more choices than experts.
    """
    if (
        gate_inputs.ndim != 3
        or routers.ndim != 3
        or gate_inputs.shape[0] != routers.shape[0]
        or gate_inputs.shape[2] != routers.shape[1]
    ):
        raise ValueError(
            f"predict_next_gate: gate_inputs {gate_inputs.shape} and routers {routers.shape}: "
            "allowed is [layers, tokens, hidden] and [layers, hidden, experts]"
        )
    _check_top_k("predict_next_gate", top_k, routers.shape[2])
    return _from_scores(jnp.einsum("lth,lhe->lte", gate_inputs[:-1], routers[1:]), top_k)


def prediction_accuracy(
    predicted: Int[Array, "*layers tokens top_k"], actual: Int[Array, "*layers tokens top_k"]
) -> Float[Array, "*layers"]:
    """Of the experts that tokens chose, the share that was predicted: the mean over tokens of
    `|predicted & actual| / |actual|`.

    **Returns:** [...] in 0 .. 1; NaN where no token is routed. A layer without a prediction has 0.

    **Raises:** `ValueError` for shapes that differ in more than the last axis.
    """
    predicted, actual = jnp.asarray(predicted), jnp.asarray(actual)
    if predicted.shape[:-1] != actual.shape[:-1] or actual.ndim < 2:
        raise ValueError(
            f"prediction_accuracy: predicted {predicted.shape} and actual {actual.shape}: allowed "
            "is the same layers and tokens"
        )
    routed = actual != NOT_ROUTED
    found = routed & (actual[..., :, None] == predicted[..., None, :]).any(-1)
    per_token = found.sum(-1) / jnp.maximum(routed.sum(-1), 1)
    counted = routed.any(-1)
    return (per_token * counted).sum(-1) / counted.sum(-1)


def _from_scores(scores: Float[Array, "pairs tokens experts"], top_k: int):
    _, ids = jax.lax.top_k(scores, top_k)
    return jnp.concatenate([jnp.full_like(ids[:1], NOT_ROUTED), ids])


def _check_top_k(owner: str, top_k: int, num_experts: int) -> None:
    if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise ValueError(f"{owner}.top_k = {top_k!r}: allowed is 1 to {num_experts}")
