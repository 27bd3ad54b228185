"""Partitions against literal loops over experts and subsets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import moejax.partition as mp
from moejax._status import Status
from tests import strategies
from tests.oracles import partition as oracle


NAMES = ("sieve", "best_prefix", "optimal", "no_exp", "all_exp", "few_tokens", "pimoe_threshold")


def counter_example():
    """Sieve, claims: one time unit a token on the GPU, no load cost, tau(n) = n, counts 3 2 2 1.

    Prefixes cost 8, 5, 5, 7, 8; the subset {3, 1} costs 4.
    """
    costs = dict.fromkeys(
        ("attention_time", "comm_time", "expert_bytes", "token_bytes", "fixed_bytes"), 0.0
    )
    costs |= dict(fixed_flops=0.0, flops_per_token=1.0, hbm_bandwidth=1.0, flops_per_s=1.0)
    return np.array([3, 2, 2, 1]), costs | dict(pim_time_by_tokens=np.arange(4.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sieve_is_the_literal_loop_on_ten_thousand_instances(dtype, request):
    if dtype == np.float64:
        request.getfixturevalue("x64")
    rng = np.random.default_rng(7)
    problems = [strategies.random_partition_problem(rng, i % 4) for i in range(10_000)]
    problems = [(counts, strategies.in_dtype(costs, dtype)) for counts, costs in problems]
    counts, costs = strategies.stack_problems(problems)
    found = jax.jit(jax.vmap(mp.sieve))(counts, costs)
    assert found.total_time.dtype == dtype
    on_gpu, total = np.asarray(found.on_gpu), np.asarray(found.total_time)
    for i, (n, c) in enumerate(problems):
        expected, totals = oracle.sieve(n, c)
        if on_gpu[i].tolist() != expected:
            closest = np.min(np.abs(np.diff(totals))) / totals[0]
            assert dtype == np.float32 and closest < 1e-6, (i, totals)
            continue
        times = oracle.total_time(expected, n, c)
        np.testing.assert_allclose(
            [total[i], found.gpu_time[i], found.pim_time[i]], times, rtol=2e-5
        )
        assert found.num_gpu[i] == sum(expected)
    assert not np.any(found.status)


@settings(max_examples=150)
@given(strategies.partition_problems())
def test_prefixes_and_subsets(problem):
    counts, costs = problem
    module = mp.PartitionCosts(**costs)
    sieve, prefix, best = (f(counts, module) for f in (mp.sieve, mp.best_prefix, mp.optimal))
    expected_prefix = min(oracle.prefix_totals(counts, costs))
    assert float(prefix.total_time) == pytest.approx(expected_prefix, rel=1e-5, abs=1e-6)
    assert float(best.total_time) == pytest.approx(
        oracle.best_subset(counts, costs), rel=1e-5, abs=1e-6
    )
    for found in (prefix, best):
        chosen = np.asarray(found.on_gpu)
        total = oracle.total_time(chosen, counts, costs)[0]
        assert float(found.total_time) == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert float(sieve.total_time) >= float(prefix.total_time) - 1e-5
    if costs["pim_token_bytes"] == costs["contention"] == 0:
        assert float(sieve.total_time) == pytest.approx(expected_prefix, rel=1e-5, abs=1e-6)


def test_best_prefix_is_the_shortest_on_a_tie():
    # Communication hides everything, so every prefix costs the same.
    counts, costs = counter_example()
    for policy in (mp.sieve, mp.best_prefix):
        assert int(policy(counts, mp.PartitionCosts(**costs | dict(comm_time=100.0))).num_gpu) == 0


def test_twelve_experts_against_all_subsets():
    rng = np.random.default_rng(3)
    for kind in range(4):
        counts, costs = strategies.random_partition_problem(rng, kind, num_experts=12)
        found = mp.optimal(counts, mp.PartitionCosts(**costs))
        assert float(found.total_time) == pytest.approx(oracle.best_subset(counts, costs), rel=1e-5)


def test_greedy_is_not_optimal_in_general():
    counts, costs = counter_example()
    costs = mp.PartitionCosts(**costs)
    assert float(mp.sieve(counts, costs).total_time) == 5
    assert float(mp.best_prefix(counts, costs).total_time) == 5
    best = mp.optimal(counts, costs)
    assert float(best.total_time) == 4
    assert np.asarray(best.on_gpu).tolist() in (
        [True, False, False, True],
        [False, True, True, False],
    )


def test_sieve_can_stop_at_a_local_minimum_with_contention():
    rng = np.random.default_rng(1)
    problems = [strategies.random_partition_problem(rng, 2) for _ in range(2000)]
    counts, costs = strategies.stack_problems(problems)
    gap = (
        jax.vmap(mp.sieve)(counts, costs).total_time
        / jax.vmap(mp.best_prefix)(counts, costs).total_time
    )
    assert float(gap.min()) >= 1 - 1e-5
    assert float(gap.max()) > 1.001


def test_baselines_by_hand():
    counts, costs = np.array([0, 5, 4, 1]), counter_example()[1]
    costs |= dict(pim_time_by_tokens=np.arange(6.0), expert_bytes=2.5, attention_time=1.0)
    module = mp.PartitionCosts(**costs)
    gpu = lambda policy: np.asarray(policy(counts, module).on_gpu).tolist()
    assert gpu(mp.no_exp) == [False, True, True, True]
    assert gpu(mp.all_exp) == [False] * 4
    assert gpu(mp.few_tokens) == [False, True, False, False]
    # Alone on the GPU an expert takes max(2.5, n) s, on PIM n s: never faster, so all stay.
    assert gpu(mp.pimoe_threshold) == [False] * 4
    # Twice the rate: max(2.5, n / 2) < n from n = 3 on.
    module = mp.PartitionCosts(**costs | dict(flops_per_s=2.0))
    assert int(mp.isolated_threshold(module)) == 3
    assert gpu(mp.pimoe_threshold) == [False, True, True, False]
    everything = mp.all_exp(counts, module)
    assert float(everything.pim_time) == 1 + 5 + 4 + 1
    assert float(everything.gpu_time) == 0


@settings(max_examples=60)
@given(strategies.partition_problems(max_experts=7))
def test_pimoe_channel_is_the_literal_loop(problem):
    counts, costs = problem
    costs["channel_time_by_tokens"] = 2.5 * costs["pim_time_by_tokens"]
    costs = {name: np.asarray(value, np.float32)[()] for name, value in costs.items()}
    found = mp.pimoe_channel(counts, mp.PartitionCosts(**costs), num_groups=3)
    on_gpu, loads = oracle.pimoe_channel(counts, costs, num_groups=3)
    assert np.asarray(found.on_gpu).tolist() == on_gpu
    expected = costs["attention_time"] + max(loads)
    assert float(found.pim_time) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_defined_answers_at_the_edges(name):
    policy = getattr(mp, name)
    _, costs = counter_example()
    costs = mp.PartitionCosts(**costs)
    nothing = policy(np.zeros(3, int), costs)
    assert int(nothing.num_gpu) == 0 and float(nothing.total_time) == 0
    one = policy(np.array([2]), costs)
    assert float(one.total_time) == 2


def test_large_numbers():
    # 2^24 + 1 tokens on one expert, and terabytes of weights: beyond int32 and float32 integers.
    big = 2**24 + 1
    costs = counter_example()[1] | dict(expert_bytes=5e12, hbm_bandwidth=1e12)
    costs |= dict(pim_time_by_tokens=jnp.arange(big + 1, dtype=jnp.float32), flops_per_s=1e18)
    found = mp.sieve(np.array([big, big, 3]), mp.PartitionCosts(**costs))
    assert np.asarray(found.on_gpu).tolist() == [True, True, False]
    assert float(found.total_time) == pytest.approx(10.0)


BAD = {
    "negative count": (dict(), [3, -1, 2, 1], Status.NEGATIVE_COUNT),
    "beyond the table": (dict(), [3, 4, 2, 1], Status.COUNT_BEYOND_TABLE),
    "zero bandwidth": (dict(hbm_bandwidth=0.0), [3, 2, 2, 1], Status.BAD_RATE),
    "no compute": (dict(flops_per_s=0.0), [3, 2, 2, 1], Status.BAD_RATE),
    "NaN table": (
        dict(pim_time_by_tokens=np.array([0, 1, np.nan, 3])),
        [3, 2, 2, 1],
        Status.BAD_COST,
    ),
    "NaN cost": (dict(attention_time=np.nan), [3, 2, 2, 1], Status.BAD_COST),
    "negative bytes": (dict(expert_bytes=-1.0), [3, 2, 2, 1], Status.BAD_COST),
    "contention": (dict(contention=1.5), [3, 2, 2, 1], Status.BAD_COST),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_eagerly_and_has_a_status_under_jit(case, name):
    changes, counts, code = BAD[case]
    costs = mp.PartitionCosts(**counter_example()[1] | changes)
    counts = jnp.array(counts)
    policy = getattr(mp, name)
    with pytest.raises(ValueError, match=name):
        policy(counts, costs)
    if name == "optimal":
        policy = lambda n, c: mp.optimal(n, c, max_total_tokens=8)
    found = jax.jit(policy)(counts, costs)
    assert int(found.status) == code
    assert np.isnan(float(found.total_time)) and not np.any(found.on_gpu)


def test_one_bad_row_leaves_the_others_right():
    counts, costs = counter_example()
    rows = np.array([counts, [3, -2, 2, 1], counts])
    found = jax.vmap(mp.sieve, in_axes=(0, None))(rows, mp.PartitionCosts(**costs))
    assert found.status.tolist() == [0, Status.NEGATIVE_COUNT, 0]
    assert float(found.total_time[0]) == float(found.total_time[2]) == 5


def test_shapes_are_checked():
    costs = mp.PartitionCosts(**counter_example()[1])
    for wrong in (np.zeros((2, 3), int), np.zeros(0, int), np.zeros(3)):
        with pytest.raises(ValueError, match="tokens_per_expert"):
            mp.sieve(wrong, costs)
    with pytest.raises(ValueError, match="max_total_tokens"):
        jax.jit(mp.optimal)(np.zeros(3, int), costs)
    with pytest.raises(ValueError, match="max_total_tokens"):
        mp.optimal(np.array([3, 3]), costs, max_total_tokens=4)
    with pytest.raises(ValueError, match="channel_time_by_tokens"):
        mp.pimoe_channel(np.array([3, 3]), costs)


def test_counts_of_64_bits_do_not_wrap_around():
    costs = mp.PartitionCosts(**counter_example()[1])
    for policy in (mp.sieve, mp.optimal):
        with pytest.raises(ValueError, match="tokens_per_expert"):
            policy(np.array([1, 2**32 + 2]), costs)


def test_costs_are_scalars_and_masks_are_masks():
    counts, costs = counter_example()
    with pytest.raises(ValueError, match="costs.expert_bytes has shape"):
        mp.sieve(counts, mp.PartitionCosts(**costs | dict(expert_bytes=np.ones(3))))
    table = mp.PartitionCosts(**costs, channel_time_by_tokens=np.arange(3.0))
    with pytest.raises(ValueError, match="channel_time_by_tokens has shape"):
        mp.pimoe_channel(counts, table)
    costs = mp.PartitionCosts(**costs)
    for mask in (np.array([True]), np.array([1, 0, 2, 1])):
        with pytest.raises(ValueError, match="on_gpu"):
            mp.score(mask, counts, costs)
    with pytest.raises(ValueError, match="at_most = -1"):
        mp.few_tokens(counts, costs, at_most=-1)
    with pytest.raises(ValueError, match="max_total_tokens = -1"):
        mp.optimal(counts, costs, max_total_tokens=-1)


def test_stacked_costs_may_leave_out_what_defaults():
    counts, costs = counter_example()
    given = ("pim_token_bytes", "contention")
    stacked = {k: np.stack([np.asarray(v)] * 3) for k, v in costs.items() if k not in given}
    found = jax.vmap(mp.sieve)(np.stack([counts] * 3), mp.PartitionCosts(**stacked))
    assert found.total_time.tolist() == [5, 5, 5]


def test_a_plateau_that_rounding_makes_uneven_stops_the_first_move(x64):
    # A move takes 7/3 s off PIM and puts it on the memory bus, which excludes PIM: nothing gained.
    costs = counter_example()[1] | dict(
        pim_time_by_tokens=np.array([0, 1, 7 / 3]), expert_bytes=7.0, hbm_bandwidth=3.0
    )
    costs |= dict(contention=1.0, fixed_bytes=10.0, flops_per_token=0.0)
    assert int(mp.sieve(np.full(9, 2), mp.PartitionCosts(**costs)).num_gpu) == 0


def test_a_table_in_half_precision_counts_right():
    costs = counter_example()[1]
    costs |= dict(pim_time_by_tokens=jnp.arange(4, dtype=jnp.bfloat16), expert_bytes=1.0)
    found = mp.no_exp(np.ones(513, int), mp.PartitionCosts(**costs))
    assert int(found.num_gpu) == 513 and float(found.gpu_time) == 513


def test_one_compilation_for_fifty_bandwidths_and_rates():
    traces = []

    @jax.jit
    def run(counts, costs):
        traces.append(1)
        return mp.sieve(counts, costs).total_time

    counts, costs = counter_example()
    for i in range(1, 51):
        swept = costs | dict(hbm_bandwidth=float(i), flops_per_s=2.0 * i)
        run(jnp.asarray(counts), mp.PartitionCosts(**swept))
    assert len(traces) == 1


def test_gradient_is_the_finite_difference_at_a_fixed_partition(x64):
    rng = np.random.default_rng(11)
    counts, costs = strategies.random_partition_problem(rng, 0)
    costs = mp.PartitionCosts(**costs)
    total = lambda c: mp.sieve(counts, c).total_time
    gradient = jax.grad(total)(costs)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    on_gpu = mp.sieve(counts, costs).on_gpu
    for name in ("hbm_bandwidth", "expert_bytes", "attention_time", "flops_per_s", "fixed_bytes"):
        step = 1e-6 * (1 + float(getattr(costs, name)))
        moved = [
            float(mp.score(on_gpu, counts, _with(costs, name, sign * step)).total_time)
            for sign in (1, -1)
        ]
        expected = (moved[0] - moved[1]) / (2 * step)
        assert float(getattr(gradient, name)) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def _with(costs, name, change):
    from moejax._checks import replace

    return replace(costs, **{name: getattr(costs, name) + change})
