"""Synthetic routing: distribution of one token, likeness of tokens, prefixes, groups, errors."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import models
from moejax._checks import as_float
from moejax.routing import (
    NOT_ROUTED,
    AbstractPopularity,
    Dirichlet,
    LambdaTails,
    LogitNormal,
    sample_expert_ids,
    synthesize,
)
from moejax.routing._synthesize import _inside_best_groups, layer_log_popularity
from tests.oracles import synthesis as oracle


FAMILIES = (Dirichlet(0.3), LogitNormal(1.5), LambdaTails(2.0, 0.3, 0.5))
WEIGHTS = (0.4, 0.3, 0.15, 0.1, 0.05)


class Fixed(AbstractPopularity):
    """The same popularity in every layer, so that its draws can be compared with exact chances."""

    weights: jax.Array = eqx.field(converter=as_float)

    def log_popularity(self, num_experts, *, key):
        del key
        assert self.weights.shape == (num_experts,)
        return jnp.log(self.weights)


def one_hot(expert_ids, num_experts):
    return np.asarray(jax.nn.one_hot(expert_ids, num_experts).sum(-2))


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
def test_every_token_keeps_its_marginal(correlation):
    # Layers are independent batches here: 20,000 batches of two tokens.
    key = jax.random.key(3)
    ids = sample_expert_ids(Fixed(WEIGHTS), 5, 2, 20_000, 2, key=key, correlation=correlation)
    chosen = one_hot(ids, 5)
    exact = oracle.inclusion_probabilities(WEIGHTS, 2)
    # Four standard errors of a frequency over 20,000 draws.
    np.testing.assert_allclose(chosen[:, 0].mean(0), exact, atol=4 * 0.5 / 20_000**0.5)
    np.testing.assert_allclose(chosen[:, 1].mean(0), exact, atol=4 * 0.5 / 20_000**0.5)


def test_correlation_makes_tokens_alike():
    def overlap(correlation):
        arguments = (Fixed(WEIGHTS), 5, 2, 20_000, 2)
        ids = sample_expert_ids(*arguments, key=jax.random.key(0), correlation=correlation)
        first, second = np.moveaxis(one_hot(ids, 5), 1, 0)
        return (first * second).sum(-1).mean()

    independent = sum(p**2 for p in oracle.inclusion_probabilities(WEIGHTS, 2))
    assert overlap(0.0) == pytest.approx(independent, abs=0.05)
    # Two tokens share the noise of an expert with chance correlation squared.
    assert overlap(0.0) + 0.1 < overlap(0.6) < overlap(0.95) <= 2
    assert overlap(0.999) > 1.98


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_more_tokens_and_layers_change_no_earlier_one(correlation):
    arguments = dict(key=jax.random.key(1), correlation=correlation)
    few = sample_expert_ids(LogitNormal(1.5), 16, 3, 2, 3, **arguments)
    many = sample_expert_ids(LogitNormal(1.5), 16, 3, 4, 8, **arguments)
    assert few.dtype == jnp.int32
    np.testing.assert_array_equal(few, many[:2, :3])


def test_synthesize_gives_a_valid_trace():
    name = "deepseek-v3"
    model = models.get(name)
    trace = synthesize(model, 5, key=jax.random.key(0))
    assert trace.expert_ids.shape == (model.num_moe_layers, 5, model.top_k)
    assert (trace.num_experts, trace.model) == (model.num_experts, name)
    assert trace.num_sequences == 5
    trace.check()
    prefix = synthesize(model, 2, key=jax.random.key(0))
    np.testing.assert_array_equal(prefix.expert_ids, trace.expert_ids[:, :2])


def test_group_limited_tokens_stay_inside_the_groups_of_the_twin():
    ids = sample_expert_ids(
        FAMILIES[1], 32, 4, 3, 50, key=jax.random.key(0), num_groups=8, top_groups=2
    )
    groups = np.sort(np.asarray(ids) // 4, axis=-1)
    assert (1 + (np.diff(groups) > 0).sum(-1)).max() <= 2
    scores = jax.random.normal(jax.random.key(1), (50, 32))
    kept = np.isfinite(_inside_best_groups(scores, 8, 2))
    for token in range(50):
        expected = oracle.inside_best_groups(np.asarray(scores[token]).tolist(), 8, 2)
        assert np.flatnonzero(kept[token]).tolist() == expected


def test_vmap_over_keys_and_one_compilation_over_parameters():
    keys = jax.random.split(jax.random.key(0), 3)

    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def draw(sigma, correlation, keys):
        family = LogitNormal(sigma)
        one = lambda k: sample_expert_ids(family, 16, 3, 2, 4, key=k, correlation=correlation)
        return jax.vmap(one)(keys)

    for sigma, correlation in ((0.5, 0.2), (2.0, 0.0)):
        many = draw(sigma, correlation, keys)
        one = sample_expert_ids(
            LogitNormal(sigma), 16, 3, 2, 4, key=keys[1], correlation=correlation
        )
        np.testing.assert_array_equal(many[1], one)
    # Out of range under tracing: no token is routed, rather than some clamped number.
    assert (draw(1.0, 1.5, keys) == NOT_ROUTED).all()
    assert (draw(jnp.nan, 0.5, keys) == NOT_ROUTED).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_normalized_reproducible_and_differentiable(family):
    draw = jax.jit(lambda family: layer_log_popularity(family, 64, 3, key=jax.random.key(0)))
    logs = draw(family)
    np.testing.assert_allclose(jnp.exp(logs).sum(-1), 1, rtol=1e-5)
    assert not np.allclose(logs[0], logs[1])
    gradient = jax.jit(jax.grad(lambda family: jnp.square(draw(family)).mean()))(family)
    for slope in jax.tree.leaves(gradient):
        assert np.isfinite(slope) and slope != 0


def test_lambda_tails_is_its_quantile_function():
    family = LambdaTails(scale=1.7, left=0.4, right=1.3)
    key = jax.random.key(5)
    u = 1 / (1 + np.exp(-np.asarray(jax.random.logistic(key, (64,)), np.float64)))
    quantile = 1.7 * ((u**0.4 - 1) / 0.4 - ((1 - u) ** 1.3 - 1) / 1.3)
    logs = np.asarray(family.log_popularity(64, key=key))
    np.testing.assert_allclose(logs - logs[0], quantile - quantile[0], atol=1e-4)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(num_tokens=0), "num_tokens = 0"),
        (dict(num_layers=0), "num_layers = 0"),
        (dict(num_tokens=2.5), "num_tokens = 2.5: allowed is a whole number"),
        (dict(top_k=17), "top_k = 17 is more than the 16"),
        (dict(top_k=5, num_groups=4), "top_k = 5 is more than the 4"),
        (dict(num_groups=3), "does not divide"),
        (dict(num_groups=2, top_groups=3), "top_groups = 3"),
        (dict(correlation=1.0), "correlation = 1"),
        (dict(correlation=float("nan")), "correlation = nan"),
    ],
)
def test_bad_sizes_are_errors(change, words):
    arguments = dict(num_experts=16, top_k=3, num_layers=2, num_tokens=4) | change
    with pytest.raises(ValueError, match=words):
        sample_expert_ids(FAMILIES[0], **arguments, key=jax.random.key(0))


def test_bad_parameters_are_errors():
    for family in FAMILIES:
        for field in dataclasses.fields(family):
            for value in (0.0, -1.0, float("nan")):
                with pytest.raises(ValueError, match=f"{type(family).__name__}.{field.name}"):
                    dataclasses.replace(family, **{field.name: value})
