"""Systems: a curated registry, any `<gpus>x<gpu>-<pim>` composed of the two others, and the
near-memory systems of `_nmp_presets`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moejax._checks import lookup
from moejax.hardware._fields import set_fields
from moejax.hardware._gpu_presets import GPUS
from moejax.hardware._nmp_presets import NMP_SYSTEMS, NMPPreset, nmp_preset
from moejax.hardware._pim_presets import PIMS
from moejax.hardware._source import Source, cite
from moejax.hardware._system import Link, System


@dataclass(frozen=True)
class SystemPreset:
    """`num_gpus` GPUs of one kind with PIM in their HBM.

    **Arguments:**

    - `name`, `description`: for people.
    - `gpu`, `pim`: keys of `GPUS` and `PIMS`.
    - `num_gpus`: GPUs of the system.
    - `num_gpus_source`: source, confidence of that number.
    - `changed`: rows that replace numbers of the parts.
    """

    name: str
    description: str
    gpu: str
    pim: str
    num_gpus: int
    num_gpus_source: tuple[str, str] = ("chosen", "high")
    changed: tuple[Source, ...] = field(default=())

    @property
    def sources(self) -> tuple[Source, ...]:
        """Rows `(field, value, source, confidence, note)` of the whole system."""
        rows = cite(*self.num_gpus_source, num_gpus=self.num_gpus)
        rows += cite(
            "Sieve (arXiv 2605.11277), a DeepSeek-R1 layer on a B200", "high", scheduler_time=20e-6
        )
        # Those two come from the GPU.
        replaced = ("stacks", "external_bandwidth")
        pim_rows = [row for row in PIMS[self.pim].sources if row.field not in replaced]
        for row in GPUS[self.gpu].sources:
            owner = "pim." if row.field == "stacks" else "gpu."
            rows += (row if row.field.startswith("link.") else _prefix(owner, row),)
        rows += tuple(_prefix("pim.", row) for row in pim_rows)
        changed = {row.field: row for row in self.changed}
        return tuple(changed.get(row.field, row) for row in rows)

    def build(self) -> System:
        """The `System`, with as many PIM stacks per GPU as the GPU has HBM stacks."""
        gpu = GPUS[self.gpu]
        link = Link(bandwidth=gpu.values["link.bandwidth"], latency=gpu.values["link.latency"])
        pim = PIMS[self.pim].build(host=gpu)
        system = System(gpu=gpu.build(), pim=pim, link=link, num_gpus=self.num_gpus, name=self.name)
        return set_fields(system, {row.field: row.value for row in self.changed})


def _prefix(owner: str, row: Source) -> Source:
    return row._replace(field=owner + row.field)


# Short names used in names of systems.
_ALIASES: Mapping[str, str] = {
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "a100": "a100-80g-sxm",
    "samsung-pim": "samsung-hbm2-pim",
}


def _compose(name: str, description: str = "", **fields: Any) -> SystemPreset | None:
    count, _, rest = name.partition("x")
    if not re.fullmatch("[1-9][0-9]*", count):
        return None
    # Longest first: "h100-sxm-attacc" is no PIM "sxm-attacc" on an "h100".
    for gpu in sorted((*GPUS, *_ALIASES), key=len, reverse=True):
        key = _ALIASES.get(gpu, gpu)
        if rest.startswith(gpu + "-") and key in GPUS:
            pim = rest.removeprefix(gpu + "-")
            pim = _ALIASES.get(pim, pim)
            text = description or f"{count} x {key} with {pim}"
            lookup("PIM", pim, PIMS)
            return SystemPreset(name, text, key, pim, int(count), **fields)
    return None


def _curated() -> dict[str, SystemPreset]:
    paper = dict(num_gpus_source=("Sieve (arXiv 2605.11277)", "high"))
    described = {
        "1xb200-hbm-pim": ("Sieve's system for Qwen3-30B-A3B", paper),
        "2xb200-hbm-pim": ("Half of Sieve's GPT-OSS system", {}),
        "4xb200-hbm-pim": ("Sieve's system for GPT-OSS-120B", paper),
        "8xb200-hbm-pim": ("Sieve's system for Qwen3.5-397B-A17B", paper),
        "4xb200-hbm3-6400-pim": ("The same geometry on slower DRAM", {}),
        "1xb200-duplex-bank-pim": ("", {}),
        "4xb200-duplex-bank-pim": ("", {}),
        "8xb200-duplex-bank-pim": ("", {}),
        "1xb200-duplex-logic-pim": ("", {}),
        "4xb200-duplex-logic-pim": ("", {}),
        "8xb200-duplex-logic-pim": ("", {}),
        "8xh100-attacc": ("", {}),
        "8xh200-hbm-pim": ("", {}),
        "1xa100-samsung-pim": ("", {}),
        "8xmi300x-hbm-pim": ("", {}),
    }
    systems = {}
    for name, (description, fields) in described.items():
        systems[name] = _compose(name, description, **fields)
    note = "cannot hold Qwen3.5-397B-A17B in 16 bits on 8 GPUs"
    systems["table1-secondhand"] = SystemPreset(
        "table1-secondhand",
        "Sieve's Table 1 as a third-party reading note has it: 96 GB per GPU",
        "b200",
        "hbm-pim",
        4,
        num_gpus_source=("Sieve (arXiv 2605.11277), GPT-OSS-120B", "high"),
        changed=cite(
            "third-party reading note on Sieve's Table 1", "low", note, gpu__hbm_bytes=96e9
        )
        + cite("third-party reading note on Sieve's Table 1", "low", gpu__hbm_bandwidth=8e12)
        + cite(
            "third-party reading note on Sieve's Table 1", "low", pim__pseudo_channels_per_stack=32
        ),
    )
    return systems


HARDWARE: dict[str, SystemPreset | NMPPreset] = {**_curated(), **NMP_SYSTEMS}


def preset(name: str) -> SystemPreset | NMPPreset:
    """The preset of a system by name: a key of `HARDWARE`, or a name of one of these forms.

    - `<gpus>x<gpu>-<pim>`, as in `16xh100-neupims`: GPU and PIM are keys of `GPUS` and `PIMS`;
        `h100`, `h200`, `a100` and `samsung-pim` are short for the longer names.
    - `nmp-[torus-]<rows>x<cols>-<T>t-<G>g` or `nmp-fat-tree-32-<T>t-<G>g`, as in
        `nmp-4x8-3t-60g`: nodes of T TFLOP/s, links of G GB/s.

    **Raises:** `ValueError` for an unknown name, naming the nearest.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    return nmp_preset(name) or _compose(name) or lookup("hardware", name, HARDWARE)


def get(name: str) -> Any:
    """The system of a given name; see `preset` for the names.

    **Returns:** a `System`, or an `NMPSystem` for names that begin with `nmp-`.
    """
    return preset(name).build()
