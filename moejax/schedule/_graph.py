"""Tasks, the resources that they hold and what they wait for: an execution graph.

A graph vertex is a task, because a node is a vertex of a network here.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, nearest
from moejax._typing import Array, Bool, Float, Int


PADDING = "-"
"""Name of the tasks that a graph is padded with; they are not valid and take no time."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of an execution graph.

    **Arguments:**

    - `name`: unique within a graph.
    - `resources`: what it holds while it runs; none for work that is never in the way.
    - `after`: tasks that have to end before it starts.
    - `streams`: tasks that it works alongside: it ends no earlier than they do.
    - `phase`: tasks of one phase overlap ideally in the fine schedule; its own by default.
    - `hidden_by`: in the fine schedule only what it takes beyond these tasks counts.
    - `priority`: the larger goes first where several tasks could start at one time.
    """

    name: str
    resources: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    phase: str | None = None
    hidden_by: tuple[str, ...] = ()
    priority: int = 0

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Tasks that are scheduled before this one."""
        return (*self.after, *self.streams)


class TaskGraph(eqx.Module):
    """A directed acyclic graph of tasks, in topological order. Build it with `TaskGraph.of`.

    Names are static, everything else is arrays (of NumPy, so that a graph can be looked at under
    tracing): variants of a graph with the same tasks stack into one program, and padding gives
    graphs of different sizes the same shape.

    Fields: `after`, `streams` and `hidden_by`, bool [tasks, tasks], row i names what task i waits
    for; `uses`, bool [tasks, resources]; `phase` and `priority`, int32 [tasks]; `valid`, bool
    [tasks]; `names`, `resources`, `phases` static.
    """

    after: Bool[Array | np.ndarray, "tasks tasks"]
    streams: Bool[Array | np.ndarray, "tasks tasks"]
    hidden_by: Bool[Array | np.ndarray, "tasks tasks"]
    uses: Bool[Array | np.ndarray, "tasks resources"]
    phase: Int[Array | np.ndarray, " tasks"]
    priority: Int[Array | np.ndarray, " tasks"]
    valid: Bool[Array | np.ndarray, " tasks"]
    names: tuple[str, ...] = eqx.field(static=True)
    resources: tuple[str, ...] = eqx.field(static=True)
    phases: tuple[str, ...] = eqx.field(static=True)

    @classmethod
    def of(
        cls, tasks: Iterable[Task], resources: Sequence[str], *, max_tasks: int | None = None
    ) -> "TaskGraph":
        """The graph of some tasks, which may be listed in any order.

        **Arguments:**

        - `resources`: all that tasks may hold, each by one task at a time.
        - `max_tasks`: pad to so many tasks.

        **Raises:** `ValueError` for a task or resource named twice, an unknown resource or task, a
        cycle (also between phases), no task, or more than `max_tasks` tasks.
        """
        given = list(tasks)
        _check_names(given, resources)
        ordered = _topological({task.name: task.waits_for for task in given}, "tasks")
        named = {task.name: task for task in given}
        phases = _phase_order(given)
        total = max(len(given), 1) if max_tasks is None else max_tasks
        if not 1 <= len(given) <= total:
            raise ValueError(f"TaskGraph: {len(given)} tasks: allowed are 1 to {total}")
        index = {name: i for i, name in enumerate(ordered)}
        relations = {field: np.zeros((total, total), bool) for field in _RELATIONS}
        uses = np.zeros((total, len(resources)), bool)
        phase, priority = np.zeros(total, np.int32), np.zeros(total, np.int32)
        for name, i in index.items():
            task = named[name]
            for field, matrix in relations.items():
                matrix[i, [index[other] for other in getattr(task, field)]] = True
            uses[i, [list(resources).index(held) for held in task.resources]] = True
            phase[i] = phases.index(task.phase or task.name)
            priority[i] = task.priority
        return cls(
            **relations,
            uses=uses,
            phase=phase,
            priority=priority,
            valid=np.arange(total) < len(given),
            names=(*ordered, *[PADDING] * (total - len(given))),
            resources=tuple(resources),
            phases=tuple(phases),
        )

    def durations(self, seconds: Mapping[str, Any] | Array) -> Float[Array, " tasks"]:
        """Durations in the order of `names`, from a value for each task name or from an array.

        **Raises:** `ValueError` for a name that is unknown or missing, or another shape.
        """
        tasks = [name for name in self.names if name != PADDING]
        if isinstance(seconds, Mapping):
            for name in seconds:
                if name not in tasks:
                    raise ValueError(f"durations: unknown task {name!r}{nearest(name, tasks)}")
            if missing := [name for name in tasks if name not in seconds]:
                raise ValueError(f"durations: {', '.join(missing)} missing: allowed is all tasks")
            values = [as_float(seconds[name]) for name in tasks]
            seconds = jnp.stack(jnp.broadcast_arrays(*values), axis=-1)
        seconds = as_float(seconds)
        if seconds.shape[-1:] != (len(tasks),) and seconds.shape[-1:] != (len(self.names),):
            raise ValueError(
                f"durations has shape {seconds.shape}: allowed is ({len(tasks)},), the tasks of "
                "the graph (use jax.vmap for batches)"
            )
        padding = len(self.names) - seconds.shape[-1]
        return jnp.pad(seconds, [(0, 0)] * (seconds.ndim - 1) + [(0, padding)])

    def __getitem__(self, name: str) -> int:
        """Index of a task."""
        if name not in self.names:
            raise ValueError(f"unknown task {name!r}{nearest(name, self.names)}")
        return self.names.index(name)


