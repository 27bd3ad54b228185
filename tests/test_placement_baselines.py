"""The baselines: against plain loops and brute force, and every constraint they promise."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import placement as mp
from moejax._status import Status
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import placement as oracle


NAN = float("nan")
# (experts, nodes): few, because each one is compiled.
PARALLEL = [(1, 1), (3, 7), (8, 3), (1, 5), (6, 2)]


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


@settings(max_examples=25)
@given(st.sampled_from(PARALLEL), st.integers(0, 2**31))
def test_parallel_placements(sizes, seed):
    num_experts, num_nodes = sizes
    tensor = np.asarray(mp.tensor_parallel(num_experts, num_nodes))
    np.testing.assert_array_equal(tensor, np.full((num_experts, num_nodes), 1 / num_nodes, "f"))
    share = np.asarray(mp.expert_parallel(num_experts, num_nodes, key=jax.random.key(seed)))
    np.testing.assert_allclose(share.sum(1), 1, rtol=1e-6)
    few, many = sorted((num_experts, num_nodes))
    q, r = divmod(many, few)
    counts = (share > 0).sum(1 if num_nodes >= num_experts else 0)
    # The first ones, experts or nodes, have one more.
    assert counts.tolist() == [q + 1] * r + [q] * (few - r)
    if num_nodes >= num_experts:
        assert np.all((share > 0).sum(0) == 1)
        assert all(np.ptp(row[row > 0]) == 0 for row in share)
    else:
        assert set(np.unique(share)) <= {0, 1}


def test_expert_parallel_draws_by_key():
    keys = jax.random.split(jax.random.key(0), 16)
    for num_experts, num_nodes in ((3, 7), (8, 3)):
        draw = lambda key, sizes=(num_experts, num_nodes): mp.expert_parallel(*sizes, key=key)
        shares = np.asarray(jax.jit(jax.vmap(draw))(keys))
        np.testing.assert_array_equal(shares[3], draw(keys[3]))
        assert len(np.unique(shares.reshape(16, -1), axis=0)) > 8
        np.testing.assert_allclose(shares.sum(2), 1, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (4, 2.0), (True, 4)])
def test_sizes_are_whole_numbers_from_one(sizes):
    for build in (mp.tensor_parallel, lambda *s: mp.expert_parallel(*s, key=jax.random.key(0))):
        with raises("whole number from 1"):
            build(*sizes)


@settings(max_examples=25)
@given(st.sampled_from([(5, 4, 2), (5, 7, 3)]), st.integers(0, 2**31))
def test_regions_are_balanced(shape, seed):
    num_experts, num_nodes, regions = shape
    rng = np.random.default_rng(seed)
    load = rng.gamma(0.5, size=num_experts) * (rng.random(num_experts) < 0.8)
    size = [num_nodes // regions + (r < num_nodes % regions) for r in range(regions)]
    best = oracle.best_region_load(load.tolist(), size)
    for method in ("search", "milp"):
        found = mp.balance_regions(load, num_nodes, regions, method=method)
        share = np.asarray(mp.hybrid(load, num_nodes, regions, method=method))
        np.testing.assert_allclose(share.sum(1), 1, rtol=1e-6)
        counts = (share > 0).sum(1)
        assert counts.tolist() == [size[r] for r in found.region.tolist()]
        assert (load @ share).max() == pytest.approx(float(found.max_load), rel=1e-5, abs=1e-7)
        assert float(found.bound) <= best * (1 + 1e-5) + 1e-7
        assert float(found.max_load) >= best * (1 - 1e-5) - 1e-7
        if method == "milp":
            assert int(found.status) == Status.OK
            assert float(found.max_load) == pytest.approx(best, rel=1e-5, abs=1e-7)
        elif num_nodes % regions == 0:
            # Longest first is within 4/3 - 1 / (3 R) of the best, and the search only improves.
            assert float(found.max_load) <= best * (4 / 3) + 1e-6


def test_search_swaps_what_longest_first_gets_wrong():
    # Longest first gives 5 + 3 + 3 = 11 against 4 + 4 = 8; a swap of 5 and 4 or a move helps.
    found = mp.balance_regions(jnp.array([5.0, 4, 3, 3, 3]), 2, 2)
    assert float(found.max_load) == 9 and float(found.bound) == 9
    layers = jax.vmap(lambda load: mp.hybrid(load, 4, 2))(jnp.ones((3, 5)))
    assert layers.shape == (3, 5, 4)


def test_solver_without_time_returns_the_search():
    load = np.random.default_rng(0).gamma(1.0, size=40)
    found = mp.balance_regions(load, 14, 7, method="milp", time_limit=1e-6)
    searched = mp.balance_regions(load, 14, 7)
    assert int(found.status) == Status.STOPPED_EARLY
    assert float(found.bound) < float(found.max_load) <= float(searched.max_load) * (1 + 1e-6)


def test_one_node_of_each_region_has_a_place():
    found = np.asarray(mp.region_position((4, 8), (2, 4), 3))
    for node in range(32):
        region, offset = divmod(node, 4)
        block_row, block_col = divmod(region, 4)
        cell = (2 * block_row + 1) * 8 + 2 * block_col + 1
        assert found[node] == (cell if offset == 3 else mp.UNPLACED)
    offsets = jax.vmap(lambda offset: mp.region_position((4, 4), (1, 2), offset))(jnp.arange(8))
    assert sorted(offsets[offsets >= 0].tolist()) == list(range(16))


def test_hybrid_communication_by_hand():
    share, costs = np.eye(3)[[0, 0, 1]], mp.NodeCosts(1.0, 1.0, 4096.0, 5e10, 16.0, 0.5)
    statistics = mp.Statistics(np.full(3, 2 / 3), [[0, 1]], [1.0])
    # Of the one group {0, 1} region 0 sees every token: 16 tokens of 4096 bytes, whatever gamma.
    inside = 16 * 4096 / 5e10
    assert float(mp.hybrid_comm_time(1.0, share, statistics, costs)) == pytest.approx(1 + inside)
    other = mp.Statistics(statistics.frequency, [[2, -1]], [0.25])
    assert float(mp.hybrid_comm_time(0.0, share, other, costs)) == pytest.approx(inside / 4)
    published = mp.hybrid_comm_time(
        0.0, share, other, costs, paper_faithful=True, node_balanced=np.full((3, 2), 0.5)
    )
    assert float(published) == pytest.approx(2 * inside / 4)
    with raises("go together"):
        mp.hybrid_comm_time(0.0, share, statistics, costs, paper_faithful=True)


def test_bad_regions_are_named():
    load = np.ones(3)
    for arguments, options, words in [
        ((-load, 4, 2), {}, ["frequency[0] = -1"]),
        ((load[None], 4, 2), {}, ["frequency has shape (1, 3)"]),
        ((load, 4, 5), {}, ["num_regions = 5", "at most 4"]),
        ((load, 0, 1), {}, ["num_nodes = 0"]),
        ((load, 4, 2), dict(method="mlip"), ["did you mean 'milp'"]),
        ((load, 4, 2), dict(method="milp", time_limit=0), ["time_limit = 0"]),
        ((load, 4, 2), dict(method="milp", gap=-1), ["gap = -1"]),
    ]:
        with raises(*words):
            mp.hybrid(*arguments, **options)
    with raises("milp", "host"):
        jax.jit(lambda load: mp.hybrid(load, 4, 2, method="milp"))(load)
    for arguments in [((4, 8), (3, 1), 0), ((4, 8), (1, 2), 16), ((4, 0), (1, 1), 0)]:
        with raises("region_position"):
            mp.region_position(*arguments)
    traced = jax.jit(lambda load: (mp.hybrid(load, 4, 2), mp.balance_regions(load, 4, 2)))
    share, balance = traced(jnp.array([1.0, -1, 0]))
    assert np.all(np.isnan(share)) and np.isnan(balance.max_load)
    assert int(balance.status) == Status.NEGATIVE_COUNT


# (experts, replicas, groups, nodes, gpus): plain, by groups in nodes, groups that do not divide,
# fewer experts than GPUs, one node, one expert.
PACKINGS = [
    (6, 8, 1, 1, 4),
    (8, 12, 4, 2, 4),
    (6, 8, 3, 2, 4),
    (3, 8, 1, 1, 8),
    (4, 4, 1, 1, 1),
    (1, 3, 1, 1, 3),
]


@settings(max_examples=25)
@given(st.sampled_from(PACKINGS), st.integers(0, 2**31))
def test_replicas_are_packed_in_equal_numbers(sizes, seed):
    num_experts, replicas, groups, nodes, gpus = sizes
    # Whole loads of few values, so that there are ties and zeros.
    load = np.random.default_rng(seed).integers(0, 5, num_experts).astype(float)
    plan = mp.replicate_and_pack(load, *sizes[1:])
    logical, physical, count = (np.asarray(field) for field in plan)
    assert logical.tolist() == oracle.replicate_and_pack(load.tolist(), *sizes[1:])
    np.testing.assert_array_equal(np.bincount(logical, minlength=num_experts), count)
    assert count.min() >= 1 and count.sum() == replicas
    for expert in range(num_experts):
        slots = physical[expert][physical[expert] >= 0]
        assert sorted(slots) == np.flatnonzero(logical == expert).tolist()
        assert np.all(physical[expert][len(slots) :] == -1)
    share = np.asarray(mp.replica_share(plan, gpus))
    np.testing.assert_allclose(share.sum(1), 1, rtol=1e-6)
    per_gpu = np.asarray(share * count[:, None]).sum(0)
    np.testing.assert_allclose(per_gpu, replicas / gpus, rtol=1e-6)
    if groups % nodes == 0:
        node_of_expert = [set(np.flatnonzero(row) // (gpus // nodes)) for row in share]
        assert all(len(found) == 1 for found in node_of_expert)
        width = num_experts // groups
        for first in range(0, num_experts, width):
            assert len(set.union(*node_of_expert[first : first + width])) == 1


def test_layers_are_packed_one_by_one():
    load = np.random.default_rng(0).integers(0, 5, (3, 6)).astype(float)
    plan = mp.replicate_and_pack(load, 8, 1, 1, 4)
    shares = mp.replica_share(plan, 4)
    assert plan.logical_to_physical_map.shape == (3, 6, 3) and shares.shape == (3, 6, 4)
    for layer in range(3):
        one = mp.replicate_and_pack(load[layer], 8, 1, 1, 4)
        for stacked, alone in zip(plan, one, strict=True):
            np.testing.assert_array_equal(stacked[layer], alone)
        np.testing.assert_array_equal(shares[layer], mp.replica_share(one, 4))


def test_copies_without_load_are_dealt_evenly():
    plan = mp.replicate_and_pack(np.zeros(6), 18, 1, 1, 3)
    assert plan.expert_count.tolist() == [3] * 6


def test_bad_packings_are_named():
    load = np.ones(6)
    for arguments, words in [
        ((load, 5, 1, 1, 1), ["num_replicas = 5", "from 6"]),
        ((load, 8, 1, 1, 3), ["num_replicas = 8", "multiples of num_gpus = 3"]),
        ((load, 8, 4, 1, 4), ["experts = 6", "multiples of num_groups = 4"]),
        ((load, 9, 3, 2, 3), ["num_gpus = 3", "multiples of num_nodes = 2"]),
        ((load, 8, 1, 0, 4), ["num_nodes = 0"]),
        ((-load, 8, 1, 1, 4), ["load[0] = -1"]),
        ((load.reshape(1, 2, 3), 8, 1, 1, 4), ["load has shape (1, 2, 3)"]),
        ((np.where(np.eye(6), NAN, 1.0), 8, 1, 1, 4), ["load[(0, 0)] = nan"]),
    ]:
        with raises("replicate_and_pack", *words):
            mp.replicate_and_pack(*arguments)
    with raises("num_gpus = 3", "divisors of 8"):
        mp.replica_share(mp.replicate_and_pack(load, 8, 1, 1, 4), 3)
    plan, share = jax.jit(
        lambda load: (p := mp.replicate_and_pack(load, 8, 1, 1, 4), mp.replica_share(p, 4))
    )(-load)
    assert np.all(plan.physical_to_logical_map == -1) and not np.any(plan.expert_count)
    assert np.all(np.isnan(share))
