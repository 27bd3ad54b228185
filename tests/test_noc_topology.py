"""Topologies against routes written out hop by hop, and their tables against brute force."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import noc
from moejax._checks import replace
from tests.oracles import noc_routes as oracle


FAT = dict(pods=3, leaves_per_pod=2, endpoints_per_leaf=2, aggregations_per_pod=3, cores=2)


def oracle_fat_tree(source, destination):
    return oracle.fat_tree(source, destination, 3, 2, 2, 3, 2)


def candidates_of(topology):
    """{(source, destination): list of vertex lists} by the topology's own account."""
    nodes = range(topology.num_nodes)
    counts = np.asarray(topology.num_routes).reshape(topology.num_nodes, -1)
    return {
        (s, d): [topology.route(s, d, choice) for choice in range(counts[s, d])]
        for s in nodes
        for d in nodes
    }


def expected_resources(topology, path):
    """The resources of a path, with its ports where the topology has some."""
    links = [tuple(link) for link in topology.links.tolist()]
    hops = [links.index(link) for link in oracle.links_of(path)]
    if hops and topology.num_resources > len(links):
        ejection = len(links) + topology.num_nodes + path[-1]
        hops = [len(links) + path[0], *hops, ejection]
    return hops


def check_tables(topology, candidates):
    """Everything the simulator relies on, for the routes [pairs][choices] it should have."""
    resource, rank = np.asarray(topology.route_resource), np.asarray(topology.route_rank)
    segment = np.asarray(topology.segment)
    assert resource.shape == rank.shape and resource.dtype == rank.dtype == np.int32
    assert resource.shape[1] == max(map(len, candidates.values()))
    crossing = {}  # resource -> [(remaining path, rank)]
    for (source, destination), paths in candidates.items():
        pair = source * topology.num_nodes + destination
        assert topology.num_routes[pair] == len(paths)
        for choice in range(resource.shape[1]):
            column = resource[:, choice, pair]
            hops = expected_resources(topology, paths[choice]) if choice < len(paths) else []
            assert column[column != noc.NO_LINK].tolist() == hops
            remaining = oracle.links_of(paths[choice]) if choice < len(paths) else []
            places = np.flatnonzero(column != noc.NO_LINK)
            for position, (at, hop) in enumerate(zip(places, hops)):
                ports = topology.num_resources > topology.num_links
                rest = remaining[max(position - 1, 0) :] if ports else remaining[position:]
                crossing.setdefault(hop, []).append((rest, rank[at, choice, pair]))
    for through in crossing.values():
        order = sorted({tuple(rest) for rest, _ in through})
        assert [order.index(tuple(rest)) for rest, _ in through] == [r for _, r in through]
    seen = set()
    assert [0, *(s.stop for s in topology.stages)][:-1] == [s.start for s in topology.stages]
    assert (topology.stages[-1].stop if topology.stages else 0) == len(resource)
    for stage in topology.stages:
        columns = resource[stage.start : stage.stop]
        for level in [columns] if stage.cyclic else columns[:, None]:
            used = np.setdiff1d(level, [noc.NO_LINK])
            assert used.size and not seen & set(used.tolist())
            seen |= set(used.tolist())
            assert sorted(segment[used]) == list(range(len(used)))
        if stage.cyclic:
            there = columns != noc.NO_LINK
            assert np.all(there[:-1] | ~there[1:]), "hops are not left-aligned"
    assert np.all(segment < 2**topology.segment_bits - 1) and np.all(segment >= 0)
    assert np.all(rank < 2**topology.rank_bits) and np.all(rank >= 0)


def routes_by(function, nodes):
    """The expected candidates from a literal function of (source, destination)."""
    pairs = [(s, d) for s in range(nodes) for d in range(nodes)]
    routes = {pair: function(*pair) for pair in pairs}
    return {pair: path if isinstance(path[0], list) else [path] for pair, path in routes.items()}


