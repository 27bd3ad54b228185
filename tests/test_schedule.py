"""Dynamic scheduling: closed forms, choices against loops, and all layers of a batch."""

import functools
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import noc, routing, schedule, sweep
from moejax._status import Status
from tests.compilation import quick_compilation as quick_compilation
from tests.conftest import REPOSITORY
from tests.oracles import schedule as oracle


HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 1408, 64, 6  # DeepSeek-V2-Lite
PAYLOAD, ALPHA = 2.0 * HIDDEN * INTERMEDIATE, 1e-7


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


class TestBroadcast:
    # HD-MoE (arXiv 2509.09420) and its code: 32 nodes, batch 512, context 1024.
    @pytest.mark.parametrize(
        "tera, giga, time_us, chunk, count",
        [(2.5, 75, 96.7, 61831, 5), (5, 50, 139.3, 50485, 2), (10, 25, 264.1, 35698, 0)],
    )
    def test_published_numbers(self, tera, giga, time_us, chunk, count):
        best = schedule.broadcast_chunk(PAYLOAD, ALPHA, giga * 1e9, 1, 32)
        assert round(float(best.time) * 1e6, 1) == time_us
        assert int(best.chunk) == chunk
        budget = schedule.broadcast_budget(
            HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, 512, 1024,
            num_nodes=32, flops_per_s=tera * 1e12, dram_bandwidth=625e9,
        )  # fmt: skip
        fits = schedule.prebroadcast_count(PAYLOAD, ALPHA, giga * 1e9, 32, budget)
        assert int(fits) == count

    def test_published_budgets(self):
        rates = jnp.array([2.5e12, 5e12, 10e12])
        found = schedule.broadcast_budget(
            HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, 512, 1024,
            num_nodes=32, flops_per_s=rates, dram_bandwidth=625e9,
        )  # fmt: skip
        np.testing.assert_allclose(found * 1e6, [482.6, 304.8, 215.9], atol=0.05)

    @settings(max_examples=20)
    @given(
        st.floats(1e3, 1e9), st.floats(1e-9, 1e-4), st.floats(1e8, 1e12), st.integers(1, 64),
        st.integers(1, 1024), st.floats(1e-6, 1e-1),
    )  # fmt: skip
    def test_no_chunk_is_better(self, payload, alpha, bandwidth, count, nodes, budget):
        best = schedule.broadcast_chunk(payload, alpha, bandwidth, count, nodes)
        _, least = oracle.best_chunk(payload, alpha, bandwidth, count, nodes)
        np.testing.assert_allclose(best.time, least, rtol=1e-5)
        at_best = schedule.broadcast_time(best.chunk, payload, alpha, bandwidth, count, nodes)
        np.testing.assert_allclose(at_best, least, rtol=1e-5)
        fits = schedule.prebroadcast_count(
            payload, alpha, bandwidth, nodes, budget, max_broadcast=9
        )
        expected = {
            oracle.prebroadcast_count(payload, alpha, bandwidth, nodes, budget * near, 9)
            for near in (1 - 1e-5, 1 + 1e-5)
        }
        assert int(fits) in expected

    def test_a_broadcast_that_just_fits_does_not(self, x64):
        time = float(schedule.broadcast_chunk(PAYLOAD, ALPHA, 5e10, 3, 32).time)
        count = functools.partial(schedule.prebroadcast_count, PAYLOAD, ALPHA, 5e10, 32)
        assert (int(count(time)), int(count(np.nextafter(time, 1)))) == (2, 3)
        assert int(count(0.0)) == 0

    def test_arrays_and_gradients(self):
        counts = jnp.arange(1, 4)
        times = schedule.broadcast_chunk(PAYLOAD, ALPHA, 5e10, counts, 32).time
        assert times.shape == (3,) and np.all(np.diff(times) > 0)
        slope = jax.grad(lambda b: schedule.broadcast_chunk(PAYLOAD, ALPHA, b, 2, 32).time)(5e10)
        step = [schedule.broadcast_chunk(PAYLOAD, ALPHA, b, 2, 32).time for b in (4.9e10, 5.1e10)]
        np.testing.assert_allclose(slope, (step[1] - step[0]) / 0.2e10, rtol=1e-2)

    def test_bad_input(self):
        with raises("broadcast_chunk.payload = -1"):
            schedule.broadcast_chunk(-1.0, ALPHA, 5e10, 1, 32)
        with raises("broadcast_chunk.num_broadcast = 0", "(0,"):
            schedule.broadcast_chunk(PAYLOAD, ALPHA, 5e10, 0, 32)
        with raises("num_nodes = 2.5: allowed is a whole number"):
            schedule.broadcast_chunk(PAYLOAD, ALPHA, 5e10, 1, 2.5)
        with raises("broadcast_time.chunk = 0"):
            schedule.broadcast_time(0.0, PAYLOAD, ALPHA, 5e10, 1, 32)
        with raises("prebroadcast_count.budget = nan"):
            schedule.prebroadcast_count(PAYLOAD, ALPHA, 5e10, 32, float("nan"))
        with raises("max_broadcast = -1"):
            schedule.prebroadcast_count(PAYLOAD, ALPHA, 5e10, 32, 1.0, max_broadcast=-1)
        with raises("broadcast_budget.batch = -1"):
            schedule.broadcast_budget(
                8, 8, 8, 2, -1, 8, num_nodes=4, flops_per_s=1e12, dram_bandwidth=1e9
            )
        bandwidths = jnp.array([5e10, 0.0, -1.0])
        best = jax.jit(lambda b: schedule.broadcast_chunk(PAYLOAD, ALPHA, b, 1, 32))(bandwidths)
        np.testing.assert_array_equal(np.isnan(best.time), [False, True, True])
        count = jax.jit(lambda b: schedule.prebroadcast_count(PAYLOAD, ALPHA, b, 32, 3e-4))
        np.testing.assert_array_equal(count(bandwidths), [2, schedule.NO_COUNT, schedule.NO_COUNT])


