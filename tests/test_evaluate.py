"""One decode iteration: against a literal twin, under jit, vmap and grad, and with bad input."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax as mj
from moejax._status import Status
from moejax.models import Attention, MoEModel, Precision, Router
from moejax.routing import RoutingTrace
from tests.oracles import evaluate as twin
from tests.oracles.pim_timing import Device


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once or twice, so that their compilation is all the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


MAX_BATCH = 12
GQA = Attention("gqa", heads=4, kv_heads=2, head_dim=16)
SLIDING = Attention("gqa", heads=4, kv_heads=2, head_dim=16, window=64)
GATED = Attention("gqa", heads=4, kv_heads=1, head_dim=32, output_gate=True)
MLA = Attention("mla", heads=4, kv_rank=32, rope_dim=8, nope_dim=16, value_dim=24, q_rank=48)
PLAIN_MLA = Attention("mla", heads=4, kv_rank=32, rope_dim=8, nope_dim=16, value_dim=24)
LINEAR = Attention("linear", key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)


def small_model(layers, **changes):
    """A model of a few layers, 10 experts, 3 a token."""
    sizes = dict(name="small", hidden=128, moe_intermediate=96, num_experts=10, top_k=3, vocab=500)
    sizes |= dict(num_shared_experts=0, shared_intermediate=0, num_dense_layers=0)
    sizes |= dict(dense_intermediate=0, router=Router("softmax", "after_topk", False))
    bf16 = Precision.bf16()
    return MoEModel(**sizes | dict(layers=layers, precision=bf16, native_precision=bf16) | changes)


def small_system(name="1xb200-hbm-pim", **changes):
    """Rates at which no part of a small model is free."""
    system = mj.hardware.get(name).replace(
        gpu=dict(hbm_bandwidth=2e11, flops_per_s=2e12, flops_per_s_8bit=3e12),
        link=dict(bandwidth=2e11, latency=2e-8),
        scheduler_time=3e-7,
    )
    return system.replace(**changes)


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


# --- The literal twin --------------------------------------------------------------------------


def plain_model(model):
    """The model as the twin takes it."""
    p = model.precision
    kinds = dict(gqa=("heads", "kv_heads", "head_dim", "window", "output_gate"))
    kinds["mla"] = ("heads", "kv_rank", "rope_dim", "nope_dim", "value_dim", "q_rank")
    kinds["linear"] = ("key_heads", "value_heads", "key_head_dim", "value_head_dim")
    layer = lambda a: dict(kind=a.kind) | {name: getattr(a, name) for name in kinds[a.kind]}
    return dict(
        hidden=model.hidden,
        inner=model.moe_intermediate,
        experts=model.num_experts,
        top_k=model.top_k,
        vocab=model.vocab,
        tied=model.tied_embeddings,
        shared=model.shared_intermediate,
        dense_layers=model.num_dense_layers,
        dense_inner=model.dense_intermediate,
        layers=[layer(a) for a in model.layers],
        weight_bits=float(p.weight_bits),
        expert_bits=float(p.expert_weight_bits),
        activation_bits=float(p.activation_bits),
        kv_bits=float(p.kv_bits),
    )


def plain_system(system, activation_bits):
    """The system as the twin takes it; a preset's timing is the default of the twin's device."""
    gpu, pim, link = system.gpu, system.pim, system.link
    geometry = ("channels", "banks", "macs_per_unit", "row_bytes", "global_buffer_vectors")
    rate = gpu.flops_per_s_8bit if activation_bits <= 8 else gpu.flops_per_s
    return dict(
        gpus=system.num_gpus,
        attention_tp=int(system.attention_tp),
        flops_per_s=float(rate * gpu.compute_efficiency),
        hbm_bandwidth=float(gpu.hbm_bandwidth * gpu.bandwidth_efficiency),
        link_bandwidth=float(link.bandwidth),
        link_latency=float(link.latency),
        dedup=link.dedup,
        scheduler_time=float(system.scheduler_time),
        contention=float(pim.contention),
        attention_overhead=float(pim.attention_overhead),
        device=Device(**{name: int(getattr(pim, name)) for name in geometry}),
        order=pim.order,
    )


def made_up_trace(model, num_sequences=16):
    """Two tokens for each sequence, a few experts preferred."""
    rng = np.random.default_rng(5)
    shape = (model.num_moe_layers, 2 * num_sequences, model.num_experts)
    scores = rng.gumbel(size=shape) + rng.normal(size=(shape[0], 1, shape[2]))
    ids = np.argsort(-scores, axis=-1)[..., : model.top_k]
    return RoutingTrace(ids, model.num_experts, sequence_start=2 * np.arange(num_sequences))


def windows():
    # Communication, and with it the all-gather, is nothing on one GPU.
    system = small_system(
        gpu=dict(hbm_bandwidth=2e11, bandwidth_efficiency=0.85, compute_efficiency=0.8),
        pim=dict(contention=1.0, order="matrix_outer"),
    )
    policies = ["few_tokens", "sieve", "pimoe_channel"]
    model = small_model((SLIDING, GQA, SLIDING), tied_embeddings=True)
    return model, system, policies, dict(routing=made_up_trace(model))


def latent():
    # 10 experts on 3 GPUs; activations of 8 bits run at the 8-bit rate.
    model = small_model(
        (MLA, MLA, PLAIN_MLA),
        num_shared_experts=2,
        shared_intermediate=160,
        num_dense_layers=1,
        dense_intermediate=320,
        precision=Precision(8.5, 4.25, 8, 8),
    )
    system = small_system("3xb200-hbm-pim", pim=dict(contention=0.3))
    return model, system, ["all_exp", "sieve", "pimoe_threshold"], dict(correlation=0.5)


def hybrid():
    model = small_model(
        (LINEAR, LINEAR, GATED),
        num_shared_experts=1,
        shared_intermediate=96,
        precision=Precision(16, 8, 16, 4),
    )
    system = small_system(
        "4xb200-hbm-pim",
        attention_tp=2,
        link=dict(dedup=False),
        pim=dict(order="row_stationary", global_buffer_vectors=4),
    )
    routing = dict(routing=made_up_trace(model, 6), reuse=True)
    return model, system, ["all_exp", "sieve", "sieve_no_comm"], routing


@pytest.mark.parametrize("case", [windows, latent, hybrid])
def test_every_field_is_the_twins(case, x64):
    model, system, policies, routing = case()
    rng = np.random.default_rng(2)
    limits = set()
    for seed in range(6):
        batch, contexts = int(rng.integers(1, MAX_BATCH + 1)), rng.integers(0, 400, MAX_BATCH)
        faster = lambda rate: float(rate) * 10 ** rng.uniform(-0.7, 0.7)
        gpu, link = system.gpu, system.link
        varied = system.replace(
            gpu=dict(
                hbm_bandwidth=faster(gpu.hbm_bandwidth),
                flops_per_s=faster(gpu.flops_per_s),
                flops_per_s_8bit=faster(gpu.flops_per_s_8bit),
            ),
            link=dict(bandwidth=faster(link.bandwidth)),
        )
        workload = mj.Workload(batch, contexts, max_batch=MAX_BATCH, **routing)
        key = jax.random.key(seed)
        found = mj.compare(model, varied, workload, policies, key=key)
        ids = np.asarray(mj.serving.route(model, workload, key=key))[:, :batch].tolist()
        plain = plain_system(varied, float(model.precision.activation_bits))
        for policy in policies:
            expected = twin.iteration(
                plain_model(model), plain, contexts[:batch].tolist(), ids, policy
            )
            for name, value in expected.items():
                np.testing.assert_allclose(
                    getattr(found[policy], name), value, rtol=1e-9, atol=1e-18, err_msg=name
                )
            limits.add(mj.serving.LIMITS[expected["limited_by"]])
    assert len(limits) >= 2, limits


# --- Transformations: one model, one trace, one program of everything that is swept ---------------


MODEL = small_model((SLIDING, GQA))
TRACE = made_up_trace(MODEL)
KEY = jax.random.key(0)
TRACED = []


def counting(tokens_per_expert, costs):
    """Sieve as a user's own policy; counts how often it is traced."""
    TRACED.append(None)
    return mj.partition.sieve(tokens_per_expert, costs)


