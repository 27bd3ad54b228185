"""Execution graphs: schedules against plain loops, critical paths, transformations, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moejax as mj
from moejax.schedule import Task, TaskGraph, makespan, repeated
from tests.oracles import makespan as oracle


RESOURCES = ("gpu", "hbm", "pim")
SIZE = 9


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


@st.composite
def graphs(draw):
    """A random graph as tasks for moejax and for the twin. Small whole durations, so that ties are
    common and single precision is exact."""
    names = [f"t{i}" for i in range(draw(st.integers(1, SIZE)))]
    order = draw(st.permutations(names))
    tasks = []
    for i, name in enumerate(order):
        earlier = (
            st.lists(st.sampled_from(order[:i]), unique=True, max_size=3) if i else st.just([])
        )
        after = draw(earlier)
        streams = [other for other in draw(earlier) if other not in after]
        held = draw(st.lists(st.sampled_from(RESOURCES), unique=True, max_size=2))
        priority = draw(st.integers(0, 1))
        tasks.append(Task(name, tuple(held), tuple(after), tuple(streams), priority=priority))
    durations = {name: float(draw(st.integers(0, 4))) for name in names}
    return draw(st.permutations(tasks)), durations


def plain(tasks, durations, names):
    named = {task.name: task for task in tasks}
    fields = ("after", "streams", "resources", "priority")
    return {
        name: {field: getattr(named[name], field) for field in fields}
        | {"duration": durations[name]}
        for name in names
        if name in named
    }


@settings(max_examples=60)
@given(graphs())
def test_a_list_schedule_is_that_of_plain_loops(drawn):
    """Padded to one size, so that all examples are one program."""
    tasks, durations = drawn
    dag = TaskGraph.of(tasks, RESOURCES, max_tasks=SIZE)
    found = makespan(anonymous(dag), dag.durations(durations))
    expected = plain(tasks, durations, dag.names)
    start, end = oracle.list_schedule(expected)
    for i, name in enumerate(expected):
        assert (float(found.start[i]), float(found.end[i])) == (start[name], end[name])
    assert float(found.makespan) == max(end.values())
    # The critical path is what the makespan consists of, and its gradient.
    on_path = [durations[name] for name, on in zip(expected, found.critical) if on]
    assert float(found.makespan) == sum(on_path)
    slope = gradient(anonymous(dag), dag.durations(durations))
    np.testing.assert_array_equal(slope, np.asarray(found.critical, float))


def anonymous(dag):
    """The same arrays under fixed names: names are static and would compile anew."""
    names = tuple(f"n{i}" for i in range(SIZE))
    phases = tuple(f"p{i}" for i in range(SIZE))
    arrays = {field: getattr(dag, field) for field in vars(dag)}
    return TaskGraph(**arrays | dict(names=names, resources=RESOURCES, phases=phases))


gradient = jax.jit(jax.grad(lambda dag, seconds: makespan(dag, seconds).makespan, argnums=1))


@settings(max_examples=40)
@given(graphs(), st.data())
def test_ideal_overlap_is_that_of_plain_loops(drawn, data):
    tasks, durations = drawn
    # Phases along the topological order never wait for each other in a circle.
    order = TaskGraph.of(tasks, RESOURCES).names
    cut = data.draw(st.integers(1, 3))
    phase = {name: f"phase{i // cut}" for i, name in enumerate(order)}
    tasks = [
        Task(t.name, t.resources, t.after, t.streams, phase=phase[t.name], priority=t.priority)
        for t in tasks
    ]
    dag = TaskGraph.of(tasks, RESOURCES, max_tasks=SIZE)
    seconds = dag.durations(durations)
    found = makespan(anonymous(dag), seconds, overlap="fine")
    expected = oracle.fine(plain(tasks, durations, dag.names), phase)
    assert float(found.makespan) == expected
    # No resource can be asked for more.
    assert float(jnp.max(found.busy, initial=0)) <= expected


CHAIN = [
    Task("load", ("hbm",)),
    Task("compute", ("gpu",), streams=("load",)),
    Task("memory", ("pim",)),
    Task("end", ("gpu",), after=("compute", "memory")),
]


def test_a_stream_ends_with_what_it_streams_from():
    dag = TaskGraph.of(CHAIN, RESOURCES)
    found = makespan(dag, dict(load=5.0, compute=2.0, memory=4.0, end=1.0))
    by_name = dict(zip(dag.names, found.end.tolist(), strict=True))
    assert by_name == {"load": 5, "compute": 5, "memory": 4, "end": 6}
    marked = [name for name, on in zip(dag.names, found.critical) if on]
    assert marked == ["load", "end"]
    assert dict(zip(RESOURCES, found.busy.tolist(), strict=True)) == {"gpu": 6, "hbm": 5, "pim": 4}


def test_one_program_for_all_durations_and_for_variants_of_a_graph():
    traces = []
    serial = [*CHAIN[:2], Task("memory", ("pim",), after=("compute",)), CHAIN[3]]
    dags = [TaskGraph.of(tasks, RESOURCES, max_tasks=6) for tasks in (CHAIN, serial)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *dags)

    @jax.jit
    def run(dags, seconds):
        traces.append(None)
        over_rows = jax.vmap(lambda dag, row: makespan(dag, row).makespan, (None, 0))
        return jax.vmap(over_rows, (0, None))(dags, seconds)

    rows = jnp.array([[5.0, 2, 4, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert run(stacked, rows).tolist() == [[6, 2, 0], [10, 3, 0]]
    assert run(stacked, rows * 2).tolist() == [[12, 4, 0], [20, 6, 0]] and len(traces) == 1


def test_bad_durations_are_a_status_under_tracing_and_leave_the_others_alone():
    dag = TaskGraph.of(CHAIN, RESOURCES)
    rows = jnp.array([[1.0, 1, 1, 1], [-1, 1, 1, 1], [1, jnp.nan, 1, 1], [1, 1, 1, jnp.inf]])
    found = jax.jit(jax.vmap(lambda seconds: makespan(dag, seconds)))(rows)
    assert found.status.tolist() == [0, *[mj.Status.BAD_COST] * 3]
    assert float(found.makespan[0]) == 2 and np.all(np.isnan(found.makespan[1:]))
    assert not np.any(found.critical[1:])


def test_machines_meet_in_joint_tasks():
    pipeline = [
        Task("work", ("gpu",)),
        Task("send", ("net",), after=("work",)),
        Task("rest", ("gpu",), after=("send",)),
    ]
    tasks = repeated(pipeline, 2, joint=["send"])
    held = [f"{name}@{i}" for name in ("gpu", "net") for i in range(2)]
    dag = TaskGraph.of(tasks, held)
    seconds = {"work@0": 1.0, "work@1": 3.0, "send": 2.0, "rest@0": 4.0, "rest@1": 1.0}
    found = makespan(dag, seconds)
    assert float(found.makespan) == 3 + 2 + 4
    assert [n for n, on in zip(dag.names, found.critical) if on] == ["work@1", "send", "rest@0"]
    with raises("copies = 0", "1 or more"):
        repeated(pipeline, 0, joint=[])


def test_errors_name_what_is_wrong():
    with raises("tasks wait for each other", "a <- b <- a"):
        TaskGraph.of([Task("a", after=("b",)), Task("b", streams=("a",))], ())
    with raises("'a'", "unknown resource 'gpuu'", "did you mean 'gpu'"):
        TaskGraph.of([Task("a", ("gpuu",))], RESOURCES)
    with raises("'a' waits for unknown task 'lod'", "did you mean 'load'"):
        TaskGraph.of([Task("load"), Task("a", after=("lod",))], ())
    with raises("'a'", "every name once"):
        TaskGraph.of([Task("a"), Task("a")], ())
    with raises("phases wait for each other"):
        circle = [Task("a", phase="x"), Task("b", after=("a",)), Task("c", (), ("b",), phase="x")]
        TaskGraph.of(circle, ())
    with raises("0 tasks", "1 to 1"):
        TaskGraph.of([], ())
    with raises("resources ['gpu', 'gpu']", "every name once"):
        TaskGraph.of([Task("a", ("gpu",))], ("gpu", "gpu"))
    with raises("4 tasks", "1 to 3"):
        TaskGraph.of(CHAIN, RESOURCES, max_tasks=3)
    dag = TaskGraph.of(CHAIN, RESOURCES)
    good = dict(load=1.0, compute=1.0, memory=1.0, end=1.0)
    with raises("duration of compute = -1", "0 s or more"):
        makespan(dag, good | {"compute": -1.0})
    with raises("duration of end = nan"):
        makespan(dag, good | {"end": float("nan")})
    with raises("unknown task 'lod'", "did you mean 'load'"):
        makespan(dag, good | {"lod": 1.0})
    with raises("memory, end missing"):
        makespan(dag, dict(load=1.0, compute=1.0))
    with raises("shape (3,)", "(4,)"):
        makespan(dag, jnp.ones(3))
    with raises("unknown overlap 'corse'", "did you mean 'coarse'"):
        makespan(dag, good, overlap="corse")
    with raises("dag is a dict"):
        makespan({}, good)
    with raises("unknown task 'ed'"):
        dag["ed"]
