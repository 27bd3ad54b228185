"""The penalty against plain loops, and what a training loss owes: scale, bounds, finite slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.gating import hardware_penalty
from moejax.gating._layer_costs import LayerCosts
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import relax as oracle


COSTS = LayerCosts(2e-6, 3e-7, top_k=3)


def problem(seed=0, tokens=7, experts=8, nodes=4):
    """Logits and a placement with whole experts and split ones."""
    rng = np.random.default_rng(seed)
    share = np.eye(nodes)[rng.integers(0, nodes, experts)]
    share[:3] = rng.dirichlet(np.ones(nodes), 3)
    return rng.normal(size=(tokens, experts)) * 2, share


def test_equal_to_loops(x64):
    for seed in range(4):
        logits, share = problem(seed)
        loss, aux = hardware_penalty(logits, share, COSTS, temperature=0.7, sharpness=5.0)
        want = oracle.layer_penalty(
            logits.tolist(), share.tolist(), 3, 2e-6, 3e-7, temperature=0.7, sharpness=5.0
        )
        # The costs were made in single precision.
        np.testing.assert_allclose((loss, aux.layer_time), want, rtol=3e-7)
        np.testing.assert_allclose(aux.node_load.sum(), 7 * 3 * 2e-6, rtol=1e-6)
        assert aux.imbalance == pytest.approx(float(aux.node_load.max() / aux.node_load.mean()))


def test_gradient_is_that_of_finite_differences(x64):
    logits, share = problem()
    slope = jax.jit(jax.grad(lambda x: hardware_penalty(x, share, COSTS)[0]))(logits)
    for t, i in ((0, 0), (3, 5), (6, 2)):
        step = np.zeros_like(logits)
        step[t, i] = 1e-5
        up, down = (hardware_penalty(logits + s, share, COSTS)[0] for s in (step, -step))
        assert slope[t, i] == pytest.approx(float(up - down) / 2e-5, abs=1e-8)


def test_one_for_an_even_layer_and_free_of_scale():
    share = np.eye(4)[np.arange(8) % 4]
    even, _ = hardware_penalty(jnp.zeros((6, 8)), share, LayerCosts(1e-6, top_k=2))
    assert even == pytest.approx(1, rel=1e-6)
    logits, share = problem()
    loss = hardware_penalty(logits, share, COSTS)[0]
    assert loss > 1
    for factor in (1e-20, 1e-6, 1e20):
        scaled = LayerCosts(2e-6 * factor, 3e-7 * factor, top_k=3)
        assert hardware_penalty(logits, share, scaled)[0] == pytest.approx(float(loss), rel=1e-5)
    twice = np.concatenate([logits, logits])
    assert hardware_penalty(twice, share, COSTS)[0] == pytest.approx(float(loss), rel=1e-5)


def test_slopes_are_finite_at_zero_and_at_even_load():
    slope = jax.jit(
        jax.value_and_grad(
            lambda x, mask: hardware_penalty(x, problem()[1], COSTS, mask)[0].astype(jnp.float32)
        )
    )
    everyone = jnp.ones(7, bool)
    for dtype in (jnp.float32, jnp.bfloat16):
        for logits in (jnp.zeros((7, 8)), jnp.full((7, 8), 1e4), 1e4 * jnp.eye(8)[:7]):
            for mask in (everyone, ~everyone):
                loss, gradient = slope(logits.astype(dtype), mask)
                assert np.isfinite(loss) and gradient.dtype == dtype
                assert np.isfinite(gradient.astype(jnp.float32)).all()
    assert loss == 0


def test_half_precision_is_computed_in_single():
    logits, share = problem()
    half = jnp.asarray(logits, jnp.bfloat16)
    loss, aux = hardware_penalty(half, share, COSTS)
    wide, _ = hardware_penalty(half.astype(jnp.float32), share, COSTS)
    assert loss == wide and aux.node_load.dtype == jnp.float32


def test_masked_tokens_do_not_count():
    logits, share = problem()
    padded = np.concatenate([logits, np.full((2, 8), np.nan)])
    mask = np.arange(9) < 7
    loss, gradient = jax.value_and_grad(lambda x: hardware_penalty(x, share, COSTS, mask)[0])(
        jnp.asarray(padded)
    )
    assert loss == pytest.approx(float(hardware_penalty(logits, share, COSTS)[0]), rel=1e-6)
    assert np.isfinite(gradient).all() and not gradient[7:].any()


def test_descent_makes_the_layer_faster():
    logits, share = problem(1, tokens=7)
    logits = logits + np.array([3, 3, 3, 0, 0, 0, 0, 0])
    step = jax.jit(jax.grad(lambda x: hardware_penalty(x, share, COSTS, temperature=0.3)[0]))
    moved = jnp.asarray(logits)
    for _ in range(100):
        moved = moved - step(moved)
    times = []
    for x in (jnp.asarray(logits), moved):
        ids = jax.lax.top_k(x, 3)[1]
        times.append(float(COSTS.layer_time(ids, jnp.asarray(share))))
        assert times[-1] == pytest.approx(
            oracle.layer_time(ids.tolist(), share.tolist(), 2e-6, 3e-7), rel=1e-5
        )
    assert times[1] < 0.9 * times[0]


def test_sweep_over_settings():
    logits, share = problem()
    costs = LayerCosts(jnp.array([2e-6, 1e-6]), jnp.array([3e-7, 4e-6]), top_k=3)
    losses = jax.vmap(lambda c: hardware_penalty(logits, share, c)[0])(costs)
    one = hardware_penalty(logits, share, LayerCosts(1e-6, 4e-6, top_k=3))[0]
    assert losses[1] == pytest.approx(float(one), rel=1e-5) and losses[0] != losses[1]


def test_costs():
    costs = LayerCosts.published(
        2048, 768, top_k=4, flops_per_s=5e12, bandwidth=50e9, gamma=0.5, gate_step_time=2e-8
    )
    assert costs.token_time == pytest.approx(2 * 2048 * 768 / 5e12)
    assert costs.visit_time == pytest.approx(4 * 2048 / 50e9)
    assert costs.gate_time(33, 8) == pytest.approx(5 * 2e-8)
    share = jnp.eye(4)
    ids = jnp.array([[0, 1], [0, -1], [-1, -1]])
    assert costs.layer_time(ids, share) == pytest.approx(
        2 * float(costs.token_time + costs.visit_time)
    )


def test_bad_input():
    logits, share = problem()
    for wrong, message in (
        (lambda: hardware_penalty(logits[0], share, COSTS), "scores has shape"),
        (lambda: hardware_penalty(logits[:, :5], share, COSTS), "5 experts"),
        (lambda: hardware_penalty(logits, 2 * share, COSTS), "sums to 2"),
        (lambda: hardware_penalty(logits, share, COSTS, np.ones(3, bool)), "mask has shape"),
        (lambda: hardware_penalty(logits, share, LayerCosts(1.0, top_k=9)), "top_k = 9"),
        (lambda: hardware_penalty(logits, share, LayerCosts([1.0, 2], top_k=2)), "jax.vmap"),
        (lambda: hardware_penalty(logits, share, COSTS, temperature=0.0), "temperature = 0"),
        (lambda: hardware_penalty(logits, share, COSTS, sharpness=-1.0), "sharpness = -1"),
        (lambda: LayerCosts(0.0, top_k=2), "token_time = 0"),
        (lambda: LayerCosts(1.0, -1.0, top_k=2), "visit_time = -1"),
        (lambda: LayerCosts(1.0, top_k=0), "top_k = 0"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