def measure(system=None, batch=5, context=100.0, bits=16.0, key=KEY, trace=TRACE):
    model = MODEL.replace(precision=dict(expert_weight_bits=bits))
    workload = mj.Workload(batch, context, max_batch=16, routing=trace)
    return mj.evaluate(model, system or small_system(), workload, counting, key=key)


def test_one_compilation_for_every_number_that_is_swept():
    before, system = len(TRACED), small_system()
    tbt = lambda *args: float(measure(*args).tbt)
    gpu = lambda name, low, high: [
        tbt(system.replace(gpu={name: x})) for x in np.geomspace(low, high, 50)
    ]
    by_bandwidth, by_rate = gpu("hbm_bandwidth", 1e11, 1e13), gpu("flops_per_s", 1e10, 1e15)
    batches = [1, 2, 3, 4, np.int64(8), jnp.int32(12), np.uint8(15), 16]
    by_batch = [tbt(system, batch) for batch in batches]
    by_context = [tbt(system, 5, context) for context in (1, 100.0, np.float32(3000))]
    by_bits = [tbt(system, 5, 100.0, bits) for bits in (4.25, 8, 16)]
    assert len(TRACED) - before <= 1
    for falling in (by_bandwidth, by_rate):
        assert np.all(np.diff(falling) <= 1e-12) and falling[-1] < 0.9 * falling[0]
    for rising in (by_batch, by_context, by_bits):
        assert np.all(np.diff(rising) >= 0) and rising[-1] > rising[0]


