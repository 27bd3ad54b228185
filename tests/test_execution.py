"""Iterations by their execution graph, with prompts, on GPUs as they are, within memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax as mj
from moejax import cost, serving
from moejax._status import Status
from moejax.cost import GPUEfficiency
from moejax.serving import MODES, Execution, Workload, context_lengths
from moejax.serving._task_times import _early
from tests.oracles import execution as twin
from tests.test_evaluate import (
    GQA,
    MLA,
    SLIDING,
    made_up_trace,
    plain_model,
    plain_system,
    small_model,
    small_system,
)


KEY = jax.random.key(7)


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    """Little optimized: each runs once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


# --- The execution graph against a printed formula ------------------------------------------------


MODEL = small_model((MLA, SLIDING, GQA), num_dense_layers=1, dense_intermediate=320)
SYSTEM = small_system("2xb200-hbm-pim")


def test_an_iteration_is_the_printed_formula_of_every_layer(x64):
    contexts = np.random.default_rng(1).integers(0, 400, 12)
    workload = Workload(9, contexts, max_batch=12, routing=made_up_trace(MODEL))
    execution = Execution("coarse")
    found = mj.evaluate(MODEL, SYSTEM, workload, "sieve", key=KEY, execution=execution)
    ids = np.asarray(serving.route(MODEL, workload, key=KEY))[:, :9].tolist()
    counts, on_gpu = serving.partition_layers(MODEL, SYSTEM, workload, "sieve", key=KEY)
    # Ten experts on two GPUs: slot s of GPU g is expert 5 g + s.
    chosen = [{5 * g + s for g, s in np.argwhere(layer)} for layer in np.asarray(on_gpu)]
    assert any(chosen) and counts.shape == (2, 2, 5)
    plain = plain_model(MODEL), plain_system(SYSTEM, 16.0)
    tbt = twin.iteration(*plain, contexts[:9].tolist(), ids, chosen)
    np.testing.assert_allclose(found.tbt, tbt, rtol=1e-7)
    np.testing.assert_allclose(jnp.sum(found.time_limited_by), tbt, rtol=1e-7)
    np.testing.assert_allclose(sum(found.breakdown.values()), tbt, rtol=1e-7)


ONE_LAYER = small_model((GQA,), num_shared_experts=1, shared_intermediate=96)
ONE_GPU = small_system(scheduler_time=1e-6)
TRACE = made_up_trace(ONE_LAYER)


def report_of(execution=None, batch=8, system=ONE_GPU, policy="no_exp", **options):
    workload = Workload(batch, 200.0, max_batch=12, routing=TRACE)
    return mj.evaluate(ONE_LAYER, system, workload, policy, key=KEY, execution=execution, **options)


def test_less_overlap_takes_longer():
    ideal, fine, coarse = (report_of(Execution(o)) for o in ("ideal", "fine", "coarse"))
    assert float(ideal.tbt) <= float(fine.tbt) <= float(coarse.tbt)
    assert float(ideal.tbt) == float(report_of().tbt)
    for report in (fine, coarse):
        np.testing.assert_allclose(jnp.sum(report.time_limited_by), report.tbt, rtol=1e-5)
        # What a component takes does not depend on when.
        np.testing.assert_allclose(report.pim_time, ideal.pim_time, rtol=1e-6)


def test_half_batches_read_their_experts_twice_and_hide_attention():
    whole, halves = (report_of(Execution("coarse", halves=h)) for h in (1, 2))
    assert float(halves.offchip_time) > float(whole.offchip_time)
    np.testing.assert_allclose(halves.attention_time, whole.attention_time, rtol=1e-6)
    assert float(halves.experts_on_gpu) > float(whole.experts_on_gpu)
    # Where weights cost nothing, taking turns is what they are good for.
    light = ONE_GPU.replace(gpu=dict(hbm_bandwidth=1e15), pim=dict(attention_overhead=400.0))
    slow = light.replace(gpu=dict(flops_per_s=3e11))
    once, turns = (report_of(Execution("coarse", halves=h), system=slow) for h in (1, 2))
    # One layer: half of attention runs before, the other half beside the experts of the first.
    assert 0.7 * float(once.tbt) < float(turns.tbt) < float(once.tbt)


def test_attention_on_the_gpu_leaves_pim_to_the_experts():
    on_pim, on_gpu = (report_of(Execution(attention=where)) for where in ("pim", "gpu"))
    assert float(on_gpu.attention_time) == 0 < float(on_pim.attention_time)
    # Keys and values of 8 contexts of 200 tokens, 2 heads of 16, two bytes each.
    read = 8 * 200 * 2 * 2 * 16 * 2 / 2e11
    np.testing.assert_allclose(on_gpu.offchip_time - on_pim.offchip_time, read, rtol=1e-3)


