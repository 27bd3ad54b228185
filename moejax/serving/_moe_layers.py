"""All MoE layers of one iteration: what runs where, and the time of the slowest GPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, BoolScalar, Float, FloatScalar, Int, IntScalar
from moejax.cost import all_gather_time, dispatch_traffic, gpu_of_expert
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.partition import PartitionCosts, Times, channel_load, load_of, status_of, times
from moejax.routing import tokens_per_expert
from moejax.serving._fixed import Requests
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


class Decision(eqx.Module):
    """What a policy chose, [layers, gpus, ...], and what its decision costs."""

    on_gpu: Bool[Array, "layers gpus slots"]
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
) -> Layer:
    """Every MoE layer under a decision, [layers]."""
    model, system = true.model, true.system
    energy = expert_energy_table(model, system.pim, true.max_tokens)
    gathered = jnp.max(requests.count) * model.top_k * ROUTING_MAP_BYTES
    gather_time = all_gather_time(gathered, system.num_gpus, system.link)

    def one_gpu(on_gpu, counts, fixed, traffic) -> _Share:
        return _share(on_gpu, counts, true.at(fixed, traffic), num_groups, energy)

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
