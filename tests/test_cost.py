"""Rooflines by hand, traffic and the PIM cost table against literal twins."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import cost, hardware, models
from moejax.cost import PIMCostTable
from moejax.models import Attention, Precision
from tests.oracles import traffic as traffic_twin
from tests.oracles.pim_cost_table import DictTable


BF16 = Precision.bf16()
MAX_TOKENS = 5
GQA = Attention("gqa", heads=64, kv_heads=8, head_dim=64)
LINEAR = Attention("linear", key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=16)


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


# --- Rooflines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 8, 256])
@pytest.mark.parametrize("d, f", [(2880, 2880), (2048, 768), (7168, 2048)])
def test_intensity_of_an_expert(d, f, tokens):
    # At two bytes an element: 6Ndf FLOPs over 2 (3df + 2Nd) bytes.
    work = cost.expert_work(d, f, tokens, BF16)
    expected = 3 * tokens * d * f / (3 * d * f + 2 * tokens * d)
    np.testing.assert_allclose(work.arithmetic_intensity, expected, rtol=1e-6)
    np.testing.assert_allclose(work.flops, 6 * tokens * d * f, rtol=1e-6)
    spilled = cost.expert_work(d, f, tokens, BF16, spill=True)
    np.testing.assert_allclose(spilled.bytes, 2 * (3 * d * f + tokens * (2 * d + 3 * f)), rtol=1e-6)


def test_expert_bytes_follow_the_bit_widths():
    narrow = Precision(16, 4.25, 8, 8)
    work = cost.expert_work(2880, 2880, 3, narrow)
    np.testing.assert_allclose(work.bytes, 3 * 2880**2 * 4.25 / 8 + 3 * 2 * 2880, rtol=1e-6)


def test_ridge_of_a_b200_and_of_its_pim():
    system = hardware.get("1xb200-hbm-pim")
    gpu, pim = system.gpu, system.pim
    np.testing.assert_allclose(cost.ridge_point(gpu.flops_per_s, gpu.hbm_bandwidth), 281.25)
    np.testing.assert_allclose(cost.ridge_point(pim.flops_per_s, pim.internal_bandwidth), 1.0)


def test_the_roof_has_two_sides_that_meet_at_the_ridge():
    rate, bandwidth = 2250e12, 8e12
    for intensity, expected in ((1.0, 8e12), (281.25, 2250e12), (1e4, 2250e12)):
        attainable = cost.attainable_flops_per_s(intensity, rate, bandwidth)
        np.testing.assert_allclose(attainable, expected)
        # Work of that intensity takes its FLOPs over the attainable rate.
        work = cost.Work(jnp.float32(1e12), jnp.float32(1e12 / intensity))
        time = cost.roofline_time(work, rate, bandwidth)
        np.testing.assert_allclose(time, 1e12 / expected, rtol=1e-6)


@pytest.mark.parametrize(
    "name, nanoseconds",
    [("gpt-oss-120b", 759), ("qwen3-30b-a3b", 144), ("mixtral-8x7b", 5376), ("deepseek-v3", 1344)],
)
def test_roofline_of_an_expert_on_pim(name, nanoseconds):
    # 6 d f FLOPs over 256 pseudo-channels * 16 banks * 32 FLOP / 2 ns, by hand.
    model, pim = models.get(name), hardware.get("1xb200-hbm-pim").pim
    work = cost.expert_work(model.hidden, model.moe_intermediate, 1, model.precision)
    assert float(cost.pim_roofline_time(work, pim)) * 1e9 == pytest.approx(nanoseconds, rel=2e-3)


def test_work_adds_up():
    both = cost.Work(jnp.float32(1), jnp.float32(2)) + cost.Work(jnp.float32(10), jnp.float32(20))
    assert (float(both.flops), float(both.bytes)) == (11.0, 22.0)


@pytest.mark.parametrize("heads, kv_heads", [(64, 8), (32, 4), (16, 16)])
def test_intensity_of_grouped_query_attention_is_the_group(heads, kv_heads):
    attention = Attention("gqa", heads=heads, kv_heads=kv_heads, head_dim=128)
    for context in (1, 2048):
        work = cost.attention_work(attention, context, BF16)
        np.testing.assert_allclose(work.arithmetic_intensity, heads / kv_heads)
        np.testing.assert_allclose(work.bytes, 2 * 2 * context * kv_heads * 128)


def test_a_window_ends_what_attention_reads():
    sliding = Attention("gqa", heads=64, kv_heads=8, head_dim=64, window=128)
    for context, attended in ((100, 100), (128, 128), (5000, 128)):
        np.testing.assert_allclose(cost.attended(sliding, context), attended)
        work = cost.attention_work(sliding, context, BF16)
        np.testing.assert_allclose(work.flops, 4 * attended * 64 * 64)
        np.testing.assert_allclose(cost.cache_bytes(sliding, context, BF16), work.bytes)


def test_intensity_of_latent_attention():
    # DeepSeek-V3: 128 heads, ranks 512 + 64. 2 * 128 * (2 * 512 + 64) / (2 * (512 + 64)) = 241.8.
    (attention, *_) = models.get("deepseek-v3").layers
    work = cost.attention_work(attention, 4096, BF16)
    np.testing.assert_allclose(work.arithmetic_intensity, 242, rtol=2e-3)
    np.testing.assert_allclose(work.flops, 2 * 4096 * 128 * (2 * 512 + 64))
    np.testing.assert_allclose(work.bytes, 2 * 4096 * (512 + 64))


def test_linear_attention_has_a_state_and_no_context():
    state = 4 * 8 * 16
    for context in (1, 4096):
        work = cost.attention_work(LINEAR, context, BF16)
        assert (float(work.flops), float(work.bytes)) == (6 * state, 2 * 3 * state)
        assert float(cost.cache_bytes(LINEAR, context, BF16)) == 2 * state


@pytest.mark.parametrize("tokens", [1, 16])
def test_projections_read_their_weights_once(tokens):
    # Sieve: weights d h (2 n_q + 2 n_kv); written are h (n_q + 2 n_kv) values a token.
    weights, written = 2880 * 64 * (2 * 64 + 2 * 8), 64 * (64 + 2 * 8)
    work = cost.projection_work(GQA, 2880, tokens, BF16)
    np.testing.assert_allclose(work.flops, 2 * weights * tokens, rtol=1e-6)
    np.testing.assert_allclose(work.bytes, 2 * (weights + written * tokens), rtol=1e-6)


def test_router_and_head_are_matrices():
    router = cost.router_work(2880, 128, 64, BF16)
    np.testing.assert_allclose([router.flops, router.bytes], [2 * 64 * 2880 * 128, 2 * 2880 * 128])
    head = cost.head_work(2880, 201088, 64, BF16)
    assert float(head.flops) > 2**31
    np.testing.assert_allclose(head.flops, 2 * 64 * 2880 * 201088, rtol=1e-6)


def test_counts_may_be_traced_and_pass_2_to_the_31():
    work = jax.vmap(lambda n: cost.expert_work(7168, 2048, n, BF16))(jnp.arange(1, 1025))
    np.testing.assert_allclose(work.flops[-1], 6 * 1024 * 7168 * 2048, rtol=1e-6)
    length = jax.jit(lambda context: cost.attention_work(GQA, context, BF16).flops)
    np.testing.assert_allclose(length(jnp.int32(10**6)), 4e6 * 64 * 64, rtol=1e-6)


# --- Between GPUs ------------------------------------------------------------------------------

dispatch = jax.jit(cost.dispatch_traffic, static_argnums=(2, 3), static_argnames="dedup")


@st.composite
def routings(draw):
    num_experts, num_gpus = draw(st.sampled_from([(8, 1), (8, 2), (8, 4), (6, 4), (9, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.stack([rng.permutation(num_experts)[:3] for _ in range(7)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    return ids, rng.random(7) < 0.8, num_experts, num_gpus


@settings(max_examples=30)
@given(routings(), st.booleans())
def test_dispatch_traffic_is_the_literal_count(routing, dedup):
    ids, valid, num_experts, num_gpus = routing
    expected = traffic_twin.dispatch_traffic(
        ids.tolist(), valid.tolist(), num_experts, num_gpus, dedup
    )
    found = dispatch(jnp.asarray(ids), jnp.asarray(valid), num_experts, num_gpus, dedup=dedup)
    np.testing.assert_array_equal(found, expected)
    # 5760 bytes a token over 900 GB/s and 0.8 us.
    link = hardware.Link(bandwidth=900e9, latency=0.8e-6)
    time = traffic_twin.comm_time(expected, 5760.0, 900e9, 0.8e-6)
    np.testing.assert_allclose(cost.expert_comm_time(found, 5760.0, link), time, rtol=1e-6)


def test_experts_lie_in_blocks_and_tokens_in_turn():
    np.testing.assert_array_equal(cost.gpu_of_expert(8, 4), [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(cost.gpu_of_expert(5, 2), [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(cost.gpu_of_token(5, 2), [0, 1, 0, 1, 0])


def test_an_expert_that_is_not_there():
    ids = jnp.array([[0, 1], [2, 8]])
    with raises("expert id 8", "below 8"):
        cost.dispatch_traffic(ids, jnp.array([True, True]), 8, 2)
    # A token that is padding may hold anything.
    assert np.sum(cost.dispatch_traffic(ids, jnp.array([True, False]), 8, 2)) == 0
    traced = jax.jit(lambda ids: cost.dispatch_traffic(ids, jnp.array([True, True]), 8, 2))
    assert np.all(np.isnan(traced(ids)))


def test_ring_all_reduce_by_hand():
    # Four GPUs: 2 * 3 steps of a quarter of 8 kB at 1 GB/s, 1 us each before it: 6 * 3 us.
    link = hardware.Link(bandwidth=1e9, latency=1e-6)
    np.testing.assert_allclose(cost.all_reduce_time(8e3, 4, link), 18e-6, rtol=1e-6)
    assert float(cost.all_reduce_time(8e3, 1, link)) == 0.0
    # The parts of the three others, received one after the other.
    np.testing.assert_allclose(cost.all_gather_time(2e3, 4, link), 7e-6, rtol=1e-6)
    assert float(cost.all_gather_time(2e3, 1, link)) == 0.0


@pytest.mark.parametrize(
    "num_experts, num_gpus, top_k", [(8, 4, 2), (8, 2, 7), (6, 3, 1), (4, 1, 2)]
)
def test_remote_gpus_are_those_of_every_choice(num_experts, num_gpus, top_k):
    expected = traffic_twin.expected_remote_gpus(num_experts, num_gpus, top_k)
    found = cost.expected_remote_gpus(num_experts, num_gpus, top_k)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_remote_gpus_need_equal_blocks():
    with raises("num_gpus = 3", "divisors of 8"):
        cost.expected_remote_gpus(8, 3, 2)
    with raises("top_k = 9", "0 to 8"):
        cost.expected_remote_gpus(8, 2, 9)


# --- PIM cost table ----------------------------------------------------------------------------

update = jax.jit(PIMCostTable.update)


@st.composite
def runs(draw):
    """(fallback, beta, counts, observed, valid): iterations of four experts; counts repeat."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (6, 4)
    counts = rng.integers(0, MAX_TOKENS + 1, shape).astype(np.int32)
    observed = rng.uniform(0.5, 4, shape).astype(np.float32)
    valid = rng.random(shape) < draw(st.sampled_from([0.3, 1.0]))
    # Experts that did not run on PIM were not timed: what stands there is nobody's business.
    counts[~valid], observed[~valid] = MAX_TOKENS + 7, np.nan
    fallback = rng.uniform(1, 2, MAX_TOKENS + 1).astype(np.float32)
    if draw(st.booleans()):
        fallback = fallback[0]
    return fallback, draw(st.sampled_from([0.05, 0.25, 1.0])), counts, observed, valid


