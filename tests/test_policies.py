"""Every policy of the registry under one call, and what each may know and has to pay."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax as mj
from moejax.cost import PIMCostTable
from moejax.models import Attention, MoEModel, Precision, Router
from moejax.routing import RoutingTrace
from moejax.serving import policy_of


BATCH, KEY = 16, jax.random.key(0)
STATIC = ("no_exp", "all_exp", "few_tokens", "pimoe_threshold")


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once or twice, so that their compilation is all the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def small_model():
    """Two layers of 16 experts, 4 a token, with a shared expert."""
    full = Attention("gqa", heads=4, kv_heads=2, head_dim=16)
    bf16 = Precision.bf16()
    return MoEModel(
        name="small",
        hidden=128,
        moe_intermediate=96,
        num_experts=16,
        top_k=4,
        vocab=500,
        num_shared_experts=1,
        shared_intermediate=96,
        layers=(full, full),
        num_dense_layers=0,
        dense_intermediate=0,
        router=Router("softmax", "after_topk", False),
        precision=bf16,
        native_precision=bf16,
    )


MODEL = small_model()


def workload():
    """A trace with hot experts, all of them in the same two of 8 channel groups."""
    rng = np.random.default_rng(3)
    scores = rng.gumbel(size=(2, BATCH, 16)) + 2.0 * (np.arange(16) % 8 < 2)
    ids = np.argsort(-scores, axis=-1)[..., :4]
    trace = RoutingTrace(ids, 16, sequence_start=np.arange(BATCH))
    return mj.Workload(BATCH, 200.0, routing=trace)


def system(**changes):
    """An expert's weights take as long to load as a few tokens take on PIM."""
    chip = mj.hardware.get("2xb200-hbm-pim").replace(
        gpu=dict(hbm_bandwidth=1.5e11), link=dict(latency=1e-8), scheduler_time=1e-6
    )
    return chip.replace(**changes)


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


def fewest_first(tokens_per_expert, costs):
    """A user's policy: half of the experts, the less popular ones, on the GPU."""
    on_gpu = jnp.argsort(jnp.argsort(tokens_per_expert)) < tokens_per_expert.shape[0] // 2
    return mj.partition.score(on_gpu, tokens_per_expert, costs)


@pytest.fixture(scope="module")
def compared():
    """Reports of all policies and of one of our own, at three contexts."""
    policies = [*mj.POLICIES, fewest_first]
    call = lambda context: mj.compare(
        MODEL,
        system(),
        dataclasses.replace(workload(), context=jnp.float32(context)),
        policies,
        key=KEY,
    )
    return {context: call(context) for context in (0.0, 200.0, 20_000.0)}


# --- The registry -------------------------------------------------------------------------------


def test_the_registry_describes_itself():
    for name, policy in mj.POLICIES.items():
        assert policy.name == name and policy_of(name) is policy
        assert len(policy.description) > 10 and policy.description[-1] != "."
        assert policy.scheduled == (name not in STATIC)
    with raises("unknown policy 'pimoe'", "did you mean 'pimoe_"):
        policy_of("pimoe")


def test_all_run_under_one_call(compared):
    for reports in compared.values():
        assert set(reports) == {*mj.POLICIES, "fewest_first"}
        for name, report in reports.items():
            assert int(report.status) == 0 and np.isfinite(float(report.tbt)), name
            assert float(report.tbt) > 0 and bool(report.memory_fits)
            active = float(report.experts_on_gpu + report.experts_on_pim)
            assert active == float(reports["no_exp"].experts_on_gpu)
            total = float(jnp.sum(report.time_limited_by))
            assert total == pytest.approx(float(report.tbt), rel=1e-6)


def test_what_runs_where(compared):
    found = compared[0.0]
    assert float(found["no_exp"].experts_on_pim) == 0
    assert float(found["all_exp"].experts_on_gpu) == 0
    for name in ("sieve", "few_tokens", "pimoe_channel"):
        assert float(found[name].experts_on_gpu) > 0 and float(found[name].experts_on_pim) > 0
    # Each GPU has 8 experts, and half of them are to go; those without tokens do not count.
    assert 0 < float(found["fewest_first"].experts_on_gpu) <= 8


def test_decisions_are_paid_by_those_who_make_them(compared):
    """On two GPUs, dispatch hides a part of them, and everyone pays the all-gather."""
    found = compared[0.0]
    gathered = float(found["no_exp"].scheduler_time)
    assert 0 < gathered < 0.2e-6
    for name, report in found.items():
        time = float(report.scheduler_time)
        if name in STATIC:
            assert time == gathered
        else:
            assert gathered + 1e-6 < time < gathered + 2e-6, name


