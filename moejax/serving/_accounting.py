"""How FLOPs and bytes are counted on a near-memory system: all of them, or as the papers do."""

from typing import NamedTuple

import jax.numpy as jnp

from moejax._checks import lookup
from moejax._typing import FloatScalar
from moejax.cost import Work
from moejax.hardware import NMPSystem
from moejax.models import MoEModel
from moejax.noc import ESTIMATED_BYTES_PER_ELEMENT, token_bytes
from moejax.placement import NodeCosts
from moejax.serving._near_memory import counted_work, published_work
from moejax.serving._workload import Workload


BYTE = 8.0  # bits


class Accounting(NamedTuple):
    """What one token costs in one expert and on the network, and what all layers cost beside."""

    expert_flops: FloatScalar
    message_bytes: FloatScalar
    all_reduce_bytes_per_element: FloatScalar
    rest: Work


def counted(model: MoEModel, workload: Workload) -> Accounting:
    """Two FLOPs for every multiply-add of all three expert matrices, and bytes by precision."""
    held = jnp.maximum(workload.batch, 1)
    context = jnp.sum(workload.contexts) / held
    element = model.precision.activation_bits / BYTE
    rest = counted_work(model, held, context)
    flops = jnp.asarray(2.0 * model.expert_weights)
    return Accounting(flops, token_bytes(model.hidden, element), element, rest)


def published(model: MoEModel, workload: Workload) -> Accounting:
    """As in HDA-MoE (arXiv 2609.08682): 2 h IS FLOPs, 1 B an element in messages and 4 B in
    all-reduces, and the papers' own attention and memory terms, which three models have."""
    held = jnp.maximum(workload.batch, 1)
    layer = published_work(model, held, jnp.sum(workload.contexts) / held)
    rest = Work(*(model.num_moe_layers * part for part in (layer.flops, layer.bytes)))
    flops = jnp.asarray(2.0 * model.hidden * model.moe_intermediate)
    element = jnp.asarray(ESTIMATED_BYTES_PER_ELEMENT)
    return Accounting(flops, token_bytes(model.hidden), element, rest)


ACCOUNTING = {"counted": counted, "published": published}


def node_costs(
    model: MoEModel,
    system: NMPSystem,
    batch: int,
    *,
    accounting: str = "counted",
    gamma: float = 1.0,
) -> NodeCosts:
    """What a placement is fitted with: costs of one layer for `placement.node_balance`.

    The estimate counts the bytes that the network will move, so that gamma is near 1 on a mesh of
    4 x 8 and `noc.calibrate_gamma` (with `estimated_bytes` = `simulated_bytes`) refines it.
    `"published"` keeps the papers' 4 bytes an element.

    **Arguments:** `batch`, tokens of an iteration; `accounting`, a name of `ACCOUNTING`; `gamma`,
    the network's correction factor.

    **Returns:** `NodeCosts` of FLOPs, bytes, FLOP/s and B/s.

    **Raises:** `ValueError` for another accounting, suggesting the nearest.
    """
    one = lookup("accounting", accounting, ACCOUNTING)(model, Workload(batch, 0.0))
    element = one.all_reduce_bytes_per_element
    per_token = token_bytes(model.hidden, element)
    return NodeCosts(
        one.expert_flops, system.flops_per_s, per_token, system.link_bandwidth, batch, gamma
    )
