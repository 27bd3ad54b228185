"""Elasticities: Euler's theorem, finite differences, and counts that are doubled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax as mj
from moejax.hardware import numeric_fields, set_fields
from moejax.models import Attention, MoEModel, Precision, Router
from moejax.routing import RoutingTrace


RATES = ("gpu.flops_per_s", "gpu.flops_per_s_8bit", "gpu.hbm_bandwidth", "link.bandwidth")
TIMES = ("link.latency", "scheduler_time", "pim.turn_time")


@pytest.fixture(scope="module", autouse=True)
def double_precision_and_quick_compilation():
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_disable_most_optimizations", False)


def readme_chip():
    return mj.hardware.get("1xb200-hbm-pim").replace(pim=dict(macs_per_unit=32))


def time_between_tokens(system):
    """Two small layers, 7 of at most 8 requests, routed by a made-up trace."""
    window = Attention("gqa", heads=4, kv_heads=2, head_dim=16, window=64)
    state = Attention("linear", key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
    bf16 = Precision.bf16()
    model = MoEModel(
        name="small",
        hidden=128,
        moe_intermediate=96,
        num_experts=8,
        top_k=2,
        vocab=2000,
        num_shared_experts=0,
        shared_intermediate=0,
        layers=(window, state),
        num_dense_layers=0,
        dense_intermediate=0,
        router=Router("softmax", "after_topk", False),
        precision=bf16,
        native_precision=bf16,
    )
    ids = np.argsort(np.random.default_rng(1).normal(size=(2, 8, 8)), axis=-1)[..., :2]
    trace = RoutingTrace(ids, 8, sequence_start=np.arange(8))
    workload = mj.Workload(7, 300.0, max_batch=8, routing=trace)
    return mj.evaluate(model, system, workload, "sieve", key=jax.random.key(0)).tbt


@pytest.fixture(scope="module")
def slow_system():
    """Rates at which no part of a small model is free, and all of it counts somewhere."""
    return readme_chip().replace(
        num_gpus=2,
        gpu=dict(hbm_bandwidth=3e11, flops_per_s=4e12, bandwidth_efficiency=0.8),
        link=dict(bandwidth=1e10, latency=1e-8),
        pim=dict(contention=0.3, turn_time=1e-9),
        scheduler_time=1e-6,
    )


@pytest.fixture(scope="module")
def found(slow_system):
    return mj.sensitivity(time_between_tokens, slow_system)


def test_all_rates_and_times_together(found, slow_system):
    """Twice all rates and half of all times halve the result, whatever limits it (Euler)."""
    times = [path for path in found if path.startswith("pim.timing.")] + list(TIMES)
    by_rates = sum(found[path].value for path in RATES)
    by_times = sum(found[path].value for path in times)
    assert by_times - by_rates == pytest.approx(1, abs=1e-9)
    assert by_rates < -0.1 and by_times > 0.1
    # What a rate is multiplied by matters as much as the rate; a capacity not at all.
    for owner, share in (("hbm_bandwidth", "bandwidth"), ("flops_per_s", "compute")):
        expected = found[f"gpu.{owner}"].value
        assert found[f"gpu.{share}_efficiency"].value == pytest.approx(expected, abs=1e-12)
    assert found["gpu.hbm_bytes"].value == 0
    half = {path: 2 * float(numeric_fields(slow_system)[path]) for path in RATES}
    half |= {path: float(numeric_fields(slow_system)[path]) / 2 for path in times}
    halved = float(time_between_tokens(set_fields(slow_system, half)))
    assert halved == pytest.approx(found.result / 2, rel=1e-12)


def test_gradients_are_finite_differences_at_a_fixed_partition(found, slow_system):
    nonzero = 0
    for path in (
        *("gpu.hbm_bandwidth", "gpu.flops_per_s", "link.bandwidth", "link.latency"),
        *("pim.timing.mac_cadence", "pim.timing.rcd", "pim.timing.rfc", "pim.turn_time"),
        *("pim.contention", "pim.attention_overhead", "scheduler_time"),
    ):
        value, step = float(numeric_fields(slow_system)[path]), 1e-5
        up, down = (
            np.log(float(time_between_tokens(set_fields(slow_system, {path: value * (1 + s)}))))
            for s in (step, -step)
        )
        assert found[path].how == "gradient"
        assert found[path].value == pytest.approx((up - down) / (2 * step), abs=1e-6), path
        nonzero += abs(found[path].value) > 1e-3
    assert nonzero >= 6
    assert all(np.isfinite(entry.value) for entry in found.values() if entry.how == "gradient")


def test_counts_are_doubled(found, slow_system):
    numbers = numeric_fields(slow_system)
    counts = [path for path, number in numbers.items() if number.dtype == jnp.int32]
    assert {"attention_tp", "pim.banks", "pim.macs_per_unit", "pim.stacks"} <= set(counts)
    for path in ("pim.macs_per_unit", "pim.stacks", "attention_tp", "num_gpus"):
        count = int(numbers.get(path, slow_system.num_gpus))
        doubled = float(time_between_tokens(set_fields(slow_system, {path: 2 * count})))
        assert found[path].how == "x2"
        assert found[path].value == pytest.approx(np.log2(doubled / found.result), abs=1e-12)
    assert all(found[path].how != "gradient" for path in counts)


def test_every_number_is_listed_once_largest_first(found, slow_system):
    assert sorted(found) == sorted([*numeric_fields(slow_system), "num_gpus"])
    lines = repr(found).splitlines()
    assert f"{found.result:.6g}" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == list(found)
    assert all(("(x2)" in line) == (found[line.split()[0]].how == "x2") for line in lines[1:])
    sizes = [abs(entry.value) for entry in found.values() if np.isfinite(entry.value)]
    assert sizes == sorted(sizes, reverse=True)


def test_the_example_of_the_readme():
    chip = readme_chip()
    found = mj.sensitivity(time_between_tokens, chip)
    assert found.result == float(time_between_tokens(chip))
    # Nothing else is there to split an attention block with, and no traffic on a single GPU.
    assert found["attention_tp"].how == "not possible"
    assert list(found)[-1] == "attention_tp" and "nan" in repr(found).splitlines()[-1]
    assert found["link.bandwidth"].value == found["link.latency"].value == 0
    # A small model waits for decisions.
    assert next(iter(found)) == "scheduler_time"


def test_by_hand():
    system = readme_chip()
    found = mj.sensitivity(
        lambda s: s.pim.banks**2 * s.link.latency / (s.gpu.hbm_bandwidth**3 * s.num_gpus), system
    )
    assert found["pim.banks"].value == pytest.approx(2)
    assert found["link.latency"].value == pytest.approx(1)
    assert found["gpu.hbm_bandwidth"].value == pytest.approx(-3)
    assert found["num_gpus"].value == pytest.approx(-1)
    assert found["scheduler_time"].value == 0
    assert next(iter(found)) == "gpu.hbm_bandwidth"


@pytest.mark.parametrize(
    "result", [jnp.ones(3), jnp.float32(-1), jnp.float32(0), jnp.float32(np.nan), -jnp.inf]
)
def test_results_that_have_no_logarithm(result):
    with pytest.raises(ValueError, match=re.escape("allowed is one positive number")):
        mj.sensitivity(lambda system: result, readme_chip())