_RELATIONS = ("after", "streams", "hidden_by")


def repeated(tasks: Iterable[Task], copies: int, joint: Iterable[str]) -> list[Task]:
    """The same pipeline on several machines that meet in some tasks.

    Every task becomes `NAME@0`, `NAME@1` and so on, on resources named likewise. Those in `joint`
    stay one task, which waits for its predecessors on all machines and holds the resources of all.

    **Raises:** `ValueError` for fewer than one copy.
    """
    tasks, joint = list(tasks), set(joint)
    if copies < 1:
        raise ValueError(f"repeated: copies = {copies}: allowed is 1 or more")
    everywhere = lambda name: tuple(f"{name}@{i}" for i in range(copies))
    found = []
    for task in tasks:
        where = [None] if task.name in joint else range(copies)
        for i in where:

            def renamed(names: tuple[str, ...], i=i) -> tuple[str, ...]:
                here = lambda name: everywhere(name) if i is None else (f"{name}@{i}",)
                return sum(((name,) if name in joint else here(name) for name in names), ())

            held = task.resources
            found.append(
                dataclasses.replace(
                    task,
                    name=task.name if i is None else f"{task.name}@{i}",
                    resources=sum(map(everywhere, held), ())
                    if i is None
                    else tuple(f"{name}@{i}" for name in held),
                    **{field: renamed(getattr(task, field)) for field in _RELATIONS},
                )
            )
    return found


def _check_names(tasks: list[Task], resources: Sequence[str]) -> None:
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1 or name == PADDING]:
        raise ValueError(f"TaskGraph: task {twice[0]!r}: allowed is every name once, not {PADDING}")
    if len(set(resources)) < len(resources):
        raise ValueError(f"TaskGraph: resources {list(resources)}: allowed is every name once")
    for task in tasks:
        for held in task.resources:
            if held not in resources:
                raise ValueError(
                    f"task {task.name!r}: unknown resource {held!r}{nearest(held, resources)} "
                    f"(known: {', '.join(resources)})"
                )
        for other in (*task.waits_for, *task.hidden_by):
            if other not in names:
                raise ValueError(
                    f"task {task.name!r} waits for unknown task {other!r}{nearest(other, names)}"
                )


def _topological(waits: Mapping[str, Iterable[str]], what: str) -> list[str]:
    """Names so that each comes after all it waits for: always the first one given that can be."""
    left = {name: set(others) for name, others in waits.items()}
    order: list[str] = []
    while left:
        free = next((name for name, others in left.items() if not others & left.keys()), None)
        if free is None:
            raise ValueError(f"TaskGraph: {what} wait for each other: {_cycle(left)}")
        order.append(free)
        del left[free]
    return order


def _cycle(waits: Mapping[str, set[str]]) -> str:
    seen = [next(iter(waits))]
    while True:
        following = next(name for name in sorted(waits[seen[-1]]) if name in waits)
        if following in seen:
            return " <- ".join([*seen[seen.index(following) :], following])
        seen.append(following)


def _phase_order(tasks: list[Task]) -> list[str]:
    phase = {task.name: task.phase or task.name for task in tasks}
    waits: dict[str, set[str]] = {name: set() for name in phase.values()}
    for task in tasks:
        mine = phase[task.name]
        waits[mine] |= {phase[other] for other in task.waits_for} - {mine}
    return _topological(waits, "phases")
