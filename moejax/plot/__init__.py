"""Figures: functions of tidy tables, `(table, ax, ...) -> ax`.

A table is a dict of column name -> 1-D array or list, all of one length, as the sweeps write it.
Nothing here runs a model. `_table.py` checks and selects rows; `_style.py` holds the one look and
`_policies.py` the color of every policy; `_roofline.py`, `_bins.py`, `_pareto.py`, `_network.py`
and `_timeline.py` draw one figure each, `_placement.py` three. `_sweep.py` and `_heat_map.py` draw
whatever columns they are told to, with the labels and colors of `_columns.py`.

Matplotlib is optional (`pip install moejax[plots]`) and imported when a figure is made. Figures
never go through pyplot, so a backend chosen elsewhere stays as it is.
"""

from moejax.plot._bins import expert_bins as expert_bins
from moejax.plot._breakdown import breakdown as breakdown
from moejax.plot._breakdown import channel_utilization as channel_utilization
from moejax.plot._columns import label_of as label_of
from moejax.plot._gantt import gantt as gantt
from moejax.plot._gating import coefficient_map as coefficient_map
from moejax.plot._gating import moved_choices as moved_choices
from moejax.plot._gating import speedup_fidelity as speedup_fidelity
from moejax.plot._heat_map import heat_map as heat_map
from moejax.plot._network import link_heat_map as link_heat_map
from moejax.plot._pareto import throughput_interactivity as throughput_interactivity
from moejax.plot._placement import convergence as convergence
from moejax.plot._placement import expert_shares as expert_shares
from moejax.plot._placement import node_loads as node_loads
from moejax.plot._policies import PolicyStyle as PolicyStyle
from moejax.plot._policies import policy_style as policy_style
from moejax.plot._roofline import roofline as roofline
from moejax.plot._style import figure as figure
from moejax.plot._style import save as save
from moejax.plot._style import shared_legend as shared_legend
from moejax.plot._sweep import lines as lines
from moejax.plot._sweep import pareto as pareto
from moejax.plot._table import select as select
from moejax.plot._timeline import link_timeline as link_timeline


__all__ = [
    "PolicyStyle",
    "breakdown",
    "channel_utilization",
    "coefficient_map",
    "convergence",
    "expert_bins",
    "expert_shares",
    "figure",
    "gantt",
    "heat_map",
    "label_of",
    "lines",
    "link_heat_map",
    "link_timeline",
    "moved_choices",
    "node_loads",
    "pareto",
    "policy_style",
    "roofline",
    "save",
    "select",
    "shared_legend",
    "speedup_fidelity",
    "throughput_interactivity",
]
