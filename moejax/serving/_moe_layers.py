"""All MoE layers of one iteration: what runs where, and the time of the slowest GPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, BoolScalar, Float, FloatScalar, Int, IntScalar
from moejax.cost import (
    GPUEfficiency,
    all_gather_time,
    dispatch_traffic,
    gpu_of_expert,
    gpu_of_token,
)
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.partition import PartitionCosts, Times, channel_load, load_of, status_of, times
from moejax.routing import tokens_per_expert
from moejax.serving._fixed import Requests, token_half
from moejax.serving._layer_costs import LayerCosts, expert_energy_table
from moejax.serving._policies import Policy
from moejax.serving._workload import Workload


T = TypeVar("T")

ROUTING_MAP_BYTES = 4.0
"""Bytes of one expert id in the all-gather of routing maps (Sieve, execution graph)."""


class Layer(eqx.Module):
    """What one layer takes. Under vmap every field has an axis [layers].

    `times` and `attention_time` are those of the slowest GPU; `scheduler_time` is decision and
    all-gather time that dispatch does not hide; the experts are counted over all GPUs.
    """

    times: Times
    attention_time: FloatScalar
    scheduler_time: FloatScalar
    experts_on_gpu: FloatScalar
    experts_on_pim: FloatScalar
    channel_utilization: FloatScalar
    pim_energy: FloatScalar
    status: IntScalar


class _Share(eqx.Module):
    """One GPU's part of a layer."""

    times: Times
    experts_on_gpu: IntScalar
    experts_on_pim: IntScalar
    channel_utilization: FloatScalar
    pim_energy: FloatScalar
    status: IntScalar


class Routed(eqx.Module):
    """What the routing of an iteration comes down to, [layers, ...]: tokens per expert on each
    GPU, those of them that the GPU has itself, and the token vectors that each GPU sends to each
    other."""

    local_counts: Int[Array, "layers gpus experts"]
    own_counts: Int[Array, "layers gpus experts"]
    traffic: Float[Array, "layers gpus gpus"]


def summarize(
    model: MoEModel,
    system: System,
    workload: Workload,
    expert_ids: Int[Array, "layers slots top_k"],
    half: int | None = None,
) -> Routed:
    """Counts and traffic of every layer, of all tokens or half of them; the same for all
    policies."""
    slots, num_gpus = expert_slots(model.num_experts, system.num_gpus), system.num_gpus
    valid = workload.valid
    if half is not None:
        valid &= token_half(workload, num_gpus) == half
    origin = gpu_of_token(workload.num_slots, num_gpus)

    def one_layer(ids) -> Routed:
        counts = tokens_per_expert(ids, model.num_experts, valid)
        traffic = dispatch_traffic(ids, valid, model.num_experts, num_gpus, dedup=system.link.dedup)
        at_home = [
            jnp.append(tokens_per_expert(ids, model.num_experts, valid & (origin == gpu)), 0)[mine]
            for gpu, mine in enumerate(slots)
        ]
        return Routed(jnp.append(counts, 0)[slots], jnp.stack(at_home), traffic)

    return jax.vmap(one_layer)(expert_ids)


class Decision(eqx.Module):
    """What a policy chose, [layers, gpus, ...], and what its decision costs."""

    on_gpu: Bool[Array, "layers gpus experts"]
    status: Int[Array, "layers gpus"]
    scheduled: BoolScalar


def decide(policy: Policy, routed: Routed, known: LayerCosts, max_total_tokens: int) -> Decision:
    """Every MoE layer and GPU, on costs that the policy believes in."""

    def one_gpu(counts, fixed, traffic):
        return policy.choose(counts, known.at(fixed, traffic), max_total_tokens)

    on_gpu, status = _on_every_gpu(one_gpu, routed.local_counts, known.fixed, _shown(routed))
    return Decision(on_gpu, status, jnp.asarray(policy.scheduled))


def score_layers(
    decision: Decision,
    routed: Routed,
    true: LayerCosts,
    requests: Requests,
    num_groups: int | None,
    efficiency: GPUEfficiency | None = None,
) -> Layer:
    """Every MoE layer under a decision, [layers]."""
    model, system = true.model, true.system
    energy = expert_energy_table(model, system.pim, true.max_tokens)
    gather_time = routing_map_time(model, system, requests)

    def one_gpu(on_gpu, counts, fixed, traffic) -> _Share:
        costs = true.at(fixed, traffic)
        if efficiency is not None:
            costs = spilled(model, costs, efficiency)
        return _share(on_gpu, counts, costs, num_groups, energy, efficiency)

    def one_layer(share: _Share, status, traffic, attention_time) -> Layer:
        exposed = jnp.maximum(system.scheduler_time - true.dispatch_time(traffic), 0)
        slowest = jnp.argmax(share.times.total)
        return Layer(
            times=jax.tree.map(lambda time: time[slowest], share.times),
            attention_time=attention_time[slowest],
            scheduler_time=gather_time + jnp.where(decision.scheduled, exposed, 0.0),
            experts_on_gpu=jnp.sum(share.experts_on_gpu).astype(energy.dtype),
            experts_on_pim=jnp.sum(share.experts_on_pim).astype(energy.dtype),
            channel_utilization=jnp.mean(share.channel_utilization),
            pim_energy=jnp.sum(share.pim_energy),
            status=jnp.maximum(jnp.max(share.status), jnp.max(status)),
        )

    shares = _on_every_gpu(
        one_gpu, decision.on_gpu, routed.local_counts, true.fixed, _shown(routed)
    )
    return jax.vmap(one_layer)(shares, decision.status, routed.traffic, true.fixed.pim_time)