@settings(max_examples=30)
@given(runs())
def test_table_is_the_dict(run):
    fallback, beta, *iterations = run
    table = PIMCostTable.create(MAX_TOKENS, fallback, beta)
    twin = DictTable(MAX_TOKENS, fallback.tolist(), beta)
    for counts, observed, valid in zip(*iterations, strict=True):
        table = update(table, counts, observed, valid)
        twin.update(counts.tolist(), observed.tolist(), valid.tolist())
        expected = [twin.lookup(n) for n in range(MAX_TOKENS + 1)]
        np.testing.assert_allclose(table.times, expected, rtol=1e-6)
        np.testing.assert_allclose(table.lookup(np.arange(MAX_TOKENS + 1)), expected, rtol=1e-6)
        np.testing.assert_array_equal(np.flatnonzero(table.seen), sorted(twin.learnt))


def scan_updates(table, *iterations):
    step = lambda table, iteration: (table.update(*iteration), table.times)
    return jax.lax.scan(step, table, iterations)


@settings(max_examples=20)
@given(runs())
def test_a_run_is_a_scan(run):
    fallback, beta, *iterations = run
    fallback = np.broadcast_to(fallback, MAX_TOKENS + 1)
    table = PIMCostTable.create(MAX_TOKENS, fallback, beta)
    scanned, _ = jax.jit(scan_updates)(table, *iterations)
    for iteration in zip(*iterations, strict=True):
        table = update(table, *iteration)
    np.testing.assert_allclose(scanned.times, table.times, rtol=1e-6)
    np.testing.assert_array_equal(scanned.seen, table.seen)


