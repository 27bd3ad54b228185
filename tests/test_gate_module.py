"""The gate as a layer: in transformations, on disk, in models of one's own and in the zoo's."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import gating, models, zoo
from tests.compilation import quick_compilation as quick_compilation


COSTS = dict(r_comp=-0.5, r_comm=-0.125, token_time=0.25)
LAYERS, TOKENS, EXPERTS, NODES = 3, 12, 8, 4


def share_of(seed):
    return np.eye(NODES, dtype=np.float32)[np.random.default_rng(seed).permutation(EXPERTS) % NODES]


def logits_of(seed, *layers):
    shape = (*layers, TOKENS, EXPERTS)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def filled(new):
    """A model with random numbers in it: to draw them as it does takes long to compile."""
    rng = np.random.default_rng(0)
    number = lambda like: jnp.asarray(0.3 * rng.normal(size=like.shape), like.dtype)
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    shapes = eqx.filter_eval_shape(new)
    return jax.tree.map(lambda x: number(x) if is_shape(x) else x, shapes, is_leaf=is_shape)


def layered_gate():
    share = np.stack([share_of(layer) for layer in range(LAYERS)])
    rates = dict(r_comp=-np.arange(3) / 4, r_comm=-np.arange(3) / 8, token_time=0.25)
    return gating.HardwareAwareGate(share, top_k=2, **rates)


def assert_same(found, wanted):
    np.testing.assert_array_equal(found.expert_ids, wanted.expert_ids)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-6)
    np.testing.assert_allclose(found.node_load, wanted.node_load, rtol=1e-6)


def by_function(layer, logits):
    """Layer `layer` of `layered_gate`, without the module."""
    return gating.hardware_aware_top_k(
        jax.nn.softmax(logits),
        share_of(layer),
        top_k=2,
        r_comp=-layer / 4,
        r_comm=-layer / 8,
        token_time=0.25,
    )


def test_layers_in_every_transformation():
    gate, logits = layered_gate(), logits_of(0, LAYERS)
    one_by_one = [gate.layer(layer)(logits[layer]) for layer in range(LAYERS)]

    @jax.jit
    def mapped_and_scanned(gate, logits):
        axes = jax.tree.map(lambda x: 0 if x.ndim else None, gate)
        mapped = jax.vmap(lambda g, x: g(x), (axes, 0))(gate, logits)
        step = lambda index, x: (index + 1, gate.layer(index)(x))
        return mapped, jax.lax.scan(step, 0, logits)[1]

    for found in mapped_and_scanned(gate, logits):
        for layer, alone in enumerate(one_by_one):
            assert_same(jax.tree.map(lambda x, i=layer: x[i], found), alone)
            assert_same(alone, by_function(layer, logits[layer]))
    assert not np.array_equal(one_by_one[2].expert_ids, jax.lax.top_k(logits[2], 2)[1])
    with pytest.raises(ValueError, match="several layers"):
        gate(logits[0])


def test_it_goes_to_disk_and_back(tmp_path):
    gate = dataclasses.replace(layered_gate(), r_comp=jnp.asarray([-1.0, -2.0, -3.0]))
    eqx.tree_serialise_leaves(tmp_path / "gate.eqx", gate)
    back = eqx.tree_deserialise_leaves(tmp_path / "gate.eqx", layered_gate())
    assert eqx.tree_equal(gate, back)


def test_it_multiplies_by_the_router_itself():
    hidden, router = logits_of(1), logits_of(2)[:8]
    gate = gating.HardwareAwareGate(share_of(0), top_k=2, **COSTS)
    assert_same(gate(hidden, router=router), gate(hidden @ router))
    # Half precision is widened before the product.
    hidden, router = hidden.astype(jnp.bfloat16), router.astype(jnp.bfloat16)
    wide = hidden.astype(jnp.float32) @ router.astype(jnp.float32)
    assert_same(gate(hidden, router=router), gate(wide))


class MoE(eqx.Module):
    """The model of the docstring."""

    router: jax.Array
    experts: eqx.nn.MLP
    gate: gating.HardwareAwareGate

    def __call__(self, x):
        chosen = self.gate(x, router=self.router)
        run = lambda expert, x: jax.vmap(expert)(x)
        outputs = eqx.filter_vmap(run, in_axes=(eqx.if_array(0), None))(self.experts, x)
        rows = jnp.arange(len(x))[:, None]
        picked = outputs[chosen.expert_ids, rows]
        return jnp.einsum("tk,tkh->th", chosen.weights, picked)


def test_a_model_of_ones_own_learns_through_it():
    new = eqx.filter_vmap(lambda key: eqx.nn.MLP(6, 6, 8, 1, key=key))
    experts = filled(lambda: new(jax.random.split(jax.random.key(0), EXPERTS)))
    gate = gating.HardwareAwareGate(share_of(0), top_k=2, protect=1, **COSTS)
    rng = np.random.default_rng(2)
    router, x, y = (jnp.asarray(rng.normal(size=(n, 6)), jnp.float32) for n in (8, 12, 12))
    model = MoE(router.T, experts, gate)
    loss = lambda model: jnp.mean((model(x) - y) ** 2)
    value_and_slopes = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    before, slopes = value_and_slopes(model)
    assert np.isfinite(before) and np.abs(slopes.router).max() > 0
    leaves = jax.tree.leaves(slopes.gate)
    assert leaves and all(not np.any(leaf) for leaf in leaves)
    smaller = eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, slopes))
    assert value_and_slopes(smaller)[0] < before


def test_plain_jax_and_a_scan_over_micro_batches():
    gate = gating.HardwareAwareGate(share_of(0), top_k=2, **COSTS)
    logits = logits_of(3)

    @jax.jit
    def run(parameters, logits):
        def step(load, part):
            found = parameters["gate"](part, initial_load=load)
            return found.node_load, found.expert_ids

        return jax.lax.scan(step, jnp.zeros(NODES), logits.reshape(3, 4, EXPERTS))

    load, ids = run({"gate": gate}, logits)
    whole = gate(logits)
    np.testing.assert_array_equal(ids.reshape(TOKENS, 2), whole.expert_ids)
    np.testing.assert_array_equal(load, whole.node_load)


def test_in_a_flax_module():
    flax = pytest.importorskip("flax.linen", reason="flax is not installed")

    class Router(flax.Module):
        gate: gating.HardwareAwareGate

        @flax.compact
        def __call__(self, x):
            return self.gate(flax.Dense(EXPERTS, use_bias=False)(x)).weights

    layer = Router(gating.HardwareAwareGate(share_of(0), top_k=2, **COSTS))
    x = jax.random.normal(jax.random.key(4), (TOKENS, 6))
    parameters = layer.init(jax.random.key(5), x)
    (kernel,) = jax.tree.leaves(parameters)  # the gate adds no parameters of its own
    plain = lambda kernel: layer.gate(x @ kernel).weights
    np.testing.assert_allclose(layer.apply(parameters, x), plain(kernel), rtol=1e-5)
    (slope,) = jax.tree.leaves(jax.grad(lambda p: layer.apply(p, x)[:, 0].sum())(parameters))
    expected = jax.grad(lambda kernel: plain(kernel)[:, 0].sum())(kernel)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-6)
    assert np.any(slope)


def test_in_the_zoo_model():
    config = zoo.ZooConfig(
        hidden=16,
        heads=1,
        windows=(8,),
        num_experts=EXPERTS,
        top_k=2,
        intermediate=8,
        ngrams=((2, 32),),
        ngram_dim=4,
    )
    model = filled(lambda: zoo.ByteMoE(config, key=jax.random.key(6)))
    text = jnp.arange(TOKENS) * 7 % 256
    free = dict(r_comp=0.0, r_comm=0.0, token_time=0.25)
    # One compilation for all coefficients: they are arrays of the gate.
    run = eqx.filter_jit(lambda text, gate: model.record(text, gate.choose))
    same, changed = (
        run(text, gating.HardwareAwareGate(share_of(0), top_k=2, **costs))
        for costs in (free, COSTS)
    )
    plain_weights, plain_ids = zoo.top_k_gate(same.router_logits[0], 2)[::-1]
    np.testing.assert_array_equal(same.expert_ids[0], plain_ids)
    np.testing.assert_allclose(same.gate_weights[0], plain_weights, rtol=1e-5)
    assert not np.array_equal(changed.expert_ids, same.expert_ids)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3"])
def test_a_routers_own_rule(name):
    router = models.get(name).router
    bias = 0.25 * np.arange(EXPERTS) if router.score == "sigmoid" else None
    if router.num_groups > 1:
        router = dataclasses.replace(router, num_groups=4, top_groups=2)
    gate = gating.HardwareAwareGate.for_router(
        router,
        share_of(0),
        top_k=2,
        r_comp=0.0,
        r_comm=0.0,
        token_time=1.0,
        selection_bias=bias,
    )
    logits = logits_of(7)
    found = gate(logits)
    for row, ids, weights in zip(np.asarray(logits, float), found.expert_ids, found.weights):
        score = 1 / (1 + np.exp(-row)) if router.score == "sigmoid" else np.exp(row)
        score = score if router.score == "sigmoid" else score / score.sum()
        choose = score + (0 if bias is None else bias)
        if router.num_groups > 1:
            groups = np.sort(choose.reshape(4, 2), axis=1).sum(1)
            choose = np.where(np.repeat(groups >= np.sort(groups)[-2], 2), choose, -1)
        best = np.argsort(-choose)[:2]
        np.testing.assert_array_equal(ids, best)
        if router.softmax_position == "after_topk":
            wanted = np.exp(row[best]) / np.exp(row[best]).sum()
        else:
            wanted = score[best] / (score[best].sum() if router.renormalize else 1)
        np.testing.assert_allclose(weights, wanted * router.scaling, rtol=1e-5)


def test_layer_scale():
    scores = np.asarray(
        [[[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]], [[0.4, 0.3, 0.3], [0.2, 0.4, 0.4]]], np.float32
    )
    # Margins of the best over the third: 0.3 and 0.5, 0.1 and 0.2.
    wanted = np.asarray([0.4, 0.15]) / np.mean([0.4, 0.15])
    np.testing.assert_allclose(gating.layer_scale(scores, 2), wanted, rtol=1e-5)
    first = gating.layer_scale(scores, 2, jnp.asarray([True, False]))
    np.testing.assert_allclose(first, np.asarray([0.3, 0.1]) / 0.2, rtol=1e-5)
    np.testing.assert_array_equal(gating.layer_scale(np.ones((2, 2, 3)), 1), [1, 1])
    with pytest.raises(ValueError, match="top_k = 3"):
        gating.layer_scale(scores, 3)
    with pytest.raises(ValueError, match=r"layer_scale: valid has shape \(3,\): allowed is \(2,\)"):
        gating.layer_scale(scores, 2, jnp.ones(3, bool))


def test_a_router_of_other_sizes_is_named():
    gate = gating.HardwareAwareGate(np.eye(4), top_k=2, **COSTS)
    for router in (np.ones((6, 4)), np.ones((5, 3))):
        with pytest.raises(ValueError, match=r"router has shape .*allowed is \[hidden, 4\]"):
            gate(jnp.ones((2, 5)), router=router)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(score="relu"), "score 'relu'"),
        (dict(share=np.eye(4)[0]), "share"),
        (dict(r_comp=np.zeros(3), r_comm=np.zeros(2)), r"r_comp \(3,\), r_comm \(2,\)"),
        (dict(selection_bias=np.zeros(3)), "selection_bias has shape"),
    ],
)
def test_impossible_gates_are_named(changes, words):
    given = dict(share=np.eye(4), top_k=2, **COSTS) | changes
    with pytest.raises(ValueError, match=words):
        gating.HardwareAwareGate(given.pop("share"), **given)
