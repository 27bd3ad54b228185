"""Counts, bimodality, pairs and transitions against literal twins; and the published look of the
real traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moejax.routing import (
    NOT_ROUTED,
    RoutingTrace,
    bimodality,
    co_activation,
    co_activation_groups,
    concat,
    decode_batch,
    load,
    next_layer_transitions,
    tokens_per_expert,
)
from tests.oracles import routing as oracle


LAYERS, TOKENS, TOP_K, EXPERTS = 2, 6, 2, 5


@st.composite
def routings(draw):
    """Distinct experts, some slots not routed; [layers, tokens, k] and valid [tokens]."""
    order = draw(arrays(np.float64, (LAYERS, TOKENS, EXPERTS), elements=st.floats(0, 1)))
    ids = np.argsort(order, axis=-1)[..., :TOP_K]
    dropped = draw(arrays(bool, ids.shape, elements=st.integers(0, 4).map(lambda n: n == 0)))
    return np.where(dropped, NOT_ROUTED, ids), draw(arrays(bool, TOKENS))


@settings(max_examples=50)
@given(routings())
def test_counts_against_the_twin(routing):
    ids, valid = routing
    counts = tokens_per_expert(ids, EXPERTS, valid)
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [
        oracle.tokens_per_expert(layer.tolist(), EXPERTS, valid) for layer in ids
    ]
    shares = np.stack(bimodality(counts), -1)
    expected = [oracle.bimodality(layer) for layer in counts.tolist()]
    assert np.allclose(shares, expected, atol=1e-6)


@settings(max_examples=50)
@given(routings())
def test_pairs_against_the_twin(routing):
    ids, valid = routing
    pairs = co_activation(ids, EXPERTS)
    assert pairs.tolist() == oracle.co_activation([t for layer in ids for t in layer], EXPERTS)
    trace = RoutingTrace(ids, EXPERTS, valid=valid)
    for first_choice in (False, True):
        used = (ids[..., :1] if first_choice else ids).tolist()
        transitions = next_layer_transitions(trace, first_choice=first_choice)
        assert transitions.tolist() == oracle.next_layer_transitions(used, EXPERTS, valid)


@given(routings())
def test_groups_against_the_twin(routing):
    ids = routing[0][0]
    expected = oracle.co_activation_groups(ids.tolist())
    if not expected:
        with pytest.raises(ValueError, match="no token is routed"):
            co_activation_groups(ids)
        return
    groups, frequency = co_activation_groups(ids)
    assert [tuple(group) for group in groups.tolist()] == sorted(expected)
    assert frequency.tolist() == [expected[group] for group in sorted(expected)]


def test_bimodality_by_hand():
    found = bimodality(jnp.array([[0, 1, 1, 2, 3, 4, 5, 64], [0] * 8]))
    assert np.allclose(found.share_1, [2 / 7, 0]) and np.allclose(found.share_2, [1 / 7, 0])
    assert np.allclose(found.share_3_4, [2 / 7, 0]) and np.allclose(found.share_more, [2 / 7, 0])
    assert np.allclose(found.active, [7 / 8, 0])


def test_transforms_agree_with_the_eager_call():
    ids = np.random.default_rng(0).integers(-1, EXPERTS, (3, LAYERS, TOKENS, TOP_K))
    valid = np.arange(TOKENS) < 4
    eager = tokens_per_expert(ids, EXPERTS, valid)
    assert eager.shape == (3, LAYERS, EXPERTS)
    count = lambda i: tokens_per_expert(i, EXPERTS, valid)
    assert np.array_equal(jax.jit(count)(ids), eager)
    assert np.array_equal(jax.jit(jax.vmap(jax.vmap(count)))(ids), eager)
    assert np.array_equal(jax.jit(co_activation, static_argnums=1)(ids, 5), co_activation(ids, 5))


def test_bad_ids_and_counts_under_tracing_are_marked_row_by_row():
    ids = np.zeros((3, TOKENS, 1), int)
    ids[1, 2], ids[2, 3] = EXPERTS, -2
    counts = jax.jit(lambda i: tokens_per_expert(i, EXPERTS))(ids)
    assert counts.tolist() == [[TOKENS, 0, 0, 0, 0], [-1] * EXPERTS, [-1] * EXPERTS]
    found = jax.jit(bimodality)(counts)
    assert np.isnan(np.stack(found)).tolist() == [[False, True, True]] * 5
    # What is not valid is not looked at.
    valid = np.arange(TOKENS) > 3
    counts = jax.jit(lambda i: tokens_per_expert(i, EXPERTS, valid))(ids)
    assert counts[:, 0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tokens_per_expert(np.array([[0], [5]]), 5), "expert id 5, allowed is 0 to 4"),
        (lambda: tokens_per_expert(np.array([[0], [-2]]), 5), "expert id -2"),
        (lambda: tokens_per_expert([[2**32]], 5), "expert id 2147483647"),
        (lambda: tokens_per_expert(np.zeros((0, 2), int), 5), r"shape \(0, 2\)"),
        (lambda: tokens_per_expert(np.zeros((4, 3), int), 2), "top_k = 3 is more than"),
        (lambda: tokens_per_expert(np.zeros((4, 3)), 5), "whole numbers"),
        (lambda: tokens_per_expert(np.zeros(4, int), 5), r"allowed is \[..., tokens, top_k\]"),
        (lambda: co_activation(np.zeros((0, 2), int), 5), "co_activation: expert_ids has shape"),
        (lambda: bimodality(np.array([1, -3])), "count -3 is negative"),
        (lambda: bimodality(np.zeros((2, 0), int)), "counts has shape"),
        (lambda: next_layer_transitions(RoutingTrace(np.zeros((1, 2, 1), int), 2)), "one layer"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture(scope="module")
def real(data_dir):
    """All traces of each model, joined."""
    patterns = {
        "mixtral-8x7b": "mixtral-8x7b/mtbench-*.npz",
        "gpt-oss-20b": "gpt-oss-20b/decode-*.npz",
        "deepseek-v2-lite": "deepseek-v2-lite/esft-*.npz",
    }
    return {
        name: concat([load(path, model=name) for path in sorted(data_dir.glob(pattern))])
        for name, pattern in patterns.items()
    }


# The tables that come with the data, computed there by a NumPy script of its own from 200 draws:
# B, max/mean load with its range over layers, active, and the shares of N = 1, 2, 3-4, more.
LOOK = {
    "mixtral-8x7b": [
        (16, 1.70, 1.66, 1.78, 0.99, 0.06, 0.14, 0.43, 0.38),
        (64, 1.38, 1.33, 1.60, 1.00, 0.00, 0.00, 0.00, 1.00),
    ],
    "gpt-oss-20b": [
        (16, 3.45, 3.01, 4.06, 0.72, 0.30, 0.24, 0.31, 0.16),
        (64, 2.84, 2.34, 3.79, 0.91, 0.09, 0.08, 0.13, 0.70),
        (256, 2.66, 2.08, 3.71, 0.97, 0.03, 0.03, 0.05, 0.90),
    ],
    "deepseek-v2-lite": [
        (16, 4.07, 3.67, 4.49, 0.71, 0.42, 0.28, 0.24, 0.06),
        (64, 3.29, 2.78, 4.06, 0.97, 0.08, 0.11, 0.24, 0.59),
        (128, 3.15, 2.54, 4.03, 1.00, 0.02, 0.03, 0.09, 0.86),
    ],
}


@pytest.mark.parametrize("name", LOOK)
def test_decode_batches_look_as_published(real, name):
    trace = real[name]
    keys = jax.random.split(jax.random.key(7), 64)
    largest = max(row[0] for row in LOOK[name])
    batches = jax.jit(
        lambda trace: jax.vmap(lambda key: decode_batch(trace, largest, key=key))(keys)
    )(trace)
    for size, peak, low, high, *shares in LOOK[name]:
        # Smaller batches are prefixes of the largest.
        counts = tokens_per_expert(batches[:, :, :size], trace.num_experts)
        ratio = np.mean(counts.max(-1) / counts.mean(-1), axis=0)
        # A layer's mean over 64 draws has a standard error of up to 0.12 (DeepSeek at B = 16),
        # and extremes over layers are pulled outward by it.
        assert ratio.mean() == pytest.approx(peak, abs=0.07)
        assert ratio.min() == pytest.approx(low, abs=0.2)
        assert ratio.max() == pytest.approx(high, abs=0.35)
        found = bimodality(counts)
        order = (found.active, found.share_1, found.share_2, found.share_3_4, found.share_more)
        assert [float(x.mean()) for x in order] == pytest.approx(shares, abs=0.015)


@pytest.mark.parametrize(
    "name, num_hottest, hottest, reused, by_chance, guessed, most_popular",
    [
        ("mixtral-8x7b", 1, 0.15, 0.36, 0.25, 0.31, 0.16),
        ("gpt-oss-20b", 4, 0.28, 0.44, 0.19, 0.41, 0.13),
        ("deepseek-v2-lite", 7, 0.23, 0.28, 0.12, 0.38, 0.10),
    ],
)
def test_traces_look_as_published(
    real, name, num_hottest, hottest, reused, by_chance, guessed, most_popular
):
    """Nothing is sampled here: the numbers agree to the two digits they are printed with (one of
    them, 0.145, is printed as 0.15)."""
    trace = real[name]
    two_digits = lambda value: pytest.approx(value, abs=0.0055)
    counts = np.sort(tokens_per_expert(trace.expert_ids, trace.num_experts, trace.valid))
    load_share = counts / counts.sum(-1, keepdims=True)
    assert load_share[:, -num_hottest:].sum(-1).mean() == two_digits(hottest)
    choice = np.asarray(next_layer_transitions(trace, first_choice=True))
    total = choice.sum((-2, -1))
    assert np.mean(choice.max(-1).sum(-1) / total) == two_digits(guessed)
    assert np.mean(choice.sum(-2).max(-1) / total) == two_digits(most_popular)
    # Two tokens drawn at random share k * sum of squared load shares experts of k.
    assert trace.top_k * np.mean((load_share**2).sum(-1)) == two_digits(by_chance)
    ids, sequence, valid = map(np.asarray, (trace.expert_ids, trace.sequence_id, trace.valid))
    pair = valid[1:] & valid[:-1] & (sequence[1:] == sequence[:-1])
    again = (ids[:, :-1, :, None] == ids[:, 1:, None, :]).any(-1)
    assert again[:, pair].mean() == two_digits(reused)


@pytest.mark.parametrize("counts", [[0, float("nan")], [0, 1.5]])
def test_bimodality_takes_whole_numbers_only(counts):
    with pytest.raises(ValueError, match="integer"):
        bimodality(jnp.asarray(counts))
