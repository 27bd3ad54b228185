"""The relaxed gate is the exact one with slopes; tuning keeps its budgets and beats its start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.gating import cost_aware_top_k, hardware_aware_top_k
from moejax.gating._fidelity import MEASURES, fidelity_loss, squared_weights
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._node_budget import NodeBudget
from moejax.gating._relaxed_gate import Coefficients, GateForm, relaxed_gate
from moejax.gating._tune import tune
from tests.oracles import relax as oracle


COSTS = LayerCosts(1.0, 0.25, 0.125, top_k=2)
TOKENS, EXPERTS, NODES = 12, 8, 4


def routed(seed, *shape, skew=1.0):
    """Softmax scores, the first experts more wanted than the others."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape) * 1.5 + skew * (np.arange(shape[-1]) < 2)
    return jax.nn.softmax(jnp.asarray(logits, jnp.float32))


def placed(seed=0):
    """Whole experts, one of them split in halves."""
    share = np.eye(NODES)[np.arange(EXPERTS) % NODES]
    share[3] = [0.5, 0.5, 0, 0]
    return jnp.asarray(share, jnp.float32)


@pytest.mark.parametrize(
    "form",
    [GateForm(1, 1, False), GateForm(0, 5, True, True)],
    ids=["published", "budgeted, looking ahead"],
)
def test_forward_is_the_exact_gate(form):
    share = placed()
    for seed, rate, hop in ((0, -0.02, 0.0), (1, -0.1, -0.02), (2, 0.0, 0.0)):
        scores = routed(seed, TOKENS, EXPERTS)
        options = dict(
            top_k=2,
            protect=form.protect,
            chunk=form.chunk,
            include_future_original=form.ahead,
        )
        if form.budgeted:
            source = NodeBudget.of(share, token_time=1.0, budget=7.0, r_comp=rate, r_comm=hop)
            exact = cost_aware_top_k(scores, source, **options)
        else:
            costs = dict(r_comp=rate, r_comm=hop, token_time=1.0)
            exact = hardware_aware_top_k(scores, share, **costs, **options)
        given = Coefficients(jnp.float32(rate), jnp.float32(hop), jnp.float32(7))
        chosen, time = relaxed_gate(scores, share, COSTS, given, form, jnp.float32(0.1))
        ids = np.sort(np.asarray(exact.expert_ids))
        np.testing.assert_array_equal(np.argwhere(chosen > 0)[:, 1].reshape(-1, 2), ids)
        plain = oracle.layer_time(ids.tolist(), share.tolist(), 1.0, 0.25)
        assert time == pytest.approx(plain + 0.125 * -(-TOKENS // form.chunk))


def test_a_node_budget_counts_what_lies_above_it():
    """By hand: 2 s of room on one node, none on the other."""
    share = jnp.array([[1.0, 0], [0, 1], [0.5, 0.5]])
    source = NodeBudget.of(share, token_time=4.0, budget=6.0, r_comp=-0.5, r_comm=-0.25)
    cost = source.cost(jnp.array([4.0, 7.0]))
    np.testing.assert_allclose(cost, [0.5 * 2 + 0.25, 0.5 * 4 + 0.25, 0.5 * 2 + 0.5])
    with pytest.raises(ValueError, match="budget = -1"):
        NodeBudget.of(share, token_time=4.0, budget=-1.0, r_comp=-0.5)
    bad = jax.jit(lambda b: NodeBudget.of(share, token_time=4.0, budget=b, r_comp=-0.5))(-1.0)
    assert bad.status(jnp.zeros(2)) != 0


def test_losses_by_hand():
    scores = jnp.array([0.5, 0.25, 0.125, 0.125])
    chosen = jnp.array([0.0, 1.0, 1.0, 0.0])
    want = {"mass": 2 / 3, "overlap": 1 / 2, "retention": 1, "kl": np.log(0.75 / 0.375)}
    assert want.keys() == MEASURES.keys()
    for measure, loss in want.items():
        found = fidelity_loss(measure, chosen, scores, scores, 2)
        assert found == pytest.approx(loss)
        kept = fidelity_loss(measure, jnp.array([1.0, 1, 0, 0]), scores, scores, 2)
        assert kept == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(squared_weights(scores, 2), np.square([2, 1, 0.5, 0.5]) / 9)


def test_tuned_coefficients():
    """One layer is decided, one is not: two settings and two budgets in one call."""
    decided, vague = routed(0, 1, 192, EXPERTS, skew=2.0), routed(1, 1, 192, EXPERTS) ** 0.3
    scores = jnp.concatenate([decided, vague / vague.sum(-1, keepdims=True)])
    costs = LayerCosts(jnp.array([1e-6, 2e-6]), jnp.array([0.0, 1e-6]), 1e-8, top_k=2)
    budgets, seen = jnp.array([0.01, 0.04]), []
    found = tune(
        scores[:, :96],
        placed(),
        costs,
        budgets,
        batch=16,
        key=jax.random.key(0),
        heldout=scores[:, 96:],
        steps=20,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 20), (10, 20), (20, 20)]
    assert found.coefficients.r_comp.shape == (2, 2, 2)  # settings, budgets, layers
    assert np.all(found.coefficients.r_comp < 0) and np.isposinf(found.coefficients.budget).all()
    assert np.all(found.fit.loss <= budgets) and np.all(found.fit.speedup > 1)
    assert np.all(found.fit.speedup[:, 1] > found.fit.speedup[:, 0])
    assert found.front.shape == (2, 2) and found.front.any(-1).all()
    assert np.all(found.heldout.speedup[:, 1] > 1) and np.all(found.heldout.loss < 2 * budgets)
    # The same layer at twice the time, without communication, is worth the same choices.
    np.testing.assert_allclose(found.fit.loss[0], found.fit.loss[1], atol=0.01)


def test_bad_input():
    scores, share = routed(0, 2, 32, EXPERTS), placed()
    call = lambda scores=scores, share=share, costs=COSTS, budgets=0.1, **options: tune(
        scores, share, costs, budgets, **(dict(batch=16, key=jax.random.key(0)) | options)
    )
    for options, message in (
        (dict(scores=scores[0]), "scores is float32"),
        (dict(share=share[:3]), "share has shape"),
        (dict(share=2 * share), "sums to 2"),
        (dict(budgets=0.0), "budgets = "),
        (dict(batch=33), "batch = 33"),
        (dict(measure="masss"), "did you mean 'mass'"),
        (dict(costs=LayerCosts(1.0, top_k=8)), "top_k = 8"),
        (dict(form=GateForm(protect=3)), "protect = 3"),
        (dict(form=GateForm(chunk=0)), "chunk = 0"),
        (dict(layer_weight=[1.0]), "layer_weight has shape"),
        (dict(steps=0), "steps = 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**options)
