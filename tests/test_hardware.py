"""Registries, systems, fields by path, and the CSV table."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import hardware
from moejax.hardware import GPU, GPUS, HARDWARE, PIMS, AbstractPIM, Link, RatePIM, System


BITS = dict(weight_bits=16.0, activation_bits=16.0)


@pytest.fixture(scope="module")
def system():
    return hardware.get("4xb200-hbm-pim")


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


@pytest.mark.parametrize("name", [name for name in HARDWARE if not name.startswith("nmp-")])
def test_every_system_builds(name):
    preset = HARDWARE[name]
    built = preset.build()
    assert isinstance(built.pim, AbstractPIM)
    assert (built.name, built.num_gpus) == (name, preset.num_gpus)
    # What is shown is what is built.
    shown = {row.field: row for row in preset.sources}
    assert len(shown) == len(preset.sources)
    numbers = hardware.numeric_fields(built)
    for path in numbers.keys() & shown.keys():
        np.testing.assert_allclose(numbers[path], shown[path].value, rtol=1e-6)
    assert {"gpu.hbm_bandwidth", "link.latency"} <= numbers.keys() & shown.keys()
    for row in preset.sources:
        assert row.source and row.confidence in ("high", "medium", "low")


@pytest.mark.parametrize("name", PIMS)
def test_derived_peaks_are_the_published_ones(name):
    pim, values = PIMS[name].build(), PIMS[name].values
    for field in ("internal_bandwidth", "flops_per_s"):
        if f"published.{field}" in values:
            np.testing.assert_allclose(getattr(pim, field), values[f"published.{field}"], rtol=1e-6)
    if "published.internal_over_external" in values:
        # AttAcc rounds 15.9 to 16; under the power limit it says 9, the timing 10.6.
        ratio = pim.internal_bandwidth / pim.stacks / values["published.external_bandwidth"]
        np.testing.assert_allclose(ratio, values["published.internal_over_external"], rtol=0.18)


def test_peaks_follow_the_geometry():
    # 256 channels x 16 banks x 32 B / 2 ns = 65.5 TB/s, and 1 FLOP/B.
    pim = hardware.get("1xb200-hbm-pim").pim
    np.testing.assert_allclose(pim.internal_bandwidth, 65.536e12, rtol=1e-6)
    doubled = pim.replace(macs_per_unit=32)
    np.testing.assert_allclose(doubled.flops_per_s, 2 * pim.flops_per_s, rtol=1e-6)


def test_pim_stacks_are_those_of_the_gpu():
    assert hardware.get("8xh200-hbm-pim").pim.stacks == 6
    duplex = hardware.get("2xh100-duplex-logic-pim").pim
    np.testing.assert_allclose(duplex.internal_bandwidth, 4 * 3.352e12, rtol=1e-6)
    np.testing.assert_allclose(duplex.flops_per_s, 32 * 3.352e12, rtol=1e-6)


def test_second_hand_table_changes_the_capacity():
    np.testing.assert_allclose(hardware.get("table1-secondhand").gpu.hbm_bytes, 96e9)
    rows = {row.field: row for row in HARDWARE["table1-secondhand"].sources}
    assert (rows["gpu.hbm_bytes"].value, rows["gpu.hbm_bytes"].confidence) == (96e9, "low")


def test_any_combination_has_a_name():
    built = hardware.get("16xh100-sxm-neupims")
    assert (built.num_gpus, built.gpu.name, int(built.pim.burst_bytes)) == (16, "h100-sxm", 64)
    for gpu in GPUS:
        for pim in PIMS:
            assert hardware.preset(f"2x{gpu}-{pim}").sources
    with raises("unknown PIM 'hbm-pmi'; did you mean 'hbm-pim'"):
        hardware.get("3xb200-hbm-pmi")
    with raises("unknown hardware '4xb20-hbm-pim'; did you mean '4xb200-hbm-pim'"):
        hardware.get("4xb20-hbm-pim")
    with raises("unknown hardware '0xb200-hbm-pim'"):
        hardware.get("0xb200-hbm-pim")


def test_peak_follows_activation_bits(system):
    gpu = system.gpu.replace(compute_efficiency=0.5, bandwidth_efficiency=0.85)
    rates = jax.vmap(gpu.effective_flops_per_s)(jnp.array([4.0, 8.0, 9.0, 16.0]))
    np.testing.assert_allclose(rates, [2250e12, 2250e12, 1125e12, 1125e12], rtol=1e-6)
    np.testing.assert_allclose(gpu.effective_bandwidth, 6.8e12, rtol=1e-6)


def test_replace_and_set_fields_reach_every_field(system):
    paths = hardware.numeric_fields(system)
    assert {"pim.timing.ccd_long", "gpu.hbm_bandwidth", "attention_tp"} <= paths.keys()
    for path, leaf in paths.items():
        factor = 1 if "efficiency" in path or path == "pim.contention" else 2
        value = 1 if path == "pim.contention" else leaf * factor
        changed = hardware.numeric_fields(hardware.set_fields(system, {path: value}))
        np.testing.assert_allclose(changed[path], value)
        others = [p for p in paths if p != path and not np.array_equal(changed[p], paths[p])]
        assert not others
    static = {"pim.order": "matrix_outer", "num_gpus": 8, "pim.timing.faw": 16e-9}
    changed = hardware.set_fields(system, static)
    same = system.replace(pim=dict(order="matrix_outer", timing=dict(faw=16e-9)), num_gpus=8)
    assert eqx.tree_equal(changed, same)


def test_bad_values_name_the_field(system):
    with raises("unknown field 'contention'; did you mean 'pim.contention'"):
        hardware.set_fields(system, {"contention": 1})
    with raises("pim.contention = 'much': allowed is a number"):
        hardware.set_fields(system, {"pim.contention": "much"})
    with raises("GPU has no field 'hbm_bandwith'; did you mean 'hbm_bandwidth'"):
        system.replace(gpu=dict(hbm_bandwith=1.0))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with raises(f"GPU.hbm_bandwidth = {bad}: allowed is"):
            system.replace(gpu=dict(hbm_bandwidth=bad))
    with raises("BankPIM.contention = 1.5: allowed is [0, 1]"):
        system.replace(pim=dict(contention=1.5))
    with raises("BankPIM.macs_per_unit = 1.5: allowed is a whole number"):
        system.replace(pim=dict(macs_per_unit=1.5))
    with raises("BankPIM.count_gwrite = 'false': allowed is one of True, False"):
        system.replace(pim=dict(count_gwrite="false"))
    with raises("Link.dedup = 1: allowed is one of True, False"):
        Link(bandwidth=1.0, latency=0.0, dedup=1)
    for bad in (0, -1, 2.0, True):
        with raises(f"System.num_gpus = {bad}"):
            system.replace(num_gpus=bad)
    with raises("System.attention_tp = 3: allowed is a divisor of 4"):
        system.replace(attention_tp=3)


def test_a_system_is_built_and_swept_under_jit(system):
    @jax.jit
    def time(bandwidth):
        gpu = GPU(flops_per_s=1.0, flops_per_s_8bit=2.0, hbm_bandwidth=bandwidth, hbm_bytes=1.0)
        pim = RatePIM(internal_bandwidth=bandwidth)
        link = Link(bandwidth=1.0, latency=0.0)
        built = System(gpu=gpu, pim=pim, link=link, num_gpus=2, attention_tp=2)
        return built.gpu.effective_bandwidth, built.replace(num_gpus=4).pim.flops_per_s

    rates = jnp.array([1.0, 2.0])
    for result in jax.vmap(time)(rates):
        np.testing.assert_allclose(result, rates)
    # Bad rates pass while traced; the status of a result speaks for them.
    assert np.isfinite(time(-1.0)[0])


TABLE = """outputs,inputs,tokens,order,ns,pj
64,32,1,token_outer,100,7
64,32,4,token_outer,400,28
64,32,2,token_outer,180,14
64,32,1,row_stationary,90,7
32,64,3,token_outer,50,1
"""


def write(tmp_path, text):
    path = tmp_path / "gemv.csv"
    path.write_text(text)
    return path


@pytest.fixture
def table(tmp_path, system):
    return hardware.load_pim_table(write(tmp_path, TABLE), system.pim)


def test_table_interpolates_within_its_range(table, system):
    time = jax.jit(jax.vmap(lambda n: table.gemv_time(64, 32, n, **BITS)))
    times = time(jnp.array([-1, 0, 1, 2, 3, 4, 5])) * 1e9
    np.testing.assert_allclose(times, [np.nan, 0, 100, 180, 290, 400, np.nan], rtol=1e-5)
    assert table.max_tokens(64, 32) == 4
    assert np.isnan(table.gemv_time(32, 64, 1, **BITS))
    np.testing.assert_allclose(table.gemv_energy(64, 32, 3), 21e-12, rtol=1e-5)
    other = table.replace(order="row_stationary")
    np.testing.assert_allclose(other.gemv_time(64, 32, 1, **BITS), 90e-9, rtol=1e-6)
    np.testing.assert_allclose(table.flops_per_s, system.pim.flops_per_s)
    np.testing.assert_allclose(table.token_bytes(64, 32, **BITS), 256)


def test_table_extrapolates_on_request(tmp_path, system):
    path = write(tmp_path, TABLE.replace("32,64,3,token_outer,50,1\n", "").replace(",pj", ",watt"))
    path.write_text(path.read_text().replace("64,32,1,row_stationary,90,7\n", ""))
    table = hardware.load_pim_table(path, system.pim, extrapolate=True)
    np.testing.assert_allclose(table.gemv_time(64, 32, 10, **BITS), 1060e-9, rtol=1e-5)
    assert np.isnan(table.gemv_energy(64, 32, 2))
    with raises("extrapolate", "64 x 32 row_stationary has a single row"):
        hardware.load_pim_table(write(tmp_path, TABLE), system.pim, extrapolate=True)


def test_table_holds_one_precision(table):
    with raises("16-bit weights", "not 8.0"):
        table.gemv_time(64, 32, 1, weight_bits=8.0, activation_bits=16.0)
    time = jax.jit(lambda bits: table.gemv_time(64, 32, 1, weight_bits=bits, activation_bits=16.0))
    assert np.isnan(time(8.0)) and np.isfinite(time(16.0))


def test_share_of_a_table_follows_the_base(tmp_path):
    base = RatePIM(internal_bandwidth=1e12)
    table = hardware.load_pim_table(write(tmp_path, TABLE), base)
    times = [table.fraction(groups).gemv_time(64, 32, 2, **BITS) for groups in (1, 4)]
    np.testing.assert_allclose(np.asarray(times) * 1e9, [180, 720], rtol=1e-5)
    np.testing.assert_allclose(table.fraction(2).fraction(2).flops_per_s, 0.25e12, rtol=1e-6)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("order,ns", "order,us", ("gemv.csv, line 1: missing column 'ns'",)),
        ("2,token_outer,180", "2,token_outer,fast", ("gemv.csv, line 4, column ns: 'fast'",)),
        ("32,4,token", "32,1,token", ("gemv.csv, line 3, column tokens: second row",)),
        ("32,4,token", "32,0,token", ("line 3, column tokens: 0", "at least 1")),
        ("32,4,token", "32,2.5,token", ("line 3, column tokens: 2.5", "whole number")),
        ("400,28", "nan,28", ("line 3, column ns: nan", "finite")),
        ("50,1", "50", ("line 6, column pj: None is not a number",)),
        ("4,token_outer", "4,token_inner", ("line 3, column order", "did you mean 'token_outer'")),
        (TABLE, "outputs,inputs,tokens,order,ns\n", ("gemv.csv, line 1: the table has no rows",)),
        (TABLE, "", ("gemv.csv, line 1: missing column 'outputs'",)),
    ],
)
def test_table_errors_name_file_line_and_column(tmp_path, system, old, new, words):
    with raises(*words):
        hardware.load_pim_table(write(tmp_path, TABLE.replace(old, new)), system.pim)


def test_missing_shapes_and_orders_are_named(tmp_path, table, system):
    with raises("no PIM times for 8 x 8 token_outer (known: 64 x 32 token_outer,"):
        table.gemv_time(8, 8, 1, **BITS)
    with raises("no rows for 'matrix_outer' (known: row_stationary, token_outer)"):
        hardware.load_pim_table(write(tmp_path, TABLE), system.pim, order="matrix_outer")
