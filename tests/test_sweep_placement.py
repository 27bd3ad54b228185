"""The sweeps of placements in small: their rows against loops and closed forms."""

import importlib.util
import itertools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import placement, routing, sweep, zoo
from tests.compilation import quick_compilation as quick_compilation
from tests.conftest import REPOSITORY


SYSTEMS = ("nmp-2x2-2.5t-75g", "nmp-2x2-5t-50g")
NODES, BATCH, SEEDS, LAYERS = 4, 16, 2, 4
HIDDEN, INNER = 2048, 1408  # of DeepSeek-V2-Lite
HALVES = ("first half", "second half")


def load(name) -> Any:
    path = REPOSITORY / "sweeps" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = (None, None)


def fitted(mesh, system):
    """Placements of the first model by method."""
    known = list(placement.METHODS)
    found = mesh.fit(SOURCE, dict(number=0), mesh._unnamed(system), known)
    stack = found["placed"]
    others = (jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(len(known) - 1))
    return dict(zip(known, [found["reduced"], *others]))


def halved(statistics, topology, costs, key, progress):
    """Half of every expert on node e mod D, half on the next, endpoints in reverse order."""
    del costs, key, progress
    layers, experts = statistics.frequency.shape
    nodes = topology.num_nodes
    share = np.zeros((layers, experts, nodes))
    for expert in range(experts):
        share[:, expert, expert % nodes] += 0.5
        share[:, expert, (expert + 1) % nodes] += 0.5
    position = np.tile(np.arange(nodes)[::-1], (layers, 1))
    return placement.Placement(share, position, name="node_link")


def searchless(statistics, topology, costs, key, progress):
    raise AssertionError("Node Balance alone has the shares of both")


@pytest.fixture(scope="module")
def mesh():
    """`sweeps/placement_on_mesh.py` on 4 nodes; a plain rule stands for both searches, which have
    tests of their own and take long to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(placement.METHODS, "node", searchless)
        patch.setitem(placement.METHODS, "node_link", halved)
        module = load("placement_on_mesh")
        module.SETTINGS, module.BATCH, module.SEEDS = SYSTEMS, BATCH, SEEDS
        module.GAMMA_BATCHES, module.GAMMA_LAYERS, module.GROUPS = (8, 16, 24), 1, 64
        yield module


@pytest.fixture(scope="module")
def table(mesh):
    return sweep.run(mesh.SWEEP(), progress=False).columns


def where(table, **equals):
    """The rows with these values, in the table's order."""
    keep = np.all([table[name] == value for name, value in equals.items()], axis=0)
    return {name: values[keep] for name, values in table.items()}


