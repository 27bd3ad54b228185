"""The simulator against the literal event heap, and what must hold under jit, vmap and grad."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moejax import noc
from moejax._status import Status
from tests import noc_strategies as strategies
from tests.oracles import noc as oracle


SWITCHING = ("store_and_forward", "cut_through")

# Every kind of network under either switching, with and without ports, in as few compilations.
CASES = [
    ("mesh", 0),
    ("mesh_ports", 1),
    ("tree", 0),
    ("torus", 1),
    ("torus_ports", 0),
    ("graph", 0),
    ("ring_ports", 1),
]


@pytest.fixture
def quick_compilation():
    """For programs that run once or twice, so that their compilation is all the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def simulated(problem, **options):
    return noc.simulate(strategies.rated(problem), strategies.messages(problem), **options)


def heap(problem, **options):
    paths, sizes, bandwidth, others = strategies.literal(problem)
    return oracle.heap_simulate(paths, sizes, bandwidth, **others | options)


def bound(problem):
    paths, sizes, bandwidth, others = strategies.literal(problem)
    return oracle.link_bound(paths, sizes, bandwidth, others["valid"])


def occupancies(topology, run):
    """([links], [2, nodes]) of a literal run."""
    used = lambda resource: run.occupancy.get(resource, 0.0)
    ports = [
        [used((kind, node)) for node in range(topology.num_nodes)]
        for kind in (oracle.INJECTION, oracle.EJECTION)
    ]
    return [used(tuple(link)) for link in np.asarray(topology.links).tolist()], ports


def assert_equal(problem, report, run, rtol):
    close = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=rtol)
    assert report.status == Status.OK
    links, ports = occupancies(strategies.rated(problem), run)
    close(report.makespan, run.makespan)
    close(report.finish_time, run.finish)
    close(report.link_occupancy, links)
    if report.port_occupancy is not None:
        close(report.port_occupancy, ports)
    assert (int(report.iterations) > 0) == (problem.network in strategies.CYCLIC)


@pytest.mark.parametrize("name, kind", CASES)
@settings(max_examples=40)
@given(data=st.data())
def test_is_the_event_heap(name, kind, data):
    problem = data.draw(strategies.problems(name))
    switching = SWITCHING[kind]
    with jax.enable_x64(True):
        report = simulated(problem, switching=switching)
        run = heap(problem, switching=switching)
        assert_equal(problem, report, run, 1e-12)
        assert heap(problem, switching=switching, calendar=oracle.Intervals) == run
        if switching == "store_and_forward":
            assert report.makespan >= bound(problem) * (1 - 1e-12)


@pytest.mark.parametrize("name, kind", [("mesh", 0), ("torus", 1)])
@settings(max_examples=15)
@given(data=st.data())
def test_packets_are_messages_of_their_own(name, kind, data):
    problem = data.draw(strategies.problems(name))
    # Powers of two, so that equal rests of equal messages stay ties: up to 6 packets of any kind.
    size = data.draw(st.sampled_from([0.5, 1, 4])) * 2.0 ** round(np.log2(problem.bytes.max() / 3))
    with jax.enable_x64(True):
        options = dict(switching=SWITCHING[kind], packet_bytes=size)
        report = simulated(problem, **options, max_packets=10)
        assert_equal(problem, report, heap(problem, **options), 1e-12)


@pytest.mark.parametrize("name, kind", [("mesh_ports", 0), ("torus", 1)])
@settings(max_examples=20)
@given(data=st.data())
def test_single_precision_keeps_the_order(name, kind, data):
    problem = data.draw(strategies.problems(name, ("equal", "smooth", "hot"), np.float32))
    run = heap(problem, switching=SWITCHING[kind])
    for booked in run.bookings.values():
        gaps = np.diff(np.sort([booking.ready for booking in booked]))
        assume(not np.any((gaps > 0) & (gaps < 1e-6 * run.makespan)))
    report = simulated(problem, switching=SWITCHING[kind])
    assert report.makespan.dtype == np.float32
    assert_equal(problem, report, run, 1e-5)