def test_the_first_observation_replaces_and_later_ones_move():
    table = PIMCostTable.create(4, 1.0)
    np.testing.assert_array_equal(table.times, [0, 1, 2, 3, 4])
    # Two experts of two tokens: their mean, 6.
    table = table.update([2, 2, 3], [5.0, 7.0, 9.0], [True, True, False])
    np.testing.assert_array_equal(table.times, [0, 1, 6, 3, 4])
    # A quarter of the way from 6 to 10.
    table = table.update([2], [10.0], [True])
    np.testing.assert_array_equal(table.times, [0, 1, 7, 3, 4])
    assert (table.max_tokens, float(table.lookup(2))) == (4, 7.0)
    # Nothing ran on PIM.
    again = table.update([0, 0], [0.0, 0.0], [False, False])
    np.testing.assert_array_equal(again.times, table.times)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, 1.0), ("max_tokens = 0", "1 or more")),
        ((4, -1.0), ("roofline_time = -1.0",)),
        ((4, np.nan), ("roofline_time = nan",)),
        ((4, np.inf), ("roofline_time = inf",)),
        ((4, np.ones(4)), ("(4,)", "(5,)")),
        ((4, 1.0, 0.0), ("beta = 0.0", "(0, 1]")),
        ((4, 1.0, 1.5), ("beta = 1.5", "(0, 1]")),
    ],
)
def test_a_table_that_can_not_be(arguments, words):
    with raises(*words):
        PIMCostTable.create(*arguments)


