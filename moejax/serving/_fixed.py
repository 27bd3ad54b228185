"""What a layer costs each GPU whatever the partition: attention, router, shared experts."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, FloatLike, IntScalar
from moejax.cost import (
    Work,
    attended,
    attention_counts,
    attention_work,
    expert_work,
    gpu_of_token,
    projection_work,
    router_work,
)
from moejax.hardware import System
from moejax.models import Attention, MoEModel
from moejax.serving._workload import Workload


T = TypeVar("T")


class Requests(eqx.Module):
    """The requests that each GPU holds: how many, and the context of each slot.

    Fields: `count` [gpus]; `held` [gpus, slots], 1 where the GPU holds the request of a slot;
    `contexts` [slots].
    """

    count: Float[Array, " gpus"]
    held: Float[Array, "gpus slots"]
    contexts: Float[Array, " slots"]

    def total(self, values: FloatLike) -> Float[Array, " gpus"]:
        """Sum of a number per request, [slots], over the requests of each GPU."""
        return jnp.sum(self.held * values, axis=1)

    def pooled(self, group_size: IntScalar) -> "Requests":
        """What each GPU does of the attention of all requests of its tensor-parallel group:
        `group_size` consecutive GPUs split every request evenly."""
        gpus = jnp.arange(self.count.shape[0])
        together = gpus[:, None] // group_size == gpus // group_size
        held = jnp.sum(jnp.where(together[:, :, None], self.held, 0.0), axis=1) / group_size
        return Requests(jnp.sum(held, axis=1), held, self.contexts)


def requests_by_gpu(workload: Workload, num_gpus: int) -> Requests:
    """Deals the requests of a batch out in turn: data-parallel attention."""
    origin = gpu_of_token(workload.max_batch, num_gpus)
    mine = (origin == jnp.arange(num_gpus)[:, None]) & workload.valid
    held = mine.astype(workload.contexts.dtype)
    return Requests(jnp.sum(held, axis=1), held, workload.contexts)


class Fixed(eqx.Module):
    """What a layer costs each GPU whatever the partition: `work` on the GPU and seconds on PIM."""

    work: Work
    pim_time: Float[Array, " gpus"]


def attention_cost(
    attention: Attention, model: MoEModel, system: System, requests: Requests
) -> Fixed:
    """Projections on the GPU, and decode attention where it belongs (Sieve, T_PIM and T_offchip).

    Grouped-query attention runs on PIM, over the keys and values that lie there, at
    `attention_overhead` times its roofline. Latent (MLA) and linear attention reuse what they read
    too often for PIM and run on the GPU. `attention_tp` GPUs split both the weights and the
    requests.
    """
    precision, shared_by = model.precision, system.attention_tp.astype(requests.count.dtype)
    requests = requests.pooled(system.attention_tp)
    weights_only = projection_work(attention, model.hidden, 0.0, precision).bytes
    work = projection_work(attention, model.hidden, requests.count, precision)
    work = Work(work.flops, work.bytes - weights_only * (1 - 1 / shared_by))
    seen = requests.total(attended(attention, requests.contexts))
    if attention.kind == "gqa":
        flops = attention_counts(attention)[0] * seen
        # One column access feeds 16 bits / kv_bits as many multiply-adds.
        rate = system.pim.flops_per_s * 16 / precision.kv_bits
        return Fixed(work, system.pim.attention_overhead * flops / rate)
    per_length = attention_work(attention, jnp.ones(()), precision)
    work += Work(per_length.flops * seen, per_length.bytes * seen)
    return Fixed(work, jnp.zeros_like(requests.count))


def shared_expert_cost(model: MoEModel, system: System, requests: Requests, on_pim: bool) -> Fixed:
    """Shared experts see every local token, on the GPU or (AllExp) on PIM."""
    zero = jnp.zeros_like(requests.count)
    if model.shared_intermediate == 0:
        return Fixed(Work(zero, zero), zero)
    width, precision = model.shared_intermediate, model.precision
    if not on_pim:
        # Shared experts are stored like the rest of the model, not like the routed ones.
        stored = eqx.tree_at(lambda p: p.expert_weight_bits, precision, precision.weight_bits)
        return Fixed(expert_work(model.hidden, width, requests.count, stored), zero)
    bits = dict(weight_bits=precision.weight_bits, activation_bits=precision.activation_bits)
    time = lambda n: system.pim.expert_time(model.hidden, width, n, **bits)
    crossing = system.pim.token_bytes(model.hidden, width, **bits)
    pim_time = jax.vmap(time)(requests.count.astype(jnp.int32))
    return Fixed(Work(zero, crossing * requests.count), pim_time)


def moe_layer_fixed(
    attention: Attention, model: MoEModel, system: System, requests: Requests, shared_on_pim: bool
) -> Fixed:
    """Attention, router and shared experts of one MoE layer, each [gpus]."""
    block = attention_cost(attention, model, system, requests)
    shared = shared_expert_cost(model, system, requests, shared_on_pim)
    router = router_work(model.hidden, model.num_experts, requests.count, model.precision)
    return Fixed(block.work + router + shared.work, block.pim_time + shared.pim_time)


def dense_layer_fixed(
    attention: Attention, model: MoEModel, system: System, requests: Requests
) -> Fixed:
    """A layer with a dense FFN on the GPU (the first ones of DeepSeek models)."""
    block = attention_cost(attention, model, system, requests)
    precision = model.precision
    stored = eqx.tree_at(lambda p: p.expert_weight_bits, precision, precision.weight_bits)
    ffn = expert_work(model.hidden, model.dense_intermediate, requests.count, stored)
    return Fixed(block.work + ffn, block.pim_time)


def by_kind(layers: tuple[Attention, ...], cost: Callable[[Attention], T]) -> T:
    """`cost` of every layer, [layers, gpus], computed once for each distinct kind of attention."""
    kinds = tuple(dict.fromkeys(layers))
    which = np.array([kinds.index(layer) for layer in layers])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[cost(kind) for kind in kinds])
    return jax.tree.map(lambda x: x[which], stacked)