@pytest.mark.parametrize("switching", SWITCHING)
def test_chains_around_a_ring_settle(switching, x64, quick_compilation):
    rng = np.random.default_rng(6)
    topology = noc.torus(1, 9, bandwidth=1.0, hop_latency=0.25)
    source = rng.integers(9, size=36)
    hops = rng.integers(1, 5, 36)
    size, start = rng.uniform(0.1, 2, 36), rng.uniform(0, 10, 36)
    messages = noc.Messages(source, (source + hops) % 9, size, np.ones(36, bool), start)
    report = noc.simulate(topology, messages, switching=switching)
    paths = [tuple(((s + i) % 9, (s + i + 1) % 9) for i in range(n)) for s, n in zip(source, hops)]
    links = {(i, (i + 1) % 9): 1.0 for i in range(9)}
    late = dict.fromkeys(links, 0.25)
    others = dict(latency=late, start_times=start, switching=switching)
    run = oracle.heap_simulate(paths, size, links, **others)
    np.testing.assert_allclose(report.finish_time, run.finish, rtol=1e-12)
    assert report.status == Status.OK and 4 < report.iterations < 20
    if switching == "cut_through":
        return
    stopped = noc.simulate(topology, messages, switching=switching, max_iterations=2)
    assert stopped.status == Status.NOT_CONVERGED and np.isnan(stopped.makespan)


@pytest.mark.parametrize("name, kind", [("mesh", 0), ("torus_ports", 0), ("torus", 1)])
@settings(max_examples=15)
@given(data=st.data())
def test_critical_path_is_the_chain_of_waits(name, kind, data):
    problem = data.draw(strategies.problems(name, ("smooth", "hot")))
    with jax.enable_x64(True):
        topology = strategies.rated(problem)
        report = simulated(problem, switching=SWITCHING[kind])
        paths = strategies.literal(problem)[0]
        chain = oracle.critical_chain(heap(problem, switching=SWITCHING[kind]), paths)
        on_path = np.zeros(strategies.NUM_MESSAGES, bool)
        on_path[[message for _, message in chain]] = True
        crossed = {resource for resource, _ in chain}
        links = [tuple(link) in crossed for link in np.asarray(topology.links).tolist()]
        assert np.asarray(report.critical_messages).tolist() == on_path.tolist()
        assert np.asarray(report.critical_links).tolist() == links


def test_only_the_critical_path_sets_the_makespan(x64):
    problem = strategies.random_problem(5, "torus_ports", "smooth")
    report = simulated(problem)
    assert np.asarray(report.critical_messages).any() and np.asarray(report.critical_links).any()
    critical = np.asarray(report.critical_messages)
    larger = problem.bytes * np.where(critical, 1 + 1e-6, 1)
    assert heap(problem._replace(bytes=larger)).makespan > report.makespan
    others = problem.bytes * np.where(critical, 1, 1 + 1e-6)
    assert heap(problem._replace(bytes=others)).makespan == report.makespan
    faster = problem.link_bandwidth * np.where(report.critical_links, 1, 1 + 1e-6)
    assert heap(problem._replace(link_bandwidth=faster)).makespan == report.makespan
    nothing = problem._replace(valid=np.zeros_like(problem.valid))
    idle = simulated(nothing)
    assert idle.makespan == 0 and not np.asarray(idle.critical_messages).any()


FIELDS = ("bytes", "start_time", "link_bandwidth", "hop_latency")


def slopes(value, problem, field):
    """Central differences of `value` by every entry of a field."""
    numbers = getattr(problem, field)
    found = []
    for i in range(len(numbers)):
        step = np.where(np.arange(len(numbers)) == i, 1e-6 * max(numbers[i], 1e-7), 0)
        up, down = (value(problem._replace(**{field: numbers + s})) for s in (step, -step))
        found.append((up - down) / (2 * step.max()))
    return np.array(found)


def gradients(function):
    """Compiled gradients of function(topology, messages), a dict by field, of a problem."""
    run = eqx.filter_jit(eqx.filter_grad(lambda both: function(*both)))

    def of(problem):
        topology, messages = run((strategies.rated(problem), strategies.messages(problem)))
        found = {field: getattr(messages, field) for field in ("bytes", "start_time")}
        return found | {field: getattr(topology, field) for field in FIELDS[2:]}

    return of


def assert_slopes(value, of, problem, fields):
    found = of(problem)
    for field in fields:
        expected = slopes(value, problem, field)
        scale = np.abs(expected).max()
        assert scale > 0, field
        np.testing.assert_allclose(found[field], expected, rtol=1e-5, atol=1e-5 * scale)


