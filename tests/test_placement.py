"""The estimator, the statistics and the baselines against plain loops, and every constraint."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import placement as mp
from moejax._status import Status
from moejax.placement import _validate as validate
from moejax.routing import RoutingTrace
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import placement as oracle


COSTS = dict(
    flops_per_token=3e6,
    flops_per_s=2e12,
    bytes_per_token=4096.0,
    bandwidth=5e10,
    batch=16.0,
    gamma=0.5,
)
# (experts, nodes, k): few shapes, because each one is compiled.
SHAPES = [(1, 1, 1), (5, 3, 2), (3, 5, 3)]
TOKENS, ROOM = 12, 14


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


def tokens_of(rng, num_experts, k, padded=True):
    """[TOKENS, k] distinct experts, some slots and tokens padding."""
    ids = np.stack([rng.permutation(num_experts)[:k] for _ in range(TOKENS)])
    if padded:
        ids = np.where(rng.random(ids.shape) < 0.2, -1, ids)
        ids[0] = np.arange(k)
        ids[-1] = -1
    return ids


def share_of(rng, num_experts, num_nodes):
    """Rows that sum to 1, with zeros and with dust that hosts nothing."""
    share = rng.random((num_experts, num_nodes)) * (rng.random((num_experts, num_nodes)) < 0.5)
    share[np.arange(num_experts), rng.integers(num_nodes, size=num_experts)] += 0.1
    share /= share.sum(1, keepdims=True)
    return np.where(share == 0, rng.choice([0.0, 5e-7], share.shape), share)


@st.composite
def problems(draw):
    num_experts, num_nodes, k = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    scale = lambda: float(10 ** rng.uniform(-1, 1))
    costs = {name: value * scale() for name, value in COSTS.items()}
    return share_of(rng, num_experts, num_nodes), tokens_of(rng, num_experts, k), costs


def check_times(found, expected, rtol):
    assert int(found.status) == Status.OK
    np.testing.assert_allclose(found[:3], expected, rtol=rtol)
    node_times = (found.node_comp_time.max(), found.node_comm_time.max())
    np.testing.assert_allclose(node_times, expected[:2], rtol=rtol)


def check_against_loops(problem, rtol):
    share, tokens, costs = problem
    frequency, groups = oracle.statistics(tokens.tolist(), len(share))
    statistics = mp.statistics(tokens, len(share), max_groups=ROOM)
    module = mp.NodeCosts(**costs)
    expected = oracle.evaluate(share.tolist(), frequency, groups, costs)
    check_times(mp.evaluate(share, statistics, module), expected, rtol)
    expected = oracle.evaluate_batch(share.tolist(), tokens.tolist(), costs)
    check_times(mp.evaluate_batch(share, tokens, module), expected, rtol)


@settings(max_examples=25)
@given(problems())
def test_evaluate_is_the_literal_loops(problem):
    check_against_loops(problem, 1e-5)


def test_evaluate_in_double_precision(x64):
    rng = np.random.default_rng(4)
    for _ in range(10):
        check_against_loops((share_of(rng, 5, 3), tokens_of(rng, 5, 2), COSTS), 1e-12)


def test_average_batch_is_the_whole_trace_as_one_batch():
    rng = np.random.default_rng(0)
    share, tokens = share_of(rng, 5, 3), tokens_of(rng, 5, 2)
    routed = int((tokens >= 0).any(1).sum())
    costs = mp.NodeCosts(**COSTS | dict(batch=routed))
    whole = mp.evaluate(share, mp.statistics(tokens, 5, max_groups=ROOM), costs)
    batch = mp.evaluate_batch(share, tokens, costs)
    for one, other in zip(whole[:5], batch[:5], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_batches_are_mapped_and_padding_adds_nothing():
    rng = np.random.default_rng(1)
    share, costs = share_of(rng, 5, 3), mp.NodeCosts(**COSTS)
    batches = np.stack([tokens_of(rng, 5, 2) for _ in range(4)])
    found = jax.jit(jax.vmap(mp.evaluate_batch, (None, 0, None)))(share, batches, costs)
    for i, batch in enumerate(batches):
        expected = oracle.evaluate_batch(share.tolist(), batch.tolist(), COSTS)
        np.testing.assert_allclose([field[i] for field in found[:3]], expected, rtol=1e-5)


@settings(max_examples=30)
@given(st.sampled_from(SHAPES), st.integers(0, 2**31), st.integers(1, ROOM))
def test_statistics_count_sets(shape, seed, room):
    num_experts, _, k = shape
    tokens = tokens_of(np.random.default_rng(seed), num_experts, k)
    frequency, groups = oracle.statistics(tokens.tolist(), num_experts)
    found = mp.statistics(tokens, num_experts)
    np.testing.assert_allclose(found.frequency, frequency, rtol=1e-6)
    as_dict = {
        tuple(e for e in group if e >= 0): share
        for group, share in zip(found.groups.tolist(), found.group_frequency.tolist(), strict=True)
    }
    assert as_dict == pytest.approx(groups) and len(found.groups) == len(groups)
    assert found.groups.tolist() == sorted(found.groups.tolist())
    assert float(found.kept_mass) == pytest.approx(1)
    few = mp.statistics(tokens, num_experts, max_groups=room)
    assert few.groups.shape == (room, k) and few.group_frequency.shape == (room,)
    commonest = sorted(groups.values(), reverse=True)[:room]
    kept = sorted(few.group_frequency.tolist(), reverse=True)[: len(commonest)]
    np.testing.assert_allclose(kept, commonest, rtol=1e-6)
    assert float(few.kept_mass) == pytest.approx(sum(commonest))
    np.testing.assert_array_equal(few.frequency, found.frequency)


def test_frequency_sums_to_k_and_layers_are_stacked():
    rng = np.random.default_rng(2)
    ids = np.stack([tokens_of(rng, 5, 2, padded=False)[:-1] for _ in range(3)])
    stacked = mp.statistics(ids, 5)
    np.testing.assert_allclose(stacked.frequency.sum(-1), 2, rtol=1e-6)
    valid = np.arange(TOKENS - 1) % 2 == 0
    of_trace = mp.trace_statistics(RoutingTrace(ids, 5, valid=valid), max_groups=ROOM)
    times = jax.vmap(mp.evaluate, (None, 0, None))(
        mp.tensor_parallel(5, 3), of_trace, mp.NodeCosts(**COSTS)
    )
    assert times.total.shape == (3,) and not np.any(times.status)
    for layer in range(3):
        one = mp.statistics(ids[layer], 5)
        room = len(one.groups)
        np.testing.assert_array_equal(stacked.groups[layer, :room], one.groups)
        assert np.all(np.asarray(stacked.groups[layer, room:]) == -1)
        frequency, _ = oracle.statistics(ids[layer][valid].tolist(), 5)
        np.testing.assert_allclose(of_trace.frequency[layer], frequency, rtol=1e-6)


def test_every_host_set():
    rng = np.random.default_rng(3)
    tokens = tokens_of(rng, 5, 2)
    _, groups = oracle.statistics(tokens.tolist(), 5)
    found = mp.host_set_traffic(mp.statistics(tokens, 5, max_groups=ROOM))
    for hosted in range(32):
        touched = sum(f for group, f in groups.items() if any(hosted >> e & 1 for e in group))
        assert float(found[hosted]) == pytest.approx(touched, abs=1e-6)
    with raises("num_experts = 13", "at most 12"):
        mp.host_set_traffic(mp.Statistics(np.ones(13), [[0, 1]], [1.0]))


def test_gradient_is_that_of_the_busiest_node(x64):
    rng = np.random.default_rng(5)
    share, costs = share_of(rng, 5, 3), mp.NodeCosts(**COSTS)
    statistics = mp.statistics(tokens_of(rng, 5, 2), 5, max_groups=ROOM)
    total = lambda share, statistics: mp.evaluate(share, statistics, costs).total
    slope = jax.grad(total)(share, statistics)
    busiest = int(mp.evaluate(share, statistics, costs).node_comp_time.argmax())
    expected = np.zeros((5, 3))
    expected[:, busiest] = np.asarray(statistics.frequency) * 16 * 3e6 / 2e12
    np.testing.assert_allclose(slope, expected, rtol=1e-12)
    # A step from one node to another keeps rows at 1: the subgradient predicts it.
    step = 1e-5 * (np.eye(3)[(busiest + 1) % 3] - np.eye(3)[busiest])
    hosting = np.where(share > 1e-3, step, 0.0) * (share[:, [busiest]] > 1e-3)
    change = total(share + hosting, statistics) - total(share, statistics)
    assert float(change) == pytest.approx(float((slope * hosting).sum()), rel=1e-6)


def test_gradients_are_finite_without_load():
    nothing = mp.Statistics(np.zeros(5), np.full((ROOM, 2), -1), np.zeros(ROOM))
    total = lambda *args: mp.evaluate(*args).total
    slopes = jax.grad(total, (0, 1, 2), allow_int=True)(
        mp.tensor_parallel(5, 3), nothing, mp.NodeCosts(**COSTS)
    )
    leaves = [leaf for leaf in jax.tree.leaves(slopes) if leaf.dtype != jax.dtypes.float0]
    assert len(leaves) == 9 and all(np.all(np.isfinite(leaf)) for leaf in leaves)
    assert float(mp.evaluate(mp.tensor_parallel(5, 3), nothing, mp.NodeCosts(**COSTS)).total) == 0


def test_tensor_parallel_by_hand():
    costs = mp.NodeCosts.published(8, 10, flops_per_s=1000, bandwidth=100, batch=4)
    statistics = mp.statistics([[0, 1], [1, 2], [0, 2]], 3)
    found = mp.evaluate(mp.tensor_parallel(3, 5), statistics, costs)
    # k B 2 h IS / (D C) and 4 B h / BW.
    np.testing.assert_allclose(found[:3], [0.256, 1.28, 0.256 + 2.56], rtol=1e-6)
    four = mp.evaluate(mp.tensor_parallel(3, 5), statistics, costs, transfers=4)
    assert float(four.total) == pytest.approx(0.256 + 4 * 1.28)
    assert float(mp.compute_comm_ratio(costs, 5, 2)) == pytest.approx(0.2)
    assert float(mp.compute_bound(costs, 5, 2)) == pytest.approx(6 * 2 / 5)


def bad_status(share=None, groups=None, **changes):
    """The status and times under tracing of a problem with one thing wrong."""
    statistics = mp.Statistics(np.full(3, 2 / 3), [[0, 1]] if groups is None else groups, [1.0])
    share = mp.tensor_parallel(3, 2) if share is None else share
    names = {field.name for field in dataclasses.fields(statistics)}
    statistics = dataclasses.replace(
        statistics, **{n: jnp.asarray(v) for n, v in changes.items() if n in names}
    )
    costs = mp.NodeCosts(**COSTS | {n: v for n, v in changes.items() if n not in names})
    return share, statistics, costs


NAN = float("nan")


@pytest.mark.parametrize(
    "changes, code, words",
    [
        (dict(share=[[1, 0], [0.5, 0.4], [0, 1]]), Status.BAD_SHARE, ["row 1", "0.9"]),
        (dict(share=[[1, 0], [1.5, -0.5], [0, 1]]), Status.BAD_SHARE, ["share[1, 1] = -0.5"]),
        (dict(share=[[1, 0], [1, 0], [0, NAN]]), Status.BAD_SHARE, ["share[2, 1] = nan"]),
        (dict(frequency=[1.0, -1, 0]), Status.NEGATIVE_COUNT, ["statistics.frequency", "-1"]),
        (dict(group_frequency=[NAN]), Status.NEGATIVE_COUNT, ["group_frequency = nan"]),
        (dict(groups=[[0, 3]]), Status.INVALID_ROUTING, ["expert id 3", "0 to 2"]),
        (dict(bandwidth=0.0), Status.BAD_RATE, ["costs.bandwidth = 0", "above 0"]),
        (dict(gamma=-1.0), Status.BAD_COST, ["costs.gamma = -1", "0 or more"]),
    ],
)
def test_bad_values_are_named_or_flagged(changes, code, words):
    problem = bad_status(**changes)
    with raises("placement.evaluate", *words):
        mp.evaluate(*problem)
    found = jax.jit(mp.evaluate)(jnp.asarray(problem[0], float), *problem[1:])
    assert int(found.status) == code
    assert np.all(np.isnan(found.total)) and np.all(np.isnan(found.node_comm_time))


def test_bad_shapes_are_named():
    share, statistics, costs = bad_status()
    with raises("share has shape (3,)"):
        mp.evaluate(share[:, 0], statistics, costs)
    with raises("share has 2 experts, the statistics 3"):
        mp.evaluate(share[:2], statistics, costs)
    stacked = jax.tree.map(lambda leaf: leaf[None], statistics)
    with raises("statistics.frequency has shape (1, 3)", "jax.vmap"):
        mp.evaluate(share, stacked, costs)
    with raises("costs.batch has shape (2,)"):
        mp.evaluate(share, statistics, dataclasses.replace(costs, batch=np.ones(2)))
    with raises("shapes (3,), (1, 2), (2,)", "[groups, k]"):
        mp.Statistics(np.ones(3), [[0, 1]], [1.0, 0])
    with raises("groups is float"):
        mp.Statistics(np.ones(3), [[0.0, 1]], [1.0])
    with raises("evaluate_batch", "[3]"):
        mp.evaluate_batch(share, np.arange(3), costs)
    for ids, words in [
        ([[0.5]], ["float64"]),
        ([0, 1], ["shape (2,)"]),
        ([[0, 3]], ["expert id 3"]),
        ([[0, 1], [2, 2]], ["token 1 chose expert 2 twice"]),
        ([[-1, -1]], ["no token"]),
    ]:
        with raises(*words):
            mp.statistics(ids, 3)
    with raises("max_groups = 0"):
        mp.statistics([[0, 1]], 3, max_groups=0)


@pytest.mark.parametrize("whole_copies", [False, True])
def test_bytes_of_nodes(whole_copies):
    rng = np.random.default_rng(6)
    layers = np.stack([share_of(rng, 5, 3) for _ in range(2)])
    sizes = rng.uniform(1, 2, 5)
    expected = oracle.node_bytes(layers.tolist(), sizes.tolist(), whole_copies)
    capacity = np.array([1.01, 0.99, 1.01]) * expected
    found = mp.memory_use(layers, sizes, capacity=capacity, whole_copies=whole_copies)
    np.testing.assert_allclose(found.node_bytes, expected, rtol=1e-6)
    assert float(found.max_over_mean) == pytest.approx(max(expected) / np.mean(expected))
    assert found.fits.tolist() == [True, False, True] and not found.all_fit
    np.testing.assert_allclose(found.free_bytes, capacity - expected, rtol=1e-4)
    unlimited = mp.memory_use(layers, sizes)
    assert unlimited.all_fit and np.all(np.isinf(unlimited.free_bytes))


def test_memory_by_hand_and_errors():
    assert mp.published_expert_bytes(4096, 14336) == 2 * 4096 * 14336
    assert mp.published_expert_bytes(2, 3, matrices=3, bytes_per_weight=2) == 36
    even = mp.memory_use(mp.tensor_parallel(8, 4), 10.0, capacity=20.0)
    assert even.node_bytes.tolist() == [20] * 4 and float(even.max_over_mean) == 1 and even.all_fit
    assert float(mp.memory_use(np.eye(3), 0.0).max_over_mean) == 1
    for arguments, words in [
        ((np.ones(3), 1.0), ["share has shape (3,)"]),
        ((np.eye(3), np.ones(2)), ["expert_bytes has shape (2,)"]),
        ((np.eye(3), -1.0), ["expert_bytes = -1"]),
        ((-np.eye(3), 1.0), ["share", "-1"]),
    ]:
        with raises("memory_use", *words):
            mp.memory_use(*arguments)
    with raises("hidden_size = 0"):
        mp.published_expert_bytes(0, 1)


def test_positions_caps_and_limits_are_checked():
    validate.check_position("link_balance", [2, 0, 1], 3)
    validate.check_position("link_balance", [5, -1, -1], 3, 6)
    for position, words in [
        ([0, 1], ["shape (2,)", "(3,)"]),
        ([0, 1, 3], ["node_position[2] = 3", "0 to 2"]),
        ([0, 1, 1], ["place 1", "more than one node"]),
        ([0.0, 1.0, 2.0], ["float64"]),
    ]:
        with raises("link_balance", *words):
            validate.check_position("link_balance", position, 3)
    flagged = jax.jit(jax.vmap(validate.position_status))
    found = flagged(jnp.array([[2, 0, 1], [-1, 0, -1], [0, 1, 1], [0, 1, 3], [0, -2, 1]]))
    assert found.tolist() == [0, 0] + [Status.BAD_POSITION] * 3
    validate.check_memory_factor("node_balance", None)
    validate.check_memory_factor("node_balance", 1.0)
    for factor in (0.99, NAN):
        with raises("node_balance: memory_factor"):
            validate.check_memory_factor("node_balance", factor)
    with raises("time_limit = 0"):
        validate.check_time_limit("node_balance", 0)
