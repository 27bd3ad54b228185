"""Sweeps: any pure function of a configuration, over any number of configurations.

Read in this order: `Axis` (one quantity and its values) and what combines axes (`product`,
`zipped`, `conditional`, `samples` of `Range`s), `Sweep` (axes and a function), `run` and `load`.
Rows are the same however a sweep is cut up, on whatever number of devices and processes, and after
any interruption; `docs/storage.md` says how they are stored.
"""

from moejax.sweep._axes import Axis as Axis
from moejax.sweep._axes import logspace as logspace
from moejax.sweep._cluster import join_cluster as join_cluster
from moejax.sweep._design import conditional as conditional
from moejax.sweep._design import product as product
from moejax.sweep._design import zipped as zipped
from moejax.sweep._file import load_file as load_file
from moejax.sweep._file import parse_values as parse_values
from moejax.sweep._pareto import pareto_mask as pareto_mask
from moejax.sweep._progress import Bar as Bar
from moejax.sweep._progress import JsonLog as JsonLog
from moejax.sweep._progress import Watch as Watch
from moejax.sweep._result import Result as Result
from moejax.sweep._result import load as load
from moejax.sweep._run import run as run
from moejax.sweep._samples import Range as Range
from moejax.sweep._samples import samples as samples
from moejax.sweep._sweep import Sweep as Sweep


__all__ = [
    "Axis",
    "Bar",
    "JsonLog",
    "Range",
    "Result",
    "Sweep",
    "Watch",
    "conditional",
    "join_cluster",
    "load",
    "load_file",
    "logspace",
    "pareto_mask",
    "parse_values",
    "product",
    "run",
    "samples",
    "zipped",
]
