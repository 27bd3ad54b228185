"""Whether weights and caches fit into the memory of the GPUs."""

import jax.numpy as jnp

from moejax._status import Status, is_traced
from moejax._typing import Array, Float, FloatScalar, IntLike
from moejax._units import GB
from moejax.cost import cache_bytes
from moejax.hardware import System
from moejax.models import Attention, MoEModel, Precision
from moejax.serving._fixed import Requests, by_kind, requests_by_gpu
from moejax.serving._workload import Workload


def memory_bytes(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """Weights and cache on the fullest GPU, bytes.

    Routed experts are dealt out over the GPUs, embedding and LM head are split by vocabulary,
    attention and its cache over the `attention_tp` GPUs of a group, and the rest is on every GPU.
    """
    return weight_bytes(model, system) + jnp.max(cache_bytes_by_gpu(model, system, requests))


def weight_bytes(model: MoEModel, system: System) -> FloatScalar:
    """The part of weights of the fullest GPU."""
    precision, hidden = model.precision, model.hidden
    experts = -(-model.num_experts // system.num_gpus) * float(model.num_moe_layers)
    attention = float(sum(layer.num_weights(hidden) for layer in model.layers))
    tables = float(hidden) * model.vocab * (1 if model.tied_embeddings else 2)
    replicated = model.num_fixed_parameters - attention - tables
    elements = replicated + attention / system.attention_tp + tables / system.num_gpus
    return experts * model.expert_bytes + elements * precision.weight_bits / 8


def cache_bytes_by_gpu(
    model: MoEModel, system: System, requests: Requests
) -> Float[Array, " gpus"]:
    """Keys and values (or states) of all requests and prompts, [gpus]."""
    pooled = requests.pooled(system.attention_tp)
    cache = by_kind(model.layers, lambda kind: _cache(kind, pooled, model.precision))
    return jnp.sum(cache, axis=0)


def _cache(attention: Attention, requests: Requests, precision: Precision):
    # Empty slots have no context, but a linear state would still count for them: `held` is 0 there.
    prompt = cache_bytes(attention, requests.prompt_length, precision)
    held = requests.total(cache_bytes(attention, requests.contexts, precision))
    return held + requests.prompts * prompt


def cached_bytes(model: MoEModel, workload: Workload) -> FloatScalar:
    """Keys and values (or states) of all requests together."""
    requests = requests_by_gpu(workload, 1)
    cache = by_kind(model.layers, lambda kind: _cache(kind, requests, model.precision))
    return jnp.sum(cache)


def memory_detail(model: MoEModel, system: System, workload: Workload, status: IntLike) -> str:
    """What is needed and what there is, where `status` is `OUT_OF_MEMORY`; else an empty string."""
    if is_traced(status) or int(status) != Status.OUT_OF_MEMORY:
        return ""
    requests = requests_by_gpu(workload, system.num_gpus)
    weights = float(weight_bytes(model, system)) / GB
    cache = float(jnp.max(cache_bytes_by_gpu(model, system, requests))) / GB
    return (
        f"weights take {weights:.4g} GB and context {cache:.4g} GB a GPU, allowed is "
        f"{float(system.gpu.hbm_bytes) / GB:.4g} GB in all (must_fit=False times it all the same)"
    )
