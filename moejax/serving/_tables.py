"""Results as tidy columns, with units in their names: what plots, files and terminals want."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status, merge, raise_if_bad
from moejax._typing import Array, Bool, Int, IntScalar, PRNGKeyArray
from moejax._units import GB, MS
from moejax.cost import expert_work
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.partition import Partition
from moejax.serving._fixed import requests_by_gpu
from moejax.serving._inputs import input_status
from moejax.serving._layer_costs import LayerCosts, expert_time_table
from moejax.serving._moe_layers import decide, summarize
from moejax.serving._policies import Policy, policy_of
from moejax.serving._report import LIMITS, Report
from moejax.serving._workload import Workload, check_routing, route, routing_status


_COLUMNS: dict[str, Callable[[Report], Array]] = {
    "tbt_ms": lambda r: r.tbt / MS,
    "interactivity_tok_s": lambda r: r.interactivity,
    "throughput_per_gpu_tok_s": lambda r: r.throughput_per_gpu,
    "gpu_ms": lambda r: r.gpu_time / MS,
    "hbm_ms": lambda r: r.offchip_time / MS,
    "compute_ms": lambda r: r.compute_time / MS,
    "pim_ms": lambda r: r.pim_time / MS,
    "attention_ms": lambda r: r.attention_time / MS,
    "comm_ms": lambda r: r.comm_time / MS,
    "scheduler_ms": lambda r: r.scheduler_time / MS,
    "head_ms": lambda r: r.head_time / MS,
    "experts_on_gpu": lambda r: r.experts_on_gpu,
    "experts_on_pim": lambda r: r.experts_on_pim,
    "channel_utilization": lambda r: r.channel_utilization,
    "memory_gb": lambda r: r.memory_bytes / GB,
    "memory_fits": lambda r: r.memory_fits,
    "pim_energy_j": lambda r: r.pim_energy,
    "pim_energy_j_per_token": lambda r: r.pim_energy_per_token,
}


def columns(report: Report) -> dict[str, np.ndarray]:
    """A `Report`, whatever its batch axes, as columns of NumPy arrays with those axes.

    `limited_by` and `status` are names: one of `LIMITS`, one of `moejax.Status` in lower case.
    """
    table = {name: np.asarray(column(report)) for name, column in _COLUMNS.items()}
    # The last one is what -1 picks: nothing is known to limit a row that is not okay.
    table["limited_by"] = np.array([*LIMITS, "-"])[np.asarray(report.limited_by)]
    names = np.array([status.name.lower() for status in Status])
    table["status"] = names[np.asarray(report.status)]
    return table


def partition_layers(
    model: MoEModel,
    system: System,
    workload: Workload,
    policy: str | Policy | Callable[..., Partition],
    *,
    key: PRNGKeyArray,
) -> tuple[Int[Array, "layers gpus slots"], Bool[Array, "layers gpus slots"]]:
    """What runs where: tokens per expert, and whether the expert is on the GPU.

    Arguments as `evaluate`, and the same routing for the same key. Experts are in the order of
    their ids; a GPU with fewer experts than another has empty slots (no tokens) at its end.

    **Raises:** `ValueError` as `evaluate`. Under tracing there is no status beside the result, so
    look at that of `evaluate`.
    """
    check_routing(model, workload)
    counts, on_gpu, status = _partition(model, system, workload, policy_of(policy), key)
    raise_if_bad(f"{model.name} on {system.name}", status)
    return counts, on_gpu


@functools.partial(jax.jit, static_argnames="policy")
def _partition(
    model: MoEModel, system: System, workload: Workload, policy: Policy, key: PRNGKeyArray
) -> tuple[Array, Array, IntScalar]:
    """`partition_layers` with the worst status."""
    requests = requests_by_gpu(workload, system.num_gpus)
    expert_ids = route(model, workload, key=key)
    routed = summarize(model, system, workload, expert_ids)
    num_groups, shared_on_pim = policy.layout
    costs = LayerCosts.of(
        model, system, requests, num_groups=num_groups, shared_on_pim=shared_on_pim
    )
    decision = decide(policy, routed, costs, workload.num_slots * model.top_k)
    status = merge(
        input_status(model, system),
        workload.status,
        routing_status(workload, expert_ids, model.num_experts),
        jnp.max(decision.status),
    )
    return routed.local_counts, decision.on_gpu & (routed.local_counts > 0), status


def expert_rows(
    model: MoEModel, system: System, workload: Workload, policy: str | Policy, *, key: PRNGKeyArray
) -> dict[str, np.ndarray]:
    """Every active expert of every layer as a dot of the roofline plot.

    Columns: `arithmetic_intensity` in FLOP per byte of weights and activations read once,
    `flops_per_s` reached where the expert runs (on its channels, for policies that deal experts
    out over groups of them), `tokens`, `runs_on` (`"gpu"` or `"pim"`).

    **Raises:** `ValueError` as `evaluate`.
    """
    counts, on_gpu = partition_layers(model, system, workload, policy, key=key)
    active = np.asarray(counts) > 0
    tokens, runs_on_gpu = np.asarray(counts)[active], np.asarray(on_gpu)[active]
    work = expert_work(model.hidden, model.moe_intermediate, jnp.asarray(tokens), model.precision)
    flops, moved = np.asarray(work.flops), np.asarray(work.bytes)
    rate = system.gpu.effective_flops_per_s(model.precision.activation_bits)
    gpu_time = np.maximum(flops / float(rate), moved / float(system.gpu.effective_bandwidth))
    groups = policy_of(policy).num_groups or 1
    pim = system.pim if groups == 1 else system.pim.fraction(groups)
    pim_time = np.asarray(expert_time_table(model, pim, workload.num_slots))[tokens]
    return {
        "arithmetic_intensity": flops / moved,
        "flops_per_s": flops / np.where(runs_on_gpu, gpu_time, pim_time),
        "tokens": tokens,
        "runs_on": np.where(runs_on_gpu, "gpu", "pim"),
    }
