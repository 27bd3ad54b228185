"""All MoE layers of one iteration: what runs where, and the time of the slowest GPU."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, Float, FloatScalar, Int, IntScalar
from moejax.cost import PIMCostTable, all_gather_time, dispatch_traffic, gpu_of_expert
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.partition import PartitionCosts, Times, channel_load, load_of, status_of, times
from moejax.routing import tokens_per_expert
from moejax.serving._fixed import Requests
from moejax.serving._layer_costs import LayerCosts, expert_energy_table
from moejax.serving._policies import Policy
from moejax.serving._workload import Workload


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
    GPU, and the token vectors that each GPU sends to each other."""

    local_counts: Int[Array, "layers gpus slots"]
    traffic: Float[Array, "layers gpus gpus"]


def summarize(
    model: MoEModel,
    system: System,
    workload: Workload,
    expert_ids: Int[Array, "layers requests top_k"],
) -> Routed:
    """Counts and traffic of every layer; the same for all policies."""
    slots = expert_slots(model.num_experts, system.num_gpus)

    def one_layer(ids) -> Routed:
        counts = tokens_per_expert(ids, model.num_experts, workload.valid)
        traffic = dispatch_traffic(
            ids, workload.valid, model.num_experts, system.num_gpus, dedup=system.link.dedup
        )
        return Routed(jnp.append(counts, 0)[slots], traffic)

    return jax.vmap(one_layer)(expert_ids)


def moe_layers(
    model: MoEModel,
    system: System,
    workload: Workload,
    policy: Policy,
    routed: Routed,
    believed: System | PIMCostTable,
    requests: Requests,
) -> Layer:
    """Every MoE layer, [layers]: decided on `believed`, scored on `system`."""
    layout = dict(num_groups=policy.num_groups, shared_on_pim=policy.shared_on_pim)
    true = LayerCosts.of(model, system, requests, **layout)
    known = true
    if isinstance(believed, PIMCostTable):
        known = true.believing(believed)
    elif believed is not system:
        known = LayerCosts.of(model, believed, requests, **layout)
    energy = expert_energy_table(model, system.pim, workload.max_batch)
    gathered = jnp.max(requests.count) * model.top_k * ROUTING_MAP_BYTES
    gather_time = all_gather_time(gathered, system.num_gpus, system.link)
    bound = workload.max_batch * model.top_k

    def one_layer(local, traffic, true_fixed, known_fixed) -> Layer:
        def one_gpu(counts, true_fixed, known_fixed) -> _Share:
            actual = true.at(true_fixed, traffic)
            on_gpu, status = policy.choose(counts, known.at(known_fixed, traffic), bound)
            return _share(on_gpu, counts, actual, policy.num_groups, energy, status)

        share = jax.vmap(one_gpu)(local, true_fixed, known_fixed)
        exposed = jnp.maximum(system.scheduler_time - true.dispatch_time(traffic), 0)
        slowest = jnp.argmax(share.times.total)
        return Layer(
            times=jax.tree.map(lambda time: time[slowest], share.times),
            attention_time=true_fixed.pim_time[slowest],
            scheduler_time=gather_time + (exposed if policy.scheduled else 0.0),
            experts_on_gpu=jnp.sum(share.experts_on_gpu).astype(energy.dtype),
            experts_on_pim=jnp.sum(share.experts_on_pim).astype(energy.dtype),
            channel_utilization=jnp.mean(share.channel_utilization),
            pim_energy=jnp.sum(share.pim_energy),
            status=jnp.max(share.status),
        )

    return jax.vmap(one_layer)(routed.local_counts, routed.traffic, true.fixed, known.fixed)


def _share(
    on_gpu: Bool[Array, " experts"],
    counts: Int[Array, " experts"],
    actual: PartitionCosts,
    num_groups: int | None,
    energy: Float[Array, " counts"],
    status: IntScalar,
) -> _Share:
    active = counts > 0
    on_pim = active & ~on_gpu
    inside = jnp.clip(counts, 0, actual.max_tokens)
    component = times(load_of(on_gpu, inside, actual, num_groups), actual)
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
        pim_energy=jnp.sum(jnp.where(on_pim, energy[inside], 0)),
        status=jnp.maximum(status, status_of(counts, actual)),
    )


def _positive(x: FloatScalar) -> FloatScalar:
    """`x`, or 1 where it is 0: the branch of a `where` that is not taken still needs a gradient."""
    return jnp.where(x > 0, x, 1.0)


def expert_slots(num_experts: int, num_gpus: int) -> Int[Array, "gpus slots"]:
    """Expert ids on each GPU, `num_experts` where a slot is empty; static (NumPy)."""
    owner = gpu_of_expert(num_experts, num_gpus)
    slots = np.full((num_gpus, -(-num_experts // num_gpus)), num_experts)
    for gpu in range(num_gpus):
        mine = np.flatnonzero(owner == gpu)
        slots[gpu, : len(mine)] = mine
    return slots