def random_share(rng, experts, nodes):
    """Rows of quarters, so that sums are exact and there are ties."""
    share = np.zeros((experts, nodes), np.float32)
    for row in share:
        for node in rng.integers(0, nodes, 4):
            row[node] += 0.25
    return share


def random_ids(rng, tokens, top_k, experts):
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = routing.NOT_ROUTED
    return ids


SEEDS = st.integers(0, 2**32 - 1)
SIZES = dict(experts=6, nodes=4, tokens=9, top_k=3)


class TestPriority:
    @settings(max_examples=30)
    @given(SEEDS)
    def test_equals_the_loop(self, seed):
        rng = np.random.default_rng(seed)
        share = random_share(rng, 6, 4)
        load = rng.integers(0, 4, 6)
        found = schedule.priority(share, load, max_broadcast=4)
        expected = oracle.priority(share, load, 4)
        assert [e for e in found.experts.tolist() if e >= 0] == expected
        assert np.flatnonzero(found.chosen).tolist() == sorted(expected)
        for count in (0, 2):
            some = schedule.priority(share, load, max_broadcast=4, num_broadcast=count)
            assert [e for e in some.experts.tolist() if e >= 0] == expected[:count]

    def test_ties_go_to_the_larger_expert(self):
        share = np.full((3, 2), 0.5)
        found = schedule.priority(share, [2, 2, 1], max_broadcast=2)
        assert found.experts.tolist() == [1, 0]

    def test_bad_input(self):
        share = np.full((3, 2), 0.5)
        with raises("priority: predicted_load has shape (2,): allowed is (3,)"):
            schedule.priority(share, [1, 1], max_broadcast=1)
        with raises("priority.max_broadcast = 4: allowed is 0 to 3"):
            schedule.priority(share, [1, 1, 1], max_broadcast=4)
        with raises("priority: load of expert 1 = -1"):
            schedule.priority(share, [1, -1, 1], max_broadcast=1)
        with raises("priority: share of expert 0 adds up to 1.2"):
            schedule.priority(share * 1.2, [1, 1, 1], max_broadcast=1)
        pick = jax.jit(lambda s, load: schedule.priority(s, load, max_broadcast=1))
        bad = pick(share * 1.2, jnp.ones(3)), pick(share, jnp.array([1, jnp.nan, 1]))
        assert [int(b.status) for b in bad] == [Status.BAD_SHARE, Status.BAD_COST]
        assert all(b.experts.tolist() == [routing.NOT_ROUTED] for b in bad)


