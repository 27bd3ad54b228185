"""The execution graphs of decoder layers against their printed formulas."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.schedule import JOINT, layer_graph, makespan, near_memory_graph


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


ONE, LATE = layer_graph(), layer_graph(exposed=True)
SHARED = layer_graph(shared_bus=True)
TWO = layer_graph(2)
times = st.integers(0, 9).map(float)


def printed(t, exposed=False):
    """Sieve (arXiv 2605.11277), execution graph, one GPU, nothing in the way of shared experts."""
    start = t["qkv"] + max(t["attention"], t["gpu_attention"]) + t["projection"]
    routed = start + t["all_reduce"] + t["router"]
    t0 = routed + t["all_gather"] + t["metadata"]
    decided = t0 + t["decide"]
    arrived = (decided if exposed else t0) + t["dispatch"]
    early = routed + t["load_early"]
    gpu_end = max(max(decided, early) + t["load"], max(decided, arrived) + t["gemm"])
    pim_end = max(decided, arrived) + t["to_pim"] + t["pim"] + t["from_pim"]
    return max(gpu_end, pim_end) + t["combine"] + t["sum"]


@settings(max_examples=60)
@given(st.lists(times, min_size=len(ONE.names), max_size=len(ONE.names)))
def test_one_gpu_is_the_printed_formula(drawn):
    named = dict(zip((n.partition("@")[0] for n in ONE.names), drawn, strict=True))
    named |= dict(shared=0.0, load_shared=0.0)
    for dag, exposed in ((ONE, False), (LATE, True)):
        seconds = {name: named[name.partition("@")[0]] for name in dag.names}
        assert float(makespan(dag, seconds).makespan) == printed(named, exposed)


@settings(max_examples=30)
@given(st.lists(st.tuples(times, times), min_size=len(ONE.names), max_size=len(ONE.names)))
def test_two_gpus_meet_where_tokens_are_exchanged(drawn):
    plain = [name.partition("@")[0] for name in ONE.names]
    each = [dict(zip(plain, (row[i] for row in drawn), strict=True)) for i in range(2)]
    for t in each:
        t |= dict(shared=0.0, load_shared=0.0, load_early=0.0, metadata=0.0)
        t |= {name: each[0][name] for name in JOINT}
    seconds = {
        name: each[int(name[-1])][name[:-2]] if "@" in name else each[0][name] for name in TWO.names
    }
    joint = each[0]
    before = [t["qkv"] + max(t["attention"], t["gpu_attention"]) + t["projection"] for t in each]
    reduced = max(before) + joint["all_reduce"]
    t0 = max(reduced + t["router"] for t in each) + joint["all_gather"]
    ends = []
    for t in each:
        decided, arrived = t0 + t["decide"], t0 + joint["dispatch"]
        both = max(decided, arrived)
        ends += [decided + t["load"], both + t["gemm"]]
        ends += [both + t["to_pim"] + t["pim"] + t["from_pim"]]
    expected = max(ends) + joint["combine"] + max(t["sum"] for t in each)
    assert float(makespan(TWO, seconds).makespan) == expected


def seconds_of(dag, **given_):
    return {name: given_.get(name.partition("@")[0].rpartition(".")[2], 0.0) for name in dag.names}


def test_a_decision_hides_behind_the_dispatch_or_does_not():
    work = dict(decide=5.0, dispatch=3.0, gemm=4.0, load=1.0)
    hidden, exposed = (float(makespan(d, seconds_of(d, **work)).makespan) for d in (ONE, LATE))
    assert (hidden, exposed) == (5 + 4, 5 + 3 + 4)
    # Ideal overlap inside phases: only what the dispatch does not cover.
    fine = makespan(ONE, seconds_of(ONE, **work), overlap="fine")
    assert float(fine.makespan) == 5 - 3 + 4


def test_shared_experts_load_while_the_decision_is_made():
    work = dict(load_shared=4.0, decide=5.0, load=2.0, shared=1.0)
    late = layer_graph(early_shared=False)
    assert float(makespan(ONE, seconds_of(ONE, **work)).makespan) == 7
    assert float(makespan(late, seconds_of(late, **work)).makespan) == 5 + 2 + 4


def test_tokens_of_pim_queue_behind_weights_on_one_bus():
    work = dict(decide=1.0, dispatch=2.0, load=6.0, to_pim=1.0, pim=3.0)
    assert float(makespan(ONE, seconds_of(ONE, **work)).makespan) == 7
    # The load starts at 1, before the tokens arrive at 2, and nothing interrupts it.
    assert float(makespan(SHARED, seconds_of(SHARED, **work)).makespan) == 7 + 1 + 3
    # Ready at the same time, tokens go first.
    work |= dict(dispatch=1.0)
    assert float(makespan(SHARED, seconds_of(SHARED, **work)).makespan) == 1 + 1 + 6


def test_two_half_batches_take_turns():
    halves = layer_graph(halves=2)
    # Attention on PIM for 4 s, experts on the GPU for 3 s, each half.
    found = makespan(halves, seconds_of(halves, attention=4.0, load=3.0))
    end = dict(zip(halves.names, found.end.tolist(), strict=True))
    assert end["1.load@0"] == 3 and end["2.attention@0"] == 4
    assert end["2.load@0"] == 7 and end["next.attention@0"] == 8
    assert float(found.makespan) == 8
    # A batch of two halves, one after the other, would take 4 + 4 + 3 + 3.
    fine = makespan(halves, seconds_of(halves, attention=4.0, load=3.0), overlap="fine")
    assert float(fine.makespan) == 8


@settings(max_examples=30)
@given(st.lists(st.tuples(*[times] * 5), min_size=4, max_size=4))
def test_broadcasts_of_near_memory_systems_hide_in_the_layer_before(rows):
    """HDA-MoE (arXiv 2609.08682): what a broadcast takes beyond the layer before is exposed."""
    dag = near_memory_graph(4)
    kinds = ("broadcast", "attention", "memory", "exchange", "compute")
    seconds = {f"{kind}:{i}": row[j] for i, row in enumerate(rows) for j, kind in enumerate(kinds)}
    total, before = 0.0, 0.0
    for broadcast, *work in rows:
        total += max(broadcast - before, 0.0) + sum(work)
        before = sum(work)
    assert float(makespan(dag, seconds).makespan) == total


def test_the_gradient_is_finite_everywhere():
    slope = jax.grad(lambda s: makespan(TWO, s).makespan)
    for seconds in (np.zeros(len(TWO.names)), np.ones(len(TWO.names))):
        assert np.all(np.isfinite(slope(seconds.astype(np.float32))))


def test_errors():
    with raises("num_gpus = 0", "from 1"):
        layer_graph(0)
    with raises("halves = 3", "1 and 2"):
        layer_graph(halves=3)
    with raises("num_layers = 0", "from 1"):
        near_memory_graph(0)
