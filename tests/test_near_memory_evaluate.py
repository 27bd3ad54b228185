"""A model on a near-memory system: the report against plain loops, errors, one compilation."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax
from moejax import hardware, models, noc, placement
from moejax.placement import Placement, expert_parallel, tensor_parallel
from moejax.serving import Workload, evaluate_placement, network_of, place, route
from tests.oracles import near_memory as oracle


MODEL = models.get("mixtral-8x7b")
SYSTEM = hardware.get("nmp-4x8-5t-50g")
KEY = jax.random.key(3)
BATCH, CONTEXT = 8, 64.0


def repeated(share, **options):
    return Placement(jnp.broadcast_to(share, (32, *share.shape)), **options)


@pytest.fixture(scope="module")
def spread():
    return repeated(expert_parallel(8, 32, key=KEY), name="spread")


def report_of(placed, system=SYSTEM, **options):
    workload = Workload(BATCH, CONTEXT, max_batch=12)
    return evaluate_placement(MODEL, system, workload, placed, key=KEY, **options)


def test_times_are_those_of_plain_loops(spread):
    """HDA-MoE (arXiv 2609.08682): the sum of four times, in the papers' units."""
    report = report_of(spread, accounting="published")
    ids = np.asarray(route(MODEL, Workload(BATCH, CONTEXT, max_batch=12), key=KEY))[:, :BATCH]
    comp = oracle.comp_time(ids, np.asarray(spread.share, float), 2 * 4096 * 14336, 5e12)
    attention, memory = oracle.published_mixtral_rest(BATCH, CONTEXT, 32, 5e12, 625e9)
    np.testing.assert_allclose(report.comp_time, comp, rtol=1e-5)
    np.testing.assert_allclose(report.attention_time, attention, rtol=1e-5)
    np.testing.assert_allclose(report.memory_time, memory, rtol=1e-5)
    total = report.comp_time + report.comm_time + report.attention_time + report.memory_time
    np.testing.assert_allclose(report.tbt, total, rtol=1e-6)
    np.testing.assert_allclose(report.throughput, BATCH / report.tbt, rtol=1e-6)


def test_communication_is_twice_the_gather_on_the_network(spread):
    report = report_of(spread, accounting="published")
    ids = jnp.asarray(route(MODEL, Workload(BATCH, CONTEXT, max_batch=12), key=KEY))[:, :BATCH]
    gathers = [
        moejax.noc.simulate(
            network_of(SYSTEM),
            moejax.noc.expert_traffic(
                ids[layer],
                spread.share[layer],
                spread.node_position[layer],
                bytes_per_token=4096.0,
                key=jax.random.fold_in(KEY, layer),
            ),
        ).makespan
        for layer in range(32)
    ]
    np.testing.assert_allclose(report.comm_time, 2 * float(sum(gathers)), rtol=1e-5)


def test_a_network_of_ones_own_is_one_object(spread):
    mesh = lambda bandwidth, hop_latency: noc.mesh(
        4, 8, bandwidth=bandwidth, hop_latency=hop_latency
    )
    own = SYSTEM.replace(network=mesh, shape=(32,))
    assert report_of(spread, own).comm_time == report_of(spread).comm_time
    ring = SYSTEM.replace(network=functools.partial(noc.ring, 32), shape=(32,))
    assert report_of(spread, ring).comm_time > report_of(spread).comm_time
    few = SYSTEM.replace(network=functools.partial(noc.ring, 5), shape=(32,))
    with pytest.raises(ValueError, match=r"network gives 5 nodes, but shape = \(32,\)"):
        report_of(spread, few)


def test_tensor_parallelism_pays_all_reduces_and_is_balanced():
    """4 * 4 B h / BW a layer (HDA-MoE's script), and k B 2 h IS / (D C) of compute."""
    placed = repeated(tensor_parallel(8, 32), all_reduce=True)
    report = report_of(placed, accounting="published")
    np.testing.assert_allclose(report.comm_time, 32 * 16 * BATCH * 4096 / 50e9, rtol=1e-5)
    np.testing.assert_allclose(
        report.comp_time, 32 * 2 * BATCH * 2 * 4096 * 14336 / (32 * 5e12), rtol=1e-5
    )
    np.testing.assert_allclose(report.load_imbalance, 1, rtol=1e-6)


