"""One decode iteration of a model on a system under a policy."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp

from moejax._status import is_traced, merge, raise_if_bad
from moejax._typing import PRNGKeyArray
from moejax.cost import GPUEfficiency, PIMCostTable
from moejax.hardware import NMPSystem, System, TablePIM
from moejax.models import MoEModel
from moejax.partition import Partition
from moejax.placement import Placement
from moejax.serving._execution import Execution
from moejax.serving._fixed import Requests, requests_by_gpu
from moejax.serving._graph_time import run_graphs
from moejax.serving._inputs import check_optional, check_required, input_status
from moejax.serving._layer_costs import LayerCosts
from moejax.serving._memory import memory_detail
from moejax.serving._moe_layers import Decision, Routed, decide, score_layers, summarize
from moejax.serving._near_memory_evaluate import NearMemoryReport, evaluate_placement
from moejax.serving._place import place
from moejax.serving._policies import Policy, policy_of
from moejax.serving._report import Report, report_of
from moejax.serving._shared import Shared
from moejax.serving._task_times import Kernels, expert_times
from moejax.serving._workload import Workload, check_routing, route, routing_status


@overload
def evaluate(
    model: MoEModel,
    system: System,
    workload: Workload,
    policy: str | Policy | Callable[..., Partition],
    *,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None = None,
    execution: Execution | None = None,
    efficiency: GPUEfficiency | None = None,
    must_fit: bool = True,
) -> Report: ...


@overload
def evaluate(
    model: MoEModel,
    system: NMPSystem,
    workload: Workload,
    policy: str | Placement,
    *,
    key: PRNGKeyArray,
    must_fit: bool = True,
) -> NearMemoryReport: ...


def evaluate(
    model: MoEModel,
    system: System | NMPSystem,
    workload: Workload,
    policy: str | Policy | Callable[..., Partition] | Placement,
    *,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None = None,
    execution: Execution | None = None,
    efficiency: GPUEfficiency | None = None,
    must_fit: bool = True,
) -> Report | NearMemoryReport:
    """Time, throughput and what limits them, for one iteration.

    Each MoE layer takes `max(communication, GPU, PIM)` of its slowest GPU, the ideal overlap of
    Sieve (arXiv 2605.11277, Eq. 1), plus the decision time that dispatch does not hide; layers,
    embedding and LM head add up. `execution` replaces that by the execution graph, task by task.
    On a near-memory system nothing overlaps, and a placement of the experts takes the place of the
    policy: see `evaluate_placement`.

    **Arguments:**

    - `model`, `system`, `workload`: one of each; batch them with `jax.vmap`.
    - `policy`: a name of `POLICIES`, a `Policy`, or any function
        `(tokens_per_expert, costs) -> Partition`. For an `NMPSystem`: a `Placement`, or a name of
        `placement.METHODS`, which is fitted to the workload's own routing (`serving.place` fits
        it to another trace, once for many calls).
    - `key`: draws the routing and nothing else, so that policies with one key are paired.
    - `believed`: what the policy decides on, if that is not the truth: another `System`, or a
        `PIMCostTable` of at least `workload.num_slots` tokens for the PIM times alone. The result
        is always scored on `system`.
    - `execution`: how the tasks of a layer are ordered, `Execution("coarse")` for instance. Static.
    - `efficiency`: what GPU kernels really reach of `system.gpu`, which no policy knows of;
        `cost.gpu_efficiency` has measured ones. `None`: the roofline.
    - `must_fit`: weights and caches have to fit into memory. `False` times them all the same.

    **Returns:** `Report`, or `NearMemoryReport` for an `NMPSystem`; differentiable in every number
    of `model.precision` and `system` at the partition chosen.

    **Raises:** `ValueError` for unknown policies, traces of another model, impossible numbers and
    contexts that memory does not hold; a `status` for the latter two under tracing.
    """
    if isinstance(system, NMPSystem):
        options = dict(believed=believed, execution=execution, efficiency=efficiency)
        if given := [name for name, value in options.items() if value is not None]:
            raise ValueError(f"{given[0]} is allowed for systems with PIM only")
        return _near_memory(model, system, workload, policy, key, must_fit)
    if isinstance(policy, Placement):
        raise ValueError(f"policy is a Placement, but {system.name} is no near-memory system")
    chosen = policy_of(policy)
    return compare(
        model,
        system,
        workload,
        [chosen],
        key=key,
        believed=believed,
        execution=execution,
        efficiency=efficiency,
        must_fit=must_fit,
    )[chosen.name]


def _near_memory(model, system, workload, placement, key, must_fit) -> NearMemoryReport:
    check_required(model=(model, MoEModel), workload=(workload, Workload))
    if isinstance(placement, str):
        placement = place(model, system, workload, placement, key=key)
    if not isinstance(placement, Placement):
        raise ValueError(f"policy = {placement!r}: allowed on {system.name} is a Placement or name")
    return evaluate_placement(model, system, workload, placement, key=key, must_fit=must_fit)


def compare(
    model: MoEModel,
    system: System,
    workload: Workload,
    policies: Sequence[str | Policy | Callable[..., Partition]],
    *,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None = None,
    execution: Execution | None = None,
    efficiency: GPUEfficiency | None = None,
    must_fit: bool = True,
) -> dict[str, Report]:
    """`evaluate` for several policies on one draw of the routing, in one compilation.

    **Returns:** `Report` by policy name.

    **Raises:** as `evaluate`; `ValueError` for two policies of one name.
    """
    check_required(model=(model, MoEModel), system=(system, System), workload=(workload, Workload))
    chosen = tuple(policy_of(policy) for policy in policies)
    names = [policy.name for policy in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"policies = {names}: allowed is every name once")
    if isinstance(believed, PIMCostTable) and believed.max_tokens < workload.num_slots:
        raise ValueError(
            f"believed covers {believed.max_tokens} tokens: allowed is max_batch = "
            f"{workload.num_slots} or more (tokens of prompts count)"
        )
    for each in (system, believed):
        if isinstance(each, System):
            _check_table(model, each, workload, any(policy.shared_on_pim for policy in chosen))
    if isinstance(believed, System) and believed.num_gpus != system.num_gpus:
        raise ValueError(
            f"believed.num_gpus = {believed.num_gpus}: allowed is that of the system, "
            f"{system.num_gpus}"
        )
    check_optional("believed", believed, (System, PIMCostTable))
    check_optional("efficiency", efficiency, (GPUEfficiency,))
    execution = Execution() if execution is None else execution
    check_required(execution=(execution, Execution), must_fit=(must_fit, bool))
    if execution.halves == 2 and not is_traced(workload.batch) and int(workload.batch) < 2:
        raise ValueError(f"Workload.batch = {workload.batch}: allowed is 2 or more for two halves")
    check_routing(model, workload)
    static = _Static(chosen, execution, must_fit)
    reports = _compare(model, system, workload, static, key, believed, efficiency)
    if not is_traced(reports):
        for report in reports:
            detail = memory_detail(model, system, workload, report.status)
            raise_if_bad(f"{model.name} on {system.name}", report.status, detail)
    return dict(zip(names, reports, strict=True))


class _Static(NamedTuple):
    """What is fixed before compilation."""

    policies: tuple[Policy, ...]
    execution: Execution
    must_fit: bool


class _Part(NamedTuple):
    """A whole batch, or half of one: who holds what, and where its tokens go."""

    requests: Requests
    routed: Routed


@functools.partial(jax.jit, static_argnames="static")
def _compare(
    model, system, workload, static: _Static, key, believed, efficiency
) -> tuple[Report, ...]:
    requests = requests_by_gpu(workload, system.num_gpus)
    expert_ids = route(model, workload, key=key)
    status = merge(
        input_status(model, system, efficiency),
        workload.status,
        routing_status(workload, expert_ids, model.num_experts),
    )
    halves = (None,) if static.execution.halves == 1 else (0, 1)
    parts = [
        _Part(
            requests if half is None else requests_by_gpu(workload, system.num_gpus, half),
            summarize(model, system, workload, expert_ids, half),
        )
        for half in halves
    ]
    kernels = Kernels(system, model.precision.activation_bits, efficiency)
    shared = Shared.of(model, requests, kernels, static.execution, status)
    if static.must_fit:
        shared = shared.must_fit(system)
    reports: dict[str, Report] = {}
    # Policies that lay experts out alike are scored together: one piece of code to compile.
    for layout in dict.fromkeys(policy.layout for policy in static.policies):
        alike = [policy for policy in static.policies if policy.layout == layout]
        scored = _score_alike(model, workload, alike, parts, believed, shared, kernels, static)
        unstacked = [jax.tree.map(operator.itemgetter(i), scored) for i in range(len(alike))]
        reports |= zip((policy.name for policy in alike), unstacked, strict=True)
    return tuple(reports[policy.name] for policy in static.policies)


def _score_alike(
    model: MoEModel,
    workload: Workload,
    policies: list[Policy],
    parts: list[_Part],
    believed: System | PIMCostTable | None,
    shared: Shared,
    kernels: Kernels,
    static: _Static,
) -> Report:
    """Reports of policies with one layout, every field with an axis [policies]."""
    num_groups, shared_on_pim = policies[0].layout
    system, execution = kernels.system, static.execution

    def costs(of: System) -> list[LayerCosts]:
        layout = functools.partial(
            LayerCosts.of,
            num_groups=num_groups,
            shared_on_pim=shared_on_pim,
            attention_on_gpu=execution.attention == "gpu",
        )
        return [layout(model, of, part.requests) for part in parts]

    true = known = costs(system)
    if isinstance(believed, PIMCostTable):
        known = [each.believing(believed) for each in true]
    elif believed is not None:
        known = costs(believed)
    bound = workload.num_slots * model.top_k
    decisions = [
        [decide(policy, part.routed, each, bound) for part, each in zip(parts, known, strict=True)]
        for policy in policies
    ]

    def score(decided: list[Decision]) -> Report:
        layers, experts = [], []
        for decision, part, each in zip(decided, parts, true, strict=True):
            about = decision, part.routed, each, part.requests, num_groups
            layers.append(score_layers(*about, kernels.efficiency))
            if execution.overlap != "ideal":
                about = each, part.routed, decision, part.requests, num_groups, shared_on_pim
                experts.append(expert_times(*about, kernels, execution))
        graphs = None
        if experts:
            requests = [part.requests for part in parts]
            graphs = run_graphs(model, requests, experts, kernels, execution)
        return report_of(system, workload, layers, shared, graphs, execution)

    return jax.vmap(score)(jax.tree.map(lambda *x: jnp.stack(x), *decisions))


def _check_table(model: MoEModel, system: System, workload: Workload, shared_on_pim: bool) -> None:
    """A table of GEMV times says here what it lacks; under tracing it would only yield NaN."""
    pim, precision = system.pim, model.precision
    if not isinstance(pim, TablePIM):
        return
    asked = [(model.moe_intermediate, precision.expert_weight_bits)]
    if shared_on_pim and model.shared_intermediate:
        asked.append((model.shared_intermediate, precision.weight_bits))
    for inner, weight_bits in asked:
        bits = dict(weight_bits=weight_bits, activation_bits=precision.activation_bits)
        for outputs, inputs in ((2 * inner, model.hidden), (model.hidden, inner)):
            covered = pim.max_tokens(outputs, inputs)
            if covered < workload.num_slots and not pim.extrapolate:
                raise ValueError(
                    f"the PIM table covers {covered} tokens of {outputs} x {inputs}: allowed is "
                    f"max_batch = {workload.num_slots} or more (or extrapolate=True)"
                )
            pim.gemv_time(outputs, inputs, 1, **bits)
