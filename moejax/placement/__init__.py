"""Which node holds which share of which expert, and what that costs.

A reading guide: a placement is an array `share` [experts, nodes] whose rows sum to 1.
`_statistics.py` is what one is fitted to, `_costs.py` the estimate it is judged by, and
`_parallel.py` holds the placements that need neither.
"""

from moejax.placement._costs import HOSTING_SHARE as HOSTING_SHARE
from moejax.placement._costs import NodeCosts as NodeCosts
from moejax.placement._costs import PlacementTimes as PlacementTimes
from moejax.placement._costs import compute_bound as compute_bound
from moejax.placement._costs import compute_comm_ratio as compute_comm_ratio
from moejax.placement._costs import evaluate as evaluate
from moejax.placement._costs import evaluate_batch as evaluate_batch
from moejax.placement._costs import host_set_traffic as host_set_traffic
from moejax.placement._costs import node_load as node_load
from moejax.placement._costs import node_traffic as node_traffic
from moejax.placement._parallel import expert_parallel as expert_parallel
from moejax.placement._parallel import tensor_parallel as tensor_parallel
from moejax.placement._statistics import Statistics as Statistics
from moejax.placement._statistics import statistics as statistics
from moejax.placement._statistics import trace_statistics as trace_statistics


__all__ = [
    "HOSTING_SHARE",
    "NodeCosts",
    "PlacementTimes",
    "Statistics",
    "compute_bound",
    "compute_comm_ratio",
    "evaluate",
    "evaluate_batch",
    "expert_parallel",
    "host_set_traffic",
    "node_load",
    "node_traffic",
    "statistics",
    "tensor_parallel",
    "trace_statistics",
]