class TestDispatch:
    @settings(max_examples=30)
    @given(SEEDS, st.booleans())
    def test_equals_the_loop(self, seed, only_partners):
        rng = np.random.default_rng(seed)
        share, ids = random_share(rng, 6, 4), random_ids(rng, 9, 3, 6)
        broadcast = rng.random(6) < 0.4
        found = schedule.dispatch(ids, share, broadcast, only_partners=only_partners)
        node, load, visits = oracle.dispatch(ids.tolist(), share, broadcast, only_partners)
        np.testing.assert_array_equal(found.node, node)
        np.testing.assert_array_equal(found.load, load)
        np.testing.assert_array_equal(found.visits, visits)
        # Every routed slot runs once.
        assert float(found.load.sum()) == (ids >= 0).sum()

    def test_earlier_tokens_are_remembered(self):
        """Four tokens of a broadcast expert, whose node has no other work, beside one that keeps
        two nodes busy."""
        share = np.array([[1, 0, 0], [0, 0.5, 0.5]])
        found = schedule.dispatch([[0, 1]] * 4, share, [True, False])
        np.testing.assert_array_equal(found.load, [3, 3, 2])
        assert found.node[:, 0].tolist() == [0, 0, 0, 1]
        # Node 0 has no other work of the token: with partners only, nothing runs there.
        free = schedule.dispatch([[0, 1]] * 4, share, [True, False], only_partners=True)
        np.testing.assert_array_equal(free.load, [0, 4, 4])
        assert found.visits[:, 0].tolist() == [True, True, True, False] and not free.visits.any()

    def test_batches_by_vmap(self):
        rng = np.random.default_rng(0)
        share = random_share(rng, 6, 4)
        ids = np.stack([random_ids(rng, 9, 3, 6) for _ in range(3)])
        chosen = rng.random((3, 6)) < 0.5
        found = jax.jit(jax.vmap(lambda i, c: schedule.dispatch(i, share, c)))(ids, chosen)
        for batch in range(3):
            one = schedule.dispatch(ids[batch], share, chosen[batch])
            np.testing.assert_array_equal(found.node[batch], one.node)
            np.testing.assert_array_equal(found.load[batch], one.load)

    def test_bad_input(self):
        share = np.full((3, 2), 0.5)
        with raises("dispatch: expert_ids holds 3: allowed is 0 to 2, or -1"):
            schedule.dispatch([[0, 3]], share, [True] * 3)
        with raises("dispatch: expert_ids is float64"):
            schedule.dispatch([[0.0, 1.0]], share, [True] * 3)
        with raises("dispatch: broadcast is bool (2,): allowed is bool (3,)"):
            schedule.dispatch([[0, 1]], share, [True] * 2)
        with raises("dispatch: share has shape (3,)"):
            schedule.dispatch([[0, 1]], share[:, 0], [True] * 3)
        run = jax.jit(lambda ids, share: schedule.dispatch(ids, share, jnp.ones(3, bool)))
        for ids, table, code in (
            ([[0, 3]], share, Status.INVALID_ROUTING),
            ([[0, 1]], -share, Status.BAD_SHARE),
        ):
            found = run(jnp.array(ids), table)
            assert int(found.status) == code and np.isnan(found.load).all()


