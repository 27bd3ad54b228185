"""The exact gate against a literal token loop, published numbers, and what it promises."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import Status, gating
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import gating as oracle


COEFFICIENTS = dict(r_comp=-0.5, r_comm=-0.125, token_time=0.25)


def dyadic_share(rng, experts, nodes):
    """Rows of halves and quarters: every sum of loads is exact."""
    share = np.zeros((experts, nodes), np.float32)
    for row in share:
        parts = [[1.0], [0.5, 0.5], [0.25, 0.25, 0.5]][rng.integers(min(3, nodes))]
        row[rng.permutation(nodes)[: len(parts)]] = parts
    return share


def exact_problem(seed, tokens, experts, nodes):
    """Small numbers of few binary digits, full of ties."""
    rng = np.random.default_rng(seed)
    sixteenths = lambda high, *shape: rng.integers(0, high, shape).astype(np.float32) / 16
    return dict(
        scores=sixteenths(rng.choice([2, 16, 64]), tokens, experts),
        selection_scores=sixteenths(rng.choice([2, 16]), tokens, experts),
        extra_cost=sixteenths(4, tokens, experts) * rng.integers(2),
        share=dyadic_share(rng, experts, nodes),
        initial_load=sixteenths(64, nodes) * rng.integers(2),
        valid=rng.random(tokens) < rng.choice([0.6, 1.0]),
        r_comp=np.float32(-rng.choice([0, 0.25, 1, 64])),
        r_comm=np.float32(-rng.choice([0, 0.0625, 1])),
        token_time=np.float32(rng.choice([0, 0.25, 1])),
        enabled=rng.random() < 0.9,
    )


OPTIONS = [
    ((7, 8, 6), 3, dict()),
    ((7, 8, 6), 3, dict(protect=2, chunk=3)),
    ((7, 8, 6), 3, dict(groups=(4, 2, "top2"), protect=1)),
    ((7, 8, 6), 3, dict(groups=(4, 3, "max"), chunk=2, ahead=True)),
    ((5, 6, 2), 6, dict(protect=6, chunk=9)),
    ((1, 1, 1), 1, dict()),
]


@pytest.mark.parametrize("shape, k, options", OPTIONS)
def test_equal_to_the_token_loop(shape, k, options):
    literal = dict(options)
    groups, ahead = options.get("groups", (1, 1, "max")), literal.pop("ahead", False)
    mine = {name: options[name] for name in ("protect", "chunk") if name in options}
    mine |= dict(zip(("num_groups", "top_groups", "group_score"), groups))

    @settings(max_examples=20)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        given = exact_problem(seed, *shape)
        found = gating.hardware_aware_top_k(
            **given, top_k=k, include_future_original=ahead, max_hosts=shape[2], **mine
        )
        ids, load = oracle.gate(**given, k=k, ahead=ahead, **literal)
        np.testing.assert_array_equal(found.expert_ids, ids)
        np.testing.assert_array_equal(found.node_load, load)
        assert found.status == Status.OK

    check()


def routed(rng, *shape):
    return jax.nn.softmax(jnp.asarray(rng.normal(size=shape)) * 1.5)


def whole_experts(rng, experts, nodes):
    """Expert parallel: every expert on one node."""
    return np.eye(nodes)[rng.permutation(experts) % nodes]


def test_batches_of_real_scores(x64):
    """Settings over layers, two levels of vmap: dense and sparse loads, rows and products."""
    rng = np.random.default_rng(0)
    scores = routed(rng, 3, 24, 16)
    sparse = np.stack([whole_experts(rng, 16, 8) for _ in range(3)])
    dense = rng.dirichlet(np.full(8, 0.3), (3, 16))
    rates = jnp.asarray([-1e3, -1e4, -3e4])
    for share, k, hosts in ((sparse, 4, 1), (sparse, 4, None), (dense, 4, None), (dense, 9, None)):
        one = functools.partial(
            gating.hardware_aware_top_k, top_k=k, r_comm=-0.02, token_time=2e-6, max_hosts=hosts
        )
        over_layers = jax.vmap(lambda s, p, r, one=one: one(s, p, r_comp=r), (0, 0, None))
        found = jax.vmap(over_layers, (None, None, 0))(scores, jnp.asarray(share), rates)
        for a, rate in enumerate(rates):
            for layer in range(3):
                plain = np.asarray(scores[layer]), share[layer], k, float(rate), -0.02, 2e-6
                for loop in (oracle.gate, oracle.numpy_loop):
                    ids, load = loop(*plain)
                    np.testing.assert_array_equal(found.expert_ids[a, layer], ids)
                    np.testing.assert_allclose(found.node_load[a, layer], load, rtol=1e-12)


def test_shared_placement_in_a_batch():
    """Only the scores are batched, the placement is known: one matrix for all lanes."""
    rng = np.random.default_rng(1)
    scores, share = routed(rng, 8, 12, 16), whole_experts(rng, 16, 8).astype(np.float32)
    gate = lambda s: gating.hardware_aware_top_k(s, share, top_k=4, **COEFFICIENTS, chunk=2)
    for s, ids in zip(scores, jax.jit(jax.vmap(gate))(scores).expert_ids):
        want, _ = oracle.gate(np.asarray(s), share, 4, **COEFFICIENTS, chunk=2)
        np.testing.assert_array_equal(ids, want)


def test_penalties_alone_give_the_published_computation(data_dir):
    """HDA-MoE, Mixtral, 4x8 at 2.5 TFLOPS and 75 GB/s, batch 16: 1510.16 us of computation."""
    file = data_dir / "hd-moe-reference" / "placements.npz"
    if not file.is_file():
        pytest.skip(f"no published placements at {file}")
    share = jnp.asarray(np.load(file)["mixtral_nodelink_2.5T_75.0G_4x8_P"], jnp.float32)
    token_time = 2 * 4096 * 14336 / 2.5e12
    # 512 tokens whose scores say nothing, with the coefficients of the stored Mixtral trace.
    gate = functools.partial(
        gating.hardware_aware_top_k, top_k=2, r_comp=-1.16e6, r_comm=-0.03, token_time=token_time
    )
    found = jax.jit(jax.vmap(gate, (None, 0)))(jnp.zeros((512, 8)), share)
    assert not np.any(found.status)
    computation = np.asarray(found.node_load).max(1).sum() * 16 / 512
    assert computation * 1e6 == pytest.approx(1510.16, abs=0.006)


def standard(seed, *more):
    """(scores [12, 8], share [8, 6]): one shape, so that few programs are compiled."""
    rng = np.random.default_rng(seed)
    return routed(rng, *more, 12, 8), dyadic_share(rng, 8, 6)


def test_without_coefficients_it_is_plain_top_k():
    scores, share = standard(2)
    # Ties, and zeros of either sign, which are one value.
    scores = scores.at[:8].set(np.random.default_rng(2).integers(0, 3, (8, 8)) / 4)
    signed = scores.at[8:, ::2].set(-0.0).at[8:, 1::2].set(0.0)
    gate = functools.partial(gating.hardware_aware_top_k, share=share, top_k=2, combine="raw")
    found = gate(signed, r_comp=0.0, r_comm=0.0, token_time=1.0)
    weights, ids = jax.lax.top_k(jnp.abs(signed), 2)
    np.testing.assert_array_equal(found.expert_ids, ids)
    np.testing.assert_array_equal(found.weights, weights)
    off = gate(signed, **COEFFICIENTS, enabled=False)
    np.testing.assert_array_equal(off.expert_ids, ids)
    np.testing.assert_array_equal(off.node_load, found.node_load * 0.25)


def test_micro_batches_hand_on_their_load():
    rng = np.random.default_rng(3)
    scores, share = routed(rng, 12, 8), rng.dirichlet(np.full(6, 0.3), 8)
    gate = functools.partial(
        gating.hardware_aware_top_k, share=share, top_k=2, r_comp=-0.2, r_comm=-0.01, token_time=0.3
    )
    whole, first = gate(scores), gate(scores[:6])
    second = gate(scores[6:], initial_load=first.node_load)
    np.testing.assert_array_equal(
        whole.expert_ids, np.concatenate([first.expert_ids, second.expert_ids])
    )
    np.testing.assert_array_equal(whole.node_load, second.node_load)
    assert not np.array_equal(second.expert_ids, gate(scores[6:]).expert_ids)


def test_weights_follow_the_models_rule():
    chosen = jnp.asarray([[0.5, 0.25]])
    rule = lambda *given: gating.combine_weights(chosen, *given)[0]
    np.testing.assert_allclose(rule(), [2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(rule("raw", 2.0), [1.0, 0.5])
    e = np.exp(0.25)
    np.testing.assert_allclose(rule("softmax"), [e / (1 + e), 1 / (1 + e)], rtol=1e-6)
    # The sum that weights are divided by may be 0.
    np.testing.assert_array_equal(gating.combine_weights(jnp.zeros((1, 2))), [[0, 0]])


def test_selection_scores_choose_and_scores_weigh_and_infinite_costs_forbid():
    scores, share = standard(5)
    cost = jnp.zeros(8).at[jnp.asarray([0, 3])].set(jnp.inf)
    found = gating.hardware_aware_top_k(
        scores, share, top_k=2, **COEFFICIENTS, selection_scores=1 - scores, extra_cost=cost
    )
    want, _ = oracle.gate(np.asarray(1 - scores), share, 2, **COEFFICIENTS, extra_cost=cost)
    np.testing.assert_array_equal(found.expert_ids, want)
    assert not np.isin(found.expert_ids, [0, 3]).any()
    chosen = np.take_along_axis(np.asarray(scores), want, 1)
    np.testing.assert_allclose(found.weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-6)


def test_protected_choices_stay():
    scores, share = standard(6)
    strong = dict(r_comp=-1e6, r_comm=-1e3, token_time=1.0)
    ids = gating.hardware_aware_top_k(scores, share, top_k=2, **strong, protect=1).expert_ids
    favorite = np.asarray(scores).argmax(1)
    assert (np.asarray(ids) == favorite[:, None]).any(1).all()
    assert not np.array_equal(ids[:, 0], favorite)


def test_batches_above_the_limit_are_gated_as_ever():
    scores, share = standard(7)
    strong = dict(top_k=2, r_comp=-9.0, r_comm=-9.0, token_time=1.0)
    valid = jnp.arange(12) < 7
    call = jax.jit(
        lambda limit, enabled: (
            gating.hardware_aware_top_k(
                scores, share, **strong, valid=valid, max_rows=limit, enabled=enabled
            ).expert_ids
        )
    )
    plain, aware = jax.lax.top_k(scores, 2)[1][:7], call(7, True)[:7]
    assert not np.array_equal(plain, aware)
    np.testing.assert_array_equal(call(6, True)[:7], plain)
    np.testing.assert_array_equal(call(7, False)[:7], plain)
    np.testing.assert_array_equal(call(7, True)[7:], gating_padding(5, 2))


def gating_padding(tokens, k):
    return np.full((tokens, k), -1)


def test_padding_is_not_looked_at():
    scores, share = standard(8)
    valid = np.arange(12) % 3 > 0
    found = gating.hardware_aware_top_k(
        jnp.where(valid[:, None], scores, jnp.nan), share, top_k=2, **COEFFICIENTS, valid=valid
    )
    want, load = oracle.gate(np.asarray(scores)[valid], share, 2, **COEFFICIENTS)
    np.testing.assert_array_equal(found.expert_ids[valid], want)
    np.testing.assert_array_equal(found.weights[~valid], np.zeros((4, 2)))
    np.testing.assert_array_equal(found.expert_ids[~valid], gating_padding(4, 2))
    np.testing.assert_array_equal(found.node_load, load)


def test_half_precision_is_widened():
    scores, share = standard(9)
    scores = scores.astype(jnp.bfloat16)
    found = gating.hardware_aware_top_k(scores, share, top_k=2, **COEFFICIENTS)
    want, _ = oracle.gate(np.asarray(scores, np.float32), share, 2, **COEFFICIENTS)
    assert found.weights.dtype == jnp.float32
    np.testing.assert_array_equal(found.expert_ids, want)


# --- Cost sources -------------------------------------------------------------------------------


def test_link_loads():
    rng = np.random.default_rng(10)
    scores = np.asarray(routed(rng, 12, 8))
    traffic = (rng.integers(0, 4, (8, 5)) * (rng.random((8, 5)) < 0.5)).astype(np.float32)
    bandwidth = np.asarray([1, 2, 4, 2, 1], np.float32)
    source = gating.ResourceLoads.links(traffic, bandwidth, r_link=-0.125)
    found = gating.cost_aware_top_k(scores, source, top_k=2)
    costs = lambda counts: oracle.link_costs(counts, traffic, bandwidth, -0.125)
    ids, counts = oracle.gate_by_counts(scores, 2, costs)
    np.testing.assert_array_equal(found.expert_ids, ids)
    np.testing.assert_array_equal(found.node_load, np.asarray(counts) @ traffic / bandwidth)


@pytest.mark.parametrize("fixed", [False, True])
def test_partition_times(fixed):
    rng = np.random.default_rng(11)
    scores = np.asarray(routed(rng, 12, 8))
    pim, gpu = np.arange(26) * 2.0, np.arange(26) * 0.25 + 6.0
    gpu[0] = 0
    on_gpu = rng.random(8) < 0.5 if fixed else None
    source = gating.PartitionTimes(pim, gpu, r_time=-0.03125, num_experts=8, on_gpu=on_gpu)
    found = gating.cost_aware_top_k(scores, source, top_k=2)
    costs = lambda counts: oracle.partition_costs(counts, pim, gpu, -0.03125, on_gpu)
    ids, counts = oracle.gate_by_counts(scores, 2, costs)
    np.testing.assert_array_equal(found.expert_ids, ids)
    np.testing.assert_array_equal(found.node_load, counts)
    assert not np.array_equal(ids, jax.lax.top_k(scores, 2)[1])
    with pytest.raises(ValueError, match="more tokens than the PIM"):
        gating.cost_aware_top_k(scores, source, top_k=2, initial_load=jnp.full(8, 25.0))


class Crowding(gating.AbstractCostSource):
    """A user's own: what the docstring of the base class shows."""

    price: jax.Array

    def initial_load(self):
        return jnp.zeros_like(self.price)

    def cost(self, load):
        return self.price * load

    def update(self, load, counts):
        return load + counts


