"""Link Balance against all permutations, and what every map must hold on every kind of network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import noc
from moejax import placement as mp
from moejax._status import Status
from moejax.placement import _link_kernel, _link_traffic, _swap_search
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import link_balance as oracle
from tests.oracles import noc_routes as routes


NODES = 6
CHORDS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3)]
FIVE = [(0, 1), (1, 2), (2, 3), (3, 0), (3, 4)]
BANDWIDTH = 2.0
TREE = dict(pods=3, endpoints=2, aggregations=2, cores=2)


def both_ways(edges):
    return edges + [(v, u) for u, v in edges]


# Topology, and all equal-cost routes between two of its endpoints.
NETWORKS = {
    "mesh": (noc.mesh(2, 3, bandwidth=BANDWIDTH), lambda s, d: [routes.mesh(2, 3, s, d)]),
    "torus": (noc.torus(3, 2, bandwidth=BANDWIDTH), lambda s, d: [routes.torus(3, 2, s, d)]),
    "fat_tree": (
        noc.fat_tree(bandwidth=BANDWIDTH, pods=3, leaves_per_pod=1, cores=2),
        lambda s, d: routes.fat_tree(s, d, leaves=1, **TREE),
    ),
    "custom": (
        noc.custom(CHORDS, bandwidth=BANDWIDTH),
        lambda s, d: [routes.shortest(both_ways(CHORDS), s, d)],
    ),
}


def random_share(rng, num_experts, num_nodes):
    """Every expert on one to three nodes, with dust on others."""
    share = np.full((num_experts, num_nodes), 1e-7)
    for row in share:
        row[rng.choice(num_nodes, rng.integers(1, 4), replace=False)] = 1.0
    return share / share.sum(1, keepdims=True)


def pair_statistics(rng, num_experts):
    """All pairs of experts, with random frequencies."""
    pairs = np.array([(a, b) for b in range(num_experts) for a in range(b)])
    weight = rng.random(len(pairs)) * (rng.random(len(pairs)) < 0.8) + 1e-3
    weight /= weight.sum()
    frequency = np.bincount(pairs.ravel(), np.repeat(weight, 2), num_experts)
    return mp.Statistics(frequency, pairs, weight)


def costs_for(batch, size):
    return mp.NodeCosts(1.0, 1.0, size, 1.0, batch, 1.0)


@functools.partial(jax.jit, static_argnames="rounds")
def search(problem, start, key, rounds):
    position, curve = _swap_search.anneal(problem, start, curve_scale(problem), rounds, key)
    two = position[:2]
    swapped = position.at[two].set(position[two[::-1]])
    change = _swap_search.load_change(problem, position, swapped, two)
    loads = [_swap_search.load(problem, p) for p in (position, swapped)]
    return position, curve, change, loads[1] - loads[0]


def curve_scale(problem):
    return problem.traffic.sum(-1).max() / BANDWIDTH


@settings(max_examples=20)
@given(st.sampled_from(sorted(NETWORKS)), st.integers(0, 2**32 - 1), st.booleans())
def test_search_on_every_network(name, seed, mirrored):
    rng = np.random.default_rng(seed)
    topology, all_routes = NETWORKS[name]
    traffic = rng.integers(0, 9, (2, NODES, NODES)) * (rng.random((NODES, NODES)) < 0.4)
    traffic[:, range(NODES), range(NODES)] = 0
    share = jnp.eye(NODES)
    options = dict(mirrored=mirrored)
    problem = _swap_search.swap_problem(topology, share, jnp.asarray(traffic, float), **options)
    # Networks differ in their number of links, and the search without a mirror in a phase.
    times = np.zeros((NODES**2, 2, 64))
    times[:, : problem.route_time.shape[1], : topology.num_resources] = problem.route_time
    problem = problem._replace(route_time=jnp.asarray(times))
    start = jnp.asarray(rng.permutation(NODES))
    position, curve, change, difference = search(problem, start, jax.random.key(seed), rounds=2)
    np.testing.assert_allclose(change, difference, atol=1e-5)
    assert sorted(position.tolist()) == list(range(NODES))

    def time(position):
        there = [oracle.busiest_link(t, position, all_routes, BANDWIDTH) for t in traffic]
        if mirrored:
            there += [oracle.busiest_link(t.T, position, all_routes, BANDWIDTH) for t in traffic]
        return sum(there) / 2

    assert float(curve[-1]) == pytest.approx(time(position.tolist()), rel=1e-5)
    assert curve[-1] <= curve[0] <= time(start.tolist()) * (1 + 1e-5)


def test_slots_of_few_experts_carry_all_traffic():
    rng = np.random.default_rng(3)
    topology, _ = NETWORKS["mesh"]
    share = random_share(rng, 4, NODES)
    owners = sorted({int(np.argmax(row > 1e-6)) for row in share})
    traffic = np.zeros((2, NODES, NODES))
    traffic[:, :, owners] = rng.random((2, NODES, len(owners)))
    traffic[:, range(NODES), range(NODES)] = 0
    traffic, position = jnp.asarray(traffic), jnp.asarray(rng.permutation(NODES))
    few = _swap_search.swap_problem(topology, jnp.asarray(share), traffic, mirrored=False)
    full = _swap_search.swap_problem(topology, jnp.eye(NODES), traffic, mirrored=False)
    assert few.owner.shape == (4,) and full.owner.shape == (NODES,)
    loads = [_swap_search.load(problem, position) for problem in (few, full)]
    np.testing.assert_allclose(*loads, rtol=1e-5, atol=1e-6)


def test_drawn_traffic_is_the_expected_one_on_average():
    rng = np.random.default_rng(0)
    share, statistics = jnp.asarray(random_share(rng, 4, NODES)), pair_statistics(rng, 4)
    room = _link_traffic.message_room(share, statistics, 32)
    assert room % 256 == 0 or room == 32 * NODES
    draw = lambda key: _link_traffic.drawn_messages(share, statistics, 64.0, 2, 32, room, key)
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 500))
    assert not np.any(drawn.status)
    matrix = jax.vmap(lambda m: _link_traffic.node_traffic_matrix(m, NODES))(drawn)
    mean = _link_traffic.expected_messages(share, statistics, 64.0, None)
    expected = _link_traffic.node_traffic_matrix(mean, NODES)[0]
    np.testing.assert_allclose(matrix.mean((0, 1)), expected, atol=0.6)
    assert expected.max() > 5


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1))
def test_tiny_problems_against_all_permutations(seed):
    rng = np.random.default_rng(seed)
    share, statistics = random_share(rng, 5, 5), pair_statistics(rng, 5)
    topology, costs = noc.custom(FIVE, bandwidth=BANDWIDTH), costs_for(10.0, 3.0)
    options = dict(dispatch="mirror", traffic="expected", chains=8, steps=500, polish=400)
    key = jax.random.key(seed)
    found = mp.link_balance(share, topology, statistics, costs, key=key, **options)
    route = functools.cache(lambda s, d: routes.shortest(both_ways(FIVE), s, d))
    groups = np.asarray(statistics.groups).tolist()
    size = (30.0 * np.asarray(statistics.group_frequency, float)).tolist()
    given = (share.tolist(), groups, size, route, BANDWIDTH)
    times = lambda position, mode: oracle.gather_and_dispatch(*given, mode, position)
    for i, mode in enumerate(_link_traffic.MODES):
        for j, candidate in enumerate(found.candidates.tolist()):
            gather, dispatch = times(candidate, mode)
            assert float(found.candidate_makespan[i, j]) == pytest.approx(gather, rel=1e-4)
            comm_time = float(found.candidate_comm_time[i, j])
            assert comm_time == pytest.approx(gather + dispatch, rel=1e-4)
        least = oracle.least(lambda position: sum(times(position, mode)), 5)  # noqa: B023
        # The search sees the busiest link, and so few large messages wait for each other too.
        assert least * (1 - 1e-4) <= found.candidate_comm_time[i].min() <= 1.15 * least, mode
    assert found.comm_time == found.candidate_comm_time[0].min()
    chosen = found.candidates.tolist().index(found.node_position.tolist())
    assert found.makespan == found.candidate_makespan[0, chosen]
    messages = _link_traffic.expected_messages(jnp.asarray(share), statistics, 30.0, None)
    traffic = np.asarray(_link_traffic.node_traffic_matrix(messages, 5)[0])
    bound = lambda position: sum(
        oracle.busiest_link(matrix.tolist(), position, lambda s, d: [route(s, d)], BANDWIDTH)
        for matrix in (traffic, traffic.T)
    )
    assert float(found.curve[:, -1].min()) == pytest.approx(oracle.least(bound, 5), rel=1e-4)


def three_layers(share, statistics, bandwidth=1.0, **options):
    """Eager under `vmap`, with options that all calls share, so that there is one compilation."""
    topology, costs = noc.mesh(2, 3, bandwidth=bandwidth), costs_for(16.0, 4.0)
    options |= dict(num_batches=3, chains=2, steps=500)
    balance = lambda s, t, k: mp.link_balance(s, topology, t, costs, key=k, **options)
    return jax.vmap(balance)(share, statistics, jax.random.split(jax.random.key(0), 3))


def test_layers_at_once_repeatably_and_never_worse_than_the_start(monkeypatch):
    rng = np.random.default_rng(1)
    share = np.stack([random_share(rng, 4, NODES) for _ in range(3)])
    statistics = jax.tree.map(lambda *x: jnp.stack(x), *[pair_statistics(rng, 4) for _ in range(3)])
    traces, whole = [], _link_kernel.swap_problem
    counted = lambda *args, **options: traces.append(1) or whole(*args, **options)
    monkeypatch.setattr(_link_kernel, "swap_problem", counted)
    found, again = (three_layers(share, statistics) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (found, again))))
    assert np.sort(found.node_position, axis=1).tolist() == [list(range(NODES))] * 3
    assert np.all(found.comm_time <= found.start_comm_time)
    np.testing.assert_allclose(found.comm_time, 2 * found.makespan, rtol=1e-6)
    assert np.all(np.diff(found.curve, axis=2) <= 1e-5)
    assert found.curve.shape == (3, 2, 3) and found.candidates.shape == (3, 3, NODES)
    # Without latency, cut-through waits for nothing but the busiest link.
    assert np.all(found.candidate_makespan[:, 1] <= found.candidate_makespan[:, 0] * (1 + 1e-5))
    assert found.ranking_changes.shape == (3,) and found.switching_regret.shape == (3, 2)
    assert not np.any(found.status)
    through = three_layers(share, statistics, switching="cut_through")
    np.testing.assert_array_equal(through.candidates, found.candidates)
    np.testing.assert_array_equal(through.comm_time, found.candidate_comm_time[:, 1].min(1))
    slower = three_layers(share, statistics, bandwidth=0.5)
    np.testing.assert_allclose(slower.makespan, 2 * found.makespan, rtol=1e-5)
    cut_off = three_layers(share, statistics, bandwidth=0.0)
    assert np.all(np.isinf(cut_off.makespan)) and np.all(cut_off.status == Status.DEAD_LINK)
    share[1, 2] = 0.7
    flagged = three_layers(share, statistics)
    assert flagged.status.tolist() == [0, Status.BAD_SHARE, 0]
    assert np.isnan(flagged.makespan[1]) and np.all(flagged.node_position[1] == mp.UNPLACED)
    assert flagged.makespan[2] == found.makespan[2]
    assert len(traces) == 1


def test_ranking_between_kinds_of_switching():
    blank = dict.fromkeys(_link_kernel.LinkBalance.__dataclass_fields__, jnp.zeros(()))
    times = lambda *modes: _link_kernel.LinkBalance(
        **blank | dict(candidate_comm_time=jnp.array(modes))
    )
    assert times([3.0, 1.0, 2.0], [2.0, 1.0, 1.5]).ranking_changes == False  # noqa: E712
    crossed = times([3.0, 1.0, 2.0], [3.0, 1.5, 1.0])
    assert crossed.ranking_changes
    np.testing.assert_allclose(crossed.switching_regret, [1.0, 0.5])
    assert not times([2.0, 2.0], [1.0, 3.0]).ranking_changes


def test_bad_input_is_named():
    rng = np.random.default_rng(0)
    share, statistics = random_share(rng, 4, NODES), pair_statistics(rng, 4)
    topology = NETWORKS["mesh"][0]
    good = dict(share=share, topology=topology, statistics=statistics, costs=costs_for(4.0, 1.0))
    for change, words in [
        (dict(share=share[:3]), "3 experts, the statistics 4"),
        (dict(share=share * 1.1), "sums to 1.1"),
        (dict(topology=noc.mesh(2, 2, bandwidth=1.0)), "6 nodes, the mesh 4 endpoints"),
        (dict(start=[0, 1, 2, 3, 4, 4]), "place 4"),
        (dict(start=[0, 1, 2, 3, 4, -1]), "without a place"),
        (dict(steps=0), "steps = 0"),
        (dict(chains=0), "chains = 0"),
        (dict(num_batches=0), "num_batches = 0"),
        (dict(polish=-1), "polish = -1"),
        (dict(num_tokens=0), "num_tokens = 0"),
        (dict(message_bytes=-1.0), "message_bytes"),
        (dict(switching="wormhole"), "switching"),
        (dict(dispatch="half"), "dispatch"),
        (dict(traffic="real"), "traffic"),
        (dict(costs=costs_for(-1.0, 1.0)), "costs.batch"),
    ]:
        with pytest.raises(ValueError, match=words.replace(".", r"\.")):
            mp.link_balance(**good | change, key=jax.random.key(0))
    traced = lambda costs: mp.link_balance(**good | dict(costs=costs), key=jax.random.key(0))
    with pytest.raises(ValueError, match="num_tokens must be given"):
        jax.eval_shape(traced, good["costs"])


def test_better_than_published_maps_on_unseen_batches(data_dir):
    stored = np.load(data_dir / "hd-moe-reference" / "placements.npz")
    ids = np.load(data_dir / "mixtral-8x7b" / "mtbench-reasoning.npz")["experts"].astype(np.int32)
    name, layers, half = "mixtral_nodelink_5.0T_50.0G_4x8", np.array([3, 16]), 4193
    share = jnp.asarray(stored[f"{name}_P"][layers])
    published = jnp.asarray(stored[f"{name}_pos"][layers].astype(np.int32))
    topology, costs = noc.mesh(4, 8, bandwidth=50e9), costs_for(128.0, 4096.0)
    fitted = mp.statistics(ids[layers, :half], 8)
    room = _link_traffic.message_room(share, mp.statistics(ids[layers], 8), 128)
    options = dict(max_messages=room, chains=1, steps=4000, num_batches=6)

    def position(share, statistics):
        key = jax.random.key(0)
        return mp.link_balance(share, topology, statistics, costs, key=key, **options).node_position

    layer = lambda i: jax.tree.map(lambda x: x[i], (share, fitted))
    ours = jnp.stack([position(*layer(i)) for i in range(2)])
    tokens = np.random.default_rng(0).integers(half, ids.shape[1], (4, 128))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, 0))
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def makespan(ids, share, position):
        options = dict(bytes_per_token=4096.0, key=jax.random.key(1), max_messages=room)
        report = noc.simulate(topology, noc.expert_traffic(ids, share, position, **options))
        return report.makespan

    unseen = jnp.asarray(ids[layers][:, tokens])
    ratio = makespan(unseen, share, ours).mean(1) / makespan(unseen, share, published).mean(1)
    assert np.all(ratio < 0.85) and ratio.mean() < 0.7
