"""Hardware: GPUs with processing-in-memory (PIM) inside their HBM, linked into systems; and
near-memory systems of DRAM on logic, without GPUs.

Reading guide:

- `_system`: `GPU`, `Link` and the `System` of them.
- `_pim`: what every PIM owes (`AbstractPIM`), and one known by two rates (`RatePIM`).
- `_bank_pim`, `_dram`: a unit beside every bank, timed command by command.
- `_table_pim`: times from a CSV table.
- `_nmp`, `_nmp_presets`: systems without GPUs, of nodes that compute below their own DRAM.
- `_stack`: several systems as one batched one.
- `_fields`: checked fields, and dotted paths to reach each (`numeric_fields`, `set_fields`).
- `_gpu_presets`, `_pim_presets`, `_presets`: registries, a source beside each number; `get`.

Every number is a traced array; names, orders, shapes and `num_gpus` are static. SI units
throughout.
"""

from moejax.hardware._bank_pim import BankPIM as BankPIM
from moejax.hardware._dram import DRAMTiming as DRAMTiming
from moejax.hardware._dram import refresh_factor as refresh_factor
from moejax.hardware._dram import refresh_stall as refresh_stall
from moejax.hardware._fields import numeric_fields as numeric_fields
from moejax.hardware._fields import set_fields as set_fields
from moejax.hardware._gpu_presets import GPUS as GPUS
from moejax.hardware._nmp import NMPSystem as NMPSystem
from moejax.hardware._nmp_presets import NMPPreset as NMPPreset
from moejax.hardware._pim import AbstractPIM as AbstractPIM
from moejax.hardware._pim import RatePIM as RatePIM
from moejax.hardware._pim_presets import PIMS as PIMS
from moejax.hardware._presets import HARDWARE as HARDWARE
from moejax.hardware._presets import SystemPreset as SystemPreset
from moejax.hardware._presets import get as get
from moejax.hardware._presets import preset as preset
from moejax.hardware._source import HardwarePreset as HardwarePreset
from moejax.hardware._source import Source as Source
from moejax.hardware._stack import stack as stack
from moejax.hardware._system import GPU as GPU
from moejax.hardware._system import Link as Link
from moejax.hardware._system import System as System
from moejax.hardware._table_pim import GEMVCurve as GEMVCurve
from moejax.hardware._table_pim import TablePIM as TablePIM
from moejax.hardware._table_pim import load_pim_table as load_pim_table


__all__ = [
    "GPU",
    "GPUS",
    "HARDWARE",
    "PIMS",
    "AbstractPIM",
    "BankPIM",
    "DRAMTiming",
    "GEMVCurve",
    "HardwarePreset",
    "Link",
    "NMPPreset",
    "NMPSystem",
    "RatePIM",
    "Source",
    "System",
    "SystemPreset",
    "TablePIM",
    "get",
    "load_pim_table",
    "numeric_fields",
    "preset",
    "refresh_factor",
    "refresh_stall",
    "set_fields",
    "stack",
]
