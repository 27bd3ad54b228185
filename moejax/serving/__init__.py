"""From a model, a system, a workload and a policy to times that people decide by.

`evaluate` is the one call; read `_evaluate.py` from there. `_workload.py` draws the routing,
`_policies.py` lists who may decide, `_fixed.py` and `_layer_costs.py` turn sizes and rates into
costs, `_moe_layers.py` places experts, `_report.py` is what comes back, `_tables.py` turns it into
columns. `sensitivity` says which hardware number matters.
"""

from moejax.serving._evaluate import compare as compare
from moejax.serving._evaluate import evaluate as evaluate
from moejax.serving._intervals import mean_and_interval as mean_and_interval
from moejax.serving._intervals import mean_by as mean_by
from moejax.serving._layer_costs import LayerCosts as LayerCosts
from moejax.serving._layer_costs import expert_time_table as expert_time_table
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
from moejax.serving._workload import Workload as Workload
from moejax.serving._workload import route as route
from moejax.serving._workload import routing_source as routing_source


__all__ = [
    "LIMITS",
    "POLICIES",
    "Elasticity",
    "LayerCosts",
    "Policy",
    "Report",
    "Sensitivity",
    "Workload",
    "columns",
    "compare",
    "evaluate",
    "expert_rows",
    "expert_time_table",
    "mean_and_interval",
    "mean_by",
    "partition_layers",
    "policy_of",
    "route",
    "routing_source",
    "sensitivity",
]
