"""Fidelity metrics against their definitions written out, with masks, and with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import metrics


RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(2, 3, 5, 7))
TARGETS = RNG.integers(0, 7, (3, 5))
MASK = RNG.random((3, 5)) < 0.6


def probabilities(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


P, Q = probabilities(A), probabilities(B)


def nan_outside(x):
    return np.where(MASK[..., None], x, np.nan)


def test_text_metrics_by_definition():
    each = (P * (np.log(P) - np.log(Q))).sum(-1)
    of_targets = lambda p: np.take_along_axis(p, TARGETS[..., None], -1)[..., 0]
    loss = -np.log(of_targets(P)), -np.log(of_targets(Q))
    shift = of_targets(Q) - of_targets(P)
    for mask, a, b in ((None, A, B), (MASK, nan_outside(A), nan_outside(B))):
        on = np.ones_like(MASK) if mask is None else mask
        targets = np.where(on, TARGETS, 10**6)
        approx = lambda x: pytest.approx(float(x), rel=1e-4)
        assert float(metrics.kl(a, b, mask)) == approx(each[on].mean())
        agree = (A.argmax(-1) == B.argmax(-1))[on].mean()
        assert float(metrics.top1_agreement(a, b, mask)) == approx(100 * agree)
        ratio = np.exp(loss[1][on].mean() - loss[0][on].mean())
        assert float(metrics.ppl_ratio(a, b, targets, mask)) == approx(ratio)
        rms = 100 * np.sqrt((shift[on] ** 2).mean())
        assert float(metrics.rms_shift(a, b, targets, mask)) == approx(rms)


def test_windows_merge_to_the_whole():
    counts = MASK.sum(1)
    each = jax.vmap(metrics.ppl_ratio)(A, B, TARGETS, MASK)
    whole = metrics.ppl_ratio(A, B, TARGETS, MASK)
    np.testing.assert_allclose(metrics.merge_ppl_ratios(each, counts), whole, rtol=1e-5)
    each = jax.vmap(metrics.rms_shift)(A, B, TARGETS, MASK)
    whole = metrics.rms_shift(A, B, TARGETS, MASK)
    np.testing.assert_allclose(metrics.merge_rms_shifts(each, counts), whole, rtol=1e-5)


def test_gradients_are_finite_where_nothing_changed_and_behind_masks():
    of_text = lambda a, b: (
        metrics.kl(a, b, MASK)
        + metrics.ppl_ratio(a, b, TARGETS, MASK)
        + metrics.rms_shift(a, b, TARGETS, MASK)
        + metrics.top1_agreement(a, b, MASK)
    )
    of_outputs = lambda a, b: metrics.moe_output_change(a, b, MASK).mean
    forbidden = A.copy()
    forbidden[..., 0] = -np.inf
    slope = jax.jit(jax.grad(lambda a, b: of_text(a, b) + of_outputs(a, b), (0, 1)))
    for given in ((A, A), (nan_outside(A), nan_outside(A)), (np.zeros_like(A), np.zeros_like(A))):
        assert all(np.isfinite(x).all() for x in slope(*given))
    slope = jax.grad(lambda b: metrics.kl(forbidden, b))(jnp.asarray(forbidden))
    assert np.isfinite(slope).all()
    assert float(metrics.kl(forbidden, forbidden)) == 0


def test_half_precision_is_widened():
    a, b = jnp.asarray(A, jnp.bfloat16), jnp.asarray(B, jnp.bfloat16)
    found = metrics.kl(a, b)
    assert found.dtype == jnp.float32
    assert found == metrics.kl(a.astype(jnp.float32), b.astype(jnp.float32))


def test_nothing_that_counts_is_nan():
    none = np.zeros_like(MASK)
    assert np.isnan(metrics.kl(A, B, none))
    assert np.isnan(metrics.moe_output_change(A, B, none)).all()
    assert np.isnan(metrics.top_k_overlap(TARGETS, TARGETS, none[:, 0]))


def test_choices_by_definition():
    # One token keeps both, one loses the second, one the first and then both; one is padding.
    before = np.asarray([[1, 2], [3, 4], [5, 6], [7, 0], [-1, -1]])
    after = np.asarray([[2, 1], [3, 5], [0, 6], [4, 5], [-1, -1]])
    assert float(metrics.top1_retention(before, after)) == 0.5
    assert float(metrics.top_k_overlap(before, after)) == 0.5
    assert float(metrics.changed_ratio(before, after)) == 0.75
    np.testing.assert_allclose(metrics.replacement_ratio(before, after), [0.5, 0.5])
    weights = np.asarray([[3, 1], [3, 1], [3, 1], [3, 1], [np.nan, np.nan]])
    mass = metrics.changed_weight_mass(before, weights, after)
    assert float(mass) == pytest.approx((0 + 0.25 + 0.75 + 1) / 4)
    mask = np.arange(5) < 2
    assert float(metrics.top1_retention(before, after, mask)) == 1
    assert float(metrics.top_k_overlap(before, after, mask)) == 0.75
    np.testing.assert_allclose(metrics.replacement_ratio(before, after, mask), [0, 0.5])
    # Layers in front are tokens more; sets may differ in size.
    assert float(metrics.top_k_overlap(before[None], after[None, :, :1])) == 0.125 * 2
    slope = jax.grad(lambda w: metrics.changed_weight_mass(before[:4], w, after[:4]))
    assert np.isfinite(slope(jnp.zeros((4, 2)))).all()


def test_neighbor_sensitivity():
    scores = jnp.asarray(RNG.normal(size=(24, 6)))
    alone = lambda s: jax.lax.top_k(s, 2)[1]
    spoiled = lambda s: jnp.where(s[:1, :1] > 0, alone(s), alone(-s))
    given = dict(batch=8, key=jax.random.key(0))
    assert metrics.neighbor_sensitivity(alone, scores, **given) == 0
    found = metrics.neighbor_sensitivity(spoiled, scores, **given, draws=16)
    # Whether a token meets the best or the worst depends on who comes first in its batch. Two
    # disjoint choices half of the time, near the odds of the first column's sign.
    positive = float((scores[:, 0] > 0).mean())
    assert float(found) == pytest.approx(2 * positive * (1 - positive), abs=0.12)
    for options, message in ((dict(batch=25), "batch = 25"), (dict(draws=0), "draws = 0")):
        with pytest.raises(ValueError, match=message):
            metrics.neighbor_sensitivity(alone, scores, **(given | options))


def test_output_change_by_definition():
    each = 2 * np.linalg.norm(A - B, axis=-1) / np.linalg.norm(A, axis=-1)
    found = metrics.moe_output_change(nan_outside(A), nan_outside(B), MASK)
    np.testing.assert_allclose(found.mean, each[MASK].mean(), rtol=1e-5)
    np.testing.assert_allclose(found.p95, np.quantile(each[MASK], 0.95), rtol=1e-5)
    np.testing.assert_allclose(found.maximum, each[MASK].max(), rtol=1e-5)


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_substitutability_by_definition():
    scores, outputs = RNG.random((5, 8)), RNG.normal(size=(5, 8, 4))
    mask = np.asarray([True, True, False, True, True])
    wanted = np.zeros((2, 3))
    for t in np.flatnonzero(mask):
        order = np.argsort(-scores[t])
        v = scores[t][:, None] * outputs[t]
        full = v[order[:2]].sum(0)
        for i in range(2):
            for j in range(3):
                wanted[i, j] += cosine(full, full - v[order[i]] + v[order[2 + j]]) / mask.sum()
    given = dict(top_k=2, mask=mask)
    found = metrics.substitutability(
        scores, np.where(mask[:, None, None], outputs, np.nan), num_replacements=3, **given
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    square = metrics.substitutability(scores, outputs, **given)
    np.testing.assert_allclose(square, wanted[:, :2], rtol=1e-4)
    slope = jax.grad(lambda y: metrics.substitutability(scores, y, top_k=2).sum())
    assert np.isfinite(slope(jnp.zeros((5, 8, 4)))).all()


def test_random_control():
    # Every expert below the choice gives the same output, so what is drawn does not matter.
    scores = np.asarray([[4, 3, 1, 1, 1, 1.0]])
    outputs = np.asarray([[[1, 0], [0, 1], *[[1, 1]] * 4]], float)
    found = metrics.substitutability_control(scores, outputs, top_k=2, key=jax.random.key(0))
    full = np.asarray([4.0, 3.0])
    np.testing.assert_allclose(found.sets, cosine(full, np.asarray([2.0, 2.0])), rtol=1e-5)
    swapped = [full - [4, 0] + [1, 1], full - [0, 3] + [1, 1]]
    np.testing.assert_allclose(found.single, [cosine(full, s) for s in swapped], rtol=1e-5)
    with pytest.raises(ValueError, match="top_k = 4"):
        metrics.substitutability_control(scores, outputs, top_k=4, key=jax.random.key(0))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: metrics.kl(A, B[:2]), "kl: shapes"),
        (lambda: metrics.kl(A, B, MASK[:2]), "mask has shape"),
        (lambda: metrics.ppl_ratio(A, B, TARGETS[0]), "targets has shape"),
        (lambda: metrics.top_k_overlap(TARGETS, TARGETS[:2]), "original_ids has shape"),
        (
            lambda: metrics.changed_weight_mass(TARGETS, TARGETS[:, :2], TARGETS),
            "original_weights has shape",
        ),
        (lambda: metrics.substitutability(A[0], A, top_k=2), "scores has shape"),
        (lambda: metrics.substitutability(A[0], A[..., None], top_k=2), "expert_outputs"),
        (lambda: metrics.substitutability(A[0, :, :3], B[0][:, :3, None], top_k=2), "4 ranks"),
    ],
)
def test_shapes_that_disagree_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_settings_at_equal_speed_and_at_equal_loss():
    # (1.3, 9) loses more than the faster (1.4, 4), (1.15, 3) is slower than (1.2, 2).
    speed = np.array([1.2, 1.0, 1.3, 1.4, 1.15, np.nan, 1.1])
    loss = np.array([2.0, 0.0, 9.0, 4.0, 3.0, 0.0, 1.0])
    fast, lost = metrics.best_settings(speed, loss)
    assert fast.tolist() == [1.0, 1.1, 1.2, 1.4] and lost.tolist() == [0, 1, 2, 4]
    assert metrics.loss_at(speed, loss, 1.3) == pytest.approx(3)
    assert metrics.loss_at(speed, loss, 0.9) == 0 and np.isnan(metrics.loss_at(speed, loss, 1.5))
    assert metrics.speedup_at(speed, loss, np.sqrt(2)) == pytest.approx(1.15)
    assert np.isnan(metrics.speedup_at(speed, loss, 0.5)) and np.isnan(
        metrics.speedup_at(speed, loss, 5.0)
    )
    assert np.isnan(metrics.speedup_at([1.0], [0.0], 0.5))
    with pytest.raises(ValueError, match="no setting"):
        metrics.best_settings([np.nan], [1.0])
    with pytest.raises(ValueError, match="allowed is a row"):
        metrics.loss_at([1.0], [1.0, 2.0], 1.0)