def test_sources_of_ones_own_and_sums():
    rng = np.random.default_rng(12)
    scores, share = np.asarray(routed(rng, 3, 12, 8)), dyadic_share(rng, 8, 6)
    price = np.asarray([[0.125] * 8, [0.25] * 8, [0.0] * 8], np.float32)
    found = jax.vmap(lambda s, p: gating.cost_aware_top_k(s, Crowding(p), top_k=2))(
        scores, jnp.asarray(price)
    )
    for s, p, ids in zip(scores, price, found.expert_ids):
        want, _ = oracle.gate_by_counts(s, 2, lambda counts, p=p: np.asarray(counts) * p)
        np.testing.assert_array_equal(ids, want)

    shared = Crowding(jnp.asarray(price[0]))
    again = jax.vmap(lambda s: gating.cost_aware_top_k(s, shared, top_k=2))(scores)
    np.testing.assert_array_equal(again.expert_ids[0], found.expert_ids[0])
    assert (again.node_load.sum(1) == 24).all()

    node = gating.ResourceLoads.nodes(share, **COEFFICIENTS)
    both = lambda s, p: gating.cost_aware_top_k(s, gating.SummedCosts((node, Crowding(p))), top_k=2)
    summed = jax.vmap(both, (None, 0))(scores[0], jnp.asarray(price))
    alone = gating.hardware_aware_top_k(scores[0], share, top_k=2, **COEFFICIENTS)
    np.testing.assert_array_equal(summed.expert_ids[2], alone.expert_ids)
    np.testing.assert_array_equal(summed.node_load[0][2], alone.node_load)
    assert not np.array_equal(summed.expert_ids[1], alone.expert_ids)
    assert (summed.node_load[1].sum(1) == 24).all()