SHAPES = [(1, 1), (1, 4), (5, 1), (2, 2), (2, 5), (3, 4), (4, 4), (4, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("builder", [noc.mesh, noc.torus])
def test_grid_routes_are_the_literal_ones(builder, shape):
    topology = builder(*shape, bandwidth=1.0)
    literal = getattr(oracle, builder.__name__)
    expected = routes_by(lambda s, d: literal(*shape, s, d), topology.num_nodes)
    assert candidates_of(topology) == expected
    check_tables(topology, expected)
    assert topology.kind == builder.__name__ and topology.shape == shape
    rows, cols = shape
    node = rows * cols - 1
    assert topology.coordinates[node].tolist() == [cols - 1, rows - 1]


@pytest.mark.parametrize(
    "build, candidates",
    [
        (
            lambda: noc.mesh(3, 4, bandwidth=1, port_bandwidth=1),
            partial(oracle.mesh, 3, 4),
        ),
        (
            lambda: noc.torus(4, 5, bandwidth=1, port_bandwidth=1),
            partial(oracle.torus, 4, 5),
        ),
        (lambda: noc.fat_tree(bandwidth=1, **FAT), oracle_fat_tree),
        (lambda: noc.fat_tree(bandwidth=1, port_bandwidth=1, **FAT), oracle_fat_tree),
        (lambda: noc.fat_tree(bandwidth=1), oracle.fat_tree),
        (lambda: noc.mesh(1, 1, bandwidth=1, port_bandwidth=1), lambda s, d: [s]),
    ],
)
def test_ports_and_choices(build, candidates):
    topology = build()
    expected = routes_by(candidates, topology.num_nodes)
    assert candidates_of(topology) == expected
    check_tables(topology, expected)


@pytest.mark.parametrize(
    "build, links",
    [
        (lambda: noc.mesh(4, 4, bandwidth=1), 48),
        (lambda: noc.mesh(4, 8, bandwidth=1), 104),
        (lambda: noc.mesh(8, 8, bandwidth=1), 224),
        (lambda: noc.torus(4, 8, bandwidth=1), 128),
        (lambda: noc.fat_tree(bandwidth=1), 64 + 64 + 32 + 16),
        (lambda: noc.ring(6, bandwidth=1), 12),
        (lambda: noc.fully_connected(5, bandwidth=1), 20),
        (lambda: noc.mesh_3d(2, 3, 4, bandwidth=1), 2 * (12 + 16 + 18)),
        # An axis of two has one link each way, not two.
        (lambda: noc.torus(2, 4, bandwidth=1), 8 + 16),
        (lambda: noc.torus(1, 3, bandwidth=1), 6),
    ],
)
def test_links(build, links):
    topology = build()
    assert topology.num_links == links and topology.num_resources == links
    listed = [tuple(link) for link in topology.links.tolist()]
    assert listed == sorted(set(listed))
    paths = [path for paths in candidates_of(topology).values() for path in paths]
    used = {link for path in paths for link in oracle.links_of(path)}
    assert used == set(listed)
    assert all(topology.link_id(u, v) == i for i, (u, v) in enumerate(listed))
    assert topology.coordinates.shape == (topology.num_vertices, 2)
    assert len({tuple(xy) for xy in topology.coordinates.tolist()}) == topology.num_vertices


def test_torus_ties_go_forward():
    torus = noc.torus(4, 8, bandwidth=1.0)
    assert torus.route(0, 4) == [0, 1, 2, 3, 4]
    assert torus.route(4, 0) == [4, 5, 6, 7, 0]
    assert torus.route(0, 5) == [0, 7, 6, 5]
    assert torus.route(24, 8) == [24, 0, 8]


def test_stages():
    for rows, cols in ((3, 5), (4, 8)):
        mesh = noc.mesh(rows, cols, bandwidth=1.0)
        assert mesh.stages == (noc.Stage(0, rows - 1 + cols - 1, False),)
        ports = noc.mesh(rows, cols, bandwidth=1.0, port_bandwidth=1.0)
        assert ports.stages == (noc.Stage(0, rows + cols, False),)
    assert noc.fat_tree(bandwidth=1.0).stages == (noc.Stage(0, 6, False),)
    assert noc.torus(4, 8, bandwidth=1.0).stages == (noc.Stage(0, 2, True), noc.Stage(2, 6, True))
    # Rings of three never take two hops, so nothing waits for itself.
    assert noc.torus(3, 3, bandwidth=1.0).stages == (noc.Stage(0, 2, False),)
    inject, rows, cols, eject = noc.torus(4, 4, bandwidth=1.0, port_bandwidth=1.0).stages
    assert [s.cyclic for s in (inject, rows, cols, eject)] == [False, True, True, False]
    assert noc.mesh_3d(2, 2, 3, bandwidth=1.0).stages[0].cyclic is False
    assert len(noc.mesh_3d(2, 2, 3, bandwidth=1.0).stages) == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: noc.ring(1, bandwidth=1),
        lambda: noc.ring(2, bandwidth=1),
        lambda: noc.ring(7, bandwidth=1),
        lambda: noc.ring(8, bandwidth=1, port_bandwidth=1),
        lambda: noc.fully_connected(5, bandwidth=1),
        lambda: noc.mesh_3d(2, 3, 3, bandwidth=1),
        # A star of leaves around one switch, and a one-way ring.
        lambda: noc.custom([(0, 3), (1, 3), (2, 3)], bandwidth=1, num_nodes=3, port_bandwidth=1),
        lambda: noc.custom([(0, 1), (1, 2), (2, 3), (3, 0)], bandwidth=1, directed=True),
    ],
)
def test_graph_routes(build):
    topology = build()
    links = [tuple(link) for link in topology.links.tolist()]
    expected = routes_by(lambda s, d: oracle.shortest(links, s, d), topology.num_nodes)
    assert candidates_of(topology) == expected
    check_tables(topology, expected)


