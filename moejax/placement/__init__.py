"""Which node holds which share of which expert, and what that costs.

A reading guide: one layer's placement is an array `share` [experts, nodes] whose rows sum to 1,
and `node_position` [nodes] on the network; a whole model's is a `Placement`.
`_statistics.py` is what one is fitted to, `_costs.py` the prices of a layer, `_estimate.py` what it
is judged by, `_memory.py` what it stores on each node.

The baselines: `_parallel.py` holds those that need no trace, `_hybrid.py` balances regions of nodes
(with the search and solver of `_regions.py`), `_eplb.py` copies whole experts.

`_node_balance.py` says which node should hold what, after `_node_checks.py` of its arguments. Few
experts: `_host_sets.py` searches over sets of experts, with exact shares for given hosts from
`_shares.py`. Many: `_search.py` improves the starts of `_construct.py` by the `_moves.py` that are
on the `_shortlist.py`. `_node_kernel.py` runs both and minimizes `_node_problem.py`, with
`_fat_tree.py` on top and `_node_bound.py` below; `_milp.py` and `_host_set_milp.py` are the exact
solvers. `_link_balance.py` maps nodes to endpoints by the search of `_link_kernel.py`: messages and
the simulator's word in `_link_traffic.py`, annealing on the busiest link in `_swap_search.py`.
`_methods.py` fits whole models by name.
"""

from moejax.noc import HOSTING_SHARE as HOSTING_SHARE
from moejax.noc import UNPLACED as UNPLACED
from moejax.placement._construct import wrap_around as wrap_around
from moejax.placement._costs import NodeCosts as NodeCosts
from moejax.placement._costs import compute_bound as compute_bound
from moejax.placement._costs import compute_comm_ratio as compute_comm_ratio
from moejax.placement._eplb import ReplicaPlan as ReplicaPlan
from moejax.placement._eplb import replica_share as replica_share
from moejax.placement._eplb import replicate_and_pack as replicate_and_pack
from moejax.placement._estimate import PlacementTimes as PlacementTimes
from moejax.placement._estimate import evaluate as evaluate
from moejax.placement._estimate import evaluate_batch as evaluate_batch
from moejax.placement._estimate import host_set_traffic as host_set_traffic
from moejax.placement._estimate import node_load as node_load
from moejax.placement._estimate import node_traffic as node_traffic
from moejax.placement._hybrid import balance_regions as balance_regions
from moejax.placement._hybrid import hybrid as hybrid
from moejax.placement._hybrid import hybrid_comm_time as hybrid_comm_time
from moejax.placement._hybrid import region_position as region_position
from moejax.placement._hybrid import region_share as region_share
from moejax.placement._link_balance import link_balance as link_balance
from moejax.placement._link_kernel import LinkBalance as LinkBalance
from moejax.placement._link_traffic import message_room as message_room
from moejax.placement._memory import MemoryUse as MemoryUse
from moejax.placement._memory import memory_use as memory_use
from moejax.placement._memory import published_expert_bytes as published_expert_bytes
from moejax.placement._methods import METHODS as METHODS
from moejax.placement._methods import place as place
from moejax.placement._node_balance import NodeBalance as NodeBalance
from moejax.placement._node_balance import node_balance as node_balance
from moejax.placement._node_bound import lp_bound as lp_bound
from moejax.placement._parallel import expert_parallel as expert_parallel
from moejax.placement._parallel import tensor_parallel as tensor_parallel
from moejax.placement._placement import Placement as Placement
from moejax.placement._regions import RegionBalance as RegionBalance
from moejax.placement._statistics import Statistics as Statistics
from moejax.placement._statistics import drawn_statistics as drawn_statistics
from moejax.placement._statistics import statistics as statistics
from moejax.placement._statistics import trace_statistics as trace_statistics


__all__ = [
    "HOSTING_SHARE",
    "METHODS",
    "UNPLACED",
    "LinkBalance",
    "MemoryUse",
    "NodeBalance",
    "NodeCosts",
    "Placement",
    "PlacementTimes",
    "RegionBalance",
    "ReplicaPlan",
    "Statistics",
    "balance_regions",
    "compute_bound",
    "compute_comm_ratio",
    "drawn_statistics",
    "evaluate",
    "evaluate_batch",
    "expert_parallel",
    "host_set_traffic",
    "hybrid",
    "hybrid_comm_time",
    "link_balance",
    "lp_bound",
    "memory_use",
    "message_room",
    "node_balance",
    "node_load",
    "node_traffic",
    "place",
    "published_expert_bytes",
    "region_position",
    "region_share",
    "replica_share",
    "replicate_and_pack",
    "statistics",
    "tensor_parallel",
    "trace_statistics",
    "wrap_around",
]