# --- Gradients ----------------------------------------------------------------------------------


def test_gradients_are_those_of_fixed_choices(x64):
    rng = np.random.default_rng(13)
    logits = jnp.asarray(rng.normal(size=(6, 8)))
    share = jnp.asarray(dyadic_share(rng, 8, 6), jnp.float64)

    def outcome(logits, token_time, r_comp):
        found = gating.hardware_aware_top_k(
            jax.nn.softmax(logits),
            share,
            top_k=2,
            r_comp=r_comp,
            r_comm=-0.01,
            token_time=token_time,
        )
        return (found.weights[:, 0] ** 2).sum() + found.node_load @ jnp.arange(6.0)

    value = jax.jit(outcome)
    slope = jax.jit(jax.vmap(jax.grad(outcome, (0, 1, 2)), (0, None, None)))
    found = slope(jnp.stack([logits, -logits]), 0.25, -0.1)
    np.testing.assert_array_equal(found[2], [0, 0])  # choices have no gradient
    step = 1e-6
    for at, of_logits, of_time in zip((logits, -logits), *found[:2]):
        ends = (value(at + sign * step * of_logits, 0.25, -0.1) for sign in (1, -1))
        np.testing.assert_allclose(np.subtract(*ends) / (2 * step), (of_logits**2).sum(), rtol=1e-6)
        ends = (value(at, 0.25 + sign * step, -0.1) for sign in (1, -1))
        np.testing.assert_allclose(np.subtract(*ends) / (2 * step), of_time, rtol=1e-6)