def with_times(seed, name):
    """No ties, no zeros, and latencies and start times that count."""
    rng = np.random.default_rng(seed)
    problem = strategies.random_problem(seed, name, "smooth")
    links, messages = len(problem.link_bandwidth), strategies.NUM_MESSAGES
    return problem._replace(
        bytes=rng.uniform(100, 5000, messages),
        start_time=rng.uniform(1e-8, 1e-6, messages),
        hop_latency=rng.uniform(1e-9, 1e-7, links),
    )


@pytest.mark.parametrize("name", ["mesh", "torus"])
@pytest.mark.parametrize("switching", SWITCHING)
def test_gradients_are_finite_differences(name, switching, x64, quick_compilation):
    of = gradients(lambda t, m: noc.simulate(t, m, switching=switching).makespan)
    value = lambda problem: heap(problem, switching=switching).makespan
    for seed in (11, 12):
        assert_slopes(value, of, with_times(seed, name), FIELDS)


@pytest.mark.parametrize("name", ["mesh_ports", "torus"])
def test_bound_is_the_busiest_link_and_its_gradients(name, x64, quick_compilation):
    problem = with_times(4, name)
    topology, messages = strategies.rated(problem), strategies.messages(problem)
    exact = bound(problem)
    assert float(noc.link_load_bound(topology, messages)) == pytest.approx(exact, rel=1e-12)
    fields = ("bytes", "link_bandwidth")
    if name == "torus":
        assert_slopes(bound, gradients(noc.link_load_bound), problem, fields)
    soft = exact / 20

    def smooth(problem):
        paths, sizes, bandwidth, others = strategies.literal(problem)
        busy = oracle.busy_times(paths, sizes, bandwidth, others["valid"])
        idle = len(bandwidth) - len(busy)
        return soft * np.log(sum(np.exp(np.array(list(busy.values())) / soft)) + idle)

    of_soft = lambda t, m: noc.link_load_bound(t, m, temperature=soft)
    assert float(of_soft(topology, messages)) == pytest.approx(smooth(problem), rel=1e-12)
    assert_slopes(smooth, gradients(of_soft), problem, fields)


def test_one_compilation_for_fifty_bandwidths_and_other_messages(quick_compilation):
    traces = []

    @jax.jit
    def run(topology, messages):
        traces.append(1)
        return noc.simulate(topology, messages).makespan

    for i in range(1, 51):
        problem = strategies.random_problem(i, "torus", "smooth", np.float32)
        topology = noc.torus(4, 5, bandwidth=1e9 * i, hop_latency=1e-9 * i)
        assert run(topology, strategies.messages(problem)) > 0
    assert len(traces) == 1


def test_vmap_is_the_loop_and_padding_changes_nothing(quick_compilation):
    flavors = strategies.FLAVORS
    problems = [strategies.random_problem(8, "torus", flavor, np.float32) for flavor in flavors]
    pairs = [(strategies.rated(problem), strategies.messages(problem)) for problem in problems]
    pairs += [(topology, garbage_in_padding(messages)) for topology, messages in pairs]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    axes = eqx.filter_vmap(noc.simulate)(*stacked)
    for i, pair in enumerate(pairs):
        alone = noc.simulate(*pair)
        for field in ("makespan", "finish_time", "link_occupancy", "critical_messages"):
            found, expected = getattr(axes, field)[i], getattr(alone, field)
            np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(axes.finish_time[:4], axes.finish_time[4:])
    assert not np.any(axes.status)


def garbage_in_padding(messages):
    """The same messages, with senseless entries wherever they are not valid."""
    swap = lambda array, value: jnp.where(messages.valid, array, value)
    return noc.Messages(
        swap(messages.source, 10_000),
        swap(messages.destination, -7),
        swap(messages.bytes, -jnp.inf),
        messages.valid,
        swap(messages.start_time, jnp.nan),
        messages.flow,
    )


def line(**changes):
    """Three messages on a row of four nodes."""
    fields = dict(source=[0, 1, 3], destination=[3, 2, 0], bytes=[8.0, 2.0, 4.0])
    fields |= dict(valid=[True, True, True]) | changes
    return noc.Messages(**{name: np.asarray(value) for name, value in fields.items()})


