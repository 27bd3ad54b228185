"""From a model, a system, a workload and a policy to times that people decide by.

`evaluate` is the one call; read `_evaluate.py` from there. `_workload.py` draws the routing,
`_policies.py` lists who may decide, `_fixed.py` and `_layer_costs.py` turn sizes and rates into
costs, `_moe_layers.py` places experts, `_report.py` is what comes back, `_tables.py` turns it into
columns. `sensitivity` says which hardware number matters.

Beyond ideal overlap: `_execution.py` says how tasks may be ordered, `_task_times.py` how long each
takes, `_graph_time.py` when it runs, `_timeline.py` shows one layer. `_prefill.py` and `_memory.py`
hold what prompts cost and whether everything fits; `_contexts.py` draws context lengths.

Near-memory systems: `_place.py` fits a placement, `_near_memory_evaluate.py` times it over the
simulated network, `_near_memory.py` and `_accounting.py` say what everything else costs.
"""

from moejax.serving._accounting import ACCOUNTING as ACCOUNTING
from moejax.serving._accounting import node_costs as node_costs
from moejax.serving._contexts import CONTEXTS as CONTEXTS
from moejax.serving._contexts import context_lengths as context_lengths
from moejax.serving._evaluate import compare as compare
from moejax.serving._evaluate import evaluate as evaluate
from moejax.serving._execution import MODES as MODES
from moejax.serving._execution import OVERLAPS as OVERLAPS
from moejax.serving._execution import Execution as Execution
from moejax.serving._execution import Mode as Mode
from moejax.serving._execution import mode as mode
from moejax.serving._intervals import mean_and_interval as mean_and_interval
from moejax.serving._intervals import mean_by as mean_by
from moejax.serving._layer_costs import LayerCosts as LayerCosts
from moejax.serving._layer_costs import expert_time_table as expert_time_table
from moejax.serving._memory import memory_detail as memory_detail
from moejax.serving._near_memory import NearMemoryTime as NearMemoryTime
from moejax.serving._near_memory import counted_work as counted_work
from moejax.serving._near_memory import near_memory_time as near_memory_time
from moejax.serving._near_memory import published_work as published_work
from moejax.serving._near_memory_evaluate import NearMemoryReport as NearMemoryReport
from moejax.serving._near_memory_evaluate import evaluate_placement as evaluate_placement
from moejax.serving._near_memory_evaluate import network_of as network_of
from moejax.serving._place import place as place
from moejax.serving._policies import POLICIES as POLICIES
from moejax.serving._policies import Policy as Policy
from moejax.serving._policies import policy_of as policy_of
from moejax.serving._report import LIMITS as LIMITS
from moejax.serving._report import Report as Report
from moejax.serving._sensitivity import Elasticity as Elasticity
from moejax.serving._sensitivity import Sensitivity as Sensitivity
from moejax.serving._sensitivity import sensitivity as sensitivity
from moejax.serving._tables import columns as columns
from moejax.serving._tables import expert_rows as expert_rows
from moejax.serving._tables import partition_layers as partition_layers
from moejax.serving._timeline import layer_timeline as layer_timeline
from moejax.serving._timeline import timeline_rows as timeline_rows
from moejax.serving._workload import Workload as Workload
from moejax.serving._workload import route as route
from moejax.serving._workload import routing_source as routing_source


__all__ = [
    "ACCOUNTING",
    "CONTEXTS",
    "LIMITS",
    "MODES",
    "OVERLAPS",
    "POLICIES",
    "Elasticity",
    "Execution",
    "LayerCosts",
    "Mode",
    "NearMemoryReport",
    "NearMemoryTime",
    "Policy",
    "Report",
    "Sensitivity",
    "Workload",
    "columns",
    "compare",
    "context_lengths",
    "counted_work",
    "evaluate",
    "evaluate_placement",
    "expert_rows",
    "expert_time_table",
    "layer_timeline",
    "mean_and_interval",
    "mean_by",
    "memory_detail",
    "mode",
    "near_memory_time",
    "network_of",
    "node_costs",
    "partition_layers",
    "place",
    "policy_of",
    "published_work",
    "route",
    "routing_source",
    "sensitivity",
    "timeline_rows",
]
