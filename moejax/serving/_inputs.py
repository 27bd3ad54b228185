"""What constructors could not look at under tracing: numbers of a system and bit widths."""

import jax.numpy as jnp

from moejax._status import Status, flag, merge
from moejax._typing import IntScalar
from moejax.hardware import System
from moejax.models import MoEModel


MAX_BITS = 64.0


def input_status(model: MoEModel, system: System) -> IntScalar:
    """Whether the rates, times and widths of an evaluation can be meant. The same limits as those
    of `GPU`, `Link`, `System` and `Precision`, which raise where they see a number."""
    gpu, link, pim, precision = system.gpu, system.link, system.pim, model.precision
    rates = (gpu.flops_per_s, gpu.flops_per_s_8bit, gpu.hbm_bandwidth, gpu.hbm_bytes)
    rates = jnp.stack([*rates, link.bandwidth])
    efficiencies = jnp.stack([gpu.compute_efficiency, gpu.bandwidth_efficiency])
    bits = jnp.stack([precision.weight_bits, precision.expert_weight_bits])
    bits = jnp.append(bits, jnp.stack([precision.activation_bits, precision.kv_bits]))
    times = jnp.stack([link.latency, system.scheduler_time, pim.turn_time])
    splits = (system.attention_tp >= 1) & (system.num_gpus % system.attention_tp == 0)

    fine_rates = jnp.all((rates > 0) & jnp.isfinite(rates))
    fine_rates &= jnp.all((efficiencies > 0) & (efficiencies <= 1))
    fine_costs = jnp.all((bits > 0) & (bits <= MAX_BITS)) & splits
    fine_costs &= jnp.all((times >= 0) & jnp.isfinite(times))
    fine_costs &= (pim.contention >= 0) & (pim.contention <= 1) & (pim.attention_overhead > 0)
    return merge(flag(~fine_costs, Status.BAD_COST), flag(~fine_rates, Status.BAD_RATE))
