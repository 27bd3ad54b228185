"""Sweep files: the quickstart in small, calibration's table, and the example of the README."""

import contextlib
import importlib.util
import io
import itertools
import re

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moejax import routing, sweep
from moejax.cli import main
from moejax.serving import LIMITS
from tests.conftest import REPOSITORY


SWEEPS = REPOSITORY / "sweeps"
BATCHES, SEEDS, POLICIES = (2, 8), 3, ("no_exp", "sieve", "all_exp")
SMALLER = f"""\
import importlib.util

spec = importlib.util.spec_from_file_location("quickstart", {str(SWEEPS / "quickstart.py")!r})
quickstart = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quickstart)
quickstart.CASES = {{"qwen3-30b-a3b": 1}}
quickstart.BATCHES, quickstart.SEEDS, quickstart.POLICIES = {BATCHES}, {SEEDS}, {POLICIES}
SWEEP, summary, figures = quickstart.SWEEP, quickstart.summary, quickstart.figures
"""
SYSTEMS = ["1xb200-hbm-pim", "1xb200-hbm-pim, free decision", "1xh200-hbm-pim"]
LAYERS = {"qwen3-30b-a3b": 48, "gpt-oss-20b": 24}


@pytest.fixture(scope="module", autouse=True)
def own_settings(tmp_path_factory):
    """Compiled programs in a folder of their own, little optimized: they run once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def moejax_run(path, out, *more):
    """(exit status, standard output, standard error)."""
    text, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
        status = main(["run", str(path), "--out", str(out), *map(str, more)])
    return status, text.getvalue(), errors.getvalue()


def picked(table, **equals):
    """The columns of the rows where others have a value."""
    keep = np.all([table[name] == value for name, value in equals.items()], axis=0)
    return {name: values[keep] for name, values in table.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The quickstart on one model: (folder of results, standard output, columns)."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "small.py").write_text(SMALLER)
    status, out, errors = moejax_run(folder / "small.py", folder / "out")
    assert (status, errors) == (0, "")
    return folder / "out", out, sweep.load(folder / "out").columns


class TestQuickstart:
    def test_one_row_per_system_batch_policy_and_seed(self, finished):
        _, _, table = finished
        names = ("system", "batch", "policy", "seed")
        found = list(zip(*(table[name].tolist() for name in names), strict=True))
        expected = itertools.product(SYSTEMS, BATCHES, POLICIES, range(SEEDS))
        assert sorted(found) == sorted(expected)
        assert set(table["model"]) == {"qwen3-30b-a3b"}
        assert set(table["context"]) == {512}
        assert all("calibrated" in text or "fitted" in text for text in table["routing"])
        assert not table["extrapolated"].any() and set(table["compute_efficiency"]) == {1.0}

    def test_names_of_numbers_have_units(self, finished):
        _, _, table = finished
        shares = {"share_1", "share_2", "share_3_4", "share_more", "active", "channel_utilization"}
        shares |= {"bandwidth_efficiency", "compute_efficiency"}
        counts = {"experts_on_gpu", "experts_on_pim"}
        for name, values in table.items():
            if values.dtype.kind == "f" and name not in shares | counts:
                assert name.endswith(("_ms", "_tok_s", "_gb", "_j", "_j_per_token", "_w")), name
        assert all((table[name] >= 0).all() and (table[name] <= 1).all() for name in shares)

    def test_numbers_hang_together(self, finished):
        _, _, table = finished
        assert set(table["status"]) == {"ok"}
        assert set(table["limited_by"]) <= set(LIMITS)
        assert table["memory_fits"].dtype == bool and table["memory_fits"].all()
        np.testing.assert_allclose(table["interactivity_tok_s"], 1000 / table["tbt_ms"], rtol=1e-5)
        throughput = 1000 * table["batch"] / table["tbt_ms"]
        np.testing.assert_allclose(table["throughput_per_gpu_tok_s"], throughput, rtol=1e-5)
        shares = sum(table[name] for name in ("share_1", "share_2", "share_3_4", "share_more"))
        np.testing.assert_allclose(shares, 1, rtol=1e-5)
        # On one GPU all active experts are its own.
        active = table["experts_on_gpu"] + table["experts_on_pim"]
        np.testing.assert_allclose(active, 128 * table["active"], rtol=1e-5)

    def test_systems_differ_in_what_they_say(self, finished):
        _, _, table = finished
        decided = picked(table, policy="sieve", system=SYSTEMS[0])["scheduler_ms"]
        np.testing.assert_allclose(decided, LAYERS["qwen3-30b-a3b"] * 0.020, rtol=1e-5)
        assert not picked(table, system=SYSTEMS[1])["scheduler_ms"].any()
        # Each policy is under its own name: no_exp decides nothing and sends nothing to PIM.
        assert not picked(table, policy="no_exp")["experts_on_pim"].any()
        assert not picked(table, policy="all_exp")["experts_on_gpu"].any()
        baseline = [picked(table, policy="no_exp", system=system) for system in SYSTEMS]
        np.testing.assert_array_equal(baseline[0]["tbt_ms"], baseline[1]["tbt_ms"])
        # Bound by HBM, of which the B200 has 8 TB/s.
        h200 = baseline[2]["hbm_ms"] / baseline[0]["hbm_ms"]
        np.testing.assert_allclose(h200, 8e12 / 4.8e12, rtol=0.02)

    def test_policies_and_systems_see_the_same_draws(self, finished):
        _, _, table = finished
        for batch in BATCHES:
            shares = []
            for seed in range(SEEDS):
                drawn = picked(table, batch=batch, seed=seed)
                assert len(set(drawn["share_1"])) == len(set(drawn["active"])) == 1
                shares.append(drawn["active"][0])
            assert len(set(shares)) == SEEDS

    def test_summary_is_the_paired_ratio(self, finished):
        _, out, table = finished
        assert "tbt of no_exp over tbt of the policy, mean +- 95 % over seeds" in out
        assert "qwen3-30b-a3b on 1xb200-hbm-pim; routing: " in out
        lines = out.splitlines()
        start = next(i for i, line in enumerate(lines) if "on 1xb200-hbm-pim, free" in line)
        header, row = lines[start + 1].split(), lines[start + 2].split()
        # The batch sizes it shows are 8, 64 and 256; the small sweep has the first.
        assert (header, row[0]) == (["policy", "B=8"], "sieve")
        case = picked(table, system=SYSTEMS[1], batch=8)
        ratio = picked(case, policy="no_exp")["tbt_ms"] / picked(case, policy="sieve")["tbt_ms"]
        assert float(row[1]) == pytest.approx(ratio.mean(), abs=0.006)
        # Student's t at two degrees of freedom.
        half = 4.30265 * ratio.std(ddof=1) / np.sqrt(3)
        assert float(row[2].removeprefix("+-")) == pytest.approx(half, abs=0.006)

    def test_pictures(self, finished):
        pytest.importorskip("matplotlib")
        folder, out, _ = finished
        for name in ("roofline", "expert_bins", "throughput"):
            path = folder / f"{name}.png"
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
            assert f"wrote {path}" in out
        assert {path.stem for path in folder.glob("*.png")} == {
            "roofline", "expert_bins", "throughput",
        }  # fmt: skip

    def test_measured_trace(self, tmp_path, data_dir):
        trace = data_dir / "gpt-oss-20b" / "decode-misc.npz"
        (tmp_path / "small.py").write_text(SMALLER)
        out = tmp_path / "out"
        status, text, errors = moejax_run(tmp_path / "small.py", out, "--trace", trace)
        assert (status, errors) == (0, "")
        table = sweep.load(out).columns
        assert len(table["model"]) == len(SYSTEMS) * len(BATCHES) * len(POLICIES) * SEEDS
        assert set(table["model"]) == {"gpt-oss-20b"}
        assert set(table["routing"]) == {"trace of gpt-oss-20b"}
        assert "gpt-oss-20b on 1xb200-hbm-pim; routing: trace of gpt-oss-20b" in text
        decided = picked(table, policy="sieve", system=SYSTEMS[0])["scheduler_ms"]
        np.testing.assert_allclose(decided, LAYERS["gpt-oss-20b"] * 0.020, rtol=1e-5)
        assert (out / "roofline.png").is_file()

    def test_trace_without_a_known_model(self, tmp_path):
        trace = tmp_path / "trace.npz"
        experts = np.tile(np.arange(4, dtype=np.uint8).reshape(2, 2), (3, 1, 1))
        np.savez(trace, experts=experts, seq_start=np.array([0, 1]))
        trace.with_suffix(".json").write_text('{"model": "Homegrown-MoE", "experts": 4}')
        status, out, errors = moejax_run(SWEEPS / "quickstart.py", tmp_path, "--trace", trace)
        assert (status, out) == (2, "")
        assert errors == f"moejax run: {trace}: no sizes known for its model, Homegrown-MoE\n"


@pytest.fixture(scope="module")
def calibration():
    """`sweeps/routing_calibration.py` as a module."""
    path = SWEEPS / "routing_calibration.py"
    spec = importlib.util.spec_from_file_location("routing_calibration", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestCalibrationSweep:
    def test_summary(self, calibration):
        def row(family, batch, error, parameters):
            numbers = dict(target=0.5, expected=0.5 + error, sampled=0.51 + error, error=error)
            where = dict(model="qwen3-30b-a3b", family=family, against="fitted", batch=batch)
            return where | numbers | dict(statistic="share_1", parameters=parameters)

        rows = [
            row("Dirichlet", 64, 0.02, "concentration=0.3"),
            row("Dirichlet", 256, -0.05, "concentration=0.3"),
            row("LambdaTails", 64, 0.004, "scale=2.5"),
        ]
        table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        head, *lines = calibration.summary(table).splitlines()
        worst = lines[lines.index("") + 2 :]
        assert len(lines[: lines.index("")]) == len(rows)
        assert head.split()[:5] == ["model", "family", "against", "batch", "statistic"]
        assert head.split()[5:] == ["target", "expected", "sampled", "error"]
        assert lines[1].split() == [
            "qwen3-30b-a3b", "Dirichlet", "fitted", "B=256", "share_1", "0.500", "0.450", "0.460",
            "-0.050",
        ]  # fmt: skip
        # Columns of numbers end where their heads end.
        assert {len(line) for line in (head, *lines[: len(rows)])} == {len(head)}
        assert [line.split()[:4] for line in worst] == [
            ["qwen3-30b-a3b", "Dirichlet", "fitted", "0.050"],
            ["qwen3-30b-a3b", "LambdaTails", "fitted", "0.004"],
        ]
        assert worst[0].endswith("concentration=0.3")

    def test_every_published_model_meets_every_family(self, calibration):
        jobs = calibration._published()
        assert len(jobs) == len(calibration.PUBLISHED) * len(calibration.FAMILIES)
        assert all(set(job) >= {"model", "shape", "targets", "family"} for job in jobs)

    def test_rows_are_the_numbers_of_the_fits(self, calibration, monkeypatch):
        """Every number of a fit is asked for once, and none that it does not give."""
        fits = []

        def calibrate(shape, targets, family, *, batches, **options):
            calls.append((shape, type(family).__name__))
            numbers = [
                Fit(target.batch, name, value, value + 0.01, value + 0.02)
                for target in targets
                for name, value in target.items()
            ]
            fits.extend(numbers)
            return Calibration(family, "", tuple(numbers))

        def judge(fitted, targets, shape, **options):
            return calibrate(shape, targets, fitted.popularity, batches=())

        calls, measured = [], lambda: []
        Fit, Calibration = routing.Fit, routing.Calibration
        monkeypatch.setattr(calibration, "_measured", measured)
        monkeypatch.setattr(calibration.routing, "calibrate", calibrate)
        monkeypatch.setattr(calibration.routing, "judge", judge)
        found = sweep.run(calibration.SWEEP())
        asked = sum(len(target.items()) for of in calibration.PUBLISHED.values() for target in of)
        assert found.num_rows == 3 * (asked + len(calibration.UNASSIGNED)) == len(fits)
        assert len(calls) == 3 * (len(calibration.PUBLISHED) + len(calibration.UNASSIGNED))
        np.testing.assert_allclose(found["expected"], found["target"] + 0.01, atol=1e-6)
        assert set(found["status"]) == {"ok"} and set(found["family"]) == {
            "Dirichlet", "LogitNormal", "LambdaTails",
        }  # fmt: skip


class TestReadme:
    TEXT = (SWEEPS / "README.md").read_text()

    def test_lists_every_sweep(self):
        for path in SWEEPS.glob("*.py"):
            assert f"| `{path.name}` |" in self.TEXT

    def test_example_is_a_sweep_file(self, tmp_path):
        (code,) = re.findall("```python\n(.*?)```", self.TEXT, re.DOTALL)
        (tmp_path / "own.py").write_text(code)
        status, out, errors = moejax_run(tmp_path / "own.py", tmp_path / "out")
        assert (status, errors) == (0, "")
        table = sweep.load(tmp_path / "out").columns
        assert table["system.pim.macs_per_unit"].tolist() == [8, 16, 32, 64]
        # Wider units are never slower.
        assert (np.diff(table["tbt_ms"]) <= 0).all()
        assert out.splitlines()[1].split() == ["8", f"{table['tbt_ms'][0]:.3f}", "ms"]
