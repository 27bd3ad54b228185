"""Seconds of every task of a layer's execution graph, on every GPU."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, Int
from moejax.cost import GPUEfficiency, Work, router_work
from moejax.hardware import System
from moejax.models import Attention, MoEModel
from moejax.partition import load_of
from moejax.serving._execution import Execution
from moejax.serving._fixed import (
    Requests,
    attention_core,
    by_kind,
    dense_work,
    projections,
    shared_expert_cost,
)
from moejax.serving._layer_costs import LayerCosts, attention_all_reduce, vector_bytes
from moejax.serving._moe_layers import Decision, Routed, routing_map_time, spilled


TaskTimes = dict[str, Float[Array, "layers gpus"]]

EARLY_TOKENS = 2
"""A GPU loads experts ahead of the decision that it has at least so many tokens for itself."""


class Kernels(eqx.Module):
    """How long a GPU takes for work that is not split into tasks."""

    system: System
    activation_bits: FloatLike
    efficiency: GPUEfficiency | None

    @property
    def bandwidth(self) -> FloatScalar:
        """B/s reached."""
        reached = 1.0 if self.efficiency is None else self.efficiency.bandwidth
        return self.system.gpu.effective_bandwidth * reached

    @property
    def flops_per_s(self) -> FloatScalar:
        """FLOP/s reached."""
        reached = 1.0 if self.efficiency is None else self.efficiency.compute
        return self.system.gpu.effective_flops_per_s(self.activation_bits) * reached

    def time(self, work: Work) -> Float[Array, "..."]:
        """Seconds of a kernel that streams what it reads."""
        return jnp.maximum(work.flops / self.flops_per_s, work.bytes / self.bandwidth)


def output_share(attention: Attention, hidden: int) -> float:
    """The part of an attention block's weights that its output projection has."""
    width = {
        "gqa": attention.heads * attention.head_dim,
        "mla": attention.heads * attention.value_dim,
        "linear": attention.value_heads * attention.value_head_dim,
    }[attention.kind]
    return width * hidden / attention.num_weights(hidden)


def attention_times(
    model: MoEModel,
    layers: tuple[Attention, ...],
    requests: Requests,
    kernels: Kernels,
    execution: Execution,
) -> TaskTimes:
    """Tasks of the attention block of each layer, on either side of attention itself."""
    system, on_gpu = kernels.system, execution.attention == "gpu"

    def block(attention: Attention) -> dict[str, Array]:
        work = projections(attention, model, system, requests)
        output = output_share(attention, model.hidden)
        core = attention_core(attention, model, system, requests, on_gpu)
        part = lambda share: kernels.time(Work(work.flops * share, work.bytes * share))
        return {
            "qkv": part(1 - output),
            "attention": core.pim_time,
            "gpu_attention": kernels.time(core.work),
            "projection": part(output),
        }

    times = by_kind(layers, block)
    all_reduce = attention_all_reduce(model, system, requests)
    return times | {"all_reduce": jnp.broadcast_to(all_reduce, times["qkv"].shape)}


def expert_times(
    true: LayerCosts,
    routed: Routed,
    decision: Decision,
    requests: Requests,
    num_groups: int | None,
    shared_on_pim: bool,
    kernels: Kernels,
    execution: Execution,
) -> TaskTimes:
    """Tasks of the routed part of each layer, [layers, gpus]."""
    model, system = true.model, true.system

    def one_gpu(on_gpu, own, counts, fixed, traffic) -> dict[str, Array]:
        costs = true.at(fixed, traffic)
        if kernels.efficiency is not None:
            costs = spilled(model, costs, kernels.efficiency)
        inside = jnp.clip(counts, 0, costs.max_tokens)
        load = load_of(on_gpu, inside, costs, num_groups)
        early = _early(on_gpu, own, inside, execution)
        values = costs.token_bytes * load.gpu_tokens
        late = costs.expert_bytes * (load.gpu_experts - early["taken"]) + values
        crossing = costs.pim_token_bytes * load.pim_tokens / 2 / kernels.bandwidth
        stream, inner = late / kernels.bandwidth, load.pim_expert_time
        # GPU and PIM keep each other from the memory by as much as the shorter one takes.
        blocked = costs.contention * jnp.minimum(stream, inner)
        return {
            "load_early": costs.expert_bytes * early["loaded"] / kernels.bandwidth,
            "load": stream + blocked,
            "gemm": costs.flops_per_token * load.gpu_tokens / kernels.flops_per_s,
            "to_pim": crossing,
            "pim": inner + blocked,
            "from_pim": crossing,
            "dispatch": true.dispatch_time(traffic),
            "combine": true.dispatch_time(traffic),
        }

    layers, gpus = routed.local_counts.shape[:2]
    over_gpus = jax.vmap(one_gpu, in_axes=(0, 0, 0, 0, None))
    times = jax.vmap(over_gpus)(
        decision.on_gpu, routed.own_counts, routed.local_counts, true.fixed, routed.traffic
    )
    every = lambda value: jnp.broadcast_to(value, (layers, gpus))
    router = router_work(model.hidden, model.num_experts, requests.count, model.precision)
    shared = shared_expert_cost(model, system, requests, shared_on_pim)
    summed = requests.count * vector_bytes(model) * (model.top_k + 1)
    launch = 0.0 if kernels.efficiency is None else kernels.efficiency.launch_time
    times |= {
        "router": every(kernels.time(router)),
        "all_gather": every(routing_map_time(model, system, requests)),
        "metadata": every(launch),
        "decide": every(jnp.where(decision.scheduled, system.scheduler_time, 0.0)),
        "load_shared": every(shared.work.bytes / kernels.bandwidth),
        "shared": every(shared.work.flops / kernels.flops_per_s),
        "sum": every(summed / kernels.bandwidth),
    }
    return times | {"pim": times["pim"] + every(shared.pim_time)}


def _early(
    on_gpu: Bool[Array, " experts"],
    own: Int[Array, " experts"],
    counts: Int[Array, " experts"],
    execution: Execution,
) -> dict[str, Array]:
    """Experts loaded ahead of the decision, and those of them that it then wants."""
    ahead = (own >= EARLY_TOKENS) & (counts > 0) & execution.early_load
    number = lambda chosen: jnp.sum(chosen).astype(jnp.result_type(float))
    return {"loaded": number(ahead), "taken": number(ahead & on_gpu)}


def dense_layer_times(
    model: MoEModel, requests: Requests, kernels: Kernels, execution: Execution
) -> Float[Array, " layers"]:
    """Layers without experts, whose tasks follow each other; of the slowest GPU."""
    if model.num_dense_layers == 0:
        return jnp.zeros(0, requests.count.dtype)
    layers = model.layers[: model.num_dense_layers]
    block = attention_times(model, layers, requests, kernels, execution)
    around = block["qkv"] + block["projection"]
    inside = jnp.maximum(block["attention"], block["gpu_attention"])
    ffn = kernels.time(dense_work(model, requests))
    return jnp.max(around + inside + ffn, axis=1) + block["all_reduce"][:, 0]