def test_counting_everything_takes_three_matrices_and_the_precision(spread):
    published, counted = (report_of(spread, accounting=a) for a in ("published", "counted"))
    np.testing.assert_allclose(counted.comp_time / published.comp_time, 3, rtol=1e-5)
    np.testing.assert_allclose(counted.comm_time / published.comm_time, 2, rtol=1e-5)


def test_one_compilation_serves_all_rates(spread):
    traces = []

    @jax.jit
    def tbt(rate):
        traces.append(rate)
        return report_of(spread, SYSTEM.replace(link_bandwidth=rate)).comm_time

    times = [float(tbt(rate)) for rate in np.linspace(25e9, 75e9, 5)]
    assert len(traces) == 1 and times == sorted(times, reverse=True)
    slope = jax.grad(lambda rate: report_of(spread, SYSTEM.replace(link_bandwidth=rate)).tbt)
    assert -np.inf < float(slope(50e9)) < 0


def test_padding_and_a_batch_too_large_for_it(spread):
    bad = jax.jit(
        lambda batch: evaluate_placement(
            MODEL, SYSTEM, Workload(batch, CONTEXT, max_batch=12), spread, key=KEY
        )
    )(jnp.int32(13))
    assert int(bad.status) == moejax.Status.BATCH_ABOVE_MAX and np.isnan(bad.tbt)


def test_errors_name_what_is_wrong(spread):
    with pytest.raises(ValueError, match=r"\(1, 8, 32\).*has \(32, 8, 32\)"):
        report_of(Placement(spread.share[:1]))
    with pytest.raises(ValueError, match="row 2 of share sums to"):
        Placement(spread.share.at[0, 2].mul(0.5))
    with pytest.raises(ValueError, match="given to more than one node"):
        Placement(spread.share, jnp.zeros((32, 32), int))
    with pytest.raises(ValueError, match="unknown accounting 'publishd'; did you mean"):
        report_of(spread, accounting="publishd")
    workload = Workload(BATCH, CONTEXT)
    with pytest.raises(ValueError, match="unknown placement 'node_lnk'; did you mean 'node_link'"):
        place(MODEL, SYSTEM, workload, "node_lnk", key=KEY)
    with pytest.raises(ValueError, match="fitted on the host"):
        jax.jit(lambda c: place(MODEL, SYSTEM, Workload(8, c), "eplb", key=KEY).share)(1.0)
    gpu = hardware.get("1xb200-hbm-pim")
    with pytest.raises(ValueError, match="no near-memory system"):
        moejax.evaluate(MODEL, gpu, workload, spread, key=KEY)
    with pytest.raises(ValueError, match="allowed on nmp-4x8-5t-50g is a Placement or name"):
        moejax.evaluate(MODEL, SYSTEM, workload, lambda *a: None, key=KEY)
    with pytest.raises(ValueError, match="model = 'mixtral-8x7b': allowed is a MoEModel"):
        moejax.evaluate("mixtral-8x7b", SYSTEM, workload, "eplb", key=KEY)
    with pytest.raises(ValueError, match="placement = 'eplb': allowed is a Placement"):
        report_of("eplb")
    with pytest.raises(ValueError, match="system is a System: allowed is a NMPSystem"):
        report_of(spread, system=gpu)


def test_every_method_places_every_expert(monkeypatch):
    # Two layers, one at a time, so that the progress of a search can be seen.
    monkeypatch.setattr("moejax.placement._methods.LAYERS_AT_ONCE", 1)
    workload = Workload(BATCH, CONTEXT)
    small = hardware.get("nmp-2x2-5t-50g")
    model = MODEL.replace(layers=MODEL.layers[:2])
    # Compiling the search twice is what "node" would add to "node_link".
    for method in placement.METHODS.keys() - {"node"}:
        told = mock.Mock()
        placed = place(model, small, workload, method, key=KEY, progress=told)
        searches = [mock.call(i, 4) for i in range(1, 5)] if method == "node_link" else []
        assert told.mock_calls == searches
        assert placed.name == method and placed.share.shape == (2, 8, 4)
        np.testing.assert_allclose(placed.share.sum(-1), 1, atol=1e-5)
        assert np.all(np.sort(placed.node_position, axis=1) == np.arange(4))
        report = moejax.evaluate(model, small, workload, placed, key=KEY)
        assert int(report.status) == 0 and float(report.tbt) > 0
