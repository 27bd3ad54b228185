"""GEMV timing of bank PIM: published-style table, plain-Python twin, transforms."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import hardware
from moejax.hardware import BankPIM, DRAMTiming, RatePIM, refresh_factor, refresh_stall
from moejax.hardware._bank_pim import LAYOUTS, ORDERS, ceil_div
from tests.oracles.pim_timing import Device, gemv_ns


BITS = dict(weight_bits=16.0, activation_bits=16.0)

# Per-expert times in ns of the default device with P_k chosen per token count: hidden,
# intermediate, roofline, P_k of both matrices, T(1, 2, 3, 4, 8, 16) matrix_outer and
# row_stationary with 16 resident vectors, T(1)/roofline at 16, 8 and 4 banks per tFAW.
TABLE = {
    "gpt-oss-120b": (2880, 2880, 759, (4, 4))
    + ([1896, 3806, 5715, 7624, 15262, 30536], [1896, 2894, 3902, 4911, 8945, 17013])
    + ((1.96, 2.50, 3.69),),
    "qwen3-30b-a3b": (2048, 768, 144, (8, 2))
    + ([367, 715, 1061, 1405, 2781, 5531], [367, 538, 735, 929, 1756, 3408])
    + ((1.94, 2.55, 3.92),),
    "qwen3-next-80b": (2048, 512, 96, (4, 2))
    + ([239, 428, 609, 789, 1509, 2951], [239, 354, 486, 622, 1211, 2388])
    + ((1.90, 2.49, 3.86),),
    "qwen3.5-397b": (4096, 1024, 384, (8, 2))
    + ([846, 1705, 2564, 3423, 6860, 13732], [846, 1307, 1797, 2292, 4269, 8224])
    + ((1.76, 2.20, 3.22),),
    "mixtral-8x7b": (4096, 14336, 5376, (4, 16))
    + ([11944, 23901, 35858, 47815, 95643, 191300], [11944, 18089, 24235, 30380, 54963, 104127])
    + ((1.72, 2.22, 3.24),),
    "mixtral-8x22b": (6144, 16384, 9216, (4, 16))
    + ([20451, 40916, 61381, 81845, 163703, 327420], [20451, 30886, 41320, 51755, 93492, 176968])
    + ((1.71, 2.22, 3.24),),
    "deepseek-v3": (7168, 2048, 1344, (16, 4))
    + ([2993, 5998, 9004, 12010, 24033, 48079], [2993, 4575, 6174, 7776, 14183, 26997])
    + ((1.74, 2.23, 3.24),),
    # The table has P_k = 16 for gate and up; 4 takes exactly as long, and ties go to the smaller.
    "deepseek-v2-lite": (2048, 1408, 264, (4, 4))
    + ([659, 1331, 2004, 2676, 5366, 10744], [659, 987, 1314, 1663, 3083, 5921])
    + ((1.90, 2.50, 3.74),),
    "qwen2-57b-a14b": (3584, 2560, 840, (8, 8))
    + ([1934, 3880, 5827, 7774, 15560, 31134], [1934, 2924, 3948, 4972, 9068, 17259])
    + ((1.79, 2.30, 3.39),),
    "olmoe-1b-7b": (2048, 1024, 192, (4, 2))
    + ([417, 821, 1217, 1614, 3200, 6373], [417, 648, 906, 1167, 2230, 4357])
    + ((1.76, 2.17, 3.19),),
}


def default_pim(**changes):
    return hardware.PIMS["hbm-pim"].build().replace(**changes)


def make_pim(device, **fields):
    names = ("rcd", "rp", "ras", "rtp", "ccd_short", "ccd_long", "faw", "cl", "cwl", "burst")
    names += ("rfc", "refi", "mac_cadence")
    geometry = ("banks", "macs_per_unit", "row_bytes", "burst_bytes", "banks_per_faw")
    geometry += ("fill_columns", "global_buffer_vectors")
    return BankPIM(
        stacks=1,
        pseudo_channels_per_stack=device.channels,
        timing=DRAMTiming(**{name: getattr(device, name) * 1e-9 for name in names}),
        **{name: getattr(device, name) for name in geometry},
        **fields,
    )


@pytest.mark.parametrize("model", TABLE)
def test_table_of_expert_times(model):
    hidden, intermediate, roofline, _, matrix_outer, row_stationary, ratios = TABLE[model]
    pim = default_pim(layout="per_count", banks_per_faw=8, global_buffer_vectors=16)
    for order, expected in (("matrix_outer", matrix_outer), ("row_stationary", row_stationary)):
        device = pim.replace(order=order)
        times = [device.expert_time(hidden, intermediate, n, **BITS) for n in (1, 2, 3, 4, 8, 16)]
        np.testing.assert_allclose(np.stack(times) * 1e9, expected, rtol=5e-3)

    roofline_time = 6 * hidden * intermediate / pim.flops_per_s
    np.testing.assert_allclose(roofline_time * 1e9, roofline, rtol=5e-3)
    one = lambda a: pim.replace(banks_per_faw=a).expert_time(hidden, intermediate, 1, **BITS)
    measured = [one(banks_per_faw) / roofline_time for banks_per_faw in (16, 8, 4)]
    np.testing.assert_allclose(measured, ratios, rtol=5e-3)
    assert 2.1 < measured[1] < 2.6


@pytest.mark.parametrize("model", TABLE)
def test_table_of_reduction_groups(model):
    hidden, intermediate, _, groups, *_ = TABLE[model]
    pim = default_pim()
    chosen = [
        int(pim.reduction_groups_of(outputs, inputs, **BITS))
        for outputs, inputs in ((2 * intermediate, hidden), (hidden, intermediate))
    ]
    assert chosen == list(groups)


def test_tie_between_reduction_groups_is_exact():
    four, sixteen = (
        default_pim(reduction_groups=groups).gemv_time(2816, 2048, 1, **BITS) for groups in (4, 16)
    )
    np.testing.assert_allclose(four, sixteen, rtol=1e-6)


def test_output_sliced_mapping_ratios():
    # T(1)/roofline of the mapping that gives channels different outputs only, 16 and 8 per tFAW.
    published = {
        "gpt-oss-120b": (2.9, 3.6),
        "qwen3.5-397b": (3.7, 4.3),
        "qwen3-30b-a3b": (5.4, 6.3),
        "qwen3-next-80b": (7.2, 8.3),
    }
    for model, expected in published.items():
        hidden, intermediate = TABLE[model][:2]
        for banks_per_faw, ratio in zip((16, 8), expected):
            pim = default_pim(reduction_groups=1, banks_per_faw=banks_per_faw)
            time = pim.expert_time(hidden, intermediate, 1, **BITS)
            roofline_time = 6 * hidden * intermediate / pim.flops_per_s
            np.testing.assert_allclose(time / roofline_time, ratio, atol=0.051)


half_ns = lambda low, high: st.integers(2 * low, 2 * high).map(lambda n: n / 2)

devices = st.builds(
    Device,
    channels=st.sampled_from([1, 2, 6, 8, 12, 32, 40]),
    banks=st.sampled_from([1, 4, 8, 16, 32]),
    macs_per_unit=st.sampled_from([4, 8, 16, 24, 32]),
    row_bytes=st.sampled_from([256, 1024, 2048]),
    burst_bytes=st.sampled_from([32, 64]),
    banks_per_faw=st.sampled_from([3, 4, 8, 16]),
    fill_columns=st.integers(1, 8),
    global_buffer_vectors=st.integers(1, 5),
    rcd=half_ns(5, 20),
    rp=half_ns(5, 20),
    ras=half_ns(20, 200),
    rtp=half_ns(2, 8),
    ccd_short=half_ns(1, 2),
    ccd_long=half_ns(2, 5),
    faw=half_ns(10, 40),
    cl=half_ns(5, 20),
    cwl=half_ns(2, 8),
    burst=half_ns(1, 2),
    rfc=half_ns(100, 400),
    refi=half_ns(1000, 4000),
    mac_cadence=half_ns(1, 5),
)


@settings(max_examples=15)
@given(
    device=devices,
    outputs=st.integers(1, 700),
    inputs=st.integers(1, 700),
    tokens=st.integers(0, 11),
    weight_bits=st.sampled_from([4, 4.25, 8, 16]),
    activation_bits=st.sampled_from([8, 16]),
)
def test_agrees_with_the_twin(device, outputs, inputs, tokens, weight_bits, activation_bits):
    bits = dict(weight_bits=weight_bits, activation_bits=activation_bits)
    with jax.enable_x64(True):
        pim = make_pim(device)
        for order in ORDERS:
            for layout in LAYOUTS:
                variant = pim.replace(order=order, layout=layout)
                time = variant.gemv_time(outputs, inputs, tokens, **bits)
                expected, _ = gemv_ns(device, outputs, inputs, tokens, order, layout, **bits)
                np.testing.assert_allclose(time * 1e9, expected, rtol=1e-9)


@given(quotient=st.integers(1, 5000), denominator=st.integers(1, 3000), shift=st.integers(-1, 1))
@settings(max_examples=50)
def test_ceil_div_is_exact_in_float32(quotient, denominator, shift):
    numerator = quotient * denominator + shift
    assert int(ceil_div(float(numerator), float(denominator))) == -(-numerator // denominator)


def test_one_resident_vector_is_token_outer_without_the_last_read():
    tokens = 7
    rows = default_pim(order="row_stationary").gemv_time(5760, 2880, tokens, **BITS)
    serial = default_pim().gemv_time(5760, 2880, tokens, **BITS)
    hidden_reads = (tokens - 1) * 6e-9 / (1 - 350 / 3900)
    np.testing.assert_allclose(rows, serial - hidden_reads, rtol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_one_compilation_for_many_values_and_finite_gradients(order):
    pim = default_pim(order=order, global_buffer_vectors=4)
    traces = []

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def time(pim_and_bits, tokens):
        traces.append(1)
        pim, bits = pim_and_bits
        return 1e6 * pim.expert_time(2048, 768, tokens, weight_bits=bits, activation_bits=16.0)

    values = set()
    for step in range(50):
        changed = pim.replace(
            macs_per_unit=16 + step % 3,
            stacks=8 + step % 2,
            timing=dict(ccd_long=(2 + step / 50) * 1e-9, faw=(30 - step / 5) * 1e-9),
        )
        bits = jnp.asarray([4.25, 8.0, 16.0][step % 3])
        value, gradients = time((changed, bits), jnp.int32(1 + step % 5))
        values.add(float(value))
        for leaf in jax.tree.leaves(gradients):
            assert np.all(np.isfinite(leaf))
    assert len(traces) == 1
    assert len(values) > 40


def test_one_compilation_for_many_bandwidths():
    traces = []

    @eqx.filter_jit
    def time(pim, bits):
        traces.append(1)
        return pim.gemv_time(64, 64, 3, weight_bits=bits, activation_bits=16.0)

    for step in range(50):
        time(RatePIM(internal_bandwidth=1e12 * (step + 1)), jnp.asarray(4.0 + step))
    assert len(traces) == 1


def test_gradient_equals_a_difference():
    with jax.enable_x64(True):
        pim = default_pim()

        def time(cadence):
            changed = pim.replace(timing=dict(mac_cadence=cadence))
            return changed.expert_time(2880, 2880, 3, **BITS)

        step = 1e-13
        difference = (time(2e-9 + step) - time(2e-9 - step)) / (2 * step)
        np.testing.assert_allclose(jax.grad(time)(2e-9), difference, rtol=1e-6)


def test_refresh_stall_has_the_mean_of_the_factor():
    with jax.enable_x64(True):
        timing = default_pim().timing
        between = timing.refi - timing.rfc
        # Midpoints of equal slices of the phase range.
        phase = (jnp.arange(200_000) + 0.5) / 200_000 * between
        for time in (300e-9, 1.7e-6, 33e-6):
            slowed = time + jnp.mean(refresh_stall(time, phase, timing))
            np.testing.assert_allclose(slowed / time, 1 / (1 - 350 / 3900), rtol=2e-5)
            np.testing.assert_allclose(slowed / time, refresh_factor(timing), rtol=2e-5)


def test_no_tokens_take_no_time_and_bad_numbers_are_nan_under_tracing():
    pim = default_pim()

    @jax.jit
    def time(tokens, macs_per_unit, num_groups):
        share = pim.fraction(num_groups).replace(macs_per_unit=macs_per_unit)
        return share.gemv_time(256, 256, tokens, **BITS)

    assert time(0, 16, 1) == 0
    assert np.isfinite(time(3, 16, 1))
    for bad in ((-1, 16, 1), (3, 0, 1), (3, 2048, 1), (3, 16, 3)):
        assert np.isnan(time(*bad))


def test_a_share_of_the_channels():
    pim = default_pim()
    whole = pim.gemv_time(5760, 2880, 1, **BITS)
    eighth = pim.fraction(8).gemv_time(5760, 2880, 1, **BITS)
    expected, _ = gemv_ns(Device(channels=32), 5760, 2880, 1, "token_outer", "fixed")
    np.testing.assert_allclose(eighth * 1e9, expected, rtol=1e-5)
    assert 6 < eighth / whole < 8
    with pytest.raises(ValueError, match="num_groups = 3: allowed is a divisor of the 256"):
        pim.fraction(3)
    rate = RatePIM(internal_bandwidth=1e12)
    np.testing.assert_allclose(
        rate.fraction(4).gemv_time(64, 64, 2, **BITS), 4 * rate.gemv_time(64, 64, 2, **BITS)
    )


def test_bus_traffic_of_a_token():
    pim = default_pim()
    np.testing.assert_allclose(pim.token_bytes(2880, 1000, **BITS), 2 * 2880 * 2)
    # One reduction group: all 256 channels are written all inputs (1.5 MB for 2880 of them), and
    # every output comes back once.
    sliced = pim.replace(count_gwrite=True, reduction_groups=1)
    expected = 256 * 2 * (2880 + 1000) + 2 * (2 * 1000 + 2880)
    np.testing.assert_allclose(sliced.token_bytes(2880, 1000, **BITS), expected)
    # P_k = 4 for both matrices of gpt-oss: a quarter of the vector each, four partial sums.
    counted = pim.replace(count_gwrite=True)
    expected = 256 * 2 * (720 + 720) + 4 * 2 * (5760 + 2880)
    np.testing.assert_allclose(counted.token_bytes(2880, 2880, **BITS), expected)
    bits = dict(weight_bits=8.0, activation_bits=8.0)
    np.testing.assert_allclose(pim.token_bytes(2880, 1000, **bits), 2 * 2880)


def test_rate_pim_reuses_a_weight_over_flop_per_byte_tokens():
    bank = RatePIM(internal_bandwidth=128e12)
    logic = RatePIM(internal_bandwidth=32e12, flop_per_byte=8)
    stream = 512 * 1024 * 2
    for tokens in (1, 3, 8, 20):
        serial = tokens * stream / 128e12
        np.testing.assert_allclose(bank.gemv_time(512, 1024, tokens, **BITS), serial, rtol=1e-6)
        reused = max(1, tokens / 8) * stream / 32e12
        np.testing.assert_allclose(logic.gemv_time(512, 1024, tokens, **BITS), reused, rtol=1e-6)
    assert bank.gemv_time(512, 1024, 0, **BITS) == 0
    half = bank.gemv_time(512, 1024, 5, weight_bits=8.0, activation_bits=16.0)
    np.testing.assert_allclose(2 * half, bank.gemv_time(512, 1024, 5, **BITS), rtol=1e-6)


def test_turn_time_is_paid_per_token():
    plain, turning = default_pim(), default_pim(turn_time=1e-6)
    for pim in (plain, turning):
        assert pim.expert_time(256, 128, 0, **BITS) == 0
    added = turning.expert_time(256, 128, 3, **BITS) - plain.expert_time(256, 128, 3, **BITS)
    np.testing.assert_allclose(added, 3e-6, rtol=1e-4)


def test_eager_mistakes_are_named():
    pim = default_pim()
    with pytest.raises(ValueError, match="tokens = -1"):
        pim.gemv_time(8, 8, -1, **BITS)
    with pytest.raises(ValueError, match="outputs = 0: allowed is 1 or more"):
        pim.gemv_time(0, 8, 1, **BITS)
    with pytest.raises(ValueError, match="BankPIM.reduction_groups = 3: allowed is a divisor"):
        pim.replace(reduction_groups=3)
    with pytest.raises(ValueError, match="macs_per_unit = 1024.*row of 1024"):
        pim.replace(macs_per_unit=1024)
    with pytest.raises(ValueError, match="did you mean 'token_outer'"):
        pim.replace(order="token_first_outer")
    with pytest.raises(ValueError, match="DRAMTiming.rfc = .*allowed is less than refi"):
        pim.replace(timing=dict(rfc=4e-6))
