"""The relaxed gate is the exact one with slopes; tuning keeps its budgets and beats its start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import metrics
from moejax.gating import _search as search
from moejax.gating import tune, weight_slopes
from moejax.gating._fidelity import MEASURES, fidelity_loss, squared_weights
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._outcome import judge, make_data, of_layers, tuned_gate
from moejax.gating._relaxed_gate import Coefficients, GateForm
from moejax.gating._soft_makespan import SoftMakespan
from tests.compilation import quick_compilation as quick_compilation
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
    "form, kinds",
    [(GateForm(1, 1, False), ("overlap",)), (GateForm(0, 5, True, True), ("mass", "retention"))],
    ids=["published", "soft, looking ahead"],
)
def test_forward_is_the_exact_gate(form, kinds):
    """Losses and times of many settings at once are those of the exact gate, one by one."""
    share, scores = placed(), routed(0, 1, 3 * TOKENS, EXPERTS)
    rates = np.linspace(-0.15, 0, 12, dtype=np.float32)[:, None]
    hops, softness = rates[::-1] / 5, np.float32(1.5 if form.soft else 0)
    settings = Coefficients(rates, hops, np.full_like(rates, softness))
    key = jax.random.key(0)
    found = {
        kind: judge(scores, share, COSTS, settings, batch=TOKENS, key=key, form=form, measure=kind)
        for kind in kinds
    }
    order = jax.random.permutation(key, 3 * TOKENS)
    batches = scores[0, order].reshape(3, TOKENS, EXPERTS)
    original = jax.lax.top_k(batches, 2)
    exact = jax.jit(
        jax.vmap(lambda s, c: tuned_gate(s, share, COSTS, c, form).expert_ids, (0, None))
    )
    for i in range(len(rates)):
        ids = exact(batches, jax.tree.map(lambda x, i=i: x[i, 0], settings))
        times = [oracle.layer_time(rows, share.tolist(), 1.0, 0.25) for rows in ids.tolist()]
        steps = 0.125 * -(-TOKENS // form.chunk)
        kept = dict(
            mass=metrics.changed_weight_mass(original[1], original[0], ids),
            overlap=1 - metrics.top_k_overlap(original[1], ids),
            retention=1 - metrics.top1_retention(original[1], ids),
        )
        for kind in kinds:
            assert found[kind].time[i] == pytest.approx(np.mean(times) + steps, rel=1e-5)
            assert found[kind].loss[i] == pytest.approx(float(kept[kind]), abs=1e-6)


def test_a_soft_makespan_grows_with_every_node():
    share = jnp.array([[1.0, 0], [0, 1], [0.5, 0.5]])
    options = dict(token_time=4.0, softness=2.0, r_comp=-0.5, r_comm=-0.25)
    load = [4.0, 7.0]
    grown = [[8, 7], [4, 11], [6, 9]]
    makespan = lambda x: oracle.smooth_makespan(x, 2.0)
    want = [0.5 * (makespan(x) - makespan(load)) + 0.25 for x in grown]
    cost = SoftMakespan.nodes(share, **options).cost(jnp.array(load))
    np.testing.assert_allclose(cost, want + 0.25 * np.array([0, 0, 1]), rtol=1e-6)
    # Towards no softness it is the published cost, and long loads lose no digits.
    far = jnp.array([4e6, 4e6 + 2])
    hard = SoftMakespan.nodes(share, **(options | dict(softness=1e-3))).cost(far)
    np.testing.assert_allclose(hard, [0.5 * 2 + 0.25, 0.5 * 4 + 0.25, 0.5 * 2 + 0.5], rtol=1e-5)
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"softness = {bad:g}"):
            SoftMakespan.nodes(share, **(options | dict(softness=bad)))
    traced = jax.jit(lambda x: SoftMakespan.nodes(share, **(options | dict(softness=x))))(-1.0)
    assert traced.status(jnp.zeros(2)) != 0


def test_losses_by_hand():
    scores = jnp.array([0.5, 0.25, 0.125, 0.125])
    chosen = jnp.array([0.0, 1.0, 1.0, 0.0])
    want = {"mass": 2 / 3, "overlap": 1 / 2, "retention": 1, "kl": np.log(0.75 / 0.375)}
    # Weights 2/3, 1/3, 0, 0 become 0, 2/3, 1/3, 0.
    slopes = jnp.array([[3.0, 0, 0, 9], [0, 3, 3, 9]])
    want |= {"model_kl": (2**2 + (1 + 1) ** 2) / 2 / 2}
    assert want.keys() == MEASURES.keys()
    for measure, loss in want.items():
        found = fidelity_loss(measure, chosen, scores, scores, 2, slopes)
        assert found == pytest.approx(loss)
        kept = fidelity_loss(measure, jnp.array([1.0, 1, 0, 0]), scores, scores, 2, slopes)
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
    assert np.all(found.coefficients.r_comp < 0) and not found.coefficients.softness.any()
    assert np.all(found.fit.loss <= budgets) and np.all(found.fit.speedup > 1)
    assert np.all(found.fit.speedup[:, 1] > found.fit.speedup[:, 0])
    assert found.front.shape == (2, 2) and found.front.any(-1).all()
    assert np.all(found.heldout.speedup[:, 1] > 1) and np.all(found.heldout.loss < 2 * budgets)
    # The same layer at twice the time, without communication, is worth the same choices.
    np.testing.assert_allclose(found.fit.loss[0], found.fit.loss[1], atol=0.01)


def test_search_follows_the_gradient_of_the_gate():
    """Slopes of all layers at once are those of one coefficient of one layer at a time."""
    share, scores = placed(), routed(3, 2, 2 * TOKENS, EXPERTS)
    slopes = jax.random.normal(jax.random.key(4), (3, *scores.shape))
    form = GateForm(1, 5, True, True)
    data = make_data(scores, share, None, [0.25, 0.75], TOKENS, jax.random.key(0), slopes)
    problem = search.Problem(data, jnp.float32(0.05))
    static = search.Static(form, "model_kl", True, 0.1, 1, 2)
    logs = jnp.log(jnp.array([[0.05, 0.1], [0.01, 0.02], [1.0, 2.0]]))
    price, budget = 0.5, 0.3

    def lagrangian(logs):
        given = search.coefficients(logs, form)
        rest = data, COSTS, form, "model_kl", problem.temperature
        time, loss = of_layers(given, *rest)
        return jnp.log(time.sum()) + price * loss.sum() / budget, loss.sum()

    @jax.jit
    def both():
        slopes = [search._slopes(logs, problem, COSTS, budget, s) for s in (static, shared)]
        return jax.jacfwd(lagrangian, has_aux=True)(logs), slopes

    shared = static._replace(per_layer=False)
    (want, loss), ((faster, truer, seen), whole) = both()
    np.testing.assert_allclose(faster + price * truer, want, rtol=2e-4, atol=1e-6)
    assert seen == pytest.approx(float(loss)) and np.all(want != 0)
    np.testing.assert_allclose(
        (whole[0] + price * whole[1])[:, 0], want.sum(1), rtol=2e-4, atol=1e-6
    )
    # At the first price, a common factor on the prices of all layers changes nothing.
    first = np.exp(search._balance(faster, truer))
    assert abs((faster + first * truer)[:2].sum()) < 1e-3 * abs(faster[:2].sum())


def test_slopes_price_a_swap_in_nats():
    """A linear model of which the Fisher matrix is known: KL, and slopes, by hand."""
    tokens, experts, bytes_ = 3, 2, 4
    head = jax.random.normal(jax.random.key(0), (experts, bytes_))
    base = jnp.array([0.5, 0.25])
    logits = lambda extra: (base + extra[0]) @ head
    options = dict(key=jax.random.key(1), samples=400)
    slopes = jax.jit(lambda: weight_slopes(logits, (1, tokens, experts), **options))()
    change = jnp.array([0.1, -0.1])
    p = jax.nn.softmax(base @ head)
    pull = head - (head @ p)[:, None]
    want = 0.5 * (p * jnp.square(change @ pull)).sum()
    found = 0.5 * jnp.square((change * slopes).sum(-1)).mean(0)
    np.testing.assert_allclose(found[0], want, rtol=0.2)
    kl = metrics.kl(logits(jnp.zeros((1, 1, experts))), logits(change[None, None]))
    assert want == pytest.approx(float(kl), rel=0.1)
    only = weight_slopes(
        logits, (1, tokens, experts), mask=jnp.array([True, False, True]), **options
    )
    assert np.all(only[:, :, 1] == 0) and np.any(only[:, :, 0] != 0)
    for bad, message in ((dict(samples=0), "samples = 0"), (dict(mask=jnp.ones(2, bool)), "mask")):
        with pytest.raises(ValueError, match=message):
            weight_slopes(logits, (1, tokens, experts), **(options | bad))


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
        (dict(batches_per_step=3), "batches_per_step = 3"),
        (dict(measure="model_kl"), "slopes go with the measure 'model_kl'"),
        (dict(measure="model_kl", slopes=scores), "slopes has shape"),
        (dict(measure="model_kl", slopes=scores[None], heldout=scores), "needs its slopes"),
        (dict(scores=scores * jnp.nan), "scores are NaN or infinite"),
        (dict(learning_rate=0.0), "learning_rate = 0"),
        (dict(temperature=0.0), "temperature = 0"),
        (dict(ray=(1.0, -1.0)), "ray = .*both below 0"),
        (dict(ray=(-1.0,)), "ray = "),
        (dict(heldout=scores[:, :8]), "batch = 16"),
        (dict(heldout=scores[:1]), "heldout: scores of 1 layers: allowed is 2"),
        (dict(heldout=scores[..., :4]), "heldout: share has shape"),
        (dict(heldout=scores.at[0, 0, 0].set(jnp.nan)), "heldout: scores are NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**options)


@pytest.mark.parametrize(
    "given, form, message",
    [
        (
            Coefficients(jnp.ones((1, 1)), jnp.zeros((1, 1)), 0.0),
            GateForm(),
            "r_comp = .*or less",
        ),
        (Coefficients(jnp.zeros((1, 1)), jnp.nan, 0.0), GateForm(), "r_comm = nan: allowed is fin"),
        (Coefficients(jnp.zeros((1, 1)), 0.0, 0.0), GateForm(soft=True), "softness = 0.0.*above 0"),
        (Coefficients(jnp.zeros((1, 3)), 0.0, 0.0), GateForm(), r"r_comp has shape \(1, 3\)"),
    ],
)
def test_coefficients_that_no_gate_takes(given, form, message):
    scores, share = routed(0, 2, 32, EXPERTS), placed()
    with pytest.raises(ValueError, match=message):
        judge(scores, share, COSTS, given, batch=16, key=jax.random.key(0), form=form)


def test_a_tuned_gate_takes_no_other_form():
    scores, share = routed(0, 32, EXPERTS), placed()
    with pytest.raises(TypeError, match="protect"):
        tuned_gate(scores, share, COSTS, Coefficients(-1.0, 0.0, 0.0), protect=2)


def test_losses_of_unknown_kind():
    scores = routed(0, 4, EXPERTS)
    loss = lambda *given: fidelity_loss(given[0], scores, scores, scores, *given[1:])
    for given, message in (
        (("masss", 2), "did you mean 'mass'"),
        (("mass", EXPERTS + 1), f"top_k = {EXPERTS + 1}"),
        (("model_kl", 2), "slopes are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(*given)