class TestMesh:
    def test_one_row_per_case(self, table):
        names = ("model", "system", "method", "judged_on", "seed")
        found = list(zip(*(table[name].tolist() for name in names), strict=True))
        models = ("zoo", "synthetic gpt-oss-20b")
        cases = (models, SYSTEMS, placement.METHODS, HALVES, range(SEEDS))
        assert sorted(found) == sorted(itertools.product(*cases))
        assert set(table["cost_model"]) == {"deepseek-v2-lite"}
        assert set(table["layers"]) == {LAYERS} and set(table["fitted_on"]) == {HALVES[0]}
        np.testing.assert_array_equal(table["unseen"], table["judged_on"] == HALVES[1])

    def test_names_of_numbers_have_units(self, table):
        ratios = {"gamma", "speedup", "max_mean_load", "memory_max_over_mean"}
        units = ("_us", "_mb", "tflop_s", "link_gb_s")
        assert set(table["status"]) == {"ok"}
        for name, values in table.items():
            if values.dtype.kind == "f" and name not in ratios:
                assert name.endswith(units), name
                assert (values > 0).all(), name

    def test_parts_add_up_and_speed_ups_are_paired(self, table):
        parts = sum(table[f"{part}_us"] for part in ("comp", "comm", "attention", "memory"))
        np.testing.assert_allclose(table["tbt_us"], parts, rtol=1e-5)
        for row in range(len(table["method"])):
            same = {k: table[k][row] for k in ("model", "system", "judged_on", "seed")}
            base = where(table, method="tensor_parallel", **same)["tbt_us"]
            np.testing.assert_allclose(
                table["speedup"][row], base / table["tbt_us"][row], rtol=1e-5
            )

    def test_tensor_parallelism_is_its_closed_form(self, table):
        rates = dict(zip(SYSTEMS, ((2.5e12, 75e9), (5e12, 50e9))))
        for system, (flops, bandwidth) in rates.items():
            case = where(table, system=system, method="tensor_parallel")
            compute = LAYERS * 4 * BATCH * 2 * HIDDEN * INNER / (NODES * flops)
            np.testing.assert_allclose(case["comp_us"], 1e6 * compute, rtol=1e-5)
            reduced = LAYERS * 4 * 4 * BATCH * HIDDEN / bandwidth
            np.testing.assert_allclose(case["comm_us"], 1e6 * reduced, rtol=1e-5)
            np.testing.assert_allclose(case["memory_max_over_mean"], 1, rtol=1e-5)
            np.testing.assert_allclose(case["max_mean_load"], 1, rtol=1e-5)

    @pytest.mark.parametrize("method", ["expert_parallel", "eplb", "node_link"])
    def test_compute_is_that_of_the_busiest_node(self, mesh, table, method):
        case = mesh._cases(SOURCE)[0]
        share = np.asarray(fitted(mesh, SYSTEMS[0])[method].share, float)
        part, seed = case.parts[HALVES[1]], SEEDS - 1
        ids = np.asarray(routing.decode_batch(part, BATCH, key=jax.random.key(seed)))
        seconds = 0.0
        for layer, tokens in enumerate(ids):
            load = np.zeros(NODES)
            for expert in tokens.ravel():
                load += share[layer, expert] * 2 * HIDDEN * INNER / 2.5e12
            seconds += load.max()
        found = where(table, model="zoo", system=SYSTEMS[0], method=method, judged_on=HALVES[1])
        assert found["comp_us"][seed] == pytest.approx(1e6 * seconds, rel=1e-5)

    def test_halves_are_those_of_the_trace(self, mesh):
        parts, trace = mesh._cases(SOURCE)[0].parts, zoo.trace()
        both = np.concatenate([parts[half].expert_ids for half in HALVES], axis=1)
        np.testing.assert_array_equal(both, trace.expert_ids)
        assert [parts[half].num_sequences for half in HALVES] == [trace.num_sequences // 2] * 2

    def test_settings_differ_by_their_rates_only(self, table):
        """Expert parallelism does not look at rates, and its messages take time by bandwidth."""
        slow, fast = (where(table, method="expert_parallel", system=name) for name in SYSTEMS)
        np.testing.assert_allclose(slow["comp_us"], 2 * fast["comp_us"], rtol=1e-5)
        np.testing.assert_allclose(slow["comm_us"] * 75, fast["comm_us"] * 50, rtol=1e-4)
        np.testing.assert_allclose(slow["gamma"], fast["gamma"], rtol=1e-4)

    def test_node_is_node_link_at_random_places(self, mesh, table):
        alone, both = where(table, method="node"), where(table, method="node_link")
        np.testing.assert_array_equal(alone["comp_us"], both["comp_us"])
        found = fitted(mesh, SYSTEMS[0])
        np.testing.assert_array_equal(
            both["memory_max_over_mean"][:1], alone["memory_max_over_mean"][:1]
        )
        for place in np.asarray(found["node"].node_position):
            assert sorted(place.tolist()) == list(range(NODES))
        assert np.asarray(found["node_link"].node_position)[0].tolist() == [3, 2, 1, 0]

    def test_summary(self, mesh, table):
        lines = mesh.summary(table).splitlines()
        start = next(i for i, text in enumerate(lines) if text.startswith(f"zoo on {SYSTEMS[1]}"))
        assert "B = 16, 4 layers, gamma" in lines[start]
        line = next(text for text in lines[start:] if text.split()[:1] == ["eplb"])
        case = where(table, model="zoo", system=SYSTEMS[1], method="eplb")
        new, old = (where(case, unseen=unseen)["speedup"] for unseen in (True, False))
        cells = line.split()
        assert float(cells[3]) == pytest.approx(where(case, unseen=True)["tbt_us"].mean(), abs=0.06)
        assert float(cells[4]) == pytest.approx(new.mean(), abs=6e-4)
        # Student's t at one degree of freedom.
        half = 12.7062 * new.std(ddof=1) / np.sqrt(SEEDS)
        assert float(cells[5].removeprefix("+-")) == pytest.approx(half, abs=6e-4)
        assert float(cells[6]) == pytest.approx(old.mean(), abs=6e-4)

    def test_pictures(self, mesh, table):
        pytest.importorskip("matplotlib")
        found = mesh.figures(table)
        assert list(found) == ["speedup", "node_load", "share", "link_before_after"]
        panels = {name: len(figure.axes) for name, figure in found.items()}
        # Shares and links have a color bar each.
        assert panels == {"speedup": 2, "node_load": 3, "share": 4, "link_before_after": 3}
        titles = [ax.get_title(loc="left") for ax in found["share"].axes[:3]]
        assert titles == ["Hybrid", "EPLB", "Node Balance"]

    def test_given_trace(self, mesh, tmp_path):
        path = tmp_path / "trace.npz"
        rng = np.random.default_rng(0)
        ids = np.argsort(rng.random((32, 40, 8)), axis=-1)[..., :2].astype(np.uint8)
        np.savez(path, experts=ids, seq_start=np.array([0]))
        path.with_suffix(".json").write_text(json.dumps(dict(model="Mixtral-8x7B", experts=8)))
        (case,) = mesh._cases((str(path), None))
        assert case.name == "mixtral-8x7b"
        # One sequence is cut in the middle.
        assert [part.num_tokens for part in case.parts.values()] == [20, 20]
        path.with_suffix(".json").write_text(json.dumps(dict(model="Homegrown", experts=8)))
        with pytest.raises(ValueError, match="no sizes known for its model, Homegrown"):
            mesh._cases.__wrapped__((str(path), None))
        with pytest.raises(ValueError, match="no hd-moe-reference/placements.npz there"):
            mesh.SWEEP(data=str(tmp_path))

    def test_methods_have_a_base(self, mesh):
        with pytest.raises(ValueError, match="allowed is tensor_parallel and others"):
            sweep.run(mesh.SWEEP().set(dict(method=["eplb", "hybrid"], seeds=1)), progress=False)

    def test_published_placements(self, mesh, data_dir):
        if not (data_dir / "hd-moe-reference" / "placements.npz").is_file():
            pytest.skip("no published placements")
        made = mesh.SWEEP(data=str(data_dir))
        # 5 systems, 3 parts for each of 2 models, and 7 methods.
        assert made.num_rows == 5 * 6 * SEEDS * 7
        cases = mesh._cases((None, str(data_dir)))
        assert [case.name for case in cases] == ["mixtral-8x7b", "deepseek-v2-lite"]
        for case, (layers, experts) in zip(cases, ((32, 8), (6, 64))):
            assert case.model.num_moe_layers == layers
            for name in mesh.ALL:
                placed = mesh._published(case, mesh._unnamed(name))
                rows, columns = map(int, name.split("-")[1].split("x"))
                assert placed.share.shape == (layers, experts, rows * columns)
            assert {part.expert_ids.shape[0] for part in case.parts.values()} == {layers}
            assert case.fitted_on in case.parts


FACTORS = (1.0, 2.0, float("inf"))


@pytest.fixture(scope="module")
def memory():
    """`sweeps/placement_memory.py`, a rule standing for the search: rho nodes hold each expert."""
    module = load("placement_memory")
    module.SYSTEMS, module.FACTORS, module.GROUPS = SYSTEMS[:1], FACTORS, 64

    def balance(statistics, costs, num_nodes, factor):
        del costs
        nodes, layers = (1 if factor == np.inf else round(factor)), len(statistics.frequency)
        share = np.zeros((layers, 32, num_nodes))
        for expert, copy in itertools.product(range(32), range(nodes)):
            share[:, expert, (expert + copy) % num_nodes] += 1 / nodes
        course = jnp.tile(jnp.array([3e-5, 2e-5]), (layers, 1))
        bound = jnp.full(layers, 1e-5)
        return SimpleNamespace(share=jnp.asarray(share), curve=course, bound=bound)

    module._balance = balance
    return module


class TestMemory:
    def test_rows(self, memory):
        table = sweep.run(memory.SWEEP(), progress=False).columns
        infinite = float("inf")
        cases = [(name, infinite) for name in memory.METHODS[:-1]]
        cases += [("node", factor) for factor in FACTORS]
        found = zip(table["method"].tolist(), table["memory_factor"].tolist())
        assert list(found) == [case for case in cases for _ in HALVES]
        np.testing.assert_allclose(table["total_us"], table["comp_us"] + table["comm_us"])
        nodes = where(table, method="node", unseen=True)["nodes_per_expert"]
        np.testing.assert_allclose(nodes, [1, 2, 1])
        even = where(table, method="tensor_parallel", unseen=True)
        # Two FLOPs for each weight of three matrices.
        work = LAYERS * 4 * memory.BATCH * 6 * HIDDEN * INNER
        np.testing.assert_allclose(even["comp_us"], 1e6 * work / (NODES * 2.5e12), rtol=1e-4)
        np.testing.assert_allclose(even["memory_max_over_mean"], 1, rtol=1e-5)
        text = memory.summary(table)
        assert f"zoo on {SYSTEMS[0]}, B = 128" in text
        line = next(line for line in text.splitlines() if line.split()[:2] == ["node", "2"])
        assert float(line.split()[4]) == pytest.approx(
            where(table, memory_factor=2, unseen=True)["total_us"][0], abs=0.06
        )
        pytest.importorskip("matplotlib")
        assert list(memory.figures(table)) == ["memory", "convergence"]

    def test_the_search_gets_the_cap(self, monkeypatch):
        module, caps = load("placement_memory"), []

        def node_balance(layer, costs, num_nodes, *, key, memory_factor):
            del costs, key
            caps.append(memory_factor)
            return jnp.zeros((layer.num_experts, num_nodes))

        monkeypatch.setattr(placement, "node_balance", node_balance, raising=False)
        statistics = module._case(None)[2][HALVES[0]]
        assert module._balance(statistics, None, NODES, 1.5).shape == (LAYERS, 32, NODES)
        module._balance(statistics, None, NODES, float("inf"))
        assert caps == [1.5, None]

    def test_unknown_model(self, tmp_path):
        module, path = load("placement_memory"), tmp_path / "trace.npz"
        routing.save(routing.RoutingTrace(np.zeros((1, 4, 1), int), 4, model="homegrown"), path)
        with pytest.raises(ValueError, match="no sizes known for its model, homegrown"):
            module._case(str(path))
