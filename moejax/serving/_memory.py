"""Whether a model and its cache fit into the HBM of each GPU."""

import jax.numpy as jnp

from moejax._typing import FloatScalar
from moejax.cost import cache_bytes
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.serving._fixed import Requests, by_kind


def memory_bytes(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """Weights and cache on the fullest GPU, bytes.

    Routed experts are dealt out over the GPUs, embedding and LM head are split by vocabulary,
    attention is split over `attention_tp` GPUs, and the rest is on every GPU. The cache of a
    request lies on the GPU that it belongs to.
    """
    precision, hidden = model.precision, model.hidden
    experts = -(-model.num_experts // system.num_gpus) * float(model.num_moe_layers)
    attention = float(sum(layer.num_weights(hidden) for layer in model.layers))
    tables = float(hidden) * model.vocab * (1 if model.tied_embeddings else 2)
    replicated = model.num_fixed_parameters - attention - tables
    elements = replicated + attention / system.attention_tp + tables / system.num_gpus
    weights = experts * model.expert_bytes + elements * precision.weight_bits / 8
    cache = by_kind(model.layers, lambda kind: _cache(kind, requests, precision))
    return weights + jnp.max(jnp.sum(cache, axis=0))


def _cache(attention, requests: Requests, precision):
    # Empty slots have no context, but a linear state would still count for them: `held` is 0 there.
    return requests.total(cache_bytes(attention, requests.contexts, precision))
