"""Near-memory systems: the registry, names, fields and checks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import hardware
from moejax.cli import main
from moejax.hardware import HARDWARE, NMPPreset, NMPSystem


NAMES = [name for name in HARDWARE if name.startswith("nmp-")]
# Of HDA-MoE's settings: FLOP/s of a node, B/s of a link.
SETTINGS = {
    "nmp-4x8-2.5t-75g": (2.5e12, 75e9, "mesh", (4, 8)),
    "nmp-4x8-5t-50g": (5e12, 50e9, "mesh", (4, 8)),
    "nmp-4x8-10t-25g": (10e12, 25e9, "mesh", (4, 8)),
    "nmp-4x4-5t-50g": (5e12, 50e9, "mesh", (4, 4)),
    "nmp-8x8-5t-50g": (5e12, 50e9, "mesh", (8, 8)),
    "nmp-torus-4x8-5t-50g": (5e12, 50e9, "torus", (4, 8)),
    "nmp-fat-tree-32-5t-50g": (5e12, 50e9, "fat_tree", (4, 4, 2)),
}


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


def test_the_settings_of_the_paper_are_there():
    assert list(SETTINGS) == NAMES
    for name, (flops, bandwidth, network, shape) in SETTINGS.items():
        system = hardware.get(name)
        assert isinstance(system, NMPSystem) and system.name == name
        assert (system.network, system.shape) == (network, shape)
        rates = [system.flops_per_s, system.link_bandwidth, system.dram_bandwidth]
        np.testing.assert_allclose(rates, [flops, bandwidth, 625e9])
        assert system.num_nodes == np.prod(shape)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_is_what_is_built(name):
    preset = hardware.preset(name)
    assert isinstance(preset, NMPPreset) and preset.description
    shown = {row.field: row for row in preset.sources}
    assert len(shown) == len(preset.sources)
    numbers = hardware.numeric_fields(preset.build())
    assert numbers.keys() == shown.keys()
    for path, row in shown.items():
        np.testing.assert_allclose(numbers[path], row.value, rtol=1e-6)
        assert row.source and row.confidence in ("high", "medium", "low")
    # The capacity is nobody's number, and says so.
    assert shown["dram_bytes"].confidence == "low"


def test_any_combination_has_a_name():
    made = hardware.get("nmp-torus-3x5-0.5t-12.5g")
    assert (made.network, made.shape, made.num_nodes) == ("torus", (3, 5), 15)
    np.testing.assert_allclose([made.flops_per_s, made.link_bandwidth], [0.5e12, 12.5e9])
    sources = {row.field: row.source for row in hardware.preset("nmp-1x2-1t-1g").sources}
    assert sources["flops_per_s"] == "the name"
    with raises("unknown hardware 'nmp-4x8-5t-50'; did you mean 'nmp-4x8-5t-50g'"):
        hardware.get("nmp-4x8-5t-50")
    for bad in ("nmp-4x0-5t-50g", "nmp-4x8-0t-50g", "nmp-fat-tree-64-5t-50g", "nmp-4x8x2-5t-50g"):
        with raises(f"unknown hardware '{bad}'"):
            hardware.get(bad)


def test_fields_change_and_are_checked():
    system = hardware.get("nmp-4x8-5t-50g")
    changed = hardware.set_fields(system, {"link_bandwidth": 1e9, "shape": (2, 3)})
    assert float(changed.link_bandwidth) == 1e9 and changed.num_nodes == 6
    with raises("NMPSystem.flops_per_s = 0.0: allowed is (0,"):
        system.replace(flops_per_s=0)
    with raises("NMPSystem.hop_latency = -1.0"):
        system.replace(hop_latency=-1.0)
    with raises("NMPSystem.network = 'fat-tree'", "did you mean 'fat_tree'"):
        system.replace(network="fat-tree")
    for shape in ((4,), (4, 0), (4, 8, 2), (4.0, 8)):
        with raises("NMPSystem.shape = ", "2 whole numbers"):
            system.replace(shape=shape)
    with raises("NMPSystem.shape = (4, 8)", "network of your own is 1 whole"):
        system.replace(network=print)
    with raises("3 whole numbers"):
        system.replace(network="fat_tree")


def test_rates_are_swept_without_retracing():
    system = hardware.get("nmp-4x8-5t-50g")
    traces = []

    @jax.jit
    def time(system, flops):
        traces.append(flops)
        return system.roofline_time(flops, 625e9)

    rates = jnp.array([2.5e12, 5e12])
    found = jax.vmap(lambda rate: time(system.replace(flops_per_s=rate), 5e12))(rates)
    # 2 s or 1 s of computing and 1 s of reading, over 32 nodes.
    np.testing.assert_allclose(found, [3 / 32, 2 / 32], rtol=1e-6)
    assert len(traces) == 1


def test_they_are_listed(capsys):
    assert main(["list", "hardware", "nmp-8x8-5t-50g"]) == 0
    out = capsys.readouterr().out
    assert "dram_bandwidth" in out and "HDA-MoE (arXiv 2609.08682), section VI-B" in out
