"""The network sweep in small: its rows against loops, the literal heap, and each other."""

import importlib.util
import itertools
import json

import jax
import numpy as np
import pytest

from moejax import noc, routing
from moejax import sweep as engine
from tests.conftest import REPOSITORY
from tests.oracles import noc as oracle


NODES, BATCHES, BANDWIDTHS, LAYERS, SEEDS = 8, (4, 16), (25e9, 50e9), 2, 2
SHARES = {"busiest_link_utilization", "share_of_peak", "bytes_per_element"}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once or twice, so that their compilation is all the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def sweep():
    """`sweeps/network.py` on 8 nodes."""
    spec = importlib.util.spec_from_file_location("network", REPOSITORY / "sweeps" / "network.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TOPOLOGIES = {
        "mesh 4x8": lambda **rates: noc.mesh(2, 4, **rates),
        "torus 4x8": lambda **rates: noc.torus(2, 4, **rates),
    }
    module.NODES, module.REGIONS, module.BATCHES = NODES, 2, BATCHES
    module.BANDWIDTHS_GB_S = [bandwidth / 1e9 for bandwidth in BANDWIDTHS]
    module.LAYERS, module.SEEDS, module.SHOWN = LAYERS, SEEDS, dict(bandwidth_gb_s=50.0, batch=16)
    return module


@pytest.fixture(scope="module")
def table(sweep):
    watched = []
    found = engine.run(sweep.SWEEP(), progress=watched.append).columns
    # One for each topology and way of switching, whatever else varies.
    assert watched[-1].compiles == 4
    return found


def where(table, **equals):
    """The rows with these values, in the table's order."""
    keep = np.all([table[name] == value for name, value in equals.items()], axis=0)
    return {name: values[keep] for name, values in table.items()}


def test_one_row_per_case(sweep, table):
    names = ("topology", "switching", "placement", "batch", "layer", "seed", "bandwidth_gb_s")
    found = list(zip(*(table[name].tolist() for name in names), strict=True))
    bandwidths = [bandwidth / 1e9 for bandwidth in BANDWIDTHS]
    cases = (sweep.TOPOLOGIES, noc.SWITCHING, sweep.PLACEMENTS, BATCHES, (0, 3), (0, 1), bandwidths)
    assert sorted(found) == sorted(itertools.product(*cases))
    assert set(table["model"]) == {"zoo"} and set(table["cost_model"]) == {"mixtral-8x7b"}
    assert set(table["status"]) == {"ok"}


def test_names_of_numbers_have_units(table):
    for name, values in table.items():
        if values.dtype.kind == "f" and name not in SHARES:
            assert name.endswith(("_us", "_ns", "_gb_s")), name
            assert (values > 0).all(), name
    assert (table["busiest_link_utilization"] <= 1 + 1e-6).all()


def test_numbers_hang_together(table):
    np.testing.assert_allclose(table["comm_us"], 2 * table["makespan_us"])
    assert (table["bound_us"] <= table["makespan_us"] * (1 + 1e-6)).all()
    # There are no ports, so the bound is the busiest link.
    np.testing.assert_allclose(table["bound_us"], table["busiest_link_us"], rtol=1e-5)
    rounds = {name: where(table, topology=name)["iterations"] for name in set(table["topology"])}
    assert not rounds["mesh 4x8"].any() and rounds["torus 4x8"].all()
    slow, fast = (where(table, bandwidth_gb_s=rate) for rate in (25, 50))
    np.testing.assert_allclose(slow["bound_us"], 2 * fast["bound_us"], rtol=1e-5)
    four, one = (where(table, placement=f"tensor parallel{name}") for name in ("", ", 1 B"))
    np.testing.assert_allclose(four["bound_us"], 4 * one["bound_us"], rtol=1e-5)
    # All networks and ways of switching see the same messages.
    cases = [
        where(table, topology=topology, switching=switching)
        for topology, switching in itertools.product(set(table["topology"]), noc.SWITCHING)
    ]
    for case in cases[1:]:
        np.testing.assert_array_equal(case["messages"], cases[0]["messages"])


