"""What a layer costs each GPU whatever the partition: attention, router, shared experts."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, FloatLike, FloatScalar, Int, IntScalar
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
from moejax.serving._prefill import prefill_attention_work
from moejax.serving._workload import Workload


T = TypeVar("T")


class Requests(eqx.Module):
    """What each GPU holds: requests that decode, and tokens of prompts.

    Fields: `count` [gpus], tokens; `sampled` [gpus], requests that get a token; `held`
    [gpus, requests], 1 where the GPU holds the request of a slot; `contexts` [requests]; `prompts`
    [gpus], prompts (each GPU has its share of every one); `prompt_length`, tokens of each;
    `num_slots`, the most tokens an expert can have, static.
    """

    count: Float[Array, " gpus"]
    sampled: Float[Array, " gpus"]
    held: Float[Array, "gpus requests"]
    contexts: Float[Array, " requests"]
    prompts: Float[Array, " gpus"]
    prompt_length: FloatScalar
    num_slots: int = eqx.field(static=True)

    def total(self, values: FloatLike) -> Float[Array, " gpus"]:
        """Sum of a number per request, [requests], over the requests of each GPU."""
        return jnp.sum(self.held * values, axis=1)

    def pooled(self, group_size: IntScalar) -> "Requests":
        """What each GPU does of the attention of all requests of its tensor-parallel group:
        `group_size` consecutive GPUs split every request evenly."""
        gpus = jnp.arange(self.count.shape[0])
        together = (gpus[:, None] // group_size == gpus // group_size).astype(self.held.dtype)
        # An elementwise product: the matrix unit of a GPU would round whole numbers.
        pool = lambda x: jnp.sum(together.reshape(*together.shape, *[1] * (x.ndim - 1)) * x, 1)
        fields = dict(count=self.count, sampled=self.sampled, held=self.held, prompts=self.prompts)
        shared = {name: pool(value) / group_size for name, value in fields.items()}
        return dataclasses.replace(self, **shared)


def token_half(workload: Workload, num_gpus: int) -> Int[Array, " slots"]:
    """Which half batch a token belongs to, 0 or 1, so that every GPU has some of both."""
    return jnp.arange(workload.num_slots) // num_gpus % 2


def requests_by_gpu(workload: Workload, num_gpus: int, half: int | None = None) -> Requests:
    """Deals the tokens of a batch, or of half of it, out in turn: data-parallel attention."""
    valid = workload.valid
    if half is not None:
        valid &= token_half(workload, num_gpus) == half
    origin = gpu_of_token(workload.num_slots, num_gpus)
    mine = ((origin == jnp.arange(num_gpus)[:, None]) & valid).astype(workload.contexts.dtype)
    held = mine[:, : workload.max_batch]
    prompt_tokens = jnp.sum(mine[:, workload.max_batch :], axis=1)
    prompts = prompt_tokens / max(workload.prefill_length, 1)
    return Requests(
        count=jnp.sum(held, axis=1) + prompt_tokens,
        sampled=jnp.sum(held, axis=1) + prompts,
        held=held,
        contexts=workload.contexts,
        prompts=prompts,
        prompt_length=jnp.asarray(float(workload.prefill_length), held.dtype),
        num_slots=workload.num_slots,
    )


class Fixed(eqx.Module):
    """What a layer costs each GPU whatever the partition: `work` on the GPU and seconds on PIM."""

    work: Work
    pim_time: Float[Array, " gpus"]


def projections(attention: Attention, model: MoEModel, system: System, requests: Requests) -> Work:
    """The weight matrices of an attention block, [gpus]. `attention_tp` GPUs split both the weights
    and the tokens."""
    shared_by = system.attention_tp.astype(requests.count.dtype)
    tokens = requests.pooled(system.attention_tp).count
    weights_only = projection_work(attention, model.hidden, 0.0, model.precision).bytes
    work = projection_work(attention, model.hidden, tokens, model.precision)
    return Work(work.flops, work.bytes - weights_only * (1 - 1 / shared_by))


def attention_core(
    attention: Attention, model: MoEModel, system: System, requests: Requests, on_gpu: bool = False
) -> Fixed:
    """Attention itself, where it belongs (Sieve, T_PIM and T_offchip).

    Grouped-query decode attention runs on PIM, over the keys and values that lie there, at
    `attention_overhead` times its roofline. Latent (MLA) and linear attention reuse what they read
    too often for PIM and run on the GPU, as prompts do, and all with `on_gpu`.
    """
    precision, requests = model.precision, requests.pooled(system.attention_tp)
    seen = requests.total(attended(attention, requests.contexts))
    prompt = prefill_attention_work(attention, model, requests.prompt_length)
    work = Work(requests.prompts * prompt.flops, requests.prompts * prompt.bytes)
    if attention.kind == "gqa" and not on_gpu:
        flops = attention_counts(attention)[0] * seen
        # One column access feeds 16 bits / kv_bits as many multiply-adds.
        rate = system.pim.flops_per_s * 16 / precision.kv_bits
        return Fixed(work, system.pim.attention_overhead * flops / rate)
    each = attention_work(attention, jnp.ones(()), precision)
    work += Work(each.flops * seen, each.bytes * seen)
    return Fixed(work, jnp.zeros_like(requests.count))


def attention_cost(
    attention: Attention, model: MoEModel, system: System, requests: Requests, on_gpu: bool = False
) -> Fixed:
    """Projections and attention itself, each [gpus]."""
    core = attention_core(attention, model, system, requests, on_gpu)
    return Fixed(projections(attention, model, system, requests) + core.work, core.pim_time)


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
    attention: Attention,
    model: MoEModel,
    system: System,
    requests: Requests,
    shared_on_pim: bool,
    attention_on_gpu: bool = False,
) -> Fixed:
    """Attention, router and shared experts of one MoE layer, each [gpus]."""
    block = attention_cost(attention, model, system, requests, attention_on_gpu)
    shared = shared_expert_cost(model, system, requests, shared_on_pim)
    router = router_work(model.hidden, model.num_experts, requests.count, model.precision)
    return Fixed(block.work + router + shared.work, block.pim_time + shared.pim_time)


def dense_layer_fixed(
    attention: Attention,
    model: MoEModel,
    system: System,
    requests: Requests,
    attention_on_gpu: bool = False,
) -> Fixed:
    """A layer with a dense FFN on the GPU (the first ones of DeepSeek models)."""
    block = attention_cost(attention, model, system, requests, attention_on_gpu)
    return Fixed(block.work + dense_work(model, requests), block.pim_time)


def dense_work(model: MoEModel, requests: Requests) -> Work:
    """The dense FFN of such a layer, [gpus]."""
    precision = model.precision
    stored = eqx.tree_at(lambda p: p.expert_weight_bits, precision, precision.weight_bits)
    return expert_work(model.hidden, model.dense_intermediate, requests.count, stored)


def by_kind(layers: tuple[Attention, ...], cost: Callable[[Attention], T]) -> T:
    """`cost` of every layer, [layers, gpus], computed once for each distinct kind of attention."""
    kinds = tuple(dict.fromkeys(layers))
    which = np.array([kinds.index(layer) for layer in layers])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[cost(kind) for kind in kinds])
    return jax.tree.map(lambda x: x[which], stacked)
