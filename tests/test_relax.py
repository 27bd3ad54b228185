"""Soft choices against bisection, their limits, and the gradients they promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.gating import hard_top_k, smooth_makespan, soft_top_k
from tests.compilation import quick_compilation as quick_compilation
from tests.oracles import relax as oracle


def rows(rng, count, experts):
    """Scores of many scales, with ties and experts that can not be chosen."""
    scores = rng.normal(size=(count, experts)) * rng.choice([0.01, 1, 30], (count, 1))
    scores = np.where(rng.random((count, 1)) < 0.4, np.round(scores), scores)
    return np.where(rng.random(scores.shape) < 0.1, -np.inf, scores).astype(np.float32)


def test_equal_to_bisection():
    soft, k = jax.jit(functools.partial(soft_top_k, k=3)), 3

    @settings(max_examples=15)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.3, 2.0, 50.0]))
    def check(seed, temperature):
        scores = rows(np.random.default_rng(seed), 6, 8)
        found = soft(scores, temperature=jnp.float32(temperature))
        want = [oracle.soft_top_k(row, k, temperature) for row in scores.astype(float).tolist()]
        np.testing.assert_allclose(found, want, atol=3e-6)
        assert np.all((found >= 0) & (found <= 1)) and not np.any(found[np.isneginf(scores)])
        number = np.minimum(k, np.isfinite(scores).sum(-1))
        np.testing.assert_allclose(np.asarray(found, float).sum(-1), number, rtol=2e-6)

    check()


def test_double_precision(x64):
    scores = rows(np.random.default_rng(0), 40, 16).astype(float)
    for temperature in (0.02, 9.0):
        want = [oracle.soft_top_k(row, 15, temperature) for row in scores.tolist()]
        np.testing.assert_allclose(soft_top_k(scores, 15, temperature), want, atol=1e-13)


def test_hard_limit():
    """Ties at the boundary share what is left of k; everything else is chosen or not."""
    tied = jnp.array([3.0, 1.0, 1.0, 1.0, 0.0, -jnp.inf])
    np.testing.assert_allclose(hard_top_k(tied, 2), [1, 1 / 3, 1 / 3, 1 / 3, 0, 0], rtol=1e-6)
    scores = np.concatenate([rows(np.random.default_rng(1), 60, 5), np.full((1, 5), -np.inf)])
    for k in (1, 2, 4):
        want = [oracle.hard_top_k(row, k) for row in scores.tolist()]
        np.testing.assert_allclose(hard_top_k(scores.astype(np.float32), k), want, rtol=1e-6)
    for temperature in (0.0, 1e-38, 1e-20, 1e-7):
        separate = np.round(scores)  # what is closer than the temperature is not yet apart
        near = soft_top_k(separate.astype(np.float32), 2, temperature)
        np.testing.assert_allclose(near, hard_top_k(separate.astype(np.float32), 2), rtol=1e-5)


def test_all_and_too_few():
    scores = jnp.array([[0.5, 2.0, -1.0], [0.5, -jnp.inf, 1.0]])
    np.testing.assert_array_equal(soft_top_k(scores, 3, 1.0), [[1, 1, 1], [1, 0, 1]])
    np.testing.assert_array_equal(soft_top_k(scores, 2, 1.0)[1], [1, 0, 1])
    assert soft_top_k(jnp.full(4, -jnp.inf), 2, 1.0).sum() == 0
    np.testing.assert_allclose(soft_top_k(jnp.full(8, 7.0), 2, 0.1), 0.25, rtol=1e-6)
    gradient = jax.grad(lambda s: (soft_top_k(s, 2, 1.0) ** 2).sum())(scores)
    assert np.isfinite(gradient).all() and not gradient[1].any()


def test_gradient_is_that_of_finite_differences(x64):
    rng = np.random.default_rng(2)
    weight = rng.normal(size=6)
    value = lambda s, t: weight @ np.array(oracle.soft_top_k(list(s), 3, t))
    mine = jax.jit(jax.grad(lambda s, t: jnp.dot(weight, soft_top_k(s, 3, t)), (0, 1)))
    for temperature in (0.1, 2.0):
        scores = rng.normal(size=6)
        by_score, by_temperature = mine(scores, temperature)
        for i, step in enumerate(1e-5 * np.eye(6)):
            slope = value(scores + step, temperature) - value(scores - step, temperature)
            np.testing.assert_allclose(by_score[i], slope / 2e-5, atol=1e-7)
        slope = value(scores, temperature + 1e-5) - value(scores, temperature - 1e-5)
        np.testing.assert_allclose(by_temperature, slope / 2e-5, atol=1e-7)
    # The rule is of differentiable parts, so the second derivative follows.
    twice = jax.jit(jax.jacfwd(mine))(scores, temperature)[0]
    near = mine(scores + step, temperature)[0] - by_score
    np.testing.assert_allclose(twice @ step, near, atol=1e-8)


def test_gradients_are_finite():
    """Also where the soft choice is as good as hard; there it is zero, unless scores tie."""
    gradient = jax.jit(jax.grad(lambda s, t: (soft_top_k(s, 3, t) * jnp.arange(8)).sum(), (0, 1)))
    apart = jnp.array([1e30, -1e30, 0, 1, 2, -jnp.inf, 1e-30, 5])
    for temperature in (0.0, 1e-30, 0.5):
        for scores in (jnp.zeros(8), apart, 1e-40 * jnp.eye(8)[0]):
            assert all(np.isfinite(g).all() for g in gradient(scores, temperature))
    for scores, temperature in ((jnp.zeros(8), 0.0), (apart, 0.0), (apart, 1e-3)):
        assert not any(np.any(g) for g in gradient(scores, temperature))


def test_half_precision():
    scores = jnp.asarray(rows(np.random.default_rng(3), 6, 8), jnp.bfloat16)
    summed = lambda s: (lambda p: (p[:, 0].astype(jnp.float32).sum(), p))(soft_top_k(s, 3, 0.5))
    gradient, found = jax.jit(jax.grad(summed, has_aux=True))(scores)
    want = [oracle.soft_top_k(row, 3, 0.5) for row in scores.astype(float).tolist()]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), want, rtol=2**-8)
    assert gradient.dtype == jnp.bfloat16 and np.isfinite(gradient.astype(np.float32)).all()


def test_straight_through():
    scores = jnp.array([[0.2, 0.9, 0.9, 0.9, -1.0], [1.0, -jnp.inf, -jnp.inf, 0.0, 2.0]])
    found = soft_top_k(scores, 2, 0.3, straight_through=True)
    np.testing.assert_array_equal(found, [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])
    weigh = lambda s, through: soft_top_k(s, 2, 0.3, straight_through=through)[:, 1].sum()
    by = [jax.grad(weigh)(scores, through) for through in (False, True)]
    np.testing.assert_array_equal(*by)


def test_smooth_makespan(x64):
    rng = np.random.default_rng(4)
    load = rng.exponential(size=(5, 6))
    for temperature in (0.0, 0.05, 3.0):
        want = [oracle.smooth_makespan(row, temperature) for row in load.tolist()]
        np.testing.assert_allclose(smooth_makespan(load, temperature), want, rtol=1e-12)
    assert smooth_makespan(jnp.full(7, 0.3), 0.2) == pytest.approx(0.3)
    value = lambda x, t: oracle.smooth_makespan(list(x), t)
    by_load, by_temperature = jax.grad(smooth_makespan, (0, 1))(load[0], 0.4)
    for i, step in enumerate(1e-6 * np.eye(6)):
        slope = (value(load[0] + step, 0.4) - value(load[0] - step, 0.4)) / 2e-6
        assert by_load[i] == pytest.approx(slope, abs=1e-8)
    slope = (value(load[0], 0.4 + 1e-6) - value(load[0], 0.4 - 1e-6)) / 2e-6
    assert by_temperature == pytest.approx(slope, abs=1e-8)


def test_smooth_makespan_of_nothing_and_of_ties():
    for temperature in (0.0, 1e-30, 1.0):
        for load in (jnp.zeros(4), jnp.full(4, 1e-6), jnp.full(4, 1e30)):
            by_load, by_temperature = jax.grad(smooth_makespan, (0, 1))(load, temperature)
            np.testing.assert_allclose(by_load, 0.25)
            assert by_temperature == pytest.approx(0, abs=1e-6)
    half = smooth_makespan(jnp.ones(4, jnp.bfloat16), 0.5)
    assert half.dtype == jnp.bfloat16 and half == 1
    np.testing.assert_allclose(
        jax.grad(smooth_makespan)(jnp.array([1.0, 3, 3]), 0.0), [0, 0.5, 0.5]
    )


def test_batches_and_sweeps():
    scores = jnp.asarray(rows(np.random.default_rng(5), 12, 8)).reshape(3, 4, 8)
    over = jax.vmap(lambda t: soft_top_k(scores, 3, t))(jnp.array([0.1, 1.0]))
    for i, temperature in enumerate((0.1, 1.0)):
        np.testing.assert_allclose(over[i], soft_top_k(scores, 3, temperature), atol=1e-6)


def test_bad_input():
    scores = jnp.arange(4.0)
    for k in (0, 5, 1.5, True):
        with pytest.raises(ValueError, match="k = "):
            soft_top_k(scores, k, 1.0)
    with pytest.raises(ValueError, match="temperature = -1"):
        soft_top_k(scores, 2, -1.0)
    with pytest.raises(ValueError, match="temperature has shape"):
        soft_top_k(scores, 2, jnp.ones(4))
    for bad in (jnp.nan, jnp.inf):
        for choose in (lambda s: soft_top_k(s, 2, 1.0), lambda s: hard_top_k(s, 2)):
            with pytest.raises(ValueError, match=f"hold {float(bad):g}"):
                choose(scores.at[1].set(bad))
            traced = jax.jit(choose)(jnp.stack([scores.at[1].set(bad), scores]))
            assert np.isnan(traced[0]).all() and np.isfinite(traced[1]).all()
    with pytest.raises(ValueError, match="floating"):
        soft_top_k(jnp.arange(4), 2, 1.0)
    with pytest.raises(ValueError, match="not empty"):
        smooth_makespan(jnp.zeros((3, 0)), 1.0)
    with pytest.raises(ValueError, match="temperature"):
        smooth_makespan(scores, jnp.nan)