@settings(max_examples=40)
@given(st.data())
def test_any_graph(data):
    size = data.draw(st.integers(2, 7))
    pairs = [(u, v) for u in range(size) for v in range(size) if u != v]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True, min_size=1, max_size=20))
    nodes, directed = data.draw(st.integers(1, size)), data.draw(st.booleans())
    links = set(edges) if directed else {*edges, *((v, u) for u, v in edges)}
    routes = routes_by(lambda s, d: oracle.shortest(links, s, d) or [s, None], nodes)
    apart = [pair for pair, (path,) in routes.items() if path[-1] is None]
    options = dict(bandwidth=1.0, num_nodes=nodes, directed=directed)
    if apart:
        with pytest.raises(ValueError, match="from node {} to node {}$".format(*apart[0])):
            noc.custom(edges, **options)
        return
    topology = noc.custom(edges, **options)
    assert topology.links.tolist()[: len(edges)] == [list(edge) for edge in edges]
    assert set(map(tuple, topology.links.tolist())) == links
    check_tables(topology, routes)


def test_custom_takes_a_rate_per_edge_or_per_link():
    edges = [(0, 1), (2, 1), (1, 2)]
    per_edge = noc.custom(edges, bandwidth=[1.0, 2.0, 3.0], hop_latency=[4.0, 5.0, 6.0])
    assert per_edge.links.tolist() == [[0, 1], [2, 1], [1, 2], [1, 0]]
    assert per_edge.link_bandwidth.tolist() == [1, 2, 3, 1]
    assert per_edge.hop_latency.tolist() == [4, 5, 6, 4]
    per_link = noc.custom(edges, bandwidth=[1.0, 2.0, 3.0, 7.0])
    assert per_link.link_bandwidth.tolist() == [1, 2, 3, 7]


