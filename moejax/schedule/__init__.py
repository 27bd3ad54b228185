"""Dynamic scheduling: copies of busy experts on every node, sent before their layer begins.

A reading guide, in the order of a layer: `_predict.py` guesses which experts tokens will choose,
`_priority.py` picks those worth a copy, `_broadcast.py` says how many fit the time of the layer
before, `_dispatch.py` spreads their tokens. `_pipeline.py` runs all layers of a batch with the
rates and sizes of `_costs.py`, over the simulated network; `_exposed.py` puts broadcasts on it.

Execution graphs: `_graph.py` holds tasks, resources and edges, `_makespan.py` says when they run,
`_layer_tasks.py` has the graphs of a decoder layer.
"""

from moejax.schedule._broadcast import NO_COUNT as NO_COUNT
from moejax.schedule._broadcast import Broadcast as Broadcast
from moejax.schedule._broadcast import broadcast_budget as broadcast_budget
from moejax.schedule._broadcast import broadcast_chunk as broadcast_chunk
from moejax.schedule._broadcast import broadcast_time as broadcast_time
from moejax.schedule._broadcast import prebroadcast_count as prebroadcast_count
from moejax.schedule._costs import ScheduleCosts as ScheduleCosts
from moejax.schedule._dispatch import STAYS as STAYS
from moejax.schedule._dispatch import Dispatch as Dispatch
from moejax.schedule._dispatch import dispatch as dispatch
from moejax.schedule._graph import Task as Task
from moejax.schedule._graph import TaskGraph as TaskGraph
from moejax.schedule._graph import repeated as repeated
from moejax.schedule._layer_tasks import GPU_RESOURCES as GPU_RESOURCES
from moejax.schedule._layer_tasks import JOINT as JOINT
from moejax.schedule._layer_tasks import attention_tasks as attention_tasks
from moejax.schedule._layer_tasks import expert_tasks as expert_tasks
from moejax.schedule._layer_tasks import layer_graph as layer_graph
from moejax.schedule._layer_tasks import near_memory_graph as near_memory_graph
from moejax.schedule._makespan import Timeline as Timeline
from moejax.schedule._makespan import makespan as makespan
from moejax.schedule._pipeline import LayerTimes as LayerTimes
from moejax.schedule._pipeline import Schedule as Schedule
from moejax.schedule._pipeline import run_layers as run_layers
from moejax.schedule._predict import Transitions as Transitions
from moejax.schedule._predict import fit_transitions as fit_transitions
from moejax.schedule._predict import predict_next_gate as predict_next_gate
from moejax.schedule._predict import predict_transitions as predict_transitions
from moejax.schedule._predict import prediction_accuracy as prediction_accuracy
from moejax.schedule._priority import Priority as Priority
from moejax.schedule._priority import priority as priority


__all__ = [
    "GPU_RESOURCES",
    "JOINT",
    "NO_COUNT",
    "STAYS",
    "Broadcast",
    "Dispatch",
    "LayerTimes",
    "Priority",
    "Schedule",
    "ScheduleCosts",
    "Task",
    "TaskGraph",
    "Timeline",
    "Transitions",
    "attention_tasks",
    "broadcast_budget",
    "broadcast_chunk",
    "broadcast_time",
    "dispatch",
    "expert_tasks",
    "fit_transitions",
    "layer_graph",
    "makespan",
    "near_memory_graph",
    "prebroadcast_count",
    "predict_next_gate",
    "predict_transitions",
    "prediction_accuracy",
    "priority",
    "repeated",
    "run_layers",
]