def routing_map_time(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """The all-gather of expert ids before a decision, s; 0 on one GPU."""
    gathered = jnp.max(requests.count) * model.top_k * ROUTING_MAP_BYTES
    return all_gather_time(gathered, system.num_gpus, system.link)


def spilled(model: MoEModel, costs: PartitionCosts, efficiency: GPUEfficiency) -> PartitionCosts:
    """The same with activations inside experts going through memory."""
    inner = 3.0 * efficiency.spill * model.moe_intermediate * model.precision.activation_bits / 8
    return eqx.tree_at(lambda c: c.token_bytes, costs, costs.token_bytes + inner)


def joined(component: Times, costs: PartitionCosts, efficiency: GPUEfficiency) -> Times:
    """The times of a GPU whose kernels reach only so much of its roofline. What they lose to
    launches, or because memory and arithmetic do not overlap, counts as memory time."""
    offchip, compute = (
        component.offchip / efficiency.bandwidth,
        component.compute / efficiency.compute,
    )
    gpu = efficiency.join(offchip, compute)
    offchip = jnp.where(offchip >= compute, gpu, offchip)
    compute = jnp.where(offchip >= gpu, compute, gpu)
    memory = jnp.maximum(offchip, component.pim)
    memory += costs.contention * jnp.minimum(offchip, component.pim)
    total = jnp.maximum(jnp.maximum(component.comm, compute), memory)
    return Times(offchip, compute, component.pim, component.comm, total)


def _shown(routed: Routed) -> Float[Array, "layers gpus gpus gpus"]:
    """The traffic of a layer, once for each GPU."""
    num_gpus = routed.traffic.shape[-1]
    return jnp.repeat(routed.traffic[:, None], num_gpus, axis=1)


def _on_every_gpu(function: Callable[..., T], *arrays: Any) -> T:
    """`function` of every GPU of every layer: [layers, gpus, ...] in and out.

    One flat axis, because each nested vmap is another pass over the whole program when it is
    traced.
    """
    axes = jax.tree.leaves(arrays)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(axes[0] * axes[1], *x.shape[2:]), arrays)
    return jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]), jax.vmap(function)(*flat))


def _share(
    on_gpu: Bool[Array, " experts"],
    counts: Int[Array, " experts"],
    actual: PartitionCosts,
    num_groups: int | None,
    energy: Float[Array, " counts"],
    efficiency: GPUEfficiency | None,
) -> _Share:
    active = counts > 0
    on_pim = active & ~on_gpu
    inside = jnp.clip(counts, 0, actual.max_tokens)
    component = times(load_of(on_gpu, inside, actual, num_groups), actual)
    if efficiency is not None:
        component = joined(component, actual, efficiency)
    # Broadcast, because communication is the same on every GPU and does not depend on the share.
    component = jax.tree.map(lambda time: time + jnp.zeros_like(component.total), component)
    use = jnp.ones_like(component.total)
    if num_groups is not None:
        busy = channel_load(on_pim, inside, actual, num_groups) + actual.attention_time
        use = jnp.where(jnp.max(busy) > 0, jnp.mean(busy) / _positive(jnp.max(busy)), 1.0)
    return _Share(
        times=component,
        experts_on_gpu=jnp.sum(active & on_gpu),
        experts_on_pim=jnp.sum(on_pim),
        channel_utilization=use,
        # Of a PIM that does not know its energy, no experts do not use none.
        pim_energy=jnp.sum(jnp.where(on_pim, energy[inside], 0 * energy[1])),
        status=status_of(counts, actual),
    )


def _positive(x: FloatScalar) -> FloatScalar:
    """`x`, or 1 where it is 0: the branch of a `where` that is not taken still needs a gradient."""
    return jnp.where(x > 0, x, 1.0)


def expert_slots(num_experts: int, num_gpus: int) -> np.ndarray:
    """Expert ids on each GPU, int [gpus, slots], `num_experts` where a slot is empty."""
    owner = gpu_of_expert(num_experts, num_gpus)
    slots = np.full((num_gpus, -(-num_experts // num_gpus)), num_experts)
    for gpu in range(num_gpus):
        mine = np.flatnonzero(owner == gpu)
        slots[gpu, : len(mine)] = mine
    return slots