def test_visits_of_one_expert_alone():
    rng = np.random.default_rng(5)
    selection = rng.permutation(5 * 6).reshape(5, 6).astype(np.float32)
    share = rng.dirichlet(np.ones(2), 6)
    nodes = [set(rng.permutation(4)[:2].tolist()) for _ in range(6)]
    held = np.zeros((6, 4), np.float32)
    for expert, of in enumerate(nodes):
        held[expert, list(of)] = share[expert]
    found = gating.own_visits(jnp.asarray(selection), held, 3)
    for token, row in enumerate(selection):
        chosen = np.argsort(-row)[:3].tolist()
        for expert in range(6):
            others = set().union(*(nodes[i] for i in chosen if i != expert))
            assert found[token, expert] == len(nodes[expert] - others)
    with pytest.raises(ValueError, match="top_k = 7"):
        gating.own_visits(jnp.asarray(selection), held, 7)


# --- Devices ------------------------------------------------------------------------------------

ON_TWO_DEVICES = """
import functools, json, jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np
from moejax import gating

jax.config.update("jax_disable_most_optimizations", True)
scores = jax.nn.softmax(jax.random.normal(jax.random.key(0), (12, 8)) * 1.5)
share = jnp.eye(8)
gate = functools.partial(
    gating.hardware_aware_top_k, top_k=2, r_comp=-1.0, r_comm=0.0, token_time=0.25
)
mesh = Mesh(np.array(jax.devices()), ("tokens",))
shape = dict(mesh=mesh, in_specs=(P("tokens"), P()))
own = jax.shard_map(
    lambda s, p: (lambda g: (g.expert_ids, g.node_load[None]))(gate(s, p)),
    out_specs=(P("tokens"), P("tokens")), **shape
)
all_ = jax.shard_map(
    lambda s, p: (lambda g: (g.expert_ids, g.node_load, g.weights))(gate(s, p, axis_name="tokens")),
    out_specs=(P("tokens"), P(), P("tokens")), **shape
)
load = lambda s, p: (all_(s, p)[1] ** 2).sum()
@jax.jit
def everything(scores, share):
    one, halves = gate(scores, share), jax.vmap(gate, (0, None))(scores.reshape(2, 6, 8), share)
    own_ids, own_load = own(scores, share)
    all_ids, all_load, all_weights = all_(scores, share)
    return dict(
        own=own_ids, own_load=own_load.sum(0), all=all_ids, all_load=all_load,
        all_weights=all_weights, all_slope=jax.grad(load, 1)(scores, share),
        halves=halves.expert_ids.reshape(12, 2), halves_load=halves.node_load.sum(0),
        one=one.expert_ids, one_load=one.node_load, one_weights=one.weights,
        one_slope=jax.grad(lambda p: (gate(scores, p).node_load ** 2).sum())(share),
    )

report = everything(scores, share)
print(json.dumps(dict(devices=jax.device_count(), **{k: v.tolist() for k, v in report.items()})))
"""


def test_tokens_over_two_devices():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-c", ON_TWO_DEVICES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found["devices"] < 2:
        pytest.skip("only one host device")
    for sharded, plain in (("own", "halves"), ("all", "one")):
        assert found[sharded] == found[plain]
        np.testing.assert_allclose(found[f"{sharded}_load"], found[f"{plain}_load"])
    np.testing.assert_allclose(found["all_weights"], found["one_weights"], rtol=1e-6)
    np.testing.assert_allclose(found["all_slope"], found["one_slope"], rtol=1e-6)
    assert found["own"] != found["all"]
