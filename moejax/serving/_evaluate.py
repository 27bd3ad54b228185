"""One decode iteration of a model on a system under a policy."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import overload

import jax
import jax.numpy as jnp

from moejax._status import is_traced, merge, raise_if_bad
from moejax._typing import PRNGKeyArray
from moejax.cost import PIMCostTable
from moejax.hardware import NMPSystem, System, TablePIM
from moejax.models import MoEModel
from moejax.partition import Partition
from moejax.placement import Placement
from moejax.serving._fixed import requests_by_gpu
from moejax.serving._inputs import input_status
from moejax.serving._layer_costs import LayerCosts
from moejax.serving._moe_layers import Decision, Routed, decide, score_layers, summarize
from moejax.serving._near_memory_evaluate import NearMemoryReport, evaluate_placement
from moejax.serving._place import place
from moejax.serving._policies import Policy, policy_of
from moejax.serving._report import Report, report_of
from moejax.serving._shared import Shared
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
) -> Report: ...


@overload
def evaluate(
    model: MoEModel,
    system: NMPSystem,
    workload: Workload,
    policy: str | Placement,
    *,
    key: PRNGKeyArray,
) -> NearMemoryReport: ...


def evaluate(
    model: MoEModel,
    system: System | NMPSystem,
    workload: Workload,
    policy: str | Policy | Callable[..., Partition] | Placement,
    *,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None = None,
) -> Report | NearMemoryReport:
    """Time, throughput and what limits them, for one decode iteration.

    Each MoE layer takes `max(communication, GPU, PIM)` of its slowest GPU, the ideal overlap of
    Sieve (arXiv 2605.11277, Eq. 1), plus the decision time that dispatch does not hide; layers,
    embedding and LM head add up. On a near-memory system nothing overlaps, and a placement of the
    experts takes the place of the policy: see `evaluate_placement`.

    **Arguments:**

    - `model`, `system`, `workload`: one of each; batch them with `jax.vmap`.
    - `policy`: a name of `POLICIES`, a `Policy`, or any function
        `(tokens_per_expert, costs) -> Partition`. For an `NMPSystem`: a `Placement`, or a name of
        `placement.METHODS`, which is fitted to the workload's own routing (`serving.place` fits
        it to another trace, once for many calls).
    - `key`: draws the routing and nothing else, so that policies with one key are paired.
    - `believed`: what the policy decides on, if that is not the truth: another `System`, or a
        `PIMCostTable` of at least `max_batch` tokens for the PIM times alone. The result is
        always scored on `system`.

    **Returns:** `Report`, or `NearMemoryReport` for an `NMPSystem`; differentiable in every number
    of `model.precision` and `system` at the partition chosen.

    **Raises:** `ValueError` for unknown policies, traces of another model and impossible numbers;
    a `status` for the latter under tracing.
    """
    if isinstance(system, NMPSystem):
        return _near_memory(model, system, workload, policy, key, believed)
    if isinstance(policy, Placement):
        raise ValueError(f"policy is a Placement, but {system.name} is no near-memory system")
    chosen = policy_of(policy)
    return compare(model, system, workload, [chosen], key=key, believed=believed)[chosen.name]


def _near_memory(model, system, workload, placement, key, believed) -> NearMemoryReport:
    if believed is not None:
        raise ValueError("believed is allowed for systems with PIM only")
    if isinstance(placement, str):
        placement = place(model, system, workload, placement, key=key)
    if not isinstance(placement, Placement):
        raise ValueError(f"policy = {placement!r}: allowed on {system.name} is a Placement or name")
    return evaluate_placement(model, system, workload, placement, key=key)


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
    for name, given, kind in (
        ("model", model, MoEModel),
        ("system", system, System),
        ("workload", workload, Workload),
    ):
        if not isinstance(given, kind):
            raise ValueError(f"{name} = {given!r}: allowed is a {kind.__name__}")
    chosen = tuple(policy_of(policy) for policy in policies)
    names = [policy.name for policy in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"policies = {names}: allowed is every name once")
    if isinstance(believed, PIMCostTable) and believed.max_tokens < workload.max_batch:
        raise ValueError(
            f"believed covers {believed.max_tokens} tokens: allowed is max_batch = "
            f"{workload.max_batch} or more"
        )
    for each in (system, believed):
        if isinstance(each, System):
            _check_table(model, each, workload)
    if isinstance(believed, System) and believed.num_gpus != system.num_gpus:
        raise ValueError(
            f"believed.num_gpus = {believed.num_gpus}: allowed is that of the system, "
            f"{system.num_gpus}"
        )
    check_routing(model, workload)
    reports = _compare(model, system, workload, chosen, key, believed)
    if not is_traced(reports):
        for report in reports:
            raise_if_bad(f"{model.name} on {system.name}", report.status)
    return dict(zip(names, reports, strict=True))


@functools.partial(jax.jit, static_argnames="policies")
def _compare(
    model, system, workload, policies: tuple[Policy, ...], key, believed
) -> tuple[Report, ...]:
    requests = requests_by_gpu(workload, system.num_gpus)
    expert_ids = route(model, workload, key=key)
    routed = summarize(model, system, workload, expert_ids)
    status = merge(
        input_status(model, system),
        workload.status,
        routing_status(workload, expert_ids, model.num_experts),
    )
    shared = Shared.of(model, system, requests, status)
    reports: dict[str, Report] = {}
    # Policies that lay experts out alike are scored together: one piece of code to compile.
    for layout in dict.fromkeys(policy.layout for policy in policies):
        alike = [policy for policy in policies if policy.layout == layout]
        stacked = _score_alike(model, system, workload, alike, routed, believed, shared)
        unstacked = [jax.tree.map(operator.itemgetter(i), stacked) for i in range(len(alike))]
        reports |= zip((policy.name for policy in alike), unstacked, strict=True)
    return tuple(reports[policy.name] for policy in policies)


def _score_alike(
    model: MoEModel,
    system: System,
    workload: Workload,
    policies: list[Policy],
    routed: Routed,
    believed: System | PIMCostTable | None,
    shared: Shared,
) -> Report:
    """Reports of policies with one layout, every field with an axis [policies]."""
    num_groups, shared_on_pim = policies[0].layout

    def costs(of: System) -> LayerCosts:
        return LayerCosts.of(
            model, of, shared.requests, num_groups=num_groups, shared_on_pim=shared_on_pim
        )

    true = known = costs(system)
    if isinstance(believed, PIMCostTable):
        known = true.believing(believed)
    elif believed is not None:
        known = costs(believed)
    bound = workload.max_batch * model.top_k
    decisions = [decide(policy, routed, known, bound) for policy in policies]

    def score(decision: Decision) -> Report:
        layers = score_layers(decision, routed, true, shared.requests, num_groups)
        return report_of(system, workload, layers, shared)

    return jax.vmap(score)(jax.tree.map(lambda *x: jnp.stack(x), *decisions))


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