@pytest.mark.parametrize("name", ["expert parallel", "hybrid", "tensor parallel"])
def test_a_row_is_what_the_heap_says(sweep, table, name):
    messages = sweep._messages(None, name, 16, 3, 1)
    for topology in sweep.TOPOLOGIES:
        network = sweep._network(topology, BANDWIDTHS[0])
        links = [tuple(link) for link in np.asarray(network.links).tolist()]
        ends = zip(messages.source[messages.valid], messages.destination[messages.valid])
        routes = [network.route(int(s), int(d)) for s, d in ends]
        paths = [tuple(itertools.pairwise(route)) for route in routes]
        rates = dict.fromkeys(links, BANDWIDTHS[0]), dict.fromkeys(links, sweep.HOP_LATENCY)
        sizes = messages.bytes[messages.valid].tolist()
        found = oracle.heap_simulate(paths, sizes, rates[0], latency=rates[1])
        case = dict(batch=16, layer=3, seed=1, bandwidth_gb_s=25, switching="store_and_forward")
        row = where(table, placement=name, topology=topology, **case)
        assert row["messages"].tolist() == [len(paths)]
        assert row["makespan_us"][0] == pytest.approx(1e6 * found.makespan, rel=1e-3)
        busiest = 1e6 * max(found.occupancy.values())
        assert row["busiest_link_us"][0] == pytest.approx(busiest, rel=1e-5)


def test_messages_are_those_of_the_tokens(sweep, table):
    """Expert parallel: one message for each distinct node of a token's experts."""
    from moejax import placement, zoo

    trace, key = zoo.trace(), jax.random.key(1)
    ids = routing.decode_batch(trace, max(BATCHES), key=key, reuse=True)[3]
    share = np.asarray(placement.expert_parallel(trace.num_experts, NODES, key=key))
    owner = share.argmax(axis=1)
    for batch in BATCHES:
        expected = sum(len(set(owner[token].tolist())) for token in np.asarray(ids)[:batch])
        case = where(table, placement="expert parallel", batch=batch, layer=3, seed=1)
        assert set(case["messages"].tolist()) == {expected}


def test_summary(sweep, table):
    text = sweep.summary(table)
    assert "zoo with the vectors of mixtral-8x7b" in text
    assert "at 50 GB/s, B = 16" in text
    line = next(line for line in text.splitlines() if "torus 4x8, cut through" in line)
    case = dict(topology="torus 4x8", switching="cut_through", bandwidth_gb_s=50, batch=16)
    shown = where(table, placement="hybrid", **case)
    assert f"{shown['comm_us'].mean():.1f} +-" in line
    assert f"torus 4x8 {table['iterations'].max()}" in text


def test_figures(sweep, table):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    made = sweep.figures(table)
    assert set(made) == {"link_heat_map", "link_timeline"}
    titles = [ax.get_title(loc="left") for ax in made["link_heat_map"].axes[:2]]
    assert titles == ["mesh 4x8, 50 GB/s a link", "torus 4x8, 50 GB/s a link"]


@pytest.fixture
def trace_file(tmp_path):
    """A trace of 40 tokens in 3 layers under a model's name, by that name."""
    rng = np.random.default_rng(0)

    def write(model):
        experts = np.argsort(rng.random((3, 40, 8)), axis=-1)[..., :2].astype(np.uint8)
        np.savez(tmp_path / "trace.npz", experts=experts, seq_start=np.array([0, 20]))
        about = {"model": model, "experts": 8}
        (tmp_path / "trace.json").write_text(json.dumps(about))
        return str(tmp_path / "trace.npz")

    return write


def test_measured_trace(sweep, trace_file):
    path = trace_file("mixtral-8x7b")
    study = sweep._study(path)
    assert study.name == study.model.name == "mixtral-8x7b"
    assert study.layers == (0, 2)
    made = sweep.SWEEP(trace=path)
    assert made.num_rows == 2 * 2 * 4 * 2 * 2 * 2 * 2
    for batch in BATCHES:
        # Two experts a token, each on one of 8 nodes.
        assert sweep._messages(path, "expert parallel", batch, 2, 0).valid.sum() == 2 * batch


@pytest.mark.parametrize("case", [dict(batch=17), dict(batch=0), dict(layer=1)])
def test_messages_that_there_are_not(sweep, case):
    given = dict(batch=16, layer=3) | case
    with pytest.raises(ValueError, match=f"{next(iter(case))} = .*: allowed"):
        sweep._messages(None, "hybrid", given["batch"], given["layer"], 0)


def test_trace_without_a_known_model(sweep, trace_file):
    with pytest.raises(ValueError, match="no sizes known for its model, Homegrown-MoE"):
        sweep.SWEEP(trace=trace_file("Homegrown-MoE"))
