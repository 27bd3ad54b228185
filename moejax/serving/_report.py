"""What an evaluation says."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._status import Status, flag, merge
from moejax._typing import Array, BoolScalar, Float, FloatScalar, IntScalar
from moejax.hardware import System
from moejax.partition import Times
from moejax.serving._moe_layers import Layer
from moejax.serving._shared import Shared
from moejax.serving._workload import Workload


LIMITS = ("comm", "hbm", "compute", "pim", "scheduler")
"""What can limit a layer: the order of `Report.time_limited_by` and the meaning of
`Report.limited_by`. `scheduler` is decision time that dispatch does not hide, with the all-gather
of routing maps before it."""


class Report(eqx.Module):
    """One decode iteration. Scalars unless noted; times in s, sums over all layers.

    The component times of a layer are those of its slowest GPU; they overlap, so `tbt` is not
    their sum. Everything is NaN where `status` is not 0.

    Fields:

    - `tbt`: time between tokens, one whole iteration.
    - `interactivity`: tokens per s and user, `1 / tbt`.
    - `throughput_per_gpu`: tokens per s and GPU, `batch / (gpus * tbt)`.
    - `gpu_time`: the larger of `offchip_time` (external HBM) and `compute_time`, layer by layer.
    - `pim_time`, of which `attention_time` is decode attention and shared experts on PIM.
    - `comm_time`: dispatch, combine and all-reduce.
    - `scheduler_time`: decision and all-gather time that nothing hides.
    - `head_time`: embedding and LM head.
    - `time_limited_by`: [5], the share of `tbt` spent in layers that each of `LIMITS` limits, s.
    - `limited_by`: index into `LIMITS` of the largest of those; -1 where `status` is not 0.
    - `experts_on_gpu`, `experts_on_pim`: active experts of a layer on either side, mean over
        layers.
    - `channel_utilization`: mean over peak busy time of PIM channel groups, mean over layers; 1
        where every expert uses all channels.
    - `memory_bytes`: weights and cache of the fullest GPU; `memory_fits`: whether HBM holds them.
    - `pim_energy`: J spent by experts on PIM, NaN where the PIM does not know its energy.
    - `status`: int32, see `moejax.Status`.
    """

    tbt: FloatScalar
    interactivity: FloatScalar
    throughput_per_gpu: FloatScalar
    gpu_time: FloatScalar
    offchip_time: FloatScalar
    compute_time: FloatScalar
    pim_time: FloatScalar
    attention_time: FloatScalar
    comm_time: FloatScalar
    scheduler_time: FloatScalar
    head_time: FloatScalar
    time_limited_by: Float[Array, " limits"]
    limited_by: IntScalar
    experts_on_gpu: FloatScalar
    experts_on_pim: FloatScalar
    channel_utilization: FloatScalar
    memory_bytes: FloatScalar
    memory_fits: BoolScalar
    pim_energy: FloatScalar
    status: IntScalar


def report_of(system: System, workload: Workload, moe: Layer, shared: Shared) -> Report:
    """Adds up layers, LM head and embedding; NaN where something was wrong."""
    every = jax.tree.map(lambda *times: jnp.concatenate(times), moe.times, shared.dense)
    spent = _time_by_limit(every, moe.scheduler_time, shared.head_time)
    tbt = jnp.sum(spent)
    # What went in comes first: a rate of zero is why a time is infinite.
    seen = merge(jnp.max(moe.status), flag(~(tbt > 0), Status.BAD_COST))
    status = jnp.where(shared.status != Status.OK, shared.status, seen)
    report = Report(
        tbt=tbt,
        interactivity=1 / tbt,
        throughput_per_gpu=workload.batch / (system.num_gpus * tbt),
        gpu_time=jnp.sum(jnp.maximum(every.offchip, every.compute)),
        offchip_time=jnp.sum(every.offchip),
        compute_time=jnp.sum(every.compute),
        pim_time=jnp.sum(every.pim),
        attention_time=jnp.sum(moe.attention_time) + jnp.sum(shared.dense.pim),
        comm_time=jnp.sum(every.comm),
        scheduler_time=jnp.sum(moe.scheduler_time),
        head_time=shared.head_time,
        time_limited_by=spent,
        limited_by=jnp.argmax(spent).astype(jnp.int32),
        experts_on_gpu=jnp.mean(moe.experts_on_gpu),
        experts_on_pim=jnp.mean(moe.experts_on_pim),
        channel_utilization=jnp.mean(moe.channel_utilization),
        memory_bytes=shared.memory_bytes,
        memory_fits=shared.memory_bytes <= system.gpu.hbm_bytes,
        pim_energy=jnp.sum(moe.pim_energy),
        status=status,
    )
    okay = status == Status.OK
    poison = lambda x: jnp.where(okay, x, jnp.nan) if eqx.is_inexact_array(x) else x
    report = jax.tree.map(poison, report)
    discrete = lambda r: (r.limited_by, r.memory_fits)
    nothing = jnp.where(okay, report.limited_by, -1), report.memory_fits & okay
    return eqx.tree_at(discrete, report, nothing)


def _time_by_limit(
    layers: Times, scheduler_time: Float[Array, " layers"], head_time: FloatScalar
) -> Float[Array, " limits"]:
    """Seconds that each of `LIMITS` is what a layer waits for. LM head and embedding are memory."""
    memory = jnp.where(layers.offchip >= layers.pim, LIMITS.index("hbm"), LIMITS.index("pim"))
    limit = jnp.where(layers.compute >= layers.total, LIMITS.index("compute"), memory)
    limit = jnp.where(layers.comm >= layers.total, LIMITS.index("comm"), limit)
    spent = jnp.zeros(len(LIMITS), layers.total.dtype).at[limit].add(layers.total)
    spent = spent.at[LIMITS.index("hbm")].add(head_time)
    return spent.at[LIMITS.index("scheduler")].add(jnp.sum(scheduler_time))
