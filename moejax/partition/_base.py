"""What every policy is given, what it returns, and the formula for the time of a layer."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import Status
from moejax._typing import Array, Bool, Float, FloatScalar, IntScalar


class PartitionCosts(eqx.Module):
    """What one MoE layer costs on one GPU with its PIM stacks (Sieve, arXiv 2605.11277, Eq. 1).

    **Arguments:** all times in s, sizes in bytes, rates per s; every field is traced.

    - `pim_time_by_tokens`: [max_tokens + 1], time of one expert with n tokens on PIM.
    - `attention_time`: PIM time that is spent whatever the partition (decode attention).
    - `comm_time`: dispatch and combine over the GPU interconnect.
    - `expert_bytes`: weights of one expert, read by the GPU if the expert runs there.
    - `token_bytes`: activations in and out of one token of an expert on the GPU.
    - `flops_per_token`: FLOPs of one token in one expert.
    - `fixed_bytes`, `fixed_flops`: what the GPU moves and computes whatever the partition.
    - `hbm_bandwidth`: external bandwidth between GPU and HBM, B/s.
    - `flops_per_s`: the GPU's rate.
    - `pim_token_bytes`: bytes over the external bus for one token of an expert on PIM (0).
    - `contention`: 0 (default) where PIM and GPU accesses proceed together (dual row buffers), 1
        where they exclude each other.
    - `channel_time_by_tokens`: [max_tokens + 1], time of one expert that lies wholly in one group
        of PIM channels; only policies with `num_groups` read it.
    """

    pim_time_by_tokens: Float[Array, " counts"]
    attention_time: FloatScalar
    comm_time: FloatScalar
    expert_bytes: FloatScalar
    token_bytes: FloatScalar
    flops_per_token: FloatScalar
    fixed_bytes: FloatScalar
    fixed_flops: FloatScalar
    hbm_bandwidth: FloatScalar
    flops_per_s: FloatScalar
    pim_token_bytes: FloatScalar
    contention: FloatScalar
    channel_time_by_tokens: Float[Array, " counts"] | None

    def __init__(
        self,
        pim_time_by_tokens: Any,
        attention_time: Any,
        comm_time: Any,
        expert_bytes: Any,
        token_bytes: Any,
        flops_per_token: Any,
        fixed_bytes: Any,
        fixed_flops: Any,
        hbm_bandwidth: Any,
        flops_per_s: Any,
        pim_token_bytes: Any = None,
        contention: Any = None,
        channel_time_by_tokens: Any = None,
    ):
        self.pim_time_by_tokens = as_float(pim_time_by_tokens)
        self.attention_time = as_float(attention_time)
        self.comm_time = as_float(comm_time)
        self.expert_bytes = as_float(expert_bytes)
        self.token_bytes = as_float(token_bytes)
        self.flops_per_token = as_float(flops_per_token)
        self.fixed_bytes = as_float(fixed_bytes)
        self.fixed_flops = as_float(fixed_flops)
        self.hbm_bandwidth = as_float(hbm_bandwidth)
        self.flops_per_s = as_float(flops_per_s)
        # Shaped like a field that is given, so that costs stacked for jax.vmap are stacked whole.
        absent = jnp.zeros_like(self.expert_bytes)
        self.pim_token_bytes = absent if pim_token_bytes is None else as_float(pim_token_bytes)
        self.contention = absent if contention is None else as_float(contention)
        table = channel_time_by_tokens
        self.channel_time_by_tokens = None if table is None else as_float(table)

    @property
    def max_tokens(self) -> int:
        """The largest token count that the PIM time table covers."""
        return self.pim_time_by_tokens.shape[0] - 1


class Partition(eqx.Module):
    """Which experts run on the GPU, and what that takes.

    Fields: `on_gpu` bool [experts] (an expert without tokens is on neither side), `num_gpu`
    int32, `gpu_time`, `pim_time`, `comm_time`, `total_time` in s, `status` int32 (see
    `moejax.Status`; the times are NaN unless it is 0).
    """

    on_gpu: Bool[Array, " experts"]
    num_gpu: IntScalar
    gpu_time: FloatScalar
    pim_time: FloatScalar
    comm_time: FloatScalar
    total_time: FloatScalar
    status: IntScalar


class Load(eqx.Module):
    """Everything that the time of a partition depends on: three sums and the PIM experts' time.

    Fields: `gpu_experts` and `gpu_tokens` (summed over experts on the GPU), `pim_tokens` and
    `pim_expert_time` in s (summed over experts on PIM).
    """

    gpu_experts: FloatScalar
    gpu_tokens: FloatScalar
    pim_tokens: FloatScalar
    pim_expert_time: FloatScalar


class Times(eqx.Module):
    """Component times of one layer in s: external memory, compute, PIM, communication, total."""

    offchip: FloatScalar
    compute: FloatScalar
    pim: FloatScalar
    comm: FloatScalar
    total: FloatScalar


def times(load: Load, costs: PartitionCosts) -> Times:
    """Component times of a layer (Sieve, Eq. 1 and its T_offchip, T_comp, T_PIM).

    `total = max(comm, compute, max(offchip, pim) + contention * min(offchip, pim))`.
    """
    moved = (
        costs.fixed_bytes
        + costs.expert_bytes * load.gpu_experts
        + costs.token_bytes * load.gpu_tokens
        + costs.pim_token_bytes * load.pim_tokens
    )
    offchip = moved / costs.hbm_bandwidth
    compute = (costs.fixed_flops + costs.flops_per_token * load.gpu_tokens) / costs.flops_per_s
    pim = costs.attention_time + load.pim_expert_time
    memory = jnp.maximum(offchip, pim) + costs.contention * jnp.minimum(offchip, pim)
    total = jnp.maximum(jnp.maximum(costs.comm_time, compute), memory)
    return Times(offchip, compute, pim, costs.comm_time, total)


def partition_from(
    on_gpu: Bool[Array, " experts"],
    num_gpu: IntScalar,
    component: Times,
    status: IntScalar,
) -> Partition:
    """Assembles a `Partition`, with NaN times and nothing placed where the status is not okay."""
    okay = status == Status.OK
    poison = lambda time: jnp.where(okay, time, jnp.nan)
    return Partition(
        on_gpu=on_gpu & okay,
        num_gpu=jnp.where(okay, num_gpu, 0),
        gpu_time=poison(jnp.maximum(component.offchip, component.compute)),
        pim_time=poison(component.pim),
        comm_time=poison(component.comm),
        total_time=poison(component.total),
        status=status,
    )
