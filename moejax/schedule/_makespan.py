"""When the tasks of a graph run: a list schedule, or ideal overlap within phases."""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._checks import lookup
from moejax._status import Status, flag, is_traced, raise_if_bad
from moejax._typing import Array, Bool, Float, FloatScalar, Int, IntScalar
from moejax.schedule._graph import TaskGraph


Overlap = Literal["coarse", "fine"]

NOTHING = -1
"""Cause of a task that starts at time 0."""


class Timeline(eqx.Module):
    """When every task of a graph runs. Times in s; NaN unless `status` is 0.

    Fields: `makespan`; `start`, `end` [tasks] in the order of the graph's names; `critical` bool
    [tasks], the critical path (in a coarse schedule the tasks whose durations add up to the
    makespan, which are also its gradient); `busy` [resources], seconds that each resource is held
    (fine: asked for); `status`, see `moejax.Status`.
    """

    makespan: FloatScalar
    start: Float[Array, " tasks"]
    end: Float[Array, " tasks"]
    critical: Bool[Array, " tasks"]
    busy: Float[Array, " resources"]
    status: IntScalar


def makespan(
    dag: TaskGraph, durations: Mapping[str, Any] | Array, *, overlap: Overlap = "coarse"
) -> Timeline:
    """Schedules the tasks of a graph on its resources (Sieve, arXiv 2605.11277, execution graph).

    - `"coarse"`, a list schedule: of the tasks whose predecessors are all placed, the one that
        can start first is placed next, when its predecessors have ended and its resources are
        free. Ties go to the higher priority, then to the longest remaining path, then to the
        first name. Tasks are not interrupted; one that streams ends no earlier than what it
        streams from, and holds its resources until then. A task of no duration neither holds
        resources nor waits for them.
    - `"fine"`, ideal overlap: a phase takes as long as its busiest resource (or its longest task
        that needs none), phases follow the edges between their tasks, and the whole takes at
        least what any resource is asked for. `start` and `end` are those of the task's phase.

    Both are sequences of max-plus updates: exact under `jit` and `vmap`, and differentiable in the
    durations.

    **Arguments:**

    - `dag`: `TaskGraph`.
    - `durations`: s, by task name or [tasks] in the order of `dag.names`.

    **Returns:** `Timeline`.

    **Raises:** `ValueError` for an unknown or missing task, another shape or overlap, or a duration
    that is negative or not finite; the latter is a `status` under tracing.
    """
    schedule = lookup("overlap", overlap, {"coarse": _coarse, "fine": _fine})
    if not isinstance(dag, TaskGraph):
        raise ValueError(f"makespan: dag is a {type(dag).__name__}: allowed is a TaskGraph")
    seconds = dag.durations(durations)
    if seconds.ndim != 1:
        raise ValueError(f"makespan: durations has shape {seconds.shape}: allowed is one graph's")
    timeline = schedule(dag, seconds)
    if not is_traced(seconds, timeline) and int(timeline.status) != Status.OK:
        values = np.asarray(seconds)
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0]
        raise ValueError(
            f"makespan: duration of {dag.names[bad]} = {values[bad]:g}: allowed is 0 s or more"
        )
    raise_if_bad("makespan", timeline.status)
    return timeline


def _status(dag: TaskGraph, seconds: Array) -> IntScalar:
    sane = jnp.isfinite(seconds) & (seconds >= 0)
    return flag(jnp.any(dag.valid & ~sane), Status.BAD_COST)


def _timeline(dag, seconds, start, end, critical, total) -> Timeline:
    status = _status(dag, seconds)
    okay = lambda times: jnp.where(status == Status.OK, times, jnp.nan)
    busy = jnp.sum(jnp.where(dag.uses, (end - start)[:, None], 0), axis=0)
    critical &= dag.valid & (status == Status.OK)
    return Timeline(okay(total), okay(start), okay(end), critical, okay(busy), status)


def remaining_path(dag: TaskGraph, seconds: Float[Array, " tasks"]) -> Float[Array, " tasks"]:
    """Longest path from the start of each task to the end of everything, resources aside."""

    def step(left, i):
        # A stream from i to j leaves only what follows j once i has ended.
        follow = jnp.where(dag.after[:, i], left, 0)
        along = jnp.where(dag.streams[:, i], left - seconds, 0)
        mine = seconds[i] + jnp.maximum(jnp.max(follow), jnp.max(along))
        return left.at[i].set(mine), None

    tasks = jnp.arange(seconds.shape[0])
    return lax.scan(step, jnp.zeros_like(seconds), tasks, reverse=True)[0]


class _State(eqx.Module):
    """A schedule in the making: for tasks not yet placed, `start` and `floor` are the earliest
    start and the earliest end by what is placed, and the causes are what made them so."""

    start: Float[Array, " tasks"]
    floor: Float[Array, " tasks"]
    end: Float[Array, " tasks"]
    cause: Int[Array, " tasks"]
    floor_cause: Int[Array, " tasks"]
    waiting: Int[Array, " tasks"]
    placed: Bool[Array, " tasks"]


