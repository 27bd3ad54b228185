"""Near-memory systems by name, a source beside each number."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moejax.hardware._nmp import NMPSystem
from moejax.hardware._source import Source, cite


_PAPER = "HDA-MoE (arXiv 2609.08682), section VI-B"
_CODE = "authors' public code of HD-MoE (arXiv 2509.09420)"
# The fat-tree of 32 endpoints in the authors' code.
_FAT_TREE = (4, 4, 2)


@dataclass(frozen=True)
class NMPPreset:
    """A near-memory system of the registry.

    **Arguments:**

    - `name`, `description`: for people.
    - `network`, `shape`: as `NMPSystem`.
    - `sources`: rows `(field, value, source, confidence, note)`.
    """

    name: str
    description: str
    network: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Numbers by field."""
        return {row.field: row.value for row in self.sources}

    def build(self) -> NMPSystem:
        """The `NMPSystem`."""
        values = {row.field: row.value for row in self.sources if "." not in row.field}
        return NMPSystem(network=self.network, shape=self.shape, name=self.name, **values)


# nmp-4x8-2.5t-75g, nmp-torus-4x8-5t-50g, nmp-fat-tree-32-5t-50g
_NAME = re.compile(
    r"nmp-(?:(?P<torus>torus-)?(?P<rows>[1-9]\d*)x(?P<cols>[1-9]\d*)|fat-tree-32)"
    r"-(?P<tera>\d+(?:\.\d+)?)t-(?P<giga>\d+(?:\.\d+)?)g"
)


def nmp_preset(name: str, description: str = "", *, published: bool = False) -> NMPPreset | None:
    """The preset `nmp-[torus-]<rows>x<cols>-<T>t-<G>g` or `nmp-fat-tree-32-<T>t-<G>g` with T
    TFLOP/s a node and G GB/s a link, or None for another kind of name."""
    match = _NAME.fullmatch(name)
    if match is None or not float(match["tera"]) or not float(match["giga"]):
        return None
    network = "fat_tree" if match["rows"] is None else "torus" if match["torus"] else "mesh"
    tree = network == "fat_tree"
    shape = _FAT_TREE if tree else (int(match["rows"]), int(match["cols"]))
    text = "32-node fat-tree" if tree else f"{shape[0]} x {shape[1]} {network}"
    text += f", {match['tera']} TFLOP/s a node, {match['giga']} GB/s a link"
    chosen = cite(
        _PAPER if published else "the name",
        "high",
        flops_per_s=float(match["tera"]) * 1e12,
        link_bandwidth=float(match["giga"]) * 1e9,
    )
    return NMPPreset(name, description or text, network, shape, chosen + _common())


def _common() -> tuple[Source, ...]:
    return (
        *cite(_CODE, "high", "the same for every setting", dram_bandwidth=625e9),
        *cite(_CODE, "high", "start of a broadcast chunk at a hop", start_time=1e-7),
        *cite(_CODE, "high", "its simulation has bandwidth only", hop_latency=0.0),
        *cite(
            "assumed: ten cycles at 1 GHz to compare all experts and take the k largest",
            "low",
            "the papers name no time of their gate",
            gate_step_time=1e-8,
        ),
        *cite(
            "chosen: Qwen2-57B-A14B in 16 bits, the paper's largest model, fits on its 16 nodes",
            "low",
            "not stated in the paper",
            dram_bytes=8e9,
        ),
    )


def _published() -> dict[str, NMPPreset]:
    described: Mapping[str, str] = {
        "nmp-4x8-2.5t-75g": "HDA-MoE's compute-poor setting",
        "nmp-4x8-5t-50g": "HDA-MoE's middle setting",
        "nmp-4x8-10t-25g": "HDA-MoE's compute-rich setting",
        "nmp-4x4-5t-50g": "its small mesh",
        "nmp-8x8-5t-50g": "its large mesh",
        "nmp-torus-4x8-5t-50g": "its torus",
        "nmp-fat-tree-32-5t-50g": "its fat-tree",
    }
    found = {}
    for name, text in described.items():
        made = nmp_preset(name, published=True)
        assert made is not None
        found[name] = NMPPreset(
            name, f"{text}: {made.description}", made.network, made.shape, made.sources
        )
    return found


NMP_SYSTEMS: dict[str, NMPPreset] = _published()
