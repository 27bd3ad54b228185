"""One decode iteration of a model on a system under a policy."""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._status import Status, flag, is_traced, merge, raise_if_bad
from moejax._typing import Array, Float, FloatScalar, PRNGKeyArray
from moejax.cost import PIMCostTable, Work, head_work, roofline_time
from moejax.hardware import System, TablePIM
from moejax.models import MoEModel
from moejax.partition import Partition, Times
from moejax.serving._fixed import Requests, by_kind, dense_layer_fixed, requests_by_gpu
from moejax.serving._layer_costs import attention_all_reduce
from moejax.serving._memory import memory_bytes
from moejax.serving._moe_layers import Layer, moe_layers, summarize
from moejax.serving._policies import Policy, policy_of
from moejax.serving._report import LIMITS, Report
from moejax.serving._workload import Workload, route


def evaluate(
    model: MoEModel,
    system: System,
    workload: Workload,
    policy: str | Policy | Callable[..., Partition],
    *,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None = None,
) -> Report:
    """Time, throughput and what limits them, for one decode iteration.

    Each MoE layer takes `max(communication, GPU, PIM)` of its slowest GPU, the ideal overlap of
    Sieve (arXiv 2605.11277, Eq. 1), plus the decision time that dispatch does not hide; layers,
    embedding and LM head add up.

    **Arguments:**

    - `model`, `system`, `workload`: one of each; batch them with `jax.vmap`.
    - `policy`: a name of `POLICIES`, a `Policy`, or any function
        `(tokens_per_expert, costs) -> Partition`.
    - `key`: draws the routing and nothing else, so that policies with one key are paired.
    - `believed`: what the policy decides on, if that is not the truth: another `System`, or a
        `PIMCostTable` of at least `max_batch` tokens for the PIM times alone. The result is
        always scored on `system`.

    **Returns:** `Report`, differentiable in every number of `model.precision` and `system` at the
    partition chosen.

    **Raises:** `ValueError` for unknown policies, traces of another model and impossible numbers;
    a `status` for the latter under tracing.
    """
    chosen = policy_of(policy)
    return compare(model, system, workload, [chosen], key=key, believed=believed)[chosen.name]


def compare(
    model: MoEModel,
    system: System,
    workload: Workload,
    policies: Sequence[str | Policy | Callable[..., Partition]],
    *,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None = None,
) -> dict[str, Report]:
    """`evaluate` for several policies on one draw of the routing, in one compilation.

    **Returns:** `Report` by policy name.

    **Raises:** as `evaluate`; `ValueError` for two policies of one name.
    """
    chosen = tuple(policy_of(policy) for policy in policies)
    names = [policy.name for policy in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"policies = {names}: allowed is every name once")
    if isinstance(believed, PIMCostTable) and believed.max_tokens < workload.max_batch:
        raise ValueError(
            f"believed covers {believed.max_tokens} tokens: allowed is max_batch = "
            f"{workload.max_batch} or more"
        )
    _check_table(model, system, workload)
    reports = _compare(model, system, workload, chosen, key, believed)
    if not is_traced(reports):
        for report in reports:
            raise_if_bad(f"{model.name} on {system.name}", report.status)
    return dict(zip(names, reports, strict=True))


@functools.partial(jax.jit, static_argnames="policies")
def _compare(
    model, system, workload, policies: tuple[Policy, ...], key, believed
) -> tuple[Report, ...]:
    believed = system if believed is None else believed
    requests = requests_by_gpu(workload, system.num_gpus)
    expert_ids = route(model, workload, key=key)
    routed = summarize(model, system, workload, expert_ids)
    shared = _Shared(
        dense=_dense_layers(model, system, requests),
        head_time=_head_time(model, system, requests),
        memory_bytes=memory_bytes(model, system, requests),
    )
    return tuple(
        _report(
            system,
            workload,
            moe_layers(model, system, workload, policy, routed, believed, requests),
            shared,
        )
        for policy in policies
    )


class _Shared(eqx.Module):
    """What no policy changes."""

    dense: Times
    head_time: FloatScalar
    memory_bytes: FloatScalar


def _report(system: System, workload: Workload, moe: Layer, shared: _Shared) -> Report:
    every = jax.tree.map(lambda *times: jnp.concatenate(times), moe.times, shared.dense)
    spent = _time_by_limit(every, moe.scheduler_time, shared.head_time)
    tbt = jnp.sum(spent)
    status = merge(workload.status, jnp.max(moe.status), flag(~(tbt > 0), Status.BAD_COST))
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
    return jax.tree.map(poison, report)


def _dense_layers(model: MoEModel, system: System, requests: Requests) -> Times:
    """Layers without experts, [dense layers]; of the slowest GPU."""
    if model.num_dense_layers == 0:
        none = jnp.zeros(0, requests.count.dtype)
        return Times(none, none, none, none, none)
    rate = system.gpu.effective_flops_per_s(model.precision.activation_bits)
    cost = lambda kind: dense_layer_fixed(kind, model, system, requests)
    fixed = by_kind(model.layers[: model.num_dense_layers], cost)
    offchip = fixed.work.bytes / system.gpu.effective_bandwidth
    compute, pim = fixed.work.flops / rate, fixed.pim_time
    memory = jnp.maximum(offchip, pim) + system.pim.contention * jnp.minimum(offchip, pim)
    comm = jnp.broadcast_to(attention_all_reduce(model, system, requests), memory.shape)
    every = Times(offchip, compute, pim, comm, jnp.maximum(jnp.maximum(comm, compute), memory))
    slowest = jnp.argmax(every.total, axis=1)
    return jax.tree.map(lambda time: jnp.take_along_axis(time, slowest[:, None], 1)[:, 0], every)


def _head_time(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """Embedding rows of the local tokens, and the LM head split over all GPUs by vocabulary."""
    share, total = 1 / system.num_gpus, jnp.sum(requests.count)
    work = head_work(model.hidden, model.vocab, total, model.precision)
    rate = system.gpu.effective_flops_per_s(model.precision.activation_bits)
    split = Work(work.flops * share, work.bytes * share)
    embedding = jnp.max(requests.count) * model.hidden * model.precision.weight_bits / 8
    bandwidth = system.gpu.effective_bandwidth
    return roofline_time(split, rate, bandwidth) + embedding / bandwidth


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


def _check_table(model: MoEModel, system: System, workload: Workload) -> None:
    """A table of GEMV times says here what it lacks; under tracing it would only yield NaN."""
    pim, inner = system.pim, model.moe_intermediate
    if not isinstance(pim, TablePIM):
        return
    for outputs, inputs in ((2 * inner, model.hidden), (model.hidden, inner)):
        covered = pim.max_tokens(outputs, inputs)
        if covered < workload.max_batch and not pim.extrapolate:
            raise ValueError(
                f"the PIM table covers {covered} tokens of {outputs} x {inputs}: allowed is "
                f"max_batch = {workload.max_batch} or more (or extrapolate=True)"
            )
        bits = model.precision.expert_weight_bits, model.precision.activation_bits
        pim.gemv_time(outputs, inputs, 1, weight_bits=bits[0], activation_bits=bits[1])