class TestPrediction:
    def test_transitions_equal_the_loop(self):
        rng = np.random.default_rng(3)
        ids = np.stack([random_ids(rng, 40, 2, 5) for _ in range(3)]).clip(0)
        ids[..., 1] = (ids[..., 0] + 1 + ids[..., 1] % 4) % 5  # two different experts each
        valid = rng.random(40) < 0.8
        trace = routing.RoutingTrace(ids, 5, valid=valid)
        fitted = schedule.fit_transitions(trace)
        batch = ids[:, :6].copy()
        batch[0, 0, 1] = routing.NOT_ROUTED
        found = np.asarray(schedule.predict_transitions(fitted, batch, top_k=3))
        assert (found[0] == routing.NOT_ROUTED).all()
        for layer in (0, 1):
            for token in range(6):
                present = [i for i in batch[layer, token] if i >= 0]
                scores = oracle.transition_scores(ids[layer : layer + 2], valid, 5, present)
                chosen = found[layer + 1, token]
                np.testing.assert_allclose(
                    np.sort(np.array(scores)[chosen]), np.sort(scores)[2:], atol=1e-5
                )

    def test_certain_transitions_are_found(self):
        first = np.random.default_rng(0).integers(0, 4, (1, 50, 1))
        trace = routing.RoutingTrace(np.concatenate([first, 3 - first]), 4)
        found = schedule.predict_transitions(
            schedule.fit_transitions(trace), trace.expert_ids, top_k=1
        )
        np.testing.assert_array_equal(found[1], trace.expert_ids[1])
        np.testing.assert_allclose(schedule.prediction_accuracy(found, trace.expert_ids), [0, 1])

    def test_next_gate_is_the_gate_of_the_next_layer(self):
        rng = np.random.default_rng(1)
        inputs, routers = rng.normal(size=(3, 7, 4)), rng.normal(size=(3, 4, 6))
        found = np.asarray(schedule.predict_next_gate(inputs, routers, top_k=2))
        assert (found[0] == routing.NOT_ROUTED).all()
        for layer in (1, 2):
            order = np.argsort(-(inputs[layer - 1] @ routers[layer]), axis=-1)[:, :2]
            np.testing.assert_array_equal(found[layer], order)

    def test_accuracy_counts_what_was_chosen(self):
        actual = np.array([[0, 1, 2], [3, 4, 5]])
        predicted = np.array([[2, 9, 0], [5, 3, 4]])
        expected = oracle.accuracy(predicted.tolist(), actual.tolist())
        np.testing.assert_allclose(schedule.prediction_accuracy(predicted, actual), expected)
        padded = np.array([[0, 1, -1], [-1, -1, -1]])
        assert float(schedule.prediction_accuracy(predicted, padded)) == 0.5

    def test_bad_input(self):
        trace = routing.RoutingTrace(np.zeros((2, 3, 1), int), 4)
        fitted = schedule.fit_transitions(trace)
        for smoothing in (0, np.inf):
            with raises(f"smoothing = {smoothing}"):
                schedule.fit_transitions(trace, smoothing=smoothing)
        with raises("predict_transitions: expert_ids has shape (3, 3, 1): allowed is [2,"):
            schedule.predict_transitions(fitted, jnp.zeros((3, 3, 1), int), top_k=1)
        with raises("predict_transitions.top_k = 5: allowed is 1 to 4"):
            schedule.predict_transitions(fitted, trace.expert_ids, top_k=5)
        with raises("gate_inputs (2, 3, 4) and routers (2, 5, 6)"):
            schedule.predict_next_gate(jnp.zeros((2, 3, 4)), jnp.zeros((2, 5, 6)), top_k=1)
        with raises("prediction_accuracy: predicted (1, 2) and actual (2, 2)"):
            schedule.prediction_accuracy(np.zeros((1, 2), int), np.zeros((2, 2), int))


LAYERS, TOKENS = 3, 12