def test_fat_tree_rates():
    tree = noc.fat_tree(
        bandwidth=5.0, endpoint_bandwidth=3.0, core_bandwidth=8.0, oversubscription=4.0
    )
    for u, v, rate in ((0, 32, 3), (32, 0, 3), (32, 48, 5), (48, 32, 5), (48, 59, 2), (59, 49, 2)):
        assert tree.link_bandwidth[tree.link_id(u, v)] == rate
    plain = noc.fat_tree(bandwidth=6.0, oversubscription=2.0)
    assert sorted(plain.link_bandwidth.tolist()) == [3.0] * 48 + [6.0] * 128
    with pytest.raises(ValueError, match="no link 56 -> 49"):  # core 0 leads to aggregation 0 only
        tree.link_id(56, 49)


def test_resources():
    ports = noc.mesh(1, 2, bandwidth=[1.0, 2.0], hop_latency=[3.0, 4.0], port_bandwidth=[5.0, 6.0])
    assert ports.num_resources == 6 and ports.num_links == 2
    assert ports.resource_bandwidth.tolist() == [1, 2, 5, 6, 5, 6]
    assert ports.resource_latency.tolist() == [3, 4, 0, 0, 0, 0]
    plain = noc.mesh(1, 2, bandwidth=0.0)
    assert plain.resource_bandwidth.tolist() == plain.resource_latency.tolist() == [0, 0]


def test_one_compilation_serves_all_bandwidths():
    compilations = []

    @jax.jit
    def total(topology):
        compilations.append(topology.kind)
        return jnp.sum(topology.resource_bandwidth) + jnp.sum(topology.resource_latency)

    for i in range(50):
        rate = 1.0 + i
        total(noc.mesh(4, 8, bandwidth=rate))
        total(noc.torus(4, 8, bandwidth=rate, hop_latency=rate))
        total(noc.fat_tree(bandwidth=rate, port_bandwidth=rate))
        total(noc.custom([(0, 1), (1, 2)], bandwidth=rate))
    assert sorted(compilations) == ["custom", "fat_tree", "mesh", "torus"]


def test_traced_rates():
    def total(rate):
        tree = noc.fat_tree(bandwidth=rate, oversubscription=2.0, port_bandwidth=rate)
        edge = noc.custom([(0, 1)], bandwidth=rate[None], hop_latency=rate)
        return jnp.sum(tree.resource_bandwidth) + jnp.sum(edge.resource_latency)

    # 128 links at the full and 48 at half the rate, 64 ports; two links of latency.
    rates = jnp.arange(1.0, 4.0)
    np.testing.assert_allclose(jax.jit(jax.vmap(total))(rates), 218.0 * rates)
    np.testing.assert_allclose(jax.grad(total)(2.0), 218.0)
    mesh = noc.mesh(2, 2, bandwidth=1.0)
    sweep = jnp.ones((3, 8)) * rates[:, None]
    found = jax.vmap(lambda rate: jnp.sum(replace(mesh, link_bandwidth=rate).link_bandwidth))
    np.testing.assert_allclose(found(sweep), 8 * rates)
    # Tables built first inside a trace are as good afterwards.
    jax.jit(lambda rate: noc.mesh(2, 3, bandwidth=rate).link_bandwidth)(1.0)
    assert noc.mesh(2, 3, bandwidth=1.0).route(0, 5) == [0, 3, 4, 5]


def test_double_precision(x64):
    mesh = noc.mesh(2, 2, bandwidth=0.1, hop_latency=np.full(8, 0.2))
    assert mesh.link_bandwidth.dtype == mesh.hop_latency.dtype == jnp.float64
    assert mesh.route_resource.dtype == mesh.segment.dtype == mesh.num_routes.dtype == jnp.int32


