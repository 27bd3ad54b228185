"""Collectives, broadcasts, estimates and gamma against closed forms and literal loops."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax._status import Status
from moejax.noc import _collectives as collectives
from moejax.noc import expert_traffic, fat_tree, mesh, ring, simulate, torus
from moejax.noc._broadcast import broadcast
from moejax.noc._communication import (
    TP_ESTIMATES_CONFERENCE,
    communication_time,
    estimate,
    tensor_parallel_time,
    token_bytes,
)
from moejax.noc._gamma import calibrate_gamma
from tests.conftest import data_path
from tests.oracles import noc_traffic as oracle


CLOSED = {
    "all_reduce": (collectives.ring_all_reduce, collectives.ring_all_reduce_time),
    "reduce_scatter": (collectives.ring_reduce_scatter, collectives.reduce_scatter_time),
    "all_gather": (collectives.ring_all_gather, collectives.all_gather_time),
}


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("size", [1, 8])
def test_ring_collectives_are_their_closed_forms(name, size):
    make, closed_form = CLOSED[name]
    network = ring(max(size, 2), bandwidth=5e10, hop_latency=5e-7)
    found = collectives.collective_time(network, make(size, 1e6))
    wanted = closed_form(size, 1e6, bandwidth=5e10, latency=5e-7)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_collectives_by_hand():
    # 6 nodes, 12 B: parts of 2 B. 10 steps of 0.5 s + 2 B / (4 B/s).
    assert collectives.ring_all_reduce_time(6, 12, bandwidth=4, latency=0.5) == 10.0
    assert collectives.reduce_scatter_time(6, 12, bandwidth=4, latency=0.5) == 5.0
    assert collectives.all_gather_time(6, 2, bandwidth=4, latency=0.5) == 5.0
    assert collectives.all_to_all_time(6, 12, bandwidth=4, latency=0.5) == 15.0
    # The last clock ticks before the whole ones: 1.75 s at 0.5 s is 1.5 s.
    assert collectives.all_gather_time(3, 5, bandwidth=4, latency=0.5, resolution=0.5) == 3.0
    assert collectives.ring_all_reduce_time(3, 6, bandwidth=2, memory_bandwidth=4) == 4 + 6 * 0.5


def test_a_ring_passes_every_part_to_everyone():
    order, rng = [2, 0, 3, 1], np.random.default_rng(0)
    vectors = rng.integers(0, 100, (4, 4))
    held = oracle.ring_sums(
        order, vectors.tolist(), collectives.ring_all_reduce(order, 1.0).num_steps
    )
    assert all(held[node] == vectors.sum(axis=0).tolist() for node in order)
    messages = collectives.ring_all_reduce(order, 8.0).messages
    assert messages.source.tolist() == order and messages.destination.tolist() == [0, 3, 1, 2]
    assert messages.bytes.tolist() == [2.0] * 4


def test_a_ring_may_be_part_of_a_mesh():
    # Around a block of 2 x 2 every step is one hop; in order of ids it needs two hops twice.
    network = mesh(2, 4, bandwidth=1.0)
    around = collectives.ring_all_reduce([1, 2, 6, 5], 4.0)
    assert float(collectives.collective_time(network, around)) == 6.0
    by_id = collectives.ring_all_reduce([1, 2, 5, 6], 4.0)
    assert float(collectives.collective_time(network, by_id)) == 12.0
    assert float(collectives.collective_time(network, by_id, switching="cut_through")) == 6.0


def test_direct_collectives():
    # 3 nodes in a line at 1 B/s: 2 B parts to everyone. Link 0 -> 1 carries two of them.
    line = mesh(1, 3, bandwidth=1.0)
    once = collectives.all_to_all(3, 6.0)
    assert int(once.messages.valid.sum()) == 6 and once.num_steps == 1
    # The part 0 -> 2 takes both links, and is served after 0 -> 1 on the first: 4 s + 2 s.
    assert float(collectives.collective_time(line, once)) == 6.0
    twice = collectives.direct_all_reduce(3, 6.0)
    assert float(collectives.collective_time(line, twice)) == 12.0


# Measured with ASTRA-sim (c459ab6), analytical network: bidirectional ring at 50 GB/s of 2^30 B,
# one split, endpoint delay 1 ns. All-reduce of (nodes, B): ns without and with 500 ns a hop.
ASTRA_SIM = {
    (4, 2**16): (1837, 4837),
    (8, 2**16): (2143, 9143),
    (64, 2**16): (2521, 65521),
    (8, 2**20): (34189, 41189),
    (32, 2**20): (37883, 68883),
    (4, 2**26): (1875007, 1878007),
    (16, 2**26): (2343781, 2358781),
    (64, 2**26): (2461033, 2524033),
}


@pytest.mark.parametrize("case", ASTRA_SIM)
@pytest.mark.parametrize("as_array", [False, True])
def test_all_reduce_is_that_of_astra_sim(case, as_array):
    nodes, size = case
    for latency, measured in zip((0.0, 5e-7), ASTRA_SIM[case], strict=True):
        found = collectives.ring_all_reduce_time(
            nodes,
            jnp.float32(size) if as_array else size,
            bandwidth=50 * 2.0**30,
            latency=latency,
            endpoint_delay=1e-9,
            resolution=1e-9,
        )
        # Single precision holds seven digits.
        assert float(found) * 1e9 == pytest.approx(measured, rel=3e-7 if as_array else 1e-12)


def test_every_measured_row_of_astra_sim():
    path = data_path().parent / "spec" / "oracles.json"
    if not path.is_file():
        pytest.skip(f"no measured rows at {path}")
    closed = {name: closed_form for name, (_, closed_form) in CLOSED.items()}
    closed["all_to_all"] = collectives.all_to_all_time
    rows = [r for r in json.loads(path.read_text()) if r["simulator"].startswith("astra-sim")]
    checked = 0
    for row in rows:
        number = lambda pattern, row=row: float(re.search(pattern, row["config"])[1])
        if number(r"(\d+) split") != 1:
            continue
        op, kwargs = row["workload"]["op"], {}
        if op == "all_reduce":
            kwargs = dict(memory_bandwidth=number(r"mem-bw ([\de]+)") * 1e9)
        found = closed[op](
            row["workload"]["npus"],
            row["workload"]["bytes"],
            bandwidth=number(r"(\d+) GB/s") * 2**30,
            latency=number(r"(\d+) ns/hop") * 1e-9,
            endpoint_delay=number(r"endpoint-delay (\d+)") * 1e-9,
            resolution=1e-9,
            **kwargs,
        )
        assert found * 1e9 == pytest.approx(row["value"], rel=1e-12), row
        checked += 1
    assert checked > 250


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: collectives.ring_all_reduce([0, 1, 0], 1.0), "node 0 twice"),
        (lambda: collectives.ring_all_reduce(0, 1.0), "group = 0"),
        (lambda: collectives.all_to_all(3, -1.0), "bytes = -1"),
        (lambda: collectives.ring_all_reduce_time(0, 1.0, bandwidth=1.0), "num_nodes = 0"),
        (lambda: collectives.all_gather_time(2, 1.0, bandwidth=0.0), "bandwidth = 0"),
        (lambda: collectives.all_gather_time(2, 1.0, bandwidth=1.0, latency=-1), "latency = -1"),
        (lambda: broadcast(NETWORKS["mesh"], 6, 1.0, chunks=1), r"root = 6: allowed is 0 .. 5"),
        (lambda: broadcast(NETWORKS["mesh"], 0, 1.0, chunks=0), "chunks = 0"),
        (lambda: broadcast(NETWORKS["mesh"], 0, -1.0, chunks=1), "bytes = -1"),
    ],
)
def test_collectives_name_what_is_wrong(call, text):
    with pytest.raises(ValueError, match=text):
        call()


NETWORKS = {
    "mesh": mesh(
        2, 3, bandwidth=np.array([1, 2, 4, 1, 2, 4, 1, 2, 4, 1, 2, 4, 1, 2.0]), hop_latency=0.5
    ),
    "torus": torus(3, 3, bandwidth=2.0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_broadcast_fills_a_pipeline(name):
    network, root, chunks = NETWORKS[name], 4, 3
    nodes, size = network.num_nodes, 12.0
    routes = {node: network.route(root, node) for node in range(nodes)}
    parent = oracle.tree_of_routes(routes, nodes)
    ends = [tuple(link) for link in network.links.tolist()]
    arrivals = oracle.broadcast_arrivals(
        parent,
        root,
        chunks,
        size / chunks,
        dict(zip(ends, network.link_bandwidth.tolist(), strict=True)),
        dict(zip(ends, network.hop_latency.tolist(), strict=True)),
    )
    messages = broadcast(network, root, size, chunks=chunks)
    report = simulate(network, messages)
    children = messages.destination.tolist()
    assert messages.source.tolist() == [parent[child] for child in children]
    for index, child in enumerate(children):
        chunk = index // (nodes - 1)
        assert float(report.finish_time[index]) == pytest.approx(arrivals[child, chunk], rel=1e-6)
    # Nothing waits, and each link of the tree carries everything once, the others nothing.
    assert float(report.makespan) == pytest.approx(max(arrivals.values()), rel=1e-6)
    used = {ends[link] for link in np.flatnonzero(report.link_occupancy)}
    assert used == {(parent[child], child) for child in parent}
    carried = np.asarray(report.link_occupancy * network.link_bandwidth)
    np.testing.assert_allclose(carried[carried > 0], size, rtol=1e-6)


def test_broadcast_along_a_line_by_hand():
    # 8 B in 4 chunks over two links of 1 B/s: 5 times 2 s.
    line = mesh(1, 3, bandwidth=1.0)
    messages = broadcast(line, 0, 8.0, chunks=4)
    assert float(simulate(line, messages).makespan) == 10.0
    # At the second node the chunks set out one after the other, as they come in.
    assert messages.start_time.reshape(4, 2).tolist() == [[0, 2], [2, 4], [4, 6], [6, 8]]


def test_broadcast_with_ports_and_switches():
    # Every chunk enters the network once for each neighbor: 2 children at 1 B/s, 4 B, then 2 links.
    ports = mesh(1, 3, bandwidth=np.inf, port_bandwidth=1.0)
    report = simulate(ports, broadcast(ports, 1, 4.0, chunks=2))
    assert float(report.makespan) == 2 * 4.0 + 2.0
    tree = fat_tree(bandwidth=1.0, pods=1, leaves_per_pod=2, cores=1, aggregations_per_pod=1)
    messages = broadcast(tree, 1, 2.0, chunks=2)
    assert messages.source.tolist() == [1] * 6
    # The link of the root carries 3 copies of 2 B; the last byte is 3 hops of 1 B further.
    assert float(simulate(tree, messages).makespan) == 6.0 + 3.0


def test_broadcast_under_tracing():
    line = mesh(1, 3, bandwidth=1.0)

    @jax.jit
    def seconds(bandwidth, root):
        network = mesh(1, 3, bandwidth=bandwidth)
        messages = broadcast(network, root, 8.0, chunks=4)
        return simulate(network, messages).makespan, messages.status

    time, status = jax.vmap(seconds)(jnp.array([1.0, 2.0, 1.0]), jnp.array([0, 0, 7]))
    assert time[:2].tolist() == [10.0, 5.0] and np.isnan(time[2])
    assert status.tolist() == [0, 0, Status.INVALID_NODE]
    slope = jax.grad(lambda b: seconds(b, 0)[0])(2.0)
    assert float(slope) == pytest.approx(-2.5)
    dead = mesh(1, 3, bandwidth=0.0)
    report = simulate(dead, broadcast(dead, 0, 8.0, chunks=4))
    assert float(report.makespan) == np.inf and int(report.status) == Status.DEAD_LINK
    assert broadcast(mesh(1, 1, bandwidth=1.0), 0, 1.0, chunks=2).num_messages == 0
    assert float(simulate(line, broadcast(line, 0, 0.0, chunks=4)).makespan) == 0


def test_communication_doubles_or_mirrors_the_gather():
    # Experts on nodes 1 and 3 of a 2 x 2 mesh; the parts meet at 1 and at 3. 2 B a token, 1 B/s.
    share, position, network = np.eye(4)[[1, 3]], np.arange(4), mesh(2, 2, bandwidth=1.0)
    gather = expert_traffic([[0, 1], [0, 1], [1, 0]], share, position, bytes_per_token=2.0)
    assert float(communication_time(network, gather)) == 2 * 4.0
    # 0 -> 3 and 2 -> 3 gather over 0 -> 2 -> 3 (row first); the mirror parts at 3 -> 1 and 3 -> 2.
    share = np.eye(4)[[3, 0, 2]]
    gather = expert_traffic([[0, 1, 2]], share, position, bytes_per_token=2.0)
    assert float(communication_time(network, gather)) == 2 * 4.0
    assert float(communication_time(network, gather, dispatch="mirror")) == 4.0 + 4.0
    with pytest.raises(ValueError, match="dispatch 'mirrored'"):
        communication_time(network, gather, dispatch="mirrored")


def test_the_estimate_is_the_literal_loop():
    rng = np.random.default_rng(3)
    for _ in range(20):
        share = np.stack([rng.multinomial(4, np.full(5, 0.2)) / 4 for _ in range(6)])
        expert_ids, weight = rng.integers(-1, 6, (7, 2)), rng.random(7)
        found = estimate(
            expert_ids, share, hidden_size=10, bandwidth=8.0, bytes_per_element=2, weight=weight
        )
        wanted = oracle.estimate(expert_ids, share, weight, 20.0, 8.0)
        assert float(found) == pytest.approx(wanted, rel=1e-5)
    # Tensor parallelism touches every node with every token.
    everywhere = np.full((6, 5), 0.2)
    expert_ids = rng.integers(0, 6, (7, 2))
    found = estimate(expert_ids, everywhere, hidden_size=10, bandwidth=8.0)
    assert float(found) == 7 * 10 * 4 / 8
    assert np.isnan(
        jax.jit(lambda s: estimate(expert_ids, s, hidden_size=1, bandwidth=1.0))(share * 2)
    )
    with pytest.raises(ValueError, match="expert 0 sums to 2"):
        estimate(expert_ids, share * 2, hidden_size=1, bandwidth=1.0)


def test_conventions_of_the_papers():
    # Mixtral, 32 layers at 75 GB/s, 16 tokens: published as 447.39 and 223.70 us.
    layers = lambda **kw: 32e6 * float(tensor_parallel_time(16, 4096, bandwidth=75e9, **kw))
    assert layers() == pytest.approx(447.39, abs=0.005)
    assert layers(estimates=TP_ESTIMATES_CONFERENCE) == pytest.approx(223.70, abs=0.005)
    assert float(token_bytes(4096)) == 4096 and float(token_bytes(4096, 4)) == 16384


def gamma_problem(num_tokens=40):
    rng = np.random.default_rng(5)
    expert_ids = np.stack([rng.choice(4, 2, replace=False) for _ in range(num_tokens)])
    share = np.zeros((4, 6))
    for expert in range(4):
        share[expert, [expert, (expert + 2) % 6]] = 0.5
    return mesh(2, 3, bandwidth=4.0), expert_ids, share, rng.permutation(6)


def test_gamma_is_the_line_through_its_points():
    problem = gamma_problem()
    sizes = [1, *range(8, 36, 2), 40]
    options = dict(hidden_size=3, key=jax.random.key(2), batch_sizes=sizes)
    found = calibrate_gamma(*problem, **options)
    assert found.estimated.shape == found.simulated.shape == (16,) and int(found.status) == 0
    points = [np.asarray(v, float).tolist() for v in (found.estimated, found.simulated)]
    line = oracle.least_squares(*points)
    np.testing.assert_allclose([found.slope, found.intercept, found.r_squared], line, rtol=1e-4)
    # A node sends at most a vector of 12 B for each token, at 4 B/s; a batch of one does.
    assert np.all(np.array(points[0]) <= 3 * np.array(sizes)) and points[0][0] == 3.0
    # The largest batch is the whole trace, in whatever order.
    whole = oracle.estimate(problem[1], problem[2], np.ones(40), 12.0, 4.0)
    assert points[0][-1] == pytest.approx(whole)
    # Gamma has no unit: longer vectors change nothing, but what counts as a byte does.
    scaled = calibrate_gamma(*problem, **(options | dict(hidden_size=6)))
    assert float(scaled.slope) == pytest.approx(float(found.slope), rel=1e-5)
    quarter = calibrate_gamma(*problem, **options, simulated_bytes=4)
    assert float(quarter.slope) == pytest.approx(4 * float(found.slope), rel=1e-5)


def test_gamma_names_what_is_wrong():
    problem, options = gamma_problem(), dict(hidden_size=3, key=jax.random.key(2))
    with pytest.raises(ValueError, match="go up to 638: allowed is 40"):
        calibrate_gamma(*problem, **options)
    with pytest.raises(ValueError, match="two or more sizes"):
        calibrate_gamma(*problem, **options, batch_sizes=[8, 8])