@pytest.fixture(scope="module")
def swept():
    """Rows of one batched call by what is odd about them, and that call."""
    plain = dict(batch=5, context=100.0, bandwidth=2e11, scheduler_time=3e-7, bits=16.0, left=16)
    plain |= dict(faw=30e-9)
    rows = {
        "plain": (Status.OK, {}),
        "other": (Status.OK, dict(batch=16, context=50.0, bandwidth=4e11, bits=8.0)),
        "empty": (Status.EMPTY_BATCH, dict(batch=0)),
        "above": (Status.BATCH_ABOVE_MAX, dict(batch=17)),
        "context": (Status.BAD_COST, dict(context=-1.0)),
        "no context": (Status.BAD_COST, dict(context=np.nan)),
        "bandwidth": (Status.BAD_RATE, dict(bandwidth=0.0)),
        "no bandwidth": (Status.BAD_RATE, dict(bandwidth=np.nan)),
        "time": (Status.BAD_COST, dict(scheduler_time=-1.0)),
        "bits": (Status.BAD_COST, dict(bits=0.0)),
        "timing": (Status.BAD_COST, dict(faw=-1e-9)),
        "sequences": (Status.INVALID_ROUTING, dict(left=4)),
        "enough": (Status.OK, dict(left=5)),
    }
    columns = {name: jnp.array([(plain | row)[name] for _, row in rows.values()]) for name in plain}
    system = small_system()

    @jax.jit
    @jax.vmap
    def call(row, key):
        gpu = dict(hbm_bandwidth=row["bandwidth"])
        pim = dict(timing=dict(faw=row["faw"]))
        changed = system.replace(gpu=gpu, pim=pim, scheduler_time=row["scheduler_time"])
        valid = jnp.arange(32) < 2 * row["left"]
        trace = RoutingTrace(TRACE.expert_ids, 10, valid=valid, sequence_start=TRACE.sequence_start)
        return measure(changed, row["batch"], row["context"], row["bits"], key, trace)

    return rows, columns, lambda columns, key: call(columns, jnp.stack([key] * len(rows)))


def test_rows_say_what_is_wrong_with_them_and_leave_the_others_alone(swept):
    rows, columns, call = swept
    found = call(columns, KEY)
    expected = [status for status, _ in rows.values()]
    assert np.asarray(found.status).tolist() == expected
    for name in ("tbt", "interactivity", "throughput_per_gpu", "gpu_time", "memory_bytes"):
        assert np.isnan(getattr(found, name)).tolist() == [s != Status.OK for s in expected], name
    # The first row as it is by itself, and among rows like it.
    np.testing.assert_allclose(found.tbt[0], measure().tbt, rtol=1e-6)
    alike = call({name: jnp.full_like(column, column[0]) for name, column in columns.items()}, KEY)
    assert np.all(np.asarray(alike.status) == Status.OK)
    assert np.all(np.asarray(alike.tbt) == np.asarray(found.tbt[0]))


def test_other_keys_draw_other_routing(swept):
    _, columns, call = swept
    first, second = (call(columns, jax.random.key(i)).tbt[1] for i in (1, 2))
    assert float(first) != float(second)