@pytest.fixture(scope="module")
def batch():
    """Three layers of skewed routing on a 2 x 2 mesh: (ids, predicted, share, positions)."""
    rng = np.random.default_rng(5)
    ids = np.stack([random_ids(rng, TOKENS, 2, 6) for _ in range(LAYERS)])
    ids[:, : TOKENS // 2, 0] = np.where(ids[:, : TOKENS // 2, 1] == 5, 4, 5)
    predicted = np.stack([random_ids(rng, TOKENS, 2, 6) for _ in range(LAYERS)])
    share = np.stack([random_share(rng, 6, 4) for _ in range(LAYERS)])
    position = np.stack([rng.permutation(4) for _ in range(LAYERS)])
    return ids, predicted, share, position


COSTS = dict(flops_per_token=6e6, flops_per_s=1e12, bytes_per_token=2000.0, bandwidth=1e9)
TOPOLOGY = noc.mesh(2, 2, bandwidth=1e9)


def run(batch, predicted=None, *, num_broadcast=2, expert_bytes=1e3, **options):
    ids, guessed, share, position = batch
    costs = schedule.ScheduleCosts(**COSTS, expert_bytes=expert_bytes, **options)
    guess = guessed if predicted is None else predicted
    return schedule.run_layers(
        ids, guess, share, position, TOPOLOGY, costs,
        max_broadcast=2, num_broadcast=num_broadcast, key=jax.random.key(3), chunks=4,
        max_messages=48,
    )  # fmt: skip


class TestRunLayers:
    def test_equals_its_parts(self, batch):
        """Loops for the choices and one simulation after the other for the network."""
        ids, predicted, share, position = batch
        found = run(batch)
        for layer in range(LAYERS):
            counts = np.bincount(predicted[layer][predicted[layer] >= 0], minlength=6)
            experts = oracle.priority(share[layer], counts, 2) if layer else []
            chosen = np.isin(np.arange(6), experts)
            assert [e for e in found.broadcast[layer].tolist() if e >= 0] == experts
            stays = np.where(np.isin(ids[layer], experts), -1, ids[layer])
            for times, sent, listed in (
                (found.static, np.zeros(6, bool), ids[layer]),
                (found.dynamic, chosen, stays),
            ):
                _, load, _ = oracle.dispatch(ids[layer].tolist(), share[layer], sent)
                np.testing.assert_allclose(times.comp[layer], load.max() * 6e-6, rtol=1e-6)
                draw = jax.random.fold_in(jax.random.key(3), layer)
                messages = noc.expert_traffic(
                    listed, share[layer], position[layer], bytes_per_token=2000.0, key=draw,
                    max_messages=48,
                )  # fmt: skip
                gather = noc.simulate(TOPOLOGY, messages).makespan
                np.testing.assert_allclose(times.comm[layer], 2 * gather, rtol=1e-6)
        assert not found.dynamic.exposed.any() and int(found.status) == Status.OK
        totals = [
            float(times.comp.sum() + times.comm.sum()) for times in (found.static, found.dynamic)
        ]
        np.testing.assert_allclose(found.speedup, totals[0] / totals[1], rtol=1e-6)

    def test_nothing_broadcast_is_static(self, batch):
        found = run(batch, num_broadcast=0)
        np.testing.assert_array_equal(found.static.comp, found.dynamic.comp)
        np.testing.assert_array_equal(found.static.comm, found.dynamic.comm)
        assert float(found.speedup) == 1 and not found.broadcast_time.any()
        assert (np.asarray(found.broadcast) == routing.NOT_ROUTED).all()

    def test_perfect_prediction_relieves_the_busiest_node(self, batch):
        found = run(batch, batch[0])
        assert found.static.comp[0] == found.dynamic.comp[0]
        assert (found.dynamic.comp <= found.static.comp).all()
        assert float(found.dynamic.comp[1:].sum()) < float(found.static.comp[1:].sum())

    def test_a_late_broadcast_is_waited_for(self, batch):
        """Two experts of 1 MB over links of 1 GB/s take longer than the layers before."""
        found = run(batch, expert_bytes=1e6)
        ids, _, share, position = batch
        before = found.dynamic.comp + found.dynamic.comm
        best = schedule.broadcast_chunk(1e6, 1e-7, 1e9, 2, 4).time
        np.testing.assert_allclose(found.broadcast_time, [0, best, best], rtol=1e-6)
        assert not found.dynamic.exposed[0]
        for layer in (1, 2):
            parts = []
            for expert in found.broadcast[layer].tolist():
                held = share[layer, expert]
                for node in sorted(np.flatnonzero(held), key=lambda n: (-held[n], n)):
                    root = int(position[layer, node])
                    parts.append(noc.broadcast(TOPOLOGY, root, held[node] * 1e6, chunks=4))
            # First chunks before second ones: equal messages of equal age are served in order.
            fields = ("source", "destination", "bytes", "valid", "start_time")
            stacked = [np.stack([getattr(part, name) for part in parts]) for name in fields]
            ordered = [array.reshape(-1, 4, 3).swapaxes(0, 1).ravel() for array in stacked]
            makespan = noc.simulate(TOPOLOGY, noc.Messages(*ordered)).makespan
            np.testing.assert_allclose(
                found.dynamic.exposed[layer], makespan - before[layer - 1], rtol=1e-5
            )
            assert found.dynamic.exposed[layer] > 0
        hidden = run(batch, expert_bytes=1e6, other_time=1.0)
        assert not hidden.dynamic.exposed.any()
        np.testing.assert_array_equal(hidden.dynamic.comp, found.dynamic.comp)

    def test_bad_input(self, batch):
        ids, predicted, share, position = batch
        costs = schedule.ScheduleCosts(**COSTS, expert_bytes=1e3)
        call = functools.partial(
            schedule.run_layers, topology=TOPOLOGY, costs=costs, max_broadcast=1
        )
        with raises("run_layers: predicted_ids has (2, 12) layers"):
            call(ids, predicted[:2], share, position)
        with raises("run_layers: share has shape (3, 6, 3): allowed is [layers, experts, 4]"):
            call(ids, predicted, share[..., :3], position)
        with raises("run_layers: node_position has shape (3, 3): allowed is (3, 4)"):
            call(ids, predicted, share, position[:, :3])
        with raises("run_layers: node_position of layer 0 = [0, 0, 0, 0]"):
            call(ids, predicted, share, np.zeros_like(position))
        with raises("run_layers, layer 0: share of expert 0 adds up to 2"):
            call(ids, predicted, 2 * share, position)
        with raises("run_layers.max_broadcast = 7: allowed is 0 to 6"):
            call(ids, predicted, share, position, max_broadcast=7)
        with raises("run_layers: costs.flops_per_s = 0: allowed is above 0"):
            bad = schedule.ScheduleCosts(**COSTS | dict(flops_per_s=0.0), expert_bytes=1e3)
            call(ids, predicted, share, position, costs=bad)
        with raises("run_layers.chunks = 0"):
            call(ids, predicted, share, position, chunks=0)

    def test_swept_under_vmap_with_bad_rows(self, batch):
        """One program: counts and sizes are traced, and so are what is wrong with some rows."""
        ids, predicted, share, position = batch
        rows = [  # count, offset of ids, scale of shares, bytes of an expert
            (0, 0, 1.0, 1e3, Status.OK),
            (1, 0, 1.0, 1e6, Status.OK),
            (2, 0, 1.0, 1e6, Status.OK),
            (2, 1, 1.0, 1e3, Status.INVALID_ROUTING),
            (2, 0, 2.0, 1e3, Status.BAD_SHARE),
            (2, 0, 1.0, -1.0, Status.BAD_COST),
        ]

        @jax.jit
        @jax.vmap
        def sweep(count, offset, scale, size):
            changed = (ids + offset, predicted, scale * share, position)
            return run(changed, num_broadcast=count, expert_bytes=size)

        *arguments, codes = map(np.array, zip(*rows))
        found = sweep(*arguments)
        np.testing.assert_array_equal(found.status, codes)
        np.testing.assert_array_equal(np.isnan(found.speedup), codes != Status.OK)
        for row in range(3):
            alone = run(batch, num_broadcast=rows[row][0], expert_bytes=rows[row][3])
            for name in ("comp", "comm", "exposed"):
                one, many = (getattr(r.dynamic, name) for r in (alone, found))
                np.testing.assert_allclose(many[row], one, rtol=1e-5)


@pytest.fixture(scope="module")
def prebroadcast():
    """`sweeps/prebroadcast.py` in small: (module, table)."""
    path = REPOSITORY / "sweeps" / "prebroadcast.py"
    spec = importlib.util.spec_from_file_location("prebroadcast", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.SYSTEMS, module.BATCH, module.SEEDS = ("nmp-2x2-2.5t-75g",), 32, 2
    module.COUNTS, module.WINDOWS, module.BEFORE, module.COUNTED = (0, 2), 6, 64, 32
    return module, sweep.run(module.SWEEP(), progress=False).columns


class TestSweep:
    def test_rows(self, prebroadcast):
        module, table = prebroadcast
        names = ("predictor", "num_broadcast", "seed")
        assert len(set(zip(*(table[n].tolist() for n in names)))) == len(table["seed"]) == 3 * 2 * 2
        assert set(table["predictor"]) == set(module.PREDICTORS) and set(table["status"]) == {"ok"}
        np.testing.assert_array_equal(table["speedup"][table["num_broadcast"] == 0], 1)
        static = table["static_comp_us"] + table["static_comm_us"]
        dynamic = table["dynamic_comp_us"] + table["dynamic_comm_us"] + table["exposed_us"]
        np.testing.assert_allclose(table["speedup"], static / dynamic, rtol=1e-5)

    def test_the_next_gate_knows_more_than_counts(self, prebroadcast):
        """The usual guess on a real residual stream, and a load that it relieves."""
        _, table = prebroadcast
        known = dict(zip(table["predictor"].tolist(), table["accuracy"].tolist()))
        assert known["perfect"] == 1
        assert known["next gate"] > 0.4 and known["transitions"] < known["next gate"] < 1
        relieved = (table["predictor"] == "perfect") & (table["num_broadcast"] > 0)
        assert table["speedup"][relieved].min() > 1

    def test_summary_and_picture(self, prebroadcast):
        module, table = prebroadcast
        text = module.summary(table)
        assert "zoo on nmp-2x2-2.5t-75g, expert parallel placement, B = 32" in text
        pytest.importorskip("matplotlib")
        assert list(module.figures(table)) == ["prebroadcast"]

    def test_a_folder_without_placements(self, prebroadcast, tmp_path):
        with raises("no hd-moe-reference/placements.npz there"):
            prebroadcast[0].SWEEP(data=str(tmp_path))
