"""What an evaluation says."""

import equinox as eqx

from moejax._typing import Array, BoolScalar, Float, FloatScalar, IntScalar


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
    - `limited_by`: index into `LIMITS` of the largest of those.
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
