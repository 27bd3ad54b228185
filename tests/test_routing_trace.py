"""`RoutingTrace`, `concat`, and the batches drawn from a trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.routing import NOT_ROUTED, RoutingTrace, concat, decode_batch, prefill_batch
from tests.oracles import routing as oracle


SHAPE = (2, 12, 2)
IDS = np.arange(24).reshape(2, 12, 1) * [1, 1] % 5 + [0, 1]


def labeled(starts, valid):
    """A trace whose expert id is the token's index, so that a batch shows what was drawn."""
    tokens = len(valid)
    ids = np.broadcast_to(np.arange(tokens)[None, :, None], (2, tokens, 1))
    return RoutingTrace(ids, tokens, valid=valid, sequence_start=starts)


STARTS = [0, 3, 3, 7, 10]
VALID = [False, True, True] + [True] * 4 + [False] * 3 + [True, False]
USABLE = {0: {1, 2}, 2: {3, 4, 5, 6}, 4: {10}}  # sequence: its valid tokens
TRACE = labeled(STARTS, VALID)


def drawn(batch):
    """Token indices of a labeled batch; the layers must agree."""
    assert np.array_equal(batch[0], batch[1])
    return np.asarray(batch)[0, :, 0]


def sequence_of(token):
    return next((s for s, tokens in USABLE.items() if token in tokens), None)


def test_defaults_and_properties():
    trace = RoutingTrace(IDS.astype(np.uint8), 6)
    assert (trace.num_layers, trace.num_tokens, trace.top_k, trace.num_sequences) == (2, 12, 2, 1)
    assert trace.expert_ids.dtype == jnp.int32 and trace.valid.all() and trace.weights is None
    assert trace.sequence_start.tolist() == [0] and not trace.sequence_id.any()
    trace.check()


@pytest.mark.parametrize("starts", [[0], [0, 3, 3, 7, 10], [0, 1, 12]])
def test_sequence_id(starts):
    trace = RoutingTrace(IDS, 6, sequence_start=starts)
    assert trace.sequence_id.tolist() == oracle.sequence_id(starts, 12)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(expert_ids=np.zeros((2, 3), int)), r"shape \(2, 3\)"),
        (dict(expert_ids=np.zeros((2, 0, 2), int)), "empty"),
        (dict(expert_ids=np.zeros((0, 3, 2), int)), "empty"),
        (dict(num_experts=1), "top_k = 2 is more than num_experts = 1"),
        (dict(expert_ids=np.zeros(SHAPE)), "whole numbers"),
        (dict(weights=np.zeros((2, 12, 3))), r"weights has shape \(2, 12, 3\)"),
        (dict(logits=np.zeros((2, 12, 5))), r"logits has shape .* allowed is \(2, 12, 6\)"),
        (dict(valid=np.ones(11, bool)), "valid has shape"),
        (dict(sequence_start=[]), "sequence_start"),
    ],
)
def test_shapes_are_checked_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        RoutingTrace(**{"expert_ids": IDS, "num_experts": 6, **arguments})


@pytest.mark.parametrize(
    "position, value, message",
    [
        ((1, 7, 0), 6, r"layer 1, token 7: expert id 6, allowed is 0 to 5"),
        ((0, 3, 1), -2, r"layer 0, token 3: expert id -2"),
        ((1, 2, 0), IDS[1, 2, 1], r"layer 1, token 2: duplicate expert"),
    ],
)
def test_check_names_layer_and_token(position, value, message):
    ids = IDS.copy()
    ids[position] = value
    with pytest.raises(ValueError, match=message):
        RoutingTrace(ids, 6).check()


def test_check_allows_not_routed_twice_but_no_descending_starts():
    ids = IDS.copy()
    ids[0, 5] = NOT_ROUTED
    RoutingTrace(ids, 6, sequence_start=[0, 12]).check()
    for starts in ([1], [0, 5, 4], [0, 13]):
        with pytest.raises(ValueError, match="sequence starts"):
            RoutingTrace(IDS, 6, sequence_start=starts).check()


def test_a_trace_is_a_pytree():
    trace = RoutingTrace(IDS, 6, model="m")
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: x, t))(trace)
    assert doubled.model == "m" and doubled.num_experts == 6
    assert np.array_equal(doubled.expert_ids, trace.expert_ids)


def test_concat():
    one = RoutingTrace(IDS, 6, weights=np.ones(SHAPE), valid=np.arange(12) > 2)
    two = RoutingTrace(IDS[:, :4], 6, weights=np.zeros((2, 4, 2)), sequence_start=[0, 2])
    one, two = (dataclasses.replace(t, decode=np.arange(t.num_tokens) > 1) for t in (one, two))
    both = concat([one, two])
    assert np.array_equal(both.expert_ids, np.concatenate([IDS, IDS[:, :4]], 1))
    assert both.sequence_start.tolist() == [0, 12, 14]
    assert both.valid.tolist() == [False] * 3 + [True] * 13
    assert both.weights.sum() == 48
    assert both.decode.tolist() == [False] * 2 + [True] * 10 + [False] * 2 + [True] * 2
    plain = concat([one, RoutingTrace(IDS, 6)])
    assert plain.weights is None and plain.decode is None
    for other in (RoutingTrace(IDS, 7), RoutingTrace(IDS, 6, model="x"), RoutingTrace(IDS[:1], 6)):
        with pytest.raises(ValueError, match="traces differ"):
            concat([one, other])
    with pytest.raises(ValueError, match="no traces"):
        concat([])