# What is wrong with one observation (count, time), and the row that NaN marks under tracing.
BAD_OBSERVATIONS = [(5, 1.0, 4), (-1, 1.0, 4), (2, -1.0, 2), (2, np.nan, 2), (3, np.inf, 3)]


@pytest.mark.parametrize("count, time, row", BAD_OBSERVATIONS)
def test_bad_observations(count, time, row):
    table = PIMCostTable.create(4, 1.0)
    observations = jnp.array([1, count]), jnp.array([1.5, time]), jnp.array([True, True])
    with raises("update"):
        table.update(*observations)
    times = np.asarray(jax.jit(PIMCostTable.update)(table, *observations).times)
    assert np.flatnonzero(np.isnan(times)).tolist() == [row]
    assert times[1] == 1.5


def test_observations_of_different_lengths():
    with raises("counts (2,)", "observed (1,)"):
        PIMCostTable.create(4, 1.0).update([1, 2], [1.0], [True, True])


@pytest.mark.parametrize("count", [-1, 5])
def test_counts_beyond_the_table(count):
    table = PIMCostTable.create(4, 1.0)
    with raises("lookup", str(count), "0 to 4"):
        table.lookup(count)
    found = jax.jit(PIMCostTable.lookup)(table, jnp.array([1, count]))
    np.testing.assert_array_equal(found, [1.0, np.nan])


def test_gradients_of_a_run():
    counts = jnp.array([[1, 1], [1, 3]])
    valid = jnp.array([[True, True], [True, False]])

    def learnt(observed, roofline_time, beta):
        table = PIMCostTable.create(3, roofline_time, beta)
        # Not timed: NaN must not reach the gradient of the others.
        observed = jnp.where(valid, observed, jnp.nan)
        return scan_updates(table, counts, observed, valid)[0].lookup(jnp.array([1, 3])).sum()

    observed = jnp.array([[2.0, 4.0], [7.0, 0.0]])
    by_time, by_roofline, by_beta = jax.grad(learnt, (0, 1, 2))(observed, 1.0, 0.25)
    # Row 1 is 0.75 * (t1 + t2) / 2 + 0.25 * t3, row 3 three times the roofline; d/d beta = 7 - 3.
    np.testing.assert_allclose(by_time, [[0.375, 0.375], [0.25, 0.0]])
    np.testing.assert_allclose([by_roofline, by_beta], [3.0, 4.0])


def test_double_precision_keeps_the_dtype_of_the_table(x64):
    counts, valid = jnp.array([[1, 2]]), jnp.array([[True, True]])
    for dtype in (jnp.float32, jnp.float64):
        table = PIMCostTable.create(3, jnp.ones(4, dtype))
        scanned, _ = scan_updates(table, counts, jnp.array([[2.0, 3.0]]), valid)
        assert scanned.times.dtype == dtype
        np.testing.assert_array_equal(scanned.times, [1, 2, 3, 1])