def test_a_dead_link_stops_what_crosses_it(x64, quick_compilation):
    topology = noc.mesh(1, 4, bandwidth=2.0)
    rates = topology.link_bandwidth.at[topology.link_id(1, 2)].set(0)
    dead = eqx.tree_at(lambda t: t.link_bandwidth, topology, rates)
    report = noc.simulate(dead, line())
    assert report.status == Status.DEAD_LINK and report.makespan == np.inf
    assert np.asarray(report.finish_time).tolist() == [np.inf, np.inf, 6.0]
    assert report.link_occupancy[topology.link_id(1, 2)] == np.inf
    assert report.link_occupancy[topology.link_id(3, 2)] == 2.0
    assert noc.link_load_bound(dead, line()) == np.inf
    # Nothing takes no time, wherever it goes, and the other direction is not in the way.
    report = noc.simulate(dead, line(bytes=[0.0, 0.0, 4.0]))
    assert report.status == Status.OK and report.makespan == 6.0
    report = noc.simulate(dead, line(valid=[False, False, True]))
    assert report.status == Status.OK and report.makespan == 6.0
    ring = noc.torus(1, 4, bandwidth=jnp.zeros(8))
    report = noc.simulate(ring, line())
    assert report.status == Status.DEAD_LINK and report.makespan == np.inf


def test_bad_input_is_named():
    topology = noc.mesh(1, 4, bandwidth=2.0)
    for changes, named in (
        (dict(source=[0, 4, 3]), r"source\[1\] = 4.* 0 \.\. 3"),
        (dict(destination=[3, 2, -1]), r"destination\[2\] = -1"),
        (dict(bytes=[8.0, -2.0, 4.0]), r"bytes\[1\] = -2"),
        (dict(bytes=[8.0, 2.0, np.nan]), r"bytes\[2\] = nan"),
        (dict(start_time=[0.0, 0.0, -1.0]), r"start_time\[2\] = -1"),
    ):
        for function in (noc.simulate, noc.link_load_bound, noc.bookings):
            with pytest.raises(ValueError, match=named):
                function(topology, line(**changes))
    with pytest.raises(ValueError, match=r"message 0 .* 4 packets of 2: .* max_packets = 3"):
        noc.simulate(topology, line(), packet_bytes=2.0, max_packets=3)
    with pytest.raises(ValueError, match="packet_bytes = 0"):
        noc.simulate(topology, line(), packet_bytes=0.0)
    with pytest.raises(ValueError, match="unknown switching 'wormhole' .*cut_through"):
        noc.simulate(topology, line(), switching="wormhole")
    with pytest.raises(ValueError, match="max_iterations = 0"):
        noc.simulate(topology, line(), max_iterations=0)
    with pytest.raises(ValueError, match="jax.vmap"):
        noc.simulate(topology, jax.tree.map(lambda x: jnp.stack([x, x]), line()))


def test_under_vmap_a_status_marks_the_bad_rows_only(quick_compilation):
    topology = noc.mesh(1, 4, bandwidth=2.0)
    rows = [
        line(),
        line(source=[0, 4, 3]),
        line(bytes=[8.0, -2.0, 4.0]),
        line(bytes=[8.0, 2.0, np.nan]),
        line(bytes=[8.0, 8.5, 4.0]),
        line(bytes=[0.0, 2.0, 4.0]),
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    run = lambda m: noc.simulate(topology, m, packet_bytes=2.0, max_packets=4)
    report = jax.vmap(run)(stacked)
    assert report.status.tolist() == [
        Status.OK,
        Status.INVALID_NODE,
        Status.NEGATIVE_BYTES,
        Status.NEGATIVE_BYTES,
        Status.TOO_MANY_MESSAGES,
        Status.OK,
    ]
    bad = np.array([False, True, True, True, True, False])
    assert np.array_equal(np.isnan(report.makespan), bad)
    assert np.array_equal(np.isnan(report.finish_time), np.repeat(bad[:, None], 3, axis=1))
    assert report.makespan[5] == run(rows[5]).makespan
    bounds = jax.vmap(noc.link_load_bound, in_axes=(None, 0))(topology, stacked)
    assert np.array_equal(np.isnan(bounds), [False, True, True, True, False, False])
