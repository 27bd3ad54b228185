"""The execution graph of one layer, to look at."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from moejax._status import raise_if_bad
from moejax._typing import PRNGKeyArray
from moejax._units import US
from moejax.cost import GPUEfficiency, PIMCostTable
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.partition import Partition
from moejax.schedule import TaskGraph, Timeline
from moejax.serving._execution import Execution
from moejax.serving._fixed import requests_by_gpu
from moejax.serving._graph_time import GraphTimes, graph_of, run_graphs
from moejax.serving._inputs import check_optional
from moejax.serving._layer_costs import LayerCosts
from moejax.serving._moe_layers import decide, summarize
from moejax.serving._policies import Policy, policy_of
from moejax.serving._task_times import Kernels, expert_times
from moejax.serving._workload import Workload, check_routing, route


def layer_timeline(
    model: MoEModel,
    system: System,
    workload: Workload,
    policy: str | Policy | Callable[..., Partition],
    *,
    key: PRNGKeyArray,
    layer: int = 0,
    believed: System | PIMCostTable | None = None,
    execution: Execution | None = None,
    efficiency: GPUEfficiency | None = None,
) -> tuple[TaskGraph, Timeline]:
    """When the tasks of one MoE layer run. Arguments as `evaluate`, and the same routing.

    **Arguments:**

    - `layer`: index among the MoE layers.
    - `execution`: `Execution("coarse")` by default.

    **Returns:** the graph and its `Timeline`; `timeline_rows` makes a table of them.

    **Raises:** `ValueError` as `evaluate`, for a layer that is not there, and for ideal overlap,
    which puts nothing in order.
    """
    check_optional("believed", believed, (System, PIMCostTable))
    check_optional("execution", execution, (Execution,))
    check_optional("efficiency", efficiency, (GPUEfficiency,))
    execution = Execution("coarse") if execution is None else execution
    if execution.overlap == "ideal":
        raise ValueError("layer_timeline: Execution.overlap = 'ideal': allowed is fine or coarse")
    if not 0 <= layer < model.num_moe_layers:
        raise ValueError(
            f"layer_timeline: layer = {layer}: allowed is 0 to {model.num_moe_layers - 1}"
        )
    check_routing(model, workload)
    about = model, system, workload, policy_of(policy), execution
    found = _graphs(*about, key, believed, efficiency)
    raise_if_bad(f"{model.name} on {system.name}", found.status)
    return graph_of(system, execution), jax.tree.map(lambda x: x[layer], found.timeline)


@functools.partial(jax.jit, static_argnames=("policy", "execution"))
def _graphs(
    model: MoEModel,
    system: System,
    workload: Workload,
    policy: Policy,
    execution: Execution,
    key: PRNGKeyArray,
    believed: System | PIMCostTable | None,
    efficiency: GPUEfficiency | None,
) -> GraphTimes:
    num_groups, shared_on_pim = policy.layout
    kernels = Kernels(system, model.precision.activation_bits, efficiency)
    expert_ids = route(model, workload, key=key)
    requests, experts = [], []
    for half in (None,) if execution.halves == 1 else (0, 1):
        held = requests_by_gpu(workload, system.num_gpus, half)
        routed = summarize(model, system, workload, expert_ids, half)
        costs = functools.partial(
            LayerCosts.of,
            num_groups=num_groups,
            shared_on_pim=shared_on_pim,
            attention_on_gpu=execution.attention == "gpu",
        )
        true = known = costs(model, system, held)
        if isinstance(believed, PIMCostTable):
            known = true.believing(believed)
        elif believed is not None:
            known = costs(model, believed, held)
        decision = decide(policy, routed, known, workload.num_slots * model.top_k)
        about = true, routed, decision, held, num_groups, shared_on_pim
        requests.append(held)
        experts.append(expert_times(*about, kernels, execution))
    return run_graphs(model, requests, experts, kernels, execution)


def timeline_rows(dag: TaskGraph, timeline: Timeline) -> dict[str, np.ndarray]:
    """One row for each resource that a task holds, as `plot.gantt` draws them.

    Columns: `task`, `machine` (the number after `@`, or of the resource), `lane` (the resource
    without it; `decision` for tasks that hold none), `start_us`, `end_us`, `critical`. Tasks that
    take no time are left out.

    **Raises:** `ValueError` for the timelines of several layers.
    """
    if timeline.start.ndim != 1:
        raise ValueError(f"timeline_rows: start has shape {timeline.start.shape}: allowed is one")
    uses = np.asarray(dag.uses)
    rows = []
    for i, name in enumerate(dag.names):
        start, end = float(timeline.start[i]) / US, float(timeline.end[i]) / US
        if not (dag.valid[i] and end > start):
            continue
        task, _, machine = name.partition("@")
        held = [dag.resources[r] for r in np.flatnonzero(uses[i])] or [f"decision@{machine or 0}"]
        for resource in held:
            lane, _, where = resource.partition("@")
            rows.append((task, int(where or 0), lane, start, end, bool(timeline.critical[i])))
    names = ("task", "machine", "lane", "start_us", "end_us", "critical")
    return {name: np.array(column) for name, column in zip(names, zip(*rows), strict=True)}
