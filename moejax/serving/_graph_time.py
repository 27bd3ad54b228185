"""The layers of an iteration as execution graphs: when their tasks run, and what they wait for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, FloatScalar, IntScalar
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.schedule import TaskGraph, Timeline, layer_graph, makespan
from moejax.serving._execution import Execution
from moejax.serving._fixed import Requests
from moejax.serving._task_times import Kernels, TaskTimes, attention_times


LIMIT_OF_RESOURCE = dict(net="comm", hbm="hbm", gpu="compute", pim="pim", pim_bus="hbm")
SCHEDULING = ("all_gather", "metadata", "decide")
"""Tasks that count as scheduling, whatever resource they take."""


class GraphTimes(eqx.Module):
    """What the execution graphs of all MoE layers say.

    Fields: `timeline` of each layer, [layers, ...]; `lead` in s, the attention of the first half
    batch before the first layer (0 for whole batches); `status`.
    """

    timeline: Timeline
    lead: FloatScalar
    status: IntScalar

    @property
    def total(self) -> FloatScalar:
        """Seconds of all MoE layers."""
        return jnp.sum(self.timeline.makespan) + self.lead


def graph_of(system: System, execution: Execution) -> TaskGraph:
    """The execution graph of one layer."""
    return layer_graph(
        system.num_gpus,
        exposed=execution.exposed,
        early_shared=execution.early_shared,
        shared_bus=execution.shared_bus,
        halves=execution.halves,
    )


def run_graphs(
    model: MoEModel,
    requests: list[Requests],
    experts: list[TaskTimes],
    kernels: Kernels,
    execution: Execution,
) -> GraphTimes:
    """Schedules every MoE layer.

    **Arguments:**

    - `requests`, `experts`: of the whole batch, or of each half.
    """
    layers = model.layers[model.num_dense_layers :]
    block = lambda each: attention_times(model, layers, each, kernels, execution)
    blocks = [block(each) for each in requests]
    lead = jnp.zeros((), requests[0].count.dtype)
    if execution.halves == 1:
        named = blocks[0] | experts[0]
    else:
        # The attention of the next layer runs inside this one; there is none after the last.
        following = {name: jnp.roll(x, -1, 0).at[-1].set(0) for name, x in blocks[0].items()}
        parts = {"1.": experts[0], "2.": blocks[1] | experts[1], "next.": following}
        named = {prefix + name: x for prefix, part in parts.items() for name, x in part.items()}
        first = {name: x[0] for name, x in blocks[0].items()}
        inside = jnp.maximum(first["attention"], first["gpu_attention"])
        alone = jnp.max(first["qkv"] + inside + first["projection"])
        lead = alone + first["all_reduce"][0]
    dag = graph_of(kernels.system, execution)
    # What all GPUs do together takes as long as its slowest part.
    seconds = jnp.stack([_task_seconds(name, named) for name in dag.names], axis=-1)
    overlap = "fine" if execution.overlap == "fine" else "coarse"
    timeline = jax.vmap(lambda row: makespan(dag, row, overlap=overlap))(seconds)
    return GraphTimes(timeline, lead, jnp.max(timeline.status))


def _task_seconds(name: str, times: TaskTimes) -> Float[Array, " layers"]:
    task, at, gpu = name.partition("@")
    return times[task][:, int(gpu)] if at else jnp.max(times[task], axis=1)


def time_by_limit(
    dag: TaskGraph, timeline: Timeline, limits: tuple[str, ...]
) -> Float[Array, " limits"]:
    """Seconds of all layers by what the critical path waits for: exact for coarse schedules, and in
    proportion to the tasks on the path for fine ones."""
    group = np.array([limits.index(_limit_of(dag, i)) for i in range(len(dag.names))])
    spent = jnp.where(timeline.critical, timeline.end - timeline.start, 0)
    by_limit = jnp.zeros((*spent.shape[:-1], len(limits)), spent.dtype)
    by_limit = by_limit.at[..., group].add(spent)
    whole = jnp.sum(by_limit, axis=-1, keepdims=True)
    share = by_limit / jnp.where(whole > 0, whole, 1.0)
    return jnp.sum(share * timeline.makespan[..., None], axis=tuple(range(spent.ndim - 1)))


def _limit_of(dag: TaskGraph, task: int) -> str:
    name = dag.names[task].partition("@")[0].rpartition(".")[2]
    if name in SCHEDULING:
        return "scheduler"
    held = [dag.resources[i].partition("@")[0] for i in np.flatnonzero(dag.uses[task])]
    # The GPU's kernels that stream their weights wait for memory in decoding.
    return LIMIT_OF_RESOURCE["hbm" if "hbm" in held else held[0]]


def scheduling_time(dag: TaskGraph, timeline: Timeline) -> FloatScalar:
    """Seconds of decisions and what precedes them on the critical paths of all layers."""
    scheduling = np.array(
        [name.partition("@")[0].rpartition(".")[2] in SCHEDULING for name in dag.names]
    )
    spent = jnp.where(timeline.critical & scheduling, timeline.end - timeline.start, 0)
    return jnp.sum(spent)
