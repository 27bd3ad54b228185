"""What no policy changes: layers without experts, LM head and embedding, memory."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._typing import FloatScalar, IntScalar
from moejax.cost import Work, cache_bytes, head_work, roofline_time
from moejax.hardware import System
from moejax.models import Attention, MoEModel, Precision
from moejax.partition import Times
from moejax.serving._fixed import Requests, by_kind, dense_layer_fixed
from moejax.serving._layer_costs import attention_all_reduce


class Shared(eqx.Module):
    """Fields: `requests` of each GPU; `dense`, times of the layers without experts, [layers], of
    the slowest GPU; `head_time` in s; `memory_bytes` of the fullest GPU; `status` of what went
    in."""

    requests: Requests
    dense: Times
    head_time: FloatScalar
    memory_bytes: FloatScalar
    status: IntScalar

    @classmethod
    def of(cls, model: MoEModel, system: System, requests: Requests, status: IntScalar) -> "Shared":
        """Of one iteration."""
        return cls(
            requests=requests,
            dense=dense_layers(model, system, requests),
            head_time=head_time(model, system, requests),
            memory_bytes=memory_bytes(model, system, requests),
            status=status,
        )


def dense_layers(model: MoEModel, system: System, requests: Requests) -> Times:
    """Layers without experts, [dense layers]; of the slowest GPU."""
    if model.num_dense_layers == 0:
        none = jnp.zeros(0, requests.count.dtype)
        return Times(none, none, none, none, none)
    rate = system.gpu.effective_flops_per_s(model.precision.activation_bits)
    cost = lambda kind: dense_layer_fixed(kind, model, system, requests)
    fixed = by_kind(model.layers[: model.num_dense_layers], cost)
    offchip = fixed.work.bytes / system.gpu.effective_bandwidth
    compute, pim = fixed.work.flops / rate, fixed.pim_time
    memory = jnp.maximum(offchip, pim) + system.pim.contention * jnp.minimum(offchip, pim)
    comm = jnp.broadcast_to(attention_all_reduce(model, system, requests), memory.shape)
    every = Times(offchip, compute, pim, comm, jnp.maximum(jnp.maximum(comm, compute), memory))
    slowest = jnp.argmax(every.total, axis=1)
    return jax.tree.map(lambda time: jnp.take_along_axis(time, slowest[:, None], 1)[:, 0], every)


def head_time(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """Embedding rows of the local tokens, and the LM head split over all GPUs by vocabulary."""
    share, total = 1 / system.num_gpus, jnp.sum(requests.count)
    work = head_work(model.hidden, model.vocab, total, model.precision)
    rate = system.gpu.effective_flops_per_s(model.precision.activation_bits)
    split = Work(work.flops * share, work.bytes * share)
    embedding = jnp.max(requests.count) * model.hidden * model.precision.weight_bits / 8
    bandwidth = system.gpu.effective_bandwidth
    return roofline_time(split, rate, bandwidth) + embedding / bandwidth


def memory_bytes(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """Weights and cache on the fullest GPU, bytes.

    Routed experts are dealt out over the GPUs, embedding and LM head are split by vocabulary,
    attention and its cache over the `attention_tp` GPUs of a group, and the rest is on every GPU.
    """
    precision, hidden = model.precision, model.hidden
    experts = -(-model.num_experts // system.num_gpus) * float(model.num_moe_layers)
    attention = float(sum(layer.num_weights(hidden) for layer in model.layers))
    tables = float(hidden) * model.vocab * (1 if model.tied_embeddings else 2)
    replicated = model.num_fixed_parameters - attention - tables
    elements = replicated + attention / system.attention_tp + tables / system.num_gpus
    weights = experts * model.expert_bytes + elements * precision.weight_bits / 8
    pooled = requests.pooled(system.attention_tp)
    cache = by_kind(model.layers, lambda kind: _cache(kind, pooled, precision))
    return weights + jnp.max(jnp.sum(cache, axis=0))


def _cache(attention: Attention, requests: Requests, precision: Precision):
    # Empty slots have no context, but a linear state would still count for them: `held` is 0 there.
    return requests.total(cache_bytes(attention, requests.contexts, precision))