def test_padding_changes_nothing_and_everything_has_a_gradient():
    def exact(bits, context):
        model = MODEL.replace(precision=dict(expert_weight_bits=bits))
        workload = mj.Workload(5, context, routing=TRACE)
        assert workload.max_batch == 5
        report = mj.evaluate(model, small_system(), workload, counting, key=KEY)
        return report.pim_time + report.gpu_time, report

    slopes, found = jax.grad(exact, argnums=(0, 1), has_aux=True)(16.0, 100.0)
    padded = measure()
    for name in ("tbt", "gpu_time", "pim_time", "attention_time", "memory_bytes"):
        np.testing.assert_allclose(getattr(found, name), getattr(padded, name), rtol=1e-6)
    assert float(found.experts_on_pim) == float(padded.experts_on_pim)
    assert 0 < float(slopes[0]) < np.inf and 0 < float(slopes[1]) < np.inf


# --- Routing from a trace, and bad input ---------------------------------------------------------


def test_a_trace_must_be_of_the_model_and_long_enough():
    trace = made_up_trace(MODEL, num_sequences=4)
    call = lambda trace, **options: mj.evaluate(
        MODEL, small_system(), mj.Workload(8, 10.0, routing=trace, **options), "sieve", key=KEY
    )
    with raises("more than the trace's 4 sequences", "reuse=True"):
        call(trace)
    with raises("small", "(2, 10, 3)"):
        call(made_up_trace(small_model((GQA, GQA, GQA))))
    # Two of the four sequences have no valid token: 4 tokens are left.
    valid = np.array([True, True, False, False] * 2)
    part = RoutingTrace(trace.expert_ids, 10, valid=valid, sequence_start=trace.sequence_start)
    with raises("more than the trace's 4 valid tokens"):
        call(part, reuse=True)


def test_context_per_request():
    with raises("(4,)", "(16,)"):
        measure(context=jnp.ones(4))


@pytest.mark.parametrize("batch", [0, -1, 17])
def test_batches_out_of_range(batch):
    with raises("Workload.batch", str(batch), "1 .. max_batch = 16"):
        mj.Workload(batch, 100.0, max_batch=16)


def test_numbers_that_make_no_sense_eagerly():
    with raises("Workload.context = -1"):
        mj.Workload(4, -1.0)
    with raises("Workload.batch = 2.5", "whole number"):
        mj.Workload(2.5, 1.0)
    with raises("max_batch"):
        jax.jit(lambda batch: mj.Workload(batch, 1.0).valid)(3)
    for correlation in (-0.1, 1.0, float("nan")):
        with raises("Workload.correlation", "[0, 1)"):
            mj.Workload(4, 1.0, correlation=correlation)
    with raises("GPU.hbm_bandwidth"):
        small_system(gpu=dict(hbm_bandwidth=0.0))
    with raises("unknown policy 'seive'", "did you mean 'sieve'"):
        mj.evaluate(MODEL, small_system(), mj.Workload(4, 1.0), "seive", key=KEY)
    with raises("every name once"):
        mj.compare(MODEL, small_system(), mj.Workload(4, 1.0), ["sieve", "sieve"], key=KEY)


# --- The size of published and prototype numbers -------------------------------------------------


def test_layer_times_are_of_the_size_that_a_prototype_gave():
    """Qwen3-30B-A3B on one B200 with HBM-PIM, 512 tokens of context, no scheduler time.

    A throw-away prototype with other synthetic routing and no router weights gave, in us per
    layer: NoExp 85.7 and Sieve 42.1 at B = 64, 107.6 and 73.5 at B = 256.
    """
    model = mj.models.get("qwen3-30b-a3b")
    model = model.replace(layers=model.layers[:8])
    system = mj.hardware.get("1xb200-hbm-pim")
    system = system.replace(scheduler_time=0.0, pim=dict(order="matrix_outer"))

    def layer_us(batch):
        workload = mj.Workload(batch, 512.0, max_batch=256)
        found = mj.compare(model, system, workload, ["no_exp", "sieve"], key=KEY)
        per_layer = lambda r: 1e6 * (r.tbt - r.head_time) / model.num_layers
        return per_layer(found["no_exp"]), per_layer(found["sieve"])

    no_exp, sieve = jax.jit(jax.vmap(layer_us))(jnp.array([64, 256]))
    for found, expected in ((no_exp, [85.7, 107.6]), (sieve, [42.1, 73.5])):
        ratio = np.asarray(found) / np.array(expected)
        assert np.all((ratio > 1 / 1.5) & (ratio < 1.5)), (found, expected)
    speedup = np.asarray(no_exp / sieve) / np.array([85.7 / 42.1, 107.6 / 73.5])
    assert np.all((speedup > 1 / 1.5) & (speedup < 1.5))