def test_experts_loaded_early_are_loaded_once_where_they_are_wanted():
    on_gpu = jnp.array([True, False, True, True, False])
    own, counts = jnp.array([2, 3, 1, 0, 0]), jnp.array([4, 3, 1, 5, 0])
    found = _early(on_gpu, own, counts, Execution("coarse", early_load=True))
    # Two tokens of the GPU's own: experts 0 and 1, of which PIM then gets the second.
    assert (float(found["loaded"]), float(found["taken"])) == (2, 1)
    never = _early(on_gpu, own, counts, Execution("coarse"))
    assert (float(never["loaded"]), float(never["taken"])) == (0, 0)


def test_the_modes_are_what_their_letters_say():
    assert sorted(MODES) == list("abcde")
    assert MODES["c"].execution.halves == 2 and MODES["a"].execution.attention == "gpu"
    assert [MODES[letter].policy for letter in "bde"] == ["no_exp", "sieve", "sieve"]
    with raises("unknown mode 'f'"):
        serving.mode("f")


# --- Prompts in the batch, contexts, memory -------------------------------------------------------


def test_prompts_are_tokens_without_pim_attention():
    family = mj.routing.Dirichlet(1.0)
    system = small_system(scheduler_time=0.0)
    decode = Workload(6, 300.0, routing=family)
    mixed = Workload(8, 300.0, routing=family, prefill=2, prefill_length=50)
    assert mixed.num_slots == 8 + 100 and int(jnp.sum(mixed.valid)) == 6 + 100
    model = small_model((GQA, MLA))
    run = lambda workload: mj.evaluate(model, system, workload, "no_exp", key=KEY)
    alone, both = run(decode), run(mixed)
    # Decode attention is that of the six; throughput counts them alone.
    np.testing.assert_allclose(both.attention_time, alone.attention_time, rtol=1e-6)
    np.testing.assert_allclose(both.throughput_per_gpu, 6 / both.tbt, rtol=1e-6)
    # FLOPs of 100 more tokens: weights, experts, and causal attention of two prompts.
    weights = sum(layer.num_weights(128) for layer in model.layers) + 2 * 128 * 10
    flops = 2 * 100 * (weights + 2 * 3 * 3 * 128 * 96)
    flops += 2 * (2 * 50**2 * 4 * 16 + 50**2 * 4 * (16 + 8 + 24))
    np.testing.assert_allclose(both.compute_time - alone.compute_time, flops / 2e12, rtol=1e-4)
    # Their caches are held as well: 2 heads of 16 twice, and a latent of 32 + 8.
    held = 100 * (2 * 2 * 16 + 40) * 2
    np.testing.assert_allclose(both.memory_bytes - alone.memory_bytes, held, rtol=1e-3)


def test_a_sliding_window_bounds_the_attention_of_a_prompt():
    from moejax.serving._prefill import prefill_attention_work

    for length in (10, 64, 200):
        pairs = sum(min(i + 0.5, 64) for i in range(length)) if length > 64 else length**2 / 2
        found = prefill_attention_work(SLIDING, MODEL, length).flops
        # A window that is full sees whole tokens; its first tokens see half of themselves.
        np.testing.assert_allclose(found, 4 * 4 * 16 * pairs, rtol=0.01)


def test_contexts_are_drawn_from_a_distribution():
    drawn = context_lengths(4000, 512.0, spread=0.8, key=KEY)
    assert abs(float(jnp.median(drawn)) / 512 - 1) < 0.05
    assert abs(float(jnp.std(jnp.log(drawn))) / 0.8 - 1) < 0.05
    np.testing.assert_array_equal(drawn[:10], context_lengths(10, 512.0, spread=0.8, key=KEY))
    assert float(jnp.max(context_lengths(100, 512.0, longest=600, key=KEY))) == 600
    even = context_lengths(500, 100.0, kind="uniform", spread=0.5, key=KEY)
    assert 50 <= float(jnp.min(even)) < 60 and 140 < float(jnp.max(even)) <= 150
    assert np.all(np.asarray(context_lengths(3, 100.0, kind="fixed", key=KEY)) == 100)
    with raises("unknown kind of contexts 'lognormal'", "did you mean 'log_normal'"):
        context_lengths(3, 100.0, kind="lognormal", key=KEY)
    with raises("max_batch = 0"):
        context_lengths(0, 100.0, key=KEY)
    with raises("context_lengths.median = -1"):
        context_lengths(2, -1.0, key=KEY)
    with raises("spread = 1.5", "[0, 1]"):
        context_lengths(2, 1.0, kind="uniform", spread=1.5, key=KEY)


