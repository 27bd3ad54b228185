"""Calibration: expectation against twins, stored constants against the published numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import models, routing
from moejax.routing import Dirichlet, LambdaTails, LogitNormal, Target
from tests.oracles import synthesis as oracle


# Sieve (arXiv 2605.11277), the numbers its text ties to a model.
PUBLISHED = {
    "qwen3-30b-a3b": [Target(64, share_1=0.202, share_le4=0.476), Target(256, share_1=0.119)],
    "qwen3-next-80b-a3b": [
        Target(4, share_1=0.925),
        Target(64, share_1=0.442, share_le4=0.893),
        Target(256, share_1=0.239),
    ],
    "gpt-oss-120b": [Target(64, share_1=0.326, share_le4=0.659), Target(256, share_1=0.235)],
}
# The same at B = 256 that it does not tie to one of the two.
UNASSIGNED = {"qwen3-next-80b-a3b": 0.566, "gpt-oss-120b": 0.501}


@pytest.mark.parametrize("name", PUBLISHED)
def test_stored_constants_reach_the_published_numbers(name):
    calibration = routing.calibrated(name)
    assert "Sieve" in calibration.source
    targets = PUBLISHED[name]
    if name in UNASSIGNED:
        targets = [*targets[:-1], dataclasses.replace(targets[-1], share_le4=UNASSIGNED[name])]
    judged = routing.judge(calibration, targets, models.get(name), key=jax.random.key(2024))
    assert len(judged.fits) == sum(len(target.items()) for target in targets)
    for fit in judged.fits:
        assert abs(fit.error) < 0.03, fit


def test_every_model_has_a_calibration_that_says_where_it_comes_from():
    for name in models.MODELS:
        source = routing.calibrated(name).source
        assert source and "uncalibrated" not in source, name
    assert "borrowed from" in routing.calibrated("deepseek-v3").source
    assert "uncalibrated" in routing.calibrated("a model of my own").source


def test_inclusion_probabilities_are_near_the_exact_ones():
    for weights in ((0.4, 0.3, 0.15, 0.1, 0.05), (0.2,) * 5):
        weights = np.array(weights)
        found = routing.inclusion_probabilities(jnp.log(weights) + 3.0, 2)
        assert float(found.sum()) == pytest.approx(2, rel=1e-5)
        np.testing.assert_allclose(found, oracle.inclusion_probabilities(weights, 2), atol=0.03)
    # All experts chosen, and popularities far beyond what a float can hold.
    np.testing.assert_allclose(routing.inclusion_probabilities(jnp.log(weights), 5), 1)
    extreme = jnp.array([0.0, -1.0, -300.0, -600.0])
    np.testing.assert_allclose(routing.inclusion_probabilities(extreme, 3), [1, 1, 1, 0], atol=1e-6)
    with pytest.raises(ValueError, match="top_k = 5"):
        routing.inclusion_probabilities(extreme, 5)


def test_expected_bimodality_is_that_of_simulated_batches():
    log_popularity = LogitNormal(1.5).log_popularity(32, key=jax.random.key(0))
    weights = np.exp(np.asarray(log_popularity, np.float64))
    for batch, tolerance in ((3, 0.04), (24, 0.02)):
        expected = routing.expected_bimodality(log_popularity, 4, batch)
        twin = oracle.bimodality(weights / weights.sum(), 4, batch, draws=150, seed=batch)
        np.testing.assert_allclose(expected, twin, atol=tolerance)
        assert float(sum(expected[:4])) == pytest.approx(1, abs=1e-5)


def test_gradients_are_finite_and_implicit():
    def share(log_popularity):
        return routing.expected_bimodality(log_popularity, 4, 16).share_1

    log_popularity = LogitNormal(1.0).log_popularity(32, key=jax.random.key(0))
    gradient = jax.jit(jax.grad(share))
    direction = jax.random.normal(jax.random.key(1), (32,))
    step = 1e-2
    difference = share(log_popularity + step * direction) - share(log_popularity - step * direction)
    slope = jnp.vdot(gradient(log_popularity), direction)
    assert float(slope) == pytest.approx(float(difference) / (2 * step), rel=0.02)
    # Hot experts chosen for certain beside ones that no token ever chooses.
    assert np.isfinite(gradient(jnp.linspace(0.0, -400.0, 32))).all()


def test_a_known_family_is_recovered():
    shape = (32, 4)
    truth = routing.Calibration(LogitNormal(1.2), "truth")
    ask = [Target(16, share_1=0.5, active=0.5), Target(64, share_1=0.5, share_le4=0.5)]
    known = routing.judge(truth, ask, shape, key=jax.random.key(0), num_layers=512).fits
    targets = [Target(fit.batch, **{fit.statistic: fit.sampled}) for fit in known]
    fitted = routing.calibrate(
        shape, targets, LogitNormal(2.5), key=jax.random.key(1), steps=60, source="test"
    )
    assert float(fitted.popularity.sigma) == pytest.approx(1.2, rel=0.1)
    assert fitted.source == "test" and fitted.worst_error < 0.03


def test_calibrated_on_some_files_holds_on_another(data_dir):
    trace = routing.load(data_dir / "gpt-oss-20b" / "decode-gpqa.npz")
    calibration = routing.calibrated("gpt-oss-20b")
    assert "MMLU" in calibration.source
    arguments = dict(key=jax.random.key(0), batches=(4, 16))
    judged = routing.judge(calibration, trace, (32, 4), **arguments)
    assert {fit.batch for fit in judged.fits} == {4, 16}
    # GPQA is more skewed than the questions fitted to; uniform routing is off by 0.25.
    assert judged.worst_error < 0.08
    uniform = dataclasses.replace(calibration, popularity=LambdaTails(0.01, 1.0, 1.0))
    assert routing.judge(uniform, trace, (32, 4), **arguments).worst_error > 0.2
    with pytest.raises(ValueError, match=r"num_experts, top_k"):
        routing.judge(calibration, trace, (32, 8), key=jax.random.key(0))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(batch=0, active=0.5), "Target.batch = 0"),
        (dict(batch=4), "asks for nothing"),
        (dict(batch=4, share_1=1.2), "Target.share_1 = 1.2"),
        (dict(batch=4, active=float("nan")), "Target.active = nan"),
    ],
)
def test_bad_targets_are_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        Target(**arguments)


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="no targets"):
        routing.calibrate((32, 4), [], Dirichlet(0.3), key=jax.random.key(0))
