"""The gate's side of a forward call, one program: scores in, choices and what they changed out."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status
from moejax._typing import Array, Float, Int, IntScalar
from moejax.gating import HardwareAwareGate, LayerCosts, hardware_aware_top_k
from moejax.routing import NOT_ROUTED


class Choices(NamedTuple):
    """What the gate chose for the batches (columns) of one call and layer.

    Fields: `expert_ids`; `kept`, own choices that stay, and `favorites`, tokens whose strongest
    one does; `time` and `own_time`, modelled s of the layer with the gate's choices (and its own
    steps) and with the model's; `status`.
    """

    expert_ids: Int[Array, "columns rows top_k"]
    kept: Int[Array, " columns"]
    favorites: Int[Array, " columns"]
    time: Float[Array, " columns"]
    own_time: Float[Array, " columns"]
    status: IntScalar


class Program(NamedTuple):
    """A gate and costs, taken apart once: looking at them in every call would be most of its time.

    Fields: `leaves`, `structure` of the pair (gate, costs or None), as `jax.tree.flatten` has them.
    """

    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, gate: HardwareAwareGate, costs: LayerCosts | None) -> "Program":
        return cls(*jax.tree.flatten((settled(gate), costs)))


@functools.partial(jax.jit, static_argnames="structure")
def choose(
    leaves: list[Any],
    structure: Any,
    layer: Any,
    scores: Float[Array, "columns rows experts"],
    selection: Float[Array, "columns rows experts"],
    own_ids: Int[Array, "columns rows top_k"],
    valid: Any,
) -> Choices:
    """The choices of each column, its own batch with a load that begins at zero.

    **Arguments:**

    - `leaves`, `structure`: of a `Program` (the latter static). A gate of one layer or all; without
        costs, those of a layer are the computation of its busiest node.
    - `layer`: which.
    - `scores`, `selection`: the model's, as `hardware_aware_top_k` takes them.
    - `own_ids`: the model's choices, strongest first.
    - `valid`: bool [columns, rows], real tokens.
    """
    gate, costs = jax.tree.unflatten(structure, leaves)
    one = gate.layer(layer)
    if costs is None:
        costs = LayerCosts(one.token_time, top_k=gate.top_k)

    def column(scores, selection, own, valid):
        result = hardware_aware_top_k(
            scores,
            one.share,
            top_k=gate.top_k,
            r_comp=one.r_comp,
            r_comm=one.r_comm,
            token_time=one.token_time,
            protect=gate.protect,
            chunk=gate.chunk,
            valid=valid,
            selection_scores=selection,
            combine="raw",  # the model's own rule weighs
            max_rows=gate.max_rows,
            max_hosts=gate.max_hosts,
        )
        ids = result.expert_ids
        kept = jnp.any(own[:, :, None] == ids[:, None, :], -1) & valid[:, None]
        own = jnp.where(valid[:, None], own, NOT_ROUTED)
        steps = -(-valid.sum() // gate.chunk)  # rows that fill up a compiled size take none
        time = costs.layer_time(ids, one.share) + costs.gate_step_time * steps
        own_time = costs.layer_time(own, one.share)
        return Choices(ids, kept.sum(), kept[:, 0].sum(), time, own_time, result.status)

    found = jax.vmap(column)(scores, selection, own_ids, valid)
    return found._replace(status=found.status.max(initial=Status.OK))


def settled(gate: HardwareAwareGate) -> HardwareAwareGate:
    """The gate with the static number of hosts that makes it fast, counted where it is not given.

    **Raises:** `ValueError` for what a gate refuses, before a model is touched.
    """
    layers = max(np.size(gate.r_comp), np.size(gate.r_comm), np.size(gate.token_time))
    layers = max(layers, gate.share.shape[0] if gate.share.ndim == 3 else 1)
    experts = gate.share.shape[-2]
    for layer in range(layers):
        one = gate.layer(layer)
        # Eagerly, so that the gate looks at its own numbers; groups and biases are the model's.
        plain = dict(num_groups=1, top_groups=1, score="none", selection_bias=None)
        checked = _with(one, **plain)
        checked(jnp.zeros((1, experts)))
    if gate.max_hosts is not None:
        return gate
    return _with(gate, max_hosts=int(np.max(np.count_nonzero(np.asarray(gate.share), axis=-1))))


def _with(gate: HardwareAwareGate, **changes: Any) -> HardwareAwareGate:
    names = (
        "share top_k r_comp r_comm token_time selection_bias score combine scaling num_groups "
        "top_groups group_score protect chunk max_rows max_hosts"
    )
    return HardwareAwareGate(**({name: getattr(gate, name) for name in names.split()} | changes))