def test_tables_are_built_fast():
    start = time.process_time()
    mesh = noc.mesh(16, 16, bandwidth=1.0)
    assert time.process_time() - start < 2.0
    assert mesh.route_resource.shape == (30, 1, 65536)
    pair = 17 * 256 + 200
    resources = np.asarray(mesh.route_resource[:, 0, pair])
    links = [tuple(mesh.links[i].tolist()) for i in resources[resources != noc.NO_LINK]]
    assert links == oracle.links_of(oracle.mesh(16, 16, 17, 200))


def bad_mesh(**changes):
    return lambda: noc.mesh(**dict(rows=2, cols=3, bandwidth=1.0) | changes)


def bad_custom(*edges, **options):
    return lambda: noc.custom(edges, bandwidth=1.0, **options)


@pytest.mark.parametrize(
    "build, message",
    [
        (bad_mesh(rows=0), "mesh: rows = 0: allowed is a whole number from 1"),
        (bad_mesh(cols=-1), "mesh: cols = -1"),
        (bad_mesh(cols=2.0), "mesh: cols = 2.0"),
        (lambda: noc.torus(2, 0, bandwidth=1.0), "torus: cols = 0"),
        (bad_mesh(bandwidth=np.ones(3)), r"bandwidth has shape \(3,\), expected .*links\] = \(14,"),
        (bad_mesh(hop_latency=np.ones(3)), r"hop_latency has shape \(3,\)"),
        (bad_mesh(port_bandwidth=np.ones(3)), r"port_bandwidth .* \[nodes\] = \(6,\)"),
        (bad_mesh(bandwidth=[1.0] * 13 + [-2.0]), "link_bandwidth of link 5 -> 4 = -2.0"),
        (bad_mesh(bandwidth=np.nan), "link_bandwidth of link 0 -> 1 = nan"),
        (bad_mesh(hop_latency=np.inf), "hop_latency of link 0 -> 1 = inf"),
        (bad_mesh(port_bandwidth=-1.0), "injection_bandwidth of node 0 = -1.0"),
        (lambda: noc.fat_tree(bandwidth=1.0, pods=0), "fat_tree: pods = 0"),
        (lambda: noc.fat_tree(bandwidth=1.0, oversubscription=0.0), "oversubscription = 0.0"),
        (lambda: noc.fat_tree(bandwidth=1.0, leaf_bandwidth=[1.0, 2.0]), "leaf_bandwidth has sha"),
        (bad_custom((0, 1), (1, 2), (0, 1)), r"edge \(0, 1\) is listed twice"),
        (bad_custom((0, 1), (2, 2)), r"edge \(2, 2\) leads from a vertex to itself"),
        (bad_custom((0, -1)), r"edge \(0, -1\) has a negative vertex id"),
        (bad_custom((0, 1, 2)), r"edges has shape \(1, 3\)"),
        (bad_custom((0.0, 1.5)), "dtype float64"),
        (bad_custom((0, 1), (2, 3)), "custom: no path leads from node 0 to node 2"),
        (bad_custom((0, 1), directed=True), "no path leads from node 1 to node 0"),
        (bad_custom((0, 1), num_nodes=3), "no path leads from node 0 to node 2"),
        (bad_custom((0, 1), num_nodes=0), "custom: num_nodes = 0"),
        (lambda: noc.mesh_3d(2, 0, 2, bandwidth=1.0), "mesh_3d: y = 0"),
        (lambda: noc.ring(0, bandwidth=1.0), "ring: n = 0"),
        (lambda: bad_mesh()().link_id(0, 2), "no link 0 -> 2 in this mesh of 14 links"),
        (lambda: bad_mesh()().route(0, 6), "destination = 6: allowed is 0 .. 5"),
        (lambda: bad_mesh()().route(-1, 0), "source = -1"),
        (lambda: bad_mesh()().route(0, 5, 1), r"choice = 1: 0 -> 5 has 1 route"),
        (lambda: replace(bad_mesh()(), link_bandwidth=1.0), r"expected \[links\] = \(14,\)"),
        (lambda: replace(bad_mesh()(), injection_bandwidth=np.ones(6)), "give both"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
