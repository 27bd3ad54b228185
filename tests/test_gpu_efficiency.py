"""What GPU kernels reach: the stored fit against the measured points, error by error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import cost
from moejax.cost import GPU_EFFICIENCIES, GPUEfficiency, Work, fit_gpu_efficiency, gpu_efficiency


# RTX PRO 6000 (Blackwell): 1792 GB/s of GDDR7, 503.8 TFLOP/s of dense bf16, 128 MB of cache; public
# product description.
BOARD = dict(flops_per_s=503.8e12, bandwidth=1792e9, cache_bytes=128e6)
LAYER = dict(hidden=2048, intermediate=768, top_k=8)  # Qwen3-30B-A3B


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


@pytest.fixture(scope="module")
def measured(data_dir):
    path = data_dir / "llmservingsim-reference" / "qwen3-30b-a3b-rtxpro6000-moe.csv"
    points = np.genfromtxt(path, delimiter=",", names=True)
    assert len(points) == 50
    return points["tokens"], points["activated_experts"], points["time_us"] * 1e-6


def test_the_stored_numbers_are_what_the_fit_finds(measured):
    fit = fit_gpu_efficiency(*measured, **BOARD, **LAYER)
    stored = gpu_efficiency("measured")
    for field in ("launch_time", "bandwidth", "compute", "sharpness"):
        found = float(getattr(fit.efficiency, field))
        np.testing.assert_allclose(getattr(stored, field), found, rtol=0.01, err_msg=field)
    assert float(stored.spill) == 1 and 1.5 < fit.cache_speedup < 2.5


def test_the_error_of_every_point(measured):
    """Written with plain numbers, apart from the points whose weights fit in the cache."""
    tokens, experts, seconds = measured
    stored = gpu_efficiency("measured")
    errors = {}
    for n, e, t in zip(tokens, experts, seconds, strict=True):
        moved = 2 * (3 * e * 2048 * 768 + n * 8 * (2 * 2048 + 3 * 768))
        work = Work(6.0 * n * 8 * 2048 * 768, moved)
        errors[n, e] = float(stored.time(work, 503.8e12, 1792e9)) / t - 1
    worst = max(abs(error) for (_, e), error in errors.items() if e >= 16)
    assert worst < 0.08
    assert np.sqrt(np.mean([error**2 for (_, e), error in errors.items() if e >= 16])) < 0.04
    # From memory, eight experts take longer than the benchmark saw them take from the cache.
    few = [error for (n, e), error in errors.items() if e == 8 and n <= 16]
    assert min(few) > 0.3


def test_limits_and_gradients():
    curve = GPUEfficiency(1e-5, 0.8, 0.5, 2.0)
    assert float(curve.join(0.0, 0.0)) == pytest.approx(1e-5)
    assert float(curve.join(3e-5, 4e-5)) == pytest.approx(6e-5)
    sharp = GPUEfficiency(0.0, 1.0, 1.0)
    np.testing.assert_allclose(sharp.join(3.0, 4.0), 4.0, rtol=1e-6)
    np.testing.assert_allclose(sharp.join(4.0, 4.0), 4.0, rtol=0.02)
    for times in ((0.0, 0.0), (0.0, 1.0), (2.0, 2.0)):
        slopes = jax.grad(lambda m, c: curve.join(m, c), argnums=(0, 1))(*times)
        assert np.all(np.isfinite(slopes)) and np.all(np.asarray(slopes) >= 0)
    rows = jax.vmap(lambda share: GPUEfficiency(0.0, share, 0.5).join(1.0, 2.0))(jnp.ones(3))
    assert rows.shape == (3,)


def test_a_fit_finds_what_made_the_data():
    tokens, experts = (x.ravel() for x in np.meshgrid([1, 16, 256, 4096], [8, 32, 128]))
    made = GPUEfficiency(2e-5, 0.7, 0.5, 3.0)
    moved = 2 * (3 * experts * 2048 * 768 + tokens * 8 * (2 * 2048 + 3 * 768.0))
    seconds = made.time(Work(6.0 * tokens * 8 * 2048 * 768, moved), 503.8e12, 1792e9)
    fit = fit_gpu_efficiency(
        tokens, experts, seconds, **LAYER, flops_per_s=503.8e12, bandwidth=1792e9
    )
    found = [fit.efficiency.launch_time, fit.efficiency.bandwidth, fit.efficiency.compute]
    np.testing.assert_allclose(found, [2e-5, 0.7, 0.5], rtol=1e-3)
    np.testing.assert_allclose(fit.predicted, seconds, rtol=1e-4)


def test_errors_name_what_is_wrong():
    with raises("GPUEfficiency.bandwidth = 1.5", "(0, 1]"):
        GPUEfficiency(0.0, 1.5, 0.5)
    with raises("GPUEfficiency.sharpness = 0.5", "[1,"):
        GPUEfficiency(0.0, 0.5, 0.5, 0.5)
    with raises("GPUEfficiency.launch_time = -1"):
        GPUEfficiency(-1.0, 0.5, 0.5)
    with raises("unknown GPU efficiency 'mesured'", "did you mean 'measured'"):
        gpu_efficiency("mesured")
    with raises("(3,)", "(2,)", "at least 6"):
        fit_gpu_efficiency([1, 2, 3], [1, 2], [1, 2], **LAYER, flops_per_s=1.0, bandwidth=1.0)
    with raises("fit_gpu_efficiency.seconds"):
        fit_gpu_efficiency(*np.ones((2, 6)), -np.ones(6), **LAYER, flops_per_s=1.0, bandwidth=1.0)
    with raises("fit_gpu_efficiency.flops_per_s = 0"):
        fit_gpu_efficiency(*np.ones((3, 6)), **LAYER, flops_per_s=0.0, bandwidth=1.0)
    assert all(source for _, source in GPU_EFFICIENCIES.values()) and cost.GPUFit