@settings(max_examples=25)
@given(st.integers(0, 2**31 - 1))
def test_decode_batch_draws_different_sequences_and_prefixes_agree(seed):
    key = jax.random.key(seed)
    full = drawn(decode_batch(TRACE, 3, key=key))
    assert {sequence_of(t) for t in full} == {0, 2, 4}
    for size in (1, 2):
        assert drawn(decode_batch(TRACE, size, key=key)).tolist() == full[:size].tolist()


@settings(max_examples=25)
@given(st.integers(0, 2**31 - 1))
def test_reuse_draws_distinct_positions_round_by_round(seed):
    key = jax.random.key(seed)
    full = drawn(decode_batch(TRACE, 7, key=key, reuse=True)).tolist()
    assert sorted(full) == [1, 2, 3, 4, 5, 6, 10]
    rounds = [sorted(sequence_of(t) for t in full[a:b]) for a, b in ((0, 3), (3, 5), (5, 7))]
    assert rounds == [[0, 2, 4], [0, 2], [2, 2]]
    assert drawn(decode_batch(TRACE, 4, key=key, reuse=True)).tolist() == full[:4]


@pytest.mark.parametrize("reuse", [False, True])
def test_draws_are_uniform(reuse):
    keys = jax.random.split(jax.random.key(0), 4096)
    first = jax.jit(jax.vmap(lambda k: decode_batch(TRACE, 3, key=k, reuse=reuse)[0, 0, 0]))(keys)
    # Each sequence comes first a third of the time, each of its tokens equally often.
    for tokens in USABLE.values():
        for token in tokens:
            share, expected = np.mean(first == token), 1 / 3 / len(tokens)
            assert abs(share - expected) < 5 * np.sqrt(expected / 4096)


def test_batches_are_the_same_under_jit_vmap_and_with_the_trace_traced():
    def draws(trace, key):
        reused = decode_batch(trace, 7, key=key, reuse=True)
        return decode_batch(trace, 3, key=key), reused, prefill_batch(trace, 5, key=key)

    keys = jax.random.split(jax.random.key(3), 4)
    eager = draws(TRACE, keys[1])
    together = jax.jit(jax.vmap(lambda key: draws(TRACE, key)))(keys)
    traced = jax.jit(jax.vmap(draws, (None, 0)))(TRACE, keys)
    for one, some, others in zip(eager, together, traced):
        assert np.array_equal(some[1], one)
        assert np.array_equal(others, some)


def test_slots_that_can_not_be_filled_under_tracing_are_not_routed():
    fewer = labeled(STARTS, [False] * 5 + [True] * 3 + [False] * 4)  # sequences 2 and 3

    @jax.jit
    def draws(trace, key):
        reused = decode_batch(trace, 5, key=key, reuse=True)
        return decode_batch(trace, 5, key=key), reused, prefill_batch(trace, 5, key=key)

    plain, reused, run = map(drawn, draws(fewer, jax.random.key(0)))
    assert 7 in plain[:2] and {5, 6} & set(plain[:2].tolist()) and plain[2:].tolist() == [-1] * 3
    assert sorted(reused[:3].tolist()) == [5, 6, 7] and reused[3:].tolist() == [-1, -1]
    assert run.tolist() == [5, 6, 7, -1, -1]


def test_prefill_batch_is_a_run_of_valid_tokens():
    stream = [1, 2, 3, 4, 5, 6, 10]
    starts = set()
    for key in jax.random.split(jax.random.key(1), 40):
        run = drawn(prefill_batch(TRACE, 5, key=key)).tolist()
        starts.add(stream.index(run[0]))
        assert run == stream[stream.index(run[0]) :][:5]
    assert starts == {0, 1, 2}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t, k: decode_batch(t, 4, key=k), "batch_size = 4 .* 3 sequences .* reuse=True"),
        (lambda t, k: decode_batch(t, 8, key=k, reuse=True), "batch_size = 8 .* 7 valid tokens"),
        (lambda t, k: decode_batch(t, 0, key=k), "batch_size = 0: allowed is at least 1"),
        (lambda t, k: decode_batch(t, -1, key=k, reuse=True), "batch_size = -1"),
        (lambda t, k: decode_batch(t, 1.5, key=k), "whole number"),
        (lambda t, k: prefill_batch(t, 8, key=k), "num_tokens = 8 .* 7 valid tokens"),
        (lambda t, k: prefill_batch(t, 0, key=k), "num_tokens = 0"),
    ],
)
def test_impossible_sizes(call, message):
    with pytest.raises(ValueError, match=message):
        call(TRACE, jax.random.key(0))
    # A traced key does not hide what is wrong with a concrete trace.
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda key: call(TRACE, key))(jax.random.key(0))


def test_x64_changes_no_draw():
    key = jax.random.key(5)
    batch, reused = decode_batch(TRACE, 3, key=key), decode_batch(TRACE, 5, key=key, reuse=True)
    with jax.enable_x64(True):
        assert np.array_equal(decode_batch(TRACE, 3, key=key), batch)
        assert np.array_equal(decode_batch(TRACE, 5, key=key, reuse=True), reused)
        assert decode_batch(TRACE, 3, key=key).dtype == jnp.int32
