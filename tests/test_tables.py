"""Results as tables: units, intervals, dots of the roofline, stacked systems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax as mj
from moejax import hardware, serving
from moejax.models import Attention, MoEModel, Precision, Router
from moejax.routing import RoutingTrace
from moejax.serving import LIMITS, mean_and_interval, mean_by


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once or twice, so that their compilation is all the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class TestColumns:
    # What one unit of a column is, in the SI unit of the field it comes from.
    UNITS = {
        "tbt_ms": ("tbt", 1e-3),
        "interactivity_tok_s": ("interactivity", 1),
        "throughput_per_gpu_tok_s": ("throughput_per_gpu", 1),
        "gpu_ms": ("gpu_time", 1e-3),
        "hbm_ms": ("offchip_time", 1e-3),
        "compute_ms": ("compute_time", 1e-3),
        "pim_ms": ("pim_time", 1e-3),
        "attention_ms": ("attention_time", 1e-3),
        "comm_ms": ("comm_time", 1e-3),
        "scheduler_ms": ("scheduler_time", 1e-3),
        "head_ms": ("head_time", 1e-3),
        "experts_on_gpu": ("experts_on_gpu", 1),
        "experts_on_pim": ("experts_on_pim", 1),
        "channel_utilization": ("channel_utilization", 1),
        "memory_gb": ("memory_bytes", 1e9),
        "pim_energy_j": ("pim_energy", 1),
        "pim_energy_j_per_token": ("pim_energy_per_token", 1),
    }

    def report(self, shape):
        """Every field another number, so that none can stand in for another."""
        made = {
            field: jnp.full(shape, 0.25 + i) * (1e9 if "bytes" in field else 1)
            for i, (field, _) in enumerate(self.UNITS.values())
        }
        index = jnp.arange(np.prod(shape, dtype=int)).reshape(shape)
        return mj.Report(
            **made,
            time_limited_by=jnp.zeros((*shape, len(LIMITS))),
            limited_by=index % len(LIMITS),
            memory_fits=index % 2 == 0,
            status=index % len(mj.Status),
        )

    @pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
    def test_units_and_axes(self, shape):
        report = self.report(shape)
        table = serving.columns(report)
        assert set(table) == {*self.UNITS, "memory_fits", "limited_by", "status"}
        assert all(type(column) is np.ndarray or shape == () for column in table.values())
        assert all(column.shape == shape for column in table.values())
        for name, (field, unit) in self.UNITS.items():
            expected = np.asarray(getattr(report, field)) / unit
            np.testing.assert_allclose(table[name], expected, rtol=1e-6)

    def test_names_instead_of_codes(self):
        table = serving.columns(self.report((12,)))
        assert table["limited_by"].tolist()[:6] == [*LIMITS, LIMITS[0]]
        assert table["memory_fits"].tolist()[:2] == [True, False]
        for name, code in zip(table["status"], range(len(mj.Status)), strict=False):
            assert mj.Status[name.upper()] == code


class TestIntervals:
    def test_student_t_by_hand(self):
        # Deviations 1.5, 0.5, 0.5, 1.5: variance 5/3. The table of t has 3.182 at 3 degrees.
        mean, half = mean_and_interval(np.array([1.0, 2.0, 3.0, 4.0]))
        assert mean == 2.5
        assert half == pytest.approx(3.182446 * np.sqrt(5 / 3) / 2, rel=1e-6)

    def test_axes(self):
        values = np.array([[1.0, 3.0], [5.0, 5.0]])
        mean, half = mean_and_interval(values)
        np.testing.assert_allclose(mean, [2, 5])
        # t is 12.706 at one degree; the standard error of 1 and 3 is 1.
        np.testing.assert_allclose(half, [12.7062, 0], rtol=1e-5)
        mean, _ = mean_and_interval(values, axis=0)
        np.testing.assert_allclose(mean, [3, 4])

    def test_single_value_has_no_interval(self):
        mean, half = mean_and_interval(np.array([[2.0], [3.0]]))
        assert mean.tolist() == [2, 3]
        assert np.isnan(half).all()

    @pytest.mark.parametrize("values", [np.float64(3), np.zeros(0), np.zeros((0, 2))])
    def test_no_value_at_all(self, values):
        with pytest.raises(ValueError, match="at least one"):
            mean_and_interval(values)

    def test_mean_by(self):
        table = dict(
            policy=["sieve", "no_exp", "sieve", "sieve", "no_exp"],
            batch=[8, 8, 8, 4, 8],
            tbt_ms=[1.0, 10.0, 3.0, 7.0, 10.0],
            notes=list("abcde"),
        )
        result = mean_by(table, ["policy", "batch"], ["tbt_ms"])
        assert list(result) == ["policy", "batch", "tbt_ms", "tbt_ms_low", "tbt_ms_high"]
        assert result["policy"].tolist() == ["sieve", "no_exp", "sieve"]
        assert result["batch"].tolist() == [8, 8, 4]
        assert result["tbt_ms"].tolist() == [2, 10, 7]
        np.testing.assert_allclose(result["tbt_ms_low"], [2 - 12.7062, 10, np.nan], rtol=1e-5)
        np.testing.assert_allclose(result["tbt_ms_high"], [2 + 12.7062, 10, np.nan], rtol=1e-5)

    @pytest.mark.parametrize(
        "table, said",
        [
            (dict(policy=["a"], tbt_mss=[1.0]), "unknown column 'tbt_ms'; did you mean 'tbt_mss'"),
            (dict(policy=["a", "b"], tbt_ms=[1.0]), "'policy': 2, 'tbt_ms': 1"),
            (dict(policy=[], tbt_ms=[]), "one length above 0"),
        ],
    )
    def test_mean_by_says_what_is_wrong_with_a_table(self, table, said):
        with pytest.raises(ValueError, match=said):
            mean_by(table, ["policy"], ["tbt_ms"])


class TestStack:
    def test_systems_of_equal_structure(self):
        names = ("4xb200-hbm-pim", "4xh200-hbm-pim")
        systems = [hardware.get(name) for name in names]
        stacked = hardware.stack(systems)
        assert stacked.num_gpus == 4
        bandwidths = [float(system.gpu.hbm_bandwidth) for system in systems]
        np.testing.assert_allclose(stacked.gpu.hbm_bandwidth, bandwidths)
        derived = jax.vmap(lambda system: system.pim.internal_bandwidth)(stacked)
        expected = [float(system.pim.internal_bandwidth) for system in systems]
        np.testing.assert_allclose(derived, expected, rtol=1e-6)

    @pytest.mark.parametrize(
        "other",
        [
            "1xb200-hbm-pim",
            "4xb200-duplex-logic-pim",
            dict(pim=dict(order="matrix_outer")),
            dict(link=dict(dedup=False)),
        ],
    )
    def test_systems_of_different_structure(self, other):
        first = hardware.get("4xb200-hbm-pim")
        named = isinstance(other, str)
        second = hardware.get(other) if named else first.replace(**other, name="other")
        said = f"{second.name} differs from 4xb200-hbm-pim in more than numbers"
        with pytest.raises(ValueError, match=said):
            hardware.stack([first, second])

    def test_no_systems(self):
        with pytest.raises(ValueError, match="at least one system"):
            hardware.stack([])


BF16 = Precision.bf16()
SMALL = MoEModel(
    name="small",
    hidden=128,
    moe_intermediate=96,
    num_experts=10,
    top_k=3,
    vocab=500,
    num_shared_experts=0,
    shared_intermediate=0,
    layers=(Attention("gqa", heads=4, kv_heads=2, head_dim=16),) * 3,
    num_dense_layers=0,
    dense_intermediate=0,
    router=Router("softmax", "after_topk", False),
    precision=BF16,
    native_precision=BF16,
)
WORKLOAD = mj.Workload(12, 64)
# Rates at which a few experts of the small model are worth moving.
SYSTEM = hardware.get("1xb200-hbm-pim").replace(gpu=dict(hbm_bandwidth=2e11, flops_per_s=2e12))
KEY = jax.random.key(3)


class TestExpertRows:
    @pytest.mark.parametrize("policy", ["sieve", "pimoe_channel", "no_exp", "all_exp"])
    def test_dots_lie_under_the_roofline_of_their_machine(self, policy):
        dots = serving.expert_rows(SMALL, SYSTEM, WORKLOAD, policy, key=KEY)
        tokens, runs_on = dots["tokens"], dots["runs_on"]
        # Three experts for each of 12 tokens in each of 3 layers.
        assert tokens.sum() == 12 * 3 * 3 and tokens.min() >= 1
        assert {"no_exp": {"gpu"}, "all_exp": {"pim"}}.get(policy, {"gpu", "pim"}) == set(runs_on)

        groups = 8 if policy == "pimoe_channel" else 1
        gpu, pim = SYSTEM.gpu, SYSTEM.pim
        peak = np.where(runs_on == "gpu", gpu.flops_per_s, pim.flops_per_s / groups)
        rate = np.where(runs_on == "gpu", gpu.hbm_bandwidth, pim.internal_bandwidth / groups)
        roof = np.minimum(peak, dots["arithmetic_intensity"] * rate)
        assert (dots["flops_per_s"] <= roof * (1 + 1e-5)).all()
        # The GPU is its roofline.
        on_gpu = runs_on == "gpu"
        np.testing.assert_allclose(dots["flops_per_s"][on_gpu], roof[on_gpu], rtol=1e-5)

        # A token is 2 FLOP for every 2 bytes of weight, and there are activations besides.
        assert (dots["arithmetic_intensity"] < tokens).all()

    def test_agrees_with_partition_layers(self):
        dots = serving.expert_rows(SMALL, SYSTEM, WORKLOAD, "sieve", key=KEY)
        counts, on_gpu = serving.partition_layers(SMALL, SYSTEM, WORKLOAD, "sieve", key=KEY)
        assert counts.shape == on_gpu.shape == (3, 1, 10)
        active = np.asarray(counts) > 0
        assert dots["tokens"].tolist() == np.asarray(counts)[active].tolist()
        assert (dots["runs_on"] == "gpu").tolist() == np.asarray(on_gpu)[active].tolist()
        assert not np.any(np.asarray(on_gpu) & ~active)

    def test_partition_layers_agrees_with_evaluate(self):
        report = mj.evaluate(SMALL, SYSTEM, WORKLOAD, "sieve", key=KEY)
        counts, on_gpu = serving.partition_layers(SMALL, SYSTEM, WORKLOAD, "sieve", key=KEY)
        assert float(report.experts_on_gpu) == pytest.approx(float(jnp.sum(on_gpu)) / 3)
        on_pim = jnp.sum((counts > 0) & ~on_gpu)
        assert float(report.experts_on_pim) == pytest.approx(float(on_pim) / 3)

    @pytest.mark.parametrize("rows", [serving.expert_rows, serving.partition_layers])
    def test_bad_input_raises_as_in_evaluate(self, rows):
        with pytest.raises(ValueError, match="unknown policy 'siev'; did you mean 'sieve'"):
            rows(SMALL, SYSTEM, WORKLOAD, "siev", key=KEY)
        trace = RoutingTrace(np.tile(np.arange(3, dtype=np.int32), (3, 20, 1)), 10)
        with pytest.raises(ValueError, match="more than the trace's 1 sequences"):
            rows(SMALL, SYSTEM, mj.Workload(2, 64, routing=trace), "sieve", key=KEY)
        with pytest.raises(ValueError, match="has .MoE layers, experts, top_k. = .3, 10, 3."):
            other = SMALL.replace(top_k=2)
            rows(other, SYSTEM, mj.Workload(1, 64, routing=trace), "sieve", key=KEY)
