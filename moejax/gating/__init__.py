"""Hardware-aware gating: which experts a token takes when their cost counts, too.

A reading guide: `_functional.py` is the gate, `_run.py` what a call does, `_select.py` its loop
over the tokens. Costs come from the sources of `_cost_sources.py`, by default the node loads of
`_resource_loads.py`. `_module.py` holds the gate with its coefficients, for use inside a model.

For training: `_relax.py` makes the choice soft, `_penalty.py` the layer time a loss, `_tune.py`
finds coefficients by gradient within a budget of fidelity.
"""

from moejax.gating._combine import combine_weights as combine_weights
from moejax.gating._combine import router_options as router_options
from moejax.gating._cost_sources import AbstractCostSource as AbstractCostSource
from moejax.gating._cost_sources import Chosen as Chosen
from moejax.gating._cost_sources import InLanes as InLanes
from moejax.gating._cost_sources import SummedCosts as SummedCosts
from moejax.gating._fidelity import fidelity_loss as fidelity_loss
from moejax.gating._fidelity import lost_weights as lost_weights
from moejax.gating._fidelity import squared_weights as squared_weights
from moejax.gating._functional import cost_aware_top_k as cost_aware_top_k
from moejax.gating._functional import hardware_aware_top_k as hardware_aware_top_k
from moejax.gating._layer_costs import LayerCosts as LayerCosts
from moejax.gating._module import HardwareAwareGate as HardwareAwareGate
from moejax.gating._module import layer_scale as layer_scale
from moejax.gating._outcome import Outcome as Outcome
from moejax.gating._outcome import judge as judge
from moejax.gating._outcome import tuned_gate as tuned_gate
from moejax.gating._own_visits import own_visits as own_visits
from moejax.gating._partition_times import PartitionTimes as PartitionTimes
from moejax.gating._penalty import PenaltyAux as PenaltyAux
from moejax.gating._penalty import hardware_penalty as hardware_penalty
from moejax.gating._relax import hard_top_k as hard_top_k
from moejax.gating._relax import smooth_makespan as smooth_makespan
from moejax.gating._relax import soft_top_k as soft_top_k
from moejax.gating._relaxed_gate import Coefficients as Coefficients
from moejax.gating._relaxed_gate import GateForm as GateForm
from moejax.gating._resource_loads import ResourceLoads as ResourceLoads
from moejax.gating._run import GateResult as GateResult
from moejax.gating._slopes import weight_slopes as weight_slopes
from moejax.gating._soft_makespan import SoftMakespan as SoftMakespan
from moejax.gating._tune import Tuning as Tuning
from moejax.gating._tune import tune as tune


__all__ = [
    "AbstractCostSource",
    "Chosen",
    "Coefficients",
    "GateForm",
    "GateResult",
    "HardwareAwareGate",
    "InLanes",
    "LayerCosts",
    "Outcome",
    "PartitionTimes",
    "PenaltyAux",
    "ResourceLoads",
    "SoftMakespan",
    "SummedCosts",
    "Tuning",
    "combine_weights",
    "cost_aware_top_k",
    "fidelity_loss",
    "hard_top_k",
    "hardware_aware_top_k",
    "hardware_penalty",
    "judge",
    "layer_scale",
    "lost_weights",
    "own_visits",
    "router_options",
    "smooth_makespan",
    "soft_top_k",
    "squared_weights",
    "tune",
    "tuned_gate",
    "weight_slopes",
]
