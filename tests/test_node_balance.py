"""Node Balance against exhaustive search, the rows of the paper, and published placements."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moejax.placement as mp
from moejax import noc
from moejax._status import Status
from moejax.placement import _fat_tree, _shares
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import node_balance as oracle


KEY = jax.random.key(0)
EXPERTS, NODES, GROUPS = 4, 3, 6
SMALL = dict(num_chains=8, num_steps=30)
COSTS = mp.NodeCosts(3.0, 2.0, 5.0, 4.0, 1.0, 1.5)
LOAD_COST, TRAFFIC_COST = 3.0 / 2.0, 2 * 1.5 * 5.0 / 4.0


def layer(rng, num_experts=EXPERTS, k=2, num_groups=GROUPS, tokens=40):
    """Statistics of a few skewed tokens, padded to `num_groups`, and the same as plain numbers."""
    popularity = rng.dirichlet(np.full(num_experts, 0.7)) + 1e-3
    noise = rng.gumbel(size=(tokens, num_experts))
    ids = np.argsort(-(np.log(popularity) + noise), axis=1)[:, :k]
    found = mp.statistics(ids.astype(np.int32), num_experts, max_groups=num_groups)
    groups = {
        tuple(int(e) for e in group if e >= 0): float(share)
        for group, share in zip(np.asarray(found.groups), np.asarray(found.group_frequency))
        if share > 0
    }
    return found, np.asarray(found.frequency, float), groups


def stacked(layers):
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


def check(found, num_experts, num_nodes, memory_factor=None):
    """What holds for every placement."""
    share = np.asarray(found.share, float)
    assert share.shape == (num_experts, num_nodes)
    np.testing.assert_allclose(share.sum(1), 1, atol=2e-6)
    assert share.min() >= 0
    if memory_factor is not None:
        assert share.sum(0).max() <= memory_factor * num_experts / num_nodes * (1 + 2e-5)
    assert float(found.total) >= float(found.bound) * (1 - 1e-6)
    assert int(found.status) == Status.OK


@pytest.mark.parametrize("seed", range(2))
def test_solver_against_all_choices_of_hosts(seed):
    rng = np.random.default_rng(seed)
    statistics, frequency, groups = layer(rng, num_experts=3, num_groups=3)
    for factor in (None, 1.1):
        cap = None if factor is None else factor * 3 / 3
        best = oracle.best_by_enumeration(
            frequency, groups, LOAD_COST, TRAFFIC_COST, 3, memory_cap=cap
        )
        exact = mp.node_balance(statistics, COSTS, 3, key=KEY, method="milp", memory_factor=factor)
        assert float(exact.total) == pytest.approx(best, rel=2e-4)
        assert float(exact.bound) <= best * (1 + 1e-5)


def test_search_finds_the_optimum_of_small_layers_in_one_vmap():
    rng = np.random.default_rng(4)
    layers = [layer(rng) for _ in range(4)]
    bandwidths = (1.0, 40.0, 4.0, 4.0, 4.0)
    costs = [dataclasses.replace(COSTS, bandwidth=jnp.asarray(b)) for b in bandwidths]
    statistics = [found for found, _, _ in layers]
    negative = dataclasses.replace(statistics[0], frequency=-statistics[0].frequency)
    solve = lambda statistics, costs: mp.node_balance(statistics, costs, NODES, key=KEY, **SMALL)
    found = jax.vmap(solve)(stacked([*statistics, negative]), stacked(costs))
    assert found.share.shape == (5, EXPERTS, NODES)
    for i, (_, frequency, groups) in enumerate(layers):
        prices = LOAD_COST, TRAFFIC_COST * 4.0 / bandwidths[i]
        best, _ = oracle.paper(frequency, groups, *prices, NODES)
        one = jax.tree.map(lambda part, i=i: part[i], found)
        check(one, EXPERTS, NODES)
        assert float(one.total) == pytest.approx(best, rel=1e-4)
        literal = oracle.total(np.asarray(one.share).tolist(), frequency, groups, *prices)
        assert float(one.total) == pytest.approx(literal, rel=1e-5)
        assert float(one.curve[-1]) == pytest.approx(float(one.total), rel=1e-6)
        assert np.all(np.diff(np.asarray(one.curve)) <= 0)
    assert int(found.status[-1]) == Status.NEGATIVE_COUNT
    assert np.isnan(found.total[-1]) and np.isnan(found.share[-1]).all()


@pytest.mark.parametrize("memory, load", [(None, None), (1.0, None), (1.2, None), (None, 1.1)])
def test_both_formulations_are_the_papers_rows(memory, load):
    statistics, frequency, groups = layer(np.random.default_rng(11))
    caps = dict(
        memory_cap=None if memory is None else memory * EXPERTS / NODES,
        load_cap=None if load is None else float(mp.compute_bound(COSTS, NODES, 2)),
    )
    best, _ = oracle.paper(frequency, groups, LOAD_COST, TRAFFIC_COST, NODES, **caps)
    options = dict(key=KEY, method="milp", memory_factor=memory, compute_bound=load is not None)
    for given_statistics in (statistics, [statistics, statistics]):
        # Two equal scenarios are one, but go to the general formulation.
        found = mp.node_balance(given_statistics, COSTS, NODES, relative_gap=1e-5, **options)
        assert float(found.total) == pytest.approx(best, rel=1e-4)
        assert float(found.gap) <= 2e-5
        check(found, EXPERTS, NODES, memory)


def test_linear_relaxation_in_closed_form():
    statistics, frequency, groups = layer(np.random.default_rng(5))
    relaxed, _ = oracle.paper(frequency, groups, LOAD_COST, TRAFFIC_COST, NODES, relaxed=True)
    assert float(mp.lp_bound(statistics, COSTS, NODES)) == pytest.approx(relaxed, rel=1e-5)


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.sampled_from((1.0, 1.25, 100.0)), st.booleans())
def test_constraints(seed, memory_factor, compute_bound):
    rng = np.random.default_rng(seed)
    statistics, frequency, groups = layer(rng)
    flops_per_s = 10.0 ** rng.uniform(-1, 1)
    costs = dataclasses.replace(COSTS, flops_per_s=jnp.asarray(flops_per_s))
    options = dict(memory_factor=memory_factor, compute_bound=compute_bound)
    options |= dict(key=jax.random.key(seed))
    search = mp.node_balance(statistics, costs, NODES, **options, **SMALL)
    exact = mp.node_balance(statistics, costs, NODES, method="milp", **options)
    for found in (search, exact):
        check(found, EXPERTS, NODES, memory_factor)
        if compute_bound:
            load = mp.node_load(found.share, statistics).max()
            assert float(load) <= float(mp.compute_bound(costs, NODES, 2)) * (1 + 2e-5)
        share = np.asarray(found.share).tolist()
        literal = oracle.total(share, frequency, groups, 3.0 / flops_per_s, TRAFFIC_COST)
        assert float(found.total) == pytest.approx(literal, rel=1e-5)
    assert float(exact.bound) * (1 - 1e-5) <= float(search.total) <= 1.1 * float(exact.total)


def test_experts_without_load_and_single_sizes():
    rng = np.random.default_rng(2)
    ids = np.stack([rng.choice(3, 2, replace=False) for _ in range(30)]).astype(np.int32)
    idle = mp.statistics(ids, EXPERTS, max_groups=GROUPS)
    for options in (dict(method="milp"), dict(memory_factor=1.0, **SMALL)):
        factor = options.get("memory_factor")
        check(mp.node_balance(idle, COSTS, NODES, key=KEY, **options), EXPERTS, NODES, factor)
    check(mp.node_balance(idle, COSTS, 1, key=KEY, method="milp"), EXPERTS, 1)
    one = mp.Statistics([1.0], [[0]], [1.0])
    # A single expert, one choice a token: half the load and all the traffic on either node.
    for options in (dict(num_chains=2, num_steps=5), dict(method="milp")):
        found = mp.node_balance(one, COSTS, 2, key=KEY, **options)
        assert float(found.total) == pytest.approx(LOAD_COST / 2 + TRAFFIC_COST, rel=1e-5)


def test_wrap_around_by_hand():
    # Loads 1, 1, 2 on two nodes: the third fills one; with all memory equal, the second is cut.
    order, load = jnp.array([0, 1, 2]), jnp.array([1.0, 1.0, 2.0])
    np.testing.assert_allclose(mp.wrap_around(order, load, 2), [[1, 0], [1, 0], [0, 1]], atol=1e-5)
    capped = mp.wrap_around(order, load, 2, memory_factor=1.0)
    np.testing.assert_allclose(capped, [[1, 0], [0.5, 0.5], [0, 1]], atol=1e-5)
    reverse = mp.wrap_around(order[::-1], load, 4)
    np.testing.assert_allclose(reverse, [[0, 0, 0, 1], [0, 0, 1, 0], [0.5, 0.5, 0, 0]], atol=1e-5)
    for options in (dict(num_nodes=0), dict(frequency=-load), dict(memory_factor=0.5)):
        with pytest.raises(ValueError, match="wrap_around: "):
            mp.wrap_around(**dict(order=order, frequency=load, num_nodes=2) | options)


def test_best_shares_are_the_linear_programs():
    rng = np.random.default_rng(0)
    shares = jax.jit(_shares.best_share)
    for _ in range(20):
        hosts = rng.random((6, 9)) < 0.3
        hosts[np.arange(6), rng.integers(0, 9, 6)] = True
        frequency = rng.dirichlet(np.ones(6)).astype(np.float32)
        share = np.asarray(shares(jnp.asarray(hosts), jnp.asarray(frequency)), float)
        np.testing.assert_allclose(share.sum(1), 1, atol=1e-6)
        assert not share[~hosts].any()
        nodes = [np.flatnonzero(row).tolist() for row in hosts]
        best = oracle.least_load(frequency.tolist(), nodes, 9)
        assert (share * frequency[:, None]).sum(0).max() == pytest.approx(best, rel=2e-5)


def test_many_experts_by_moves():
    rng = np.random.default_rng(3)
    statistics, frequency, groups = layer(rng, num_experts=12, k=3, num_groups=128, tokens=200)
    found = mp.node_balance(statistics, COSTS, 5, key=KEY, **SMALL)
    check(found, 12, 5)
    literal = oracle.total(
        np.asarray(found.share).tolist(), frequency, groups, LOAD_COST, TRAFFIC_COST
    )
    assert float(found.total) == pytest.approx(literal, rel=1e-5)
    for share in (
        mp.tensor_parallel(12, 5),
        mp.expert_parallel(12, 5, key=KEY),
        mp.replica_share(mp.replicate_and_pack(statistics.frequency, 15, 1, 1, 5), 5),
    ):
        assert float(found.total) < 0.95 * float(mp.evaluate(share, statistics, COSTS).total)
    assert float(found.bound) >= float(mp.lp_bound(statistics, COSTS, 5)) * (1 - 1e-6)


def test_a_traced_cap_below_one_is_a_status():
    statistics = layer(np.random.default_rng(6))[0]
    status = lambda factor: (
        mp.node_balance(statistics, COSTS, NODES, key=KEY, memory_factor=factor).status
    )
    found = jax.jit(jax.vmap(status))(jnp.array([1.5, 0.9]))
    assert found.tolist() == [Status.OK, Status.INFEASIBLE_MEMORY]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_nodes=0), "num_nodes = 0"),
        (dict(memory_factor=0.99), "memory_factor = 0.99: allowed is 1 or more"),
        (dict(method="serach"), "did you mean 'search'"),
        (dict(time_limit=0.0), "time_limit = 0.0"),
        (dict(relative_gap=-0.1), "relative_gap = -0.1"),
        (dict(num_steps=0), "num_steps = 0"),
        (dict(method="milp", num_chains=4), "num_chains = 4: 'milp' has a time_limit instead"),
        (dict(quantile=1.5), "quantile = 1.5"),
        (dict(quantile=0.5, method="milp"), "quantile = 0.5"),
        (dict(topology=noc.mesh(2, 3, bandwidth=1.0)), "topology has 6 nodes"),
        (dict(statistics=[]), "empty sequence"),
        (dict(costs=dataclasses.replace(COSTS, bandwidth=jnp.asarray(0.0))), "costs.bandwidth = 0"),
    ],
)
def test_what_is_refused(options, message):
    statistics = layer(np.random.default_rng(0))[0]
    given_options = dict(statistics=statistics, costs=COSTS, num_nodes=NODES, key=KEY) | options
    with pytest.raises(ValueError, match=message):
        mp.node_balance(**given_options)


def test_negative_load_and_mixed_scenarios_are_refused():
    one, other = layer(np.random.default_rng(0))[0], layer(np.random.default_rng(0), 6)[0]
    with pytest.raises(ValueError, match="one size for all"):
        mp.node_balance([one, other], COSTS, NODES, key=KEY)
    negative = dataclasses.replace(one, frequency=-one.frequency)
    with pytest.raises(ValueError, match="statistics.frequency = -"):
        mp.node_balance(negative, COSTS, NODES, key=KEY)
    with pytest.raises(ValueError, match="batch = 9"):
        mp.drawn_statistics(np.zeros((8, 1), np.int32), 2, 9, 1, key=KEY)
    for ids, message in (
        (np.full((8, 1), 2), "expert id 2: allowed is 0 to 1"),
        (np.zeros((8, 2), int), "chose expert 0 twice"),
        (np.zeros((8, 1)), "expert_ids is float64"),
        (np.zeros((2, 8, 1), int), r"expert_ids has shape \(2, 8, 1\): allowed is \[tokens, k\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mp.drawn_statistics(ids, 2, 2, 1, key=KEY)


def test_a_solver_out_of_time_returns_its_best():
    statistics = layer(np.random.default_rng(8), num_experts=12, k=3, num_groups=128, tokens=200)[0]
    found = mp.node_balance(statistics, COSTS, 5, key=KEY, method="milp", time_limit=1e-3)
    assert int(found.status) == Status.STOPPED_EARLY
    np.testing.assert_allclose(np.asarray(found.share).sum(1), 1, atol=1e-5)
    assert float(found.total) >= float(found.bound) > 0
    small = layer(np.random.default_rng(8))[0]
    found = mp.node_balance(small, COSTS, NODES, key=KEY, method="milp", time_limit=1e-6)
    assert np.isfinite(float(found.total))


TREE = dict(pods=2, leaves_per_pod=2, endpoints_per_leaf=1, aggregations_per_pod=2, cores=2)


def tree_numbers(topology, bandwidth):
    """The oracle's description of a fat-tree built with `TREE`, counted by hand: 1 endpoint and 2
    uplinks a leaf; 4 links between leaves and aggregations, 4 up to cores a pod; 4 down in all."""
    rate = {
        tuple(link): float(b) for link, b in zip(topology.links.tolist(), topology.link_bandwidth)
    }
    endpoint, leaf, core = rate[0, 4], rate[4, 8], rate[8, 12]
    return dict(
        shape=(2, 2, 1),
        leaf_endpoints=bandwidth / endpoint,
        leaf_uplinks=bandwidth / (2 * leaf),
        pod_leaves=bandwidth / (4 * leaf),
        pod_cores=bandwidth / (4 * core),
        core=bandwidth / (4 * core),
    )


def test_fat_tree_rows_are_the_literal_ones():
    rng = np.random.default_rng(9)
    topology = noc.fat_tree(
        bandwidth=4.0, endpoint_bandwidth=3.0, leaf_bandwidth=1.5, oversubscription=5.0, **TREE
    )
    tree = _fat_tree.tree_of(topology, 4.0)
    numbers = tree_numbers(topology, 4.0)
    find = jax.jit(_fat_tree.tree_rows)
    for _ in range(10):
        statistics, _, groups = layer(rng)
        hosts = rng.random((EXPERTS, 4)) < 0.4
        hosted = [set(np.flatnonzero(hosts[:, c]).tolist()) for c in range(4)]
        member = np.array([[e in row for e in range(EXPERTS)] for row in groups])
        touched = (hosts.T.astype(int) @ member.T.astype(int) > 0)[:, None]
        # Groups that nobody chose, so that all layers have as many.
        room = GROUPS - len(groups)
        touched = np.pad(touched, [(0, 0), (0, 0), (0, room)])
        weight = np.pad([list(groups.values())], [(0, 0), (0, room)])
        rows = find(tree, touched, weight)[:, 0]
        expected = oracle.tree_rows(hosted, groups, numbers)
        np.testing.assert_allclose(np.sort(rows), np.sort(expected), rtol=1e-5, atol=1e-7)


def test_fat_tree_in_search_and_solver():
    rng = np.random.default_rng(10)
    topology = noc.fat_tree(bandwidth=4.0, oversubscription=8.0, **TREE)
    numbers = tree_numbers(topology, 4.0)
    costs = dataclasses.replace(COSTS, flops_per_s=jnp.asarray(0.2))
    prices = 3.0 / 0.2, TRAFFIC_COST
    statistics, frequency, groups = layer(rng, num_experts=2, k=1, num_groups=2)
    best = oracle.best_by_enumeration(frequency, groups, *prices, 4, tree=numbers)
    without = oracle.best_by_enumeration(frequency, groups, *prices, 4)
    assert best > 1.01 * without
    options = dict(key=KEY, topology=topology)
    exact = mp.node_balance(statistics, costs, 4, method="milp", **options)
    assert float(exact.total) == pytest.approx(best, rel=2e-4)
    for seed in range(2):
        statistics, frequency, groups = layer(np.random.default_rng(seed))
        exact = mp.node_balance(statistics, costs, 4, method="milp", **options)
        search = mp.node_balance(statistics, costs, 4, **SMALL, **options)
        assert float(exact.bound) * (1 - 1e-5) <= float(search.total)
        assert float(search.total) <= 1.03 * float(exact.total)
        share = np.asarray(search.share).tolist()
        literal = oracle.total(share, frequency, groups, *prices, numbers)
        assert float(search.total) == pytest.approx(literal, rel=1e-5)


def test_scenarios_make_it_robust():
    rng = np.random.default_rng(12)
    popularity = np.array([0.4, 0.3, 0.2, 0.1])
    draw = lambda tokens: np.argsort(
        -(np.log(popularity) + rng.gumbel(size=(tokens, EXPERTS))), axis=1
    )[:, :2].astype(np.int32)
    ids, unseen = draw(400), draw(4000).reshape(100, 40, 2)
    costs = dataclasses.replace(COSTS, bandwidth=jnp.asarray(40.0))
    # The optimum of the average, exactly.
    counted = mp.statistics(ids, EXPERTS, max_groups=GROUPS)
    plain = mp.node_balance(counted, costs, NODES, key=KEY, method="milp")
    batches = mp.drawn_statistics(ids, EXPERTS, 40, 12, key=KEY)
    assert float(batches[0].frequency.sum()) == pytest.approx(2.0)
    judge = jax.vmap(lambda share, batch: mp.evaluate_batch(share, batch, costs).total, (None, 0))
    average = lambda share: float(judge(share, unseen).mean())
    robust = mp.node_balance(batches, costs, NODES, key=KEY, **SMALL)
    check(robust, EXPERTS, NODES)
    inside = np.mean([float(mp.evaluate(robust.share, one, costs).total) for one in batches])
    assert float(robust.total) == pytest.approx(inside, rel=1e-5)
    assert average(robust.share) < 0.99 * average(plain.share)
    high = mp.node_balance(batches, costs, NODES, key=KEY, quantile=1.0, **SMALL)
    worst = max(float(mp.evaluate(high.share, one, costs).total) for one in batches)
    assert float(high.total) == pytest.approx(worst, rel=1e-5)


def test_published_placements_are_beaten(data_dir):
    reference = np.load(data_dir / "hd-moe-reference" / "placements.npz")
    with np.load(data_dir / "mixtral-8x7b" / "mtbench-reasoning.npz") as trace:
        ids = trace["experts"][[0, 14, 31]].astype(np.int32)
    statistics = mp.statistics(ids, 8)
    settings = {
        "10.0T_25.0G": (10e12, 25e9),
        "2.5T_75.0G": (2.5e12, 75e9),
        "5.0T_50.0G": (5e12, 50e9),
    }
    costs = stacked(
        [
            mp.NodeCosts.published(4096, 14336, flops_per_s=c, bandwidth=b, batch=128)
            for c, b in settings.values()
        ]
    )
    solve = lambda statistics, costs: mp.node_balance(statistics, costs, 32, key=KEY)
    found = jax.jit(jax.vmap(jax.vmap(solve, (None, 0)), (0, None)))(statistics, costs)
    for row, layer_id in enumerate((0, 14, 31)):
        one = jax.tree.map(lambda part, row=row: part[row], statistics)
        for column, name in enumerate(settings):
            price = jax.tree.map(lambda part, column=column: part[column], costs)
            share = reference[f"mixtral_nodelink_{name}_4x8_P"][layer_id]
            published = float(mp.evaluate(share, one, price).total)
            ours = float(found.total[row, column])
            assert ours <= published * (1 + 1e-6)
            exact = mp.node_balance(one, price, 32, key=KEY, method="milp")
            assert ours == pytest.approx(float(exact.total), rel=1e-3)
            assert float(exact.gap) <= 1.1e-4