def test_what_does_not_fit_is_an_error_or_a_status():
    small = ONE_GPU.replace(gpu=dict(hbm_bytes=4e5))
    with raises("do not fit into memory", "weights take", "allowed is 0.0004 GB", "must_fit=False"):
        report_of(system=small)


# --- GPUs as they are -----------------------------------------------------------------------------


def test_kernels_that_reach_less_take_longer_by_as_much_and_sweep_with_a_status():
    cases = {
        "half": (Status.OK, {}),
        "launched": (Status.OK, dict(launch=5e-6)),
        "spilling": (Status.OK, dict(spill=1.0)),
        "memory": (Status.OUT_OF_MEMORY, dict(capacity=4e5)),
        "none": (Status.BAD_RATE, dict(share=0.0)),
        "more than all": (Status.BAD_RATE, dict(share=1.5)),
    }
    plain = dict(share=0.5, launch=0.0, spill=0.0, capacity=1e9)
    columns = [jnp.array([(plain | case)[name] for _, case in cases.values()]) for name in plain]

    @jax.jit
    @jax.vmap
    def rows(share, launch, spill, capacity):
        curve = GPUEfficiency(launch, share, 0.5, spill=spill)
        system = ONE_GPU.replace(gpu=dict(hbm_bytes=capacity))
        return report_of(system=system, efficiency=curve)

    found = rows(*columns)
    assert found.status.tolist() == [status for status, _ in cases.values()]
    assert np.isnan(found.tbt).tolist() == [status != 0 for status, _ in cases.values()]
    # Policies decide on the roofline: the same experts, at half the rates.
    same = report_of()
    assert float(found.experts_on_gpu[0]) == float(same.experts_on_gpu)
    np.testing.assert_allclose(found.gpu_time[0], 2 * same.gpu_time, rtol=0.02)
    np.testing.assert_allclose(found.gpu_time[1] - found.gpu_time[0], 5e-6, rtol=1e-3)
    # 8 tokens of 3 experts, three inner activations of 96 in two bytes.
    more = 8 * 3 * 3 * 96 * 2 / 1e11
    np.testing.assert_allclose(found.offchip_time[2] - found.offchip_time[0], more, rtol=1e-3)


def test_a_pim_without_known_energy_uses_no_zero():
    assert np.isnan(report_of().pim_energy) and np.isnan(report_of().pim_energy_per_token)


def test_errors_name_what_is_wrong():
    with raises("Execution.overlap = 'corse'", "'coarse'"):
        Execution("corse")
    with raises("Execution.halves = 3", "1, 2"):
        Execution("coarse", halves=3)
    with raises("Execution.halves = 2", "'fine' or 'coarse'"):
        Execution(halves=2)
    with raises("Execution.attention = 'tpu'"):
        Execution(attention="tpu")
    with raises("Execution.exposed = 1", "False, True"):
        Execution("coarse", exposed=1)
    with raises("Execution.early_shared = False", "'coarse'"):
        Execution("fine", early_shared=False)
    with raises("efficiency = 'measured'", "None, GPUEfficiency"):
        report_of(efficiency="measured")
    with raises("believed = 'b200'", "None, System, PIMCostTable"):
        report_of(believed="b200")
    with raises("Workload.context = inf", "0 or more tokens"):
        Workload(8, np.inf)
    with raises("execution = 'coarse'", "Execution"):
        report_of("coarse")
    with raises("Workload.batch = 1", "2 or more for two halves"):
        report_of(Execution("coarse", halves=2), batch=1)
    with raises("Workload.prefill = 9", "up to the batch, 8"):
        Workload(8, 1.0, prefill=9)
    with raises("Workload.prefill_length = 0", "from 1"):
        Workload(8, 1.0, prefill=1, prefill_length=0)
    with raises("Workload.prefill = 1", "synthetic routing only"):
        Workload(8, 1.0, prefill=1, routing=TRACE)
    with raises("System.num_gpus = 0"):
        ONE_GPU.replace(num_gpus=0)
    with raises("Attention.kind = 'gqaa'", "gqa, mla, linear"):
        mj.models.Attention("gqaa")
    near = mj.hardware.get("nmp-4x8-5t-50g")
    mixtral = mj.models.get("mixtral-8x7b")
    with raises("do not fit into memory", "the fullest node needs", "allowed is 8 GB"):
        mj.evaluate(mixtral, near, Workload(4, 1e9), "tensor_parallel", key=KEY)
    with raises("Workload.prefill = 1", "0 on near-memory systems"):
        workload = Workload(4, 1.0, prefill=1, prefill_length=2)
        mj.evaluate(mixtral, near, workload, "tensor_parallel", key=KEY)
    with raises("efficiency is allowed for systems with PIM only"):
        curve = cost.gpu_efficiency("attacc")
        mj.evaluate(mixtral, near, Workload(4, 1.0), "eplb", key=KEY, efficiency=curve)
