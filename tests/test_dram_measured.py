"""Policies judged by DRAM commands: `measured_pim` against loops over `gemv_time`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax as mj
from moejax import hardware, serving
from moejax.cost import dram
from moejax.models import Precision
from tests.test_evaluate import GQA, made_up_trace, raises, small_model, small_system


KEY = jax.random.key(3)
BATCH, PHASES = 6, 3
MODEL = small_model((GQA, GQA), num_shared_experts=1, shared_intermediate=160)
# Refreshes so often that a short GEMV meets one at some of the phases.
SYSTEM = small_system(pim=dict(timing=dict(refi=3e-7, rfc=1e-7)))
WORKLOAD = mj.Workload(BATCH, 64.0, max_batch=BATCH, routing=made_up_trace(MODEL))


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    """Little optimized: each runs once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def measured():
    return dram.measured_pim(MODEL, SYSTEM.pim, BATCH, phases=PHASES)


def mean_time(outputs, inputs, tokens, pim=SYSTEM.pim, **options):
    """One GEMV after another, in plain Python."""
    refi = float(pim.timing.refi)
    starts = [(i + 0.5) / PHASES * refi for i in range(PHASES)]
    one = lambda phase: float(dram.gemv_time(outputs, inputs, tokens, pim, phase=phase, **options))
    return sum(map(one, starts)) / PHASES


def expert(width, tokens):
    """Of up and gate, and down."""
    return mean_time(2 * width, 128, tokens) + mean_time(128, width, tokens)


def test_times_are_means_of_commands_over_refresh_phases(measured):
    bits = dict(weight_bits=16.0, activation_bits=16.0)
    for shape in ((192, 128), (128, 96), (320, 128), (128, 160)):
        for tokens in (1, BATCH):
            found = measured.gemv_time(*shape, tokens, **bits)
            np.testing.assert_allclose(found, mean_time(*shape, tokens), rtol=1e-6)
    assert len(measured.curves) == 4 and measured.order == "token_outer"
    # So the phase matters.
    assert mean_time(192, 128, 1) > float(dram.gemv_time(192, 128, 1, SYSTEM.pim, phase=0.0))


def test_another_order_and_precision_are_measured_as_asked():
    pim = SYSTEM.pim.replace(order="row_stationary", global_buffer_vectors=2)
    narrow = MODEL.replace(precision=Precision(8, 4, 8, 8))
    found = dram.measured_pim(narrow, pim, 3, phases=PHASES)
    bits = dict(weight_bits=4.0, activation_bits=8.0)
    expected = mean_time(192, 128, 3, pim, order="row_stationary", **bits)
    np.testing.assert_allclose(found.gemv_time(192, 128, 3, **bits), expected, rtol=1e-6)
    # Shared experts of other bits have no place in the table, and a policy that wants them says so.
    assert [curve.outputs for curve in found.curves] == [192, 128]
    with raises("no PIM times for 320 x 128 row_stationary"):
        system = SYSTEM.replace(pim=found.replace(extrapolate=True))
        mj.evaluate(narrow, system, WORKLOAD, "all_exp", key=KEY)


def test_a_policy_decides_on_its_belief_and_is_judged_by_commands(measured):
    belief = SYSTEM.replace(pim=dict(turn_time=2e-6))
    fields = dict(key=KEY, believed=belief)
    truth = SYSTEM.replace(pim=measured)
    found = mj.compare(MODEL, truth, WORKLOAD, ["sieve", "all_exp"], **fields)
    counts, on_gpu = serving.partition_layers(MODEL, belief, WORKLOAD, "sieve", key=KEY)
    _, better = serving.partition_layers(MODEL, SYSTEM, WORKLOAD, "sieve", key=KEY)
    assert 0 < np.sum(counts[~on_gpu]) < np.sum(counts[~better])
    for name, chosen in (("sieve", counts[~on_gpu]), ("all_exp", counts.ravel())):
        busy = sum(expert(96, tokens) for tokens in chosen.tolist() if tokens)
        experts = found[name].pim_time - found[name].attention_time
        np.testing.assert_allclose(experts, busy, rtol=1e-4)
    # Attention is no GEMV: what AllExp has more of it is the shared expert of both layers.
    more = found["all_exp"].attention_time - found["sieve"].attention_time
    np.testing.assert_allclose(more, 2 * expert(160, BATCH), rtol=1e-4)


def test_what_is_not_measured_is_of_the_pim(measured):
    assert measured.contention == SYSTEM.pim.contention
    assert measured.fraction(8).flops_per_s == SYSTEM.pim.flops_per_s / 8
    assert np.isnan(measured.gemv_energy(192, 128, 1))


def test_mistakes_are_named():
    pim = SYSTEM.pim
    with raises("pim is a RatePIM: allowed is a BankPIM"):
        dram.measured_pim(MODEL, hardware.PIMS["duplex-bank-pim"].build(), 4)
    with raises("model is a tuple: allowed is a MoEModel"):
        dram.measured_pim((128, 96), pim, 4)
    for name in ("max_tokens", "phases"):
        with raises(f"{name} = 0: allowed is an int of at least 1"):
            dram.measured_pim(MODEL, pim, **{"max_tokens": 4, name: 0})
    with raises("weights of 4 bits: allowed with kernel 'samsung' are 16"):
        narrow = MODEL.replace(precision=Precision(4, 4, 16, 16))
        dram.measured_pim(narrow, pim, 4, kernel="samsung")
    with raises("traced: measure outside of jit and vmap"):
        jax.jit(lambda pim: dram.measured_pim(MODEL, pim, 4).curves[0].times)(pim)
    with raises("unknown order 'rows'"):
        dram.measured_pim(MODEL, pim, 4, order="rows")
    with raises("the PIM table covers 2 tokens of 192 x 128: allowed is max_batch = 6"):
        short = dram.measured_pim(MODEL, pim, 2, phases=1)
        mj.evaluate(MODEL, SYSTEM.replace(pim=short), WORKLOAD, "sieve", key=KEY)
    assert jnp.isfinite(short.curves[0].times).all()