@jax.jit
def _coarse(dag: TaskGraph, seconds: Float[Array, " tasks"]) -> Timeline:
    seconds = jnp.where(dag.valid, seconds, 0)
    left = lax.stop_gradient(remaining_path(dag, seconds))
    shared = jnp.any(dag.uses[:, None] & dag.uses[None], axis=-1)
    needs = dag.after | dag.streams

    def place(state: _State, _) -> tuple[_State, None]:
        open_ = dag.valid & ~state.placed & (state.waiting == 0)
        i = _first(open_, state.start, dag.priority, left)
        begun = state.start[i]
        worked = begun + seconds[i]
        streaming = state.floor[i] > worked
        end = jnp.where(streaming, state.floor[i], worked)
        cause = state.cause.at[i].set(jnp.where(streaming, state.floor_cause[i], state.cause[i]))
        placed = state.placed.at[i].set(True)
        held = shared[i] & (seconds[i] > 0) & (seconds > 0)
        later = ~placed & (dag.after[:, i] | held) & (end > state.start)
        longer = ~placed & dag.streams[:, i] & (end > state.floor)
        return _State(
            start=jnp.where(later, end, state.start),
            floor=jnp.where(longer, end, state.floor),
            end=state.end.at[i].set(end),
            cause=jnp.where(later, i, cause),
            floor_cause=jnp.where(longer, i, state.floor_cause),
            waiting=state.waiting - needs[:, i],
            placed=placed,
        ), None

    zeros = jnp.zeros_like(seconds)
    nothing = jnp.full(seconds.shape, NOTHING, jnp.int32)
    waiting = jnp.sum(needs, axis=1, dtype=jnp.int32)
    first = _State(zeros, zeros, zeros, nothing, nothing, waiting, jnp.logical_not(dag.valid))
    # Padding is placed from the start. Steps that are left over place the first task once more,
    # where it is.
    state = lax.scan(place, first, None, length=seconds.shape[0])[0]
    last = jnp.argmax(jnp.where(dag.valid, state.end, -1))
    streaming = state.end > state.start + seconds
    critical = _walk_back(last.astype(jnp.int32), state.cause, streaming)
    return _timeline(dag, seconds, state.start, state.end, critical, state.end[last])


def _first(open_, start, priority, left) -> IntScalar:
    """The open task that can start first, by priority, by remaining path, by index."""
    start, left = lax.stop_gradient(start), lax.stop_gradient(left)
    best = open_
    for key in (-start, priority.astype(start.dtype), left):
        most = jnp.max(jnp.where(best, key, -jnp.inf))
        best &= key == most
    return jnp.argmax(best).astype(jnp.int32)


def _walk_back(last: IntScalar, cause, streaming) -> Bool[Array, " tasks"]:
    """Tasks whose durations the end of `last` is the sum of."""

    def step(carry, _):
        i, marked = carry
        there = i != NOTHING
        marked = marked.at[i].set(marked[i] | (there & ~streaming[i]))
        return (jnp.where(there, cause[i], NOTHING), marked), None

    first = last, jnp.zeros(cause.shape, bool)
    return lax.scan(step, first, None, length=cause.shape[0])[0][1]


@jax.jit
def _fine(dag: TaskGraph, seconds: Float[Array, " tasks"]) -> Timeline:
    seconds = jnp.where(dag.valid, seconds, 0)
    covered = jnp.sum(jnp.where(dag.hidden_by, seconds, 0), axis=1)
    seconds = jnp.where(dag.hidden_by.any(1), jnp.maximum(seconds - covered, 0), seconds)
    member = (dag.phase == jnp.arange(len(dag.phases))[:, None]) & dag.valid
    load = jnp.sum(jnp.where(member[:, :, None] & dag.uses, seconds[:, None], 0), axis=1)
    alone = jnp.where(member & ~dag.uses.any(1), seconds, 0)
    takes = jnp.maximum(jnp.max(load, axis=1), jnp.max(alone, axis=1))
    joined = lambda edges: jnp.any(member[:, :, None] & edges, axis=1)  # [phases, tasks]
    before = jnp.any(joined(dag.after | dag.streams)[:, None] & member[None], axis=-1)
    before &= ~jnp.eye(len(dag.phases), dtype=bool)

    def run(carry, phase):
        # Phases are numbered in topological order, so all that this one waits for has ended.
        end, cause = carry
        waited = jnp.where(before[phase], end, 0)
        slowest = jnp.argmax(waited)
        end = end.at[phase].set(waited[slowest] + takes[phase])
        return (end, cause.at[phase].set(jnp.where(waited[slowest] > 0, slowest, NOTHING))), None

    first = jnp.zeros_like(takes), jnp.full(takes.shape, NOTHING, jnp.int32)
    (end, cause), _ = lax.scan(run, first, jnp.arange(takes.shape[0]))
    last = jnp.argmax(end)
    asked = jnp.sum(load, axis=0)
    busiest = jnp.argmax(asked)
    bound = asked[busiest] > end[last]
    on_path = _walk_back(last.astype(jnp.int32), cause, jnp.zeros(cause.shape, bool))
    # On the path, the tasks that make their phase as long as it is.
    heaviest = jnp.argmax(load, axis=1)[dag.phase]
    counts = jnp.take_along_axis(dag.uses, heaviest[:, None], 1)[:, 0]
    by_load = jnp.max(load, axis=1)[dag.phase] >= takes[dag.phase]
    longest = jnp.argmax(alone, axis=1)[dag.phase] == jnp.arange(seconds.shape[0])
    critical = on_path[dag.phase] & jnp.where(by_load, counts, longest) & (seconds > 0)
    critical = jnp.where(bound, dag.uses[:, busiest] & (seconds > 0), critical)
    total = jnp.where(bound, asked[busiest], end[last])
    begin = (end - takes)[dag.phase]
    timeline = _timeline(dag, seconds, begin, end[dag.phase], critical, total)
    okay = lambda times: jnp.where(timeline.status == Status.OK, times, jnp.nan)
    return eqx.tree_at(lambda t: t.busy, timeline, okay(asked))
