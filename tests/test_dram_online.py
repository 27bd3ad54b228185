"""The table loop: against plain Python, and how soon it learns the DRAM truth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import hardware, models, partition, routing
from moejax import sweep as engine
from moejax.cost import PIMCostTable, dram
from moejax.hardware import refresh_factor, refresh_stall
from tests import strategies
from tests.conftest import REPOSITORY
from tests.oracles import dram_online as oracle


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once, so that their compilation is most of the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


ITERATIONS, LAYERS, EXPERTS, MOST, PHASES = 6, 2, 8, 6, 3


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    beta=st.floats(0.05, 1.0),
    pessimism=st.floats(0.2, 3.0),
    learns=st.booleans(),
)
def test_agrees_with_plain_python(seed, beta, pessimism, learns):
    rng = np.random.default_rng(seed)
    problems = [
        strategies.random_partition_problem(rng, 0, EXPERTS, MOST)
        for _ in range(ITERATIONS * LAYERS)
    ]
    counts = np.stack([c for c, _ in problems]).reshape(ITERATIONS, LAYERS, EXPERTS)
    costs = problems[0][1]
    times = costs["pim_time_by_tokens"]
    truth = times * rng.uniform(0.7, 1.3, (PHASES, 1))
    fallback = times * pessimism * rng.uniform(0.8, 1.2, MOST + 1)
    with jax.enable_x64(True):
        key = jax.random.key(seed % 1000)
        table = PIMCostTable.create(MOST, jnp.array(fallback), beta)
        given_costs = partition.PartitionCosts(**costs)
        run = partition.run_online(counts, given_costs, truth, table, learns=learns, key=key)
        drawn = np.asarray(jax.random.randint(key, counts.shape, 0, PHASES))
        regret, times, run = map(jax.device_get, (run.regret, run.table.times, run))
    totals, known, learnt, on_gpu = oracle.run_online(
        counts.tolist(), costs, truth.tolist(), drawn, fallback.tolist(), beta, learns
    )
    np.testing.assert_allclose(run.total_time.ravel(), totals, rtol=1e-9)
    np.testing.assert_allclose(run.known_time.ravel(), known, rtol=1e-9)
    np.testing.assert_allclose(times, learnt, rtol=1e-9)
    assert run.num_gpu.ravel().tolist() == [sum(layer) for layer in on_gpu]
    assert np.all(regret > -1e-9)


@functools.cache
def qwen3_run():
    """40 iterations of 4 layers of Qwen3-30B-A3B at 64 tokens: the loop by beta and fallback."""
    model, pim = models.get("qwen3-30b-a3b"), hardware.PIMS["hbm-pim"].build()
    popularity = routing.calibrated(model.name).popularity
    ids = routing.sample_expert_ids(
        popularity, model.num_experts, model.top_k, 4, 40 * 64, key=jax.random.key(0)
    )
    counts = routing.tokens_per_expert(ids.reshape(160, 64, model.top_k), model.num_experts)
    counts = jnp.swapaxes(counts.reshape(4, 40, -1), 0, 1)
    # Without scans for so many counts: one token by commands, its refresh by the closed form.
    most = int(counts.max())
    phases = (jnp.arange(16) + 0.5) / 16 * (pim.timing.refi - pim.timing.rfc)
    sizes = ((2 * model.moe_intermediate, model.hidden), (model.hidden, model.moe_intermediate))
    one = sum(dram.gemv_time(*size, 1, pim, refresh=False) for size in sizes)
    time = one * jnp.arange(most + 1)
    truth = time + jax.vmap(lambda phase: refresh_stall(time, phase, pim.timing))(phases)
    np.testing.assert_allclose(truth.mean(0)[1:], time[1:] * refresh_factor(pim.timing), rtol=0.03)
    roofline = 6.0 * model.hidden * model.moe_intermediate / pim.flops_per_s
    expert_bytes = float(model.expert_bytes)
    costs = partition.PartitionCosts(
        truth[0], 2e-6, 2e-6, expert_bytes, 4.0 * model.hidden, expert_bytes, 6e7, 4e9, 8e12, 2e15
    )

    @functools.partial(jax.jit, static_argnames="learns")
    def runs(betas, scales, learns=True):
        def one(beta, scale):
            table = PIMCostTable.create(most, scale * roofline, beta)
            return partition.run_online(
                counts, costs, truth, table, learns=learns, key=jax.random.key(1)
            )

        def numbers(beta, scale):
            run = one(beta, scale)
            return dict(
                regret=run.regret,
                error=run.table_error,
                worst=run.worst_error,
                unseen=run.unseen_share,
                status=run.status,
            )

        return jax.vmap(numbers)(betas, scales)

    return runs


def test_learns_within_ten_iterations():
    """At the default beta: entries within 5 %, regret below 3 % and below half of the roofline's.

    A fallback that is too slow is never corrected for counts that it keeps away from PIM.
    """
    runs = qwen3_run()
    betas, scales = jnp.array([0.25, 0.05, 1.0, 0.25]), jnp.array([1.0, 1.0, 1.0, 8.0])
    learning = jax.tree.map(np.asarray, runs(betas, scales))
    frozen = jax.tree.map(np.asarray, runs(betas[:1], scales[:1], learns=False))
    assert np.all(learning["status"] == 0) and np.all(frozen["status"] == 0)
    default, slow, eager, pessimist = range(4)
    assert np.nanmean(learning["error"][default, 10:]) < 0.05
    assert learning["regret"][default].mean() < 0.03
    assert learning["regret"][default].mean() < frozen["regret"][0].mean() / 2
    assert frozen["error"][0, -1] > 0.5
    # Beta 1 keeps the noise of the last observation; a small beta forgets it.
    errors = np.nanmean(learning["worst"][:, 20:], axis=1)
    assert errors[slow] < errors[eager]
    assert learning["unseen"][pessimist, -1] > learning["unseen"][default, -1]
    assert learning["regret"][pessimist, 10:].mean() > learning["regret"][default, 10:].mean()


def test_mistakes_are_named_and_a_status_under_tracing():
    counts = np.ones((2, 1, 4), int)
    rng = np.random.default_rng(0)
    costs = partition.PartitionCosts(**strategies.random_partition_problem(rng, 0, 4, 6)[1])
    truth = np.arange(7.0)[None]
    table = PIMCostTable.create(6, 1.0)
    run = functools.partial(partition.run_online, key=jax.random.key(0))
    assert run(counts, costs, truth, table).status == 0
    with pytest.raises(ValueError, match=r"int32 \(2, 4\): allowed are integers .iterations"):
        run(counts[:, 0], costs, truth, table)
    with pytest.raises(ValueError, match=r"truth has shape \(1, 6\): allowed is .phases, 7."):
        run(counts, costs, truth[:, :6], table)
    with pytest.raises(ValueError, match="more tokens than the PIM time table covers.*1 .. 9"):
        run(np.where(counts > 0, [[[1, 1, 1, 9]]], 0), costs, truth, table)
    with pytest.raises(ValueError, match="allowed is less than 2.31"):
        run(counts * 2**32, costs, truth, table)
    with pytest.raises(ValueError, match="a time, size or FLOP count is negative or NaN"):
        run(counts, costs, -truth, table)
    traced = jax.jit(lambda n: run(n, costs, truth, table).status)
    assert traced(9 * counts) != 0


def test_the_sweep_in_small(monkeypatch):
    """Rows of every iteration, paired with the roofline; summary and figure of them."""
    path = REPOSITORY / "sweeps" / "cost_table_convergence.py"
    _, module = engine.load_file(path)
    for name, value in dict(ITERATIONS=6, LAYERS=1, PHASES=4, SEEDS=1, LEARNT=2).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "CASES", {"gpt-oss-120b": 4})
    monkeypatch.setattr(module, "BATCHES", (8,))
    monkeypatch.setattr(module, "BETAS", (0.25, 1.0))
    monkeypatch.setattr(module, "FALLBACKS", (1.0,))
    sweep = module.SWEEP().set({"model": ["gpt-oss-120b"], "arrivals": ["batch doubles"]})
    table = engine.run(sweep, progress=False).columns
    assert len(table["iteration"]) == 2 * 6 and set(table["status"]) == {"ok"}
    assert set(table["cost_model"]) == {"gpt-oss-120b"} and set(table["gpus"]) == {4}
    last = table["iteration"] == 6
    assert np.all(table["table_error_percent"][last] < 20)
    # Before anything is learnt, both schedulers decide the same.
    first = table["iteration"] == 1
    np.testing.assert_allclose(
        table["regret_percent"][first], table["roofline_regret_percent"][first]
    )
    assert "gpt-oss-120b, batch doubles, 8" in module.summary(table)
    assert set(module.figures(table)) == {"convergence"}
