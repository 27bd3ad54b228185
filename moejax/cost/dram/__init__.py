"""GEMV on processing-in-memory, DRAM command by DRAM command: a truth for cost tables to learn.

Reading guide:

- `_timing`: `ChannelTiming`, all times between commands, and the table of which pair needs which.
- `_engine`: `issue`, the scan that sends every command of a stream as early as its resources allow.
- `_streams`: the commands of a GEMV on three machines.
- `_gemv`: `gemv_time`, `gemv_times` for all counts, `expert_times` at all refresh phases.
- `_contention`: GPU reads in between.
- `_measured`: `measured_pim`, all of it as a PIM for `moejax.evaluate`.

It imports nothing from the cost table or the rooflines, so that they can be held against it. The
closed form is `moejax.hardware.BankPIM.gemv_time`.
"""

from moejax.cost.dram._contention import Contention as Contention
from moejax.cost.dram._contention import measure_contention as measure_contention
from moejax.cost.dram._engine import Issued as Issued
from moejax.cost.dram._engine import Stream as Stream
from moejax.cost.dram._engine import issue as issue
from moejax.cost.dram._gemv import ORDERS as ORDERS
from moejax.cost.dram._gemv import expert_times as expert_times
from moejax.cost.dram._gemv import gemv_time as gemv_time
from moejax.cost.dram._gemv import gemv_times as gemv_times
from moejax.cost.dram._measured import measured_pim as measured_pim
from moejax.cost.dram._timing import KERNELS as KERNELS
from moejax.cost.dram._timing import ChannelTiming as ChannelTiming
from moejax.cost.dram._timing import Clocks as Clocks
from moejax.cost.dram._timing import in_clocks as in_clocks


__all__ = [
    "KERNELS",
    "ORDERS",
    "ChannelTiming",
    "Clocks",
    "Contention",
    "Issued",
    "Stream",
    "expert_times",
    "gemv_time",
    "gemv_times",
    "in_clocks",
    "issue",
    "measure_contention",
    "measured_pim",
]
