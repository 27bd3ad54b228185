"""What an evaluation says."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._status import Status, flag, merge
from moejax._typing import Array, BoolScalar, Float, FloatScalar, IntScalar
from moejax.hardware import System
from moejax.partition import Times
from moejax.serving._execution import Execution
from moejax.serving._graph_time import GraphTimes, graph_of, scheduling_time, time_by_limit
from moejax.serving._moe_layers import Layer
from moejax.serving._shared import Shared
from moejax.serving._workload import Workload


LIMITS = ("comm", "hbm", "compute", "pim", "scheduler")
"""What can limit a layer: the order of `Report.time_limited_by` and the meaning of
`Report.limited_by`. `scheduler` is decision time that dispatch does not hide, with the all-gather
of routing maps before it."""


class Report(eqx.Module):
    """One iteration. Scalars unless noted; times in s, sums over all layers (and, where there are
    two half batches, over both).

    The component times of a layer are those of its slowest GPU; they overlap, so `tbt` is not
    their sum. Everything is NaN where `status` is not 0.

    Fields:

    - `tbt`: time between tokens, one whole iteration.
    - `interactivity`: tokens per s and user, `1 / tbt`.
    - `throughput_per_gpu`: tokens per s and GPU, `batch / (gpus * tbt)`; of a batch with prompts,
        those of the requests that decode.
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
    - `pim_energy`: J spent by experts on PIM, `pim_energy_per_token` for each token that a request
        gets; NaN where the PIM does not know its energy (`TablePIM` with a column `pj` does).
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
    pim_energy_per_token: FloatScalar
    status: IntScalar

    @property
    def breakdown(self) -> dict[str, FloatScalar]:
        """Where `tbt` goes, s by kind: what each layer waits for, added up over the layers."""
        kinds = zip(LIMITS, jnp.moveaxis(self.time_limited_by, -1, 0), strict=True)
        spent = {name: time for name, time in kinds}
        memory = spent.pop("hbm") + spent.pop("pim")
        return {
            "compute": spent["compute"],
            "communication": spent["comm"],
            "memory": memory,
            "scheduler": spent["scheduler"],
        }


def report_of(
    system: System,
    workload: Workload,
    parts: list[Layer],
    shared: Shared,
    graphs: GraphTimes | None,
    execution: Execution,
) -> Report:
    """Adds up layers, LM head and embedding; NaN where something was wrong.

    **Arguments:**

    - `parts`: the MoE layers of the whole batch, or of each half of it.
    - `graphs`: what their execution graphs say, where they decide on the time.
    """
    moe = parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: _both(*x), *parts)
    every = jax.tree.map(lambda *times: jnp.concatenate(times), moe.times, shared.dense)
    scheduler_time, graph_status = moe.scheduler_time, jnp.int32(Status.OK)
    if graphs is None:
        spent = _time_by_limit(every, scheduler_time)
    else:
        dag = graph_of(system, execution)
        scheduler_time = scheduling_time(dag, graphs.timeline)
        spent = time_by_limit(dag, graphs.timeline, LIMITS) + _time_by_limit(shared.dense, 0.0)
        spent = spent.at[LIMITS.index("hbm")].add(graphs.lead)
        graph_status = graphs.status
    # LM head and embedding are memory.
    spent = spent.at[LIMITS.index("hbm")].add(shared.head_time)
    tbt = jnp.sum(spent)
    # What went in comes first: a rate of zero is why a time is infinite.
    seen = merge(jnp.max(moe.status), graph_status, flag(~(tbt > 0), Status.BAD_COST))
    status = jnp.where(shared.status != Status.OK, shared.status, seen)
    report = Report(
        tbt=tbt,
        interactivity=1 / tbt,
        throughput_per_gpu=workload.decoding / (system.num_gpus * tbt),
        gpu_time=jnp.sum(jnp.maximum(every.offchip, every.compute)),
        offchip_time=jnp.sum(every.offchip),
        compute_time=jnp.sum(every.compute),
        pim_time=jnp.sum(every.pim),
        attention_time=jnp.sum(moe.attention_time) + jnp.sum(shared.dense.pim),
        comm_time=jnp.sum(every.comm),
        scheduler_time=jnp.sum(scheduler_time),
        head_time=shared.head_time,
        time_limited_by=spent,
        limited_by=jnp.argmax(spent).astype(jnp.int32),
        experts_on_gpu=jnp.mean(moe.experts_on_gpu),
        experts_on_pim=jnp.mean(moe.experts_on_pim),
        channel_utilization=jnp.mean(moe.channel_utilization) / len(parts),
        memory_bytes=shared.memory_bytes,
        memory_fits=shared.memory_bytes <= system.gpu.hbm_bytes,
        pim_energy=jnp.sum(moe.pim_energy),
        pim_energy_per_token=jnp.sum(moe.pim_energy) / jnp.maximum(workload.decoding, 1),
        status=status,
    )
    okay = status == Status.OK
    poison = lambda x: jnp.where(okay, x, jnp.nan) if eqx.is_inexact_array(x) else x
    report = jax.tree.map(poison, report)
    discrete = lambda r: (r.limited_by, r.memory_fits)
    nothing = jnp.where(okay, report.limited_by, -1), report.memory_fits & okay
    return eqx.tree_at(discrete, report, nothing)


def _both(first: Array, second: Array) -> Array:
    """Two half batches: times and counts add up, of two statuses the worse one counts."""
    return jnp.maximum(first, second) if first.dtype == jnp.int32 else first + second


def _time_by_limit(
    layers: Times, scheduler_time: Float[Array, " layers"] | float
) -> Float[Array, " limits"]:
    """Seconds that each of `LIMITS` is what a layer waits for."""
    memory = jnp.where(layers.offchip >= layers.pim, LIMITS.index("hbm"), LIMITS.index("pim"))
    limit = jnp.where(layers.compute >= layers.total, LIMITS.index("compute"), memory)
    limit = jnp.where(layers.comm >= layers.total, LIMITS.index("comm"), limit)
    spent = jnp.zeros(len(LIMITS), layers.total.dtype).at[limit].add(layers.total)
    return spent.at[LIMITS.index("scheduler")].add(jnp.sum(scheduler_time))