def test_better_partitions_take_no_longer(compared):
    for found in compared.values():
        tbt = {name: float(report.tbt) for name, report in found.items()}
        assert tbt["optimal"] <= tbt["best_prefix"] * (1 + 1e-6)
        assert tbt["best_prefix"] <= tbt["sieve"] * (1 + 1e-6)
        # Without contention and traffic of PIM tokens beyond that of the GPU's, the first stop is
        # the best prefix, so that knowing less never helps.
        assert tbt["best_prefix"] == pytest.approx(tbt["sieve"], rel=1e-6)
        for name in ("sieve_no_attention", "sieve_no_comm"):
            assert tbt["sieve"] <= tbt[name] * (1 + 1e-6)


# --- What a policy is blind to -------------------------------------------------------------------


def test_forgetting_attention_changes_the_decision_and_not_the_score(compared):
    without, long = compared[0.0], compared[20_000.0]
    blind, sieve = long["sieve_no_attention"], long["sieve"]
    # Its decision does not move with the context; that of Sieve does.
    assert float(blind.experts_on_pim) == float(without["sieve_no_attention"].experts_on_pim)
    assert float(sieve.experts_on_pim) < float(without["sieve"].experts_on_pim)
    assert float(blind.attention_time) == float(sieve.attention_time) > 0
    assert float(blind.tbt) > float(sieve.tbt)
    # Where there is no attention, there is nothing to forget.
    assert float(without["sieve_no_attention"].tbt) == float(without["sieve"].tbt)


def test_blind_policies_are_told_zero():
    costs = mj.partition.PartitionCosts(
        **dict.fromkeys(("attention_time", "comm_time", "expert_bytes", "token_bytes"), 1.0),
        **dict.fromkeys(("flops_per_token", "fixed_bytes", "fixed_flops"), 1.0),
        **dict.fromkeys(("hbm_bandwidth", "flops_per_s"), 1.0),
        pim_time_by_tokens=jnp.arange(3.0),
    )
    told = []

    def spy(tokens_per_expert, known):
        told.append(known)
        return mj.partition.no_exp(tokens_per_expert, known)

    policy = mj.Policy("spy", "", spy, blind_to=("comm_time",))
    policy.choose(jnp.array([1, 2]), costs, 3)
    assert float(told[0].comm_time) == 0 and float(told[0].attention_time) == 1


# --- Channels ------------------------------------------------------------------------------------


def test_channel_groups_wait_for_the_busiest(compared):
    for found in compared.values():
        for name, report in found.items():
            use = float(report.channel_utilization)
            assert 0 < use < 0.99 if name == "pimoe_channel" else use == pytest.approx(1), name
    # Attention keeps all channels busy alike, and so hides how uneven the experts are.
    short, long = (compared[context]["pimoe_channel"] for context in (0.0, 20_000.0))
    assert float(short.channel_utilization) < float(long.channel_utilization)


# --- Beliefs -------------------------------------------------------------------------------------


def test_decided_on_belief_and_scored_on_truth(compared):
    """Sieve that believes in a slow PIM moves all experts to the GPU, and waits for it."""
    table = lambda time: PIMCostTable.create(BATCH, time)
    call = lambda believed: mj.compare(
        MODEL, system(), workload(), ["no_exp", "sieve"], key=KEY, believed=believed
    )
    slow, quick, truth = call(table(1.0)), call(table(1e-12)), compared[200.0]
    # Nothing but the decision of Sieve is a matter of belief.
    assert float(slow["no_exp"].tbt) == pytest.approx(float(truth["no_exp"].tbt), rel=1e-6)
    assert float(slow["sieve"].experts_on_pim) == 0 < float(quick["sieve"].experts_on_pim)
    assert float(quick["sieve"].experts_on_gpu) == 0
    assert float(slow["sieve"].gpu_time) == pytest.approx(float(slow["no_exp"].gpu_time), rel=1e-6)
    for wrong in (slow, quick):
        assert float(wrong["sieve"].tbt) > float(truth["sieve"].tbt)
    # A table of the true times is the truth.
    exact = mj.serving.expert_time_table(MODEL, system().pim, BATCH)
    assert float(call(table(exact))["sieve"].tbt) == pytest.approx(
        float(truth["sieve"].tbt), rel=1e-6
    )


def test_another_system_as_belief(compared):
    slow = system(pim=dict(timing=dict(mac_cadence=1e-6)))
    call = lambda true, believed: mj.evaluate(
        MODEL, true, workload(), "sieve", key=KEY, believed=believed
    )
    wrong = call(system(), slow)
    assert float(wrong.experts_on_pim) == 0
    assert float(wrong.tbt) > float(compared[200.0]["sieve"].tbt)
    right = call(system(), system())
    assert float(right.tbt) == pytest.approx(float(compared[200.0]["sieve"].tbt), rel=1e-6)
    with raises("believed.num_gpus = 4", "2"):
        call(system(), system(num_gpus=4))
    with raises("believed covers 4 tokens", "max_batch = 16"):
        call(system(), PIMCostTable.create(4, 1e-9))
