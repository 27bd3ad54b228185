"""Gates for a Hugging Face model: made from its routers, and held against them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax.capture._families import Layer, find_layers
from moejax.gating import HardwareAwareGate


def gate_for(model: Any, share: Any, **options: Any) -> HardwareAwareGate:
    """A gate with the score, groups, bias and weights of a model's own routers.

    **Arguments:**

    - `model`: of one of the families in `moejax.capture.FAMILIES`.
    - `share`: [experts, nodes], or with a leading axis of MoE layers.
    - `options`: of `HardwareAwareGate`: `r_comp`, `r_comm` and `token_time`, and what else is
        wanted.

    **Raises:** `ValueError` as `HardwareAwareGate`, and for a share of other experts.
    """
    layers = find_layers(model)
    rule = layers[0].rule
    given = {"top_k": rule.top_k, "selection_bias": _bias(layers)} | options
    gate = HardwareAwareGate.for_router(rule.router, share, **given)
    check_fit(gate, layers)
    return gate


def _bias(layers: list[Layer]) -> np.ndarray | None:
    if layers[0].rule.bias is None:
        return None
    return np.stack([layer.rule.bias.detach().float().cpu().numpy() for layer in layers])


def check_fit(gate: HardwareAwareGate, layers: list[Layer]) -> None:
    """Raises `ValueError` naming the field of a gate that these layers contradict."""
    if not isinstance(gate, HardwareAwareGate):
        raise ValueError(f"gate is a {type(gate).__name__}: allowed is a HardwareAwareGate")
    rule = layers[0].rule
    router = rule.router
    stated = gate.selection_bias
    leading = {
        array.shape[0]
        for array, axes in (
            *((gate.share, 2), (gate.r_comp, 0), (gate.r_comm, 0), (gate.token_time, 0)),
            *([] if stated is None else [(stated, 1)]),
        )
        if array.ndim > axes
    }
    wrong = {
        "top_k": (gate.top_k, rule.top_k),
        "share, experts": (gate.share.shape[-2], rule.num_experts),
        "score": (gate.score, router.score),
    }
    if leading:
        wrong["layers"] = (max(leading), len(layers))
    # One group and no bias are what a gate has that says nothing of them.
    if gate.num_groups > 1:
        wrong["num_groups"] = (gate.num_groups, router.num_groups)
        wrong["top_groups"] = (gate.top_groups, router.top_groups)
    for name, (found, allowed) in wrong.items():
        if found != allowed:
            raise ValueError(f"gate, {name} = {found!r}: the model has {allowed!r} (see gate_for)")
    if stated is not None:
        own = _bias(layers)
        if own is None or not jnp.allclose(stated, own, atol=1e-6):
            raise ValueError("gate, selection_bias: the model has another one (see gate_for)")
