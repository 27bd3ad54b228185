"""What operators cost, before anything is scheduled.

`_roofline.py` defines `Work` and the roofline; `_work.py` counts the FLOPs and bytes of each
operator of a decoder layer; `_gpu_efficiency.py` says what kernels reach of it; `_comm.py` times
the traffic between GPUs; `_pim_table.py` is the table of expert times on PIM that a scheduler
learns at run time. How long a matrix-vector product takes inside a memory stack is a property of
the stack: see `moejax.hardware` for the closed form, and `dram` here for the truth, command by
command.
"""

from moejax.cost import dram as dram
from moejax.cost._comm import all_gather_time as all_gather_time
from moejax.cost._comm import all_reduce_time as all_reduce_time
from moejax.cost._comm import dispatch_traffic as dispatch_traffic
from moejax.cost._comm import expected_remote_gpus as expected_remote_gpus
from moejax.cost._comm import expert_comm_time as expert_comm_time
from moejax.cost._comm import gpu_of_expert as gpu_of_expert
from moejax.cost._comm import gpu_of_token as gpu_of_token
from moejax.cost._gpu_efficiency import GPU_EFFICIENCIES as GPU_EFFICIENCIES
from moejax.cost._gpu_efficiency import GPUEfficiency as GPUEfficiency
from moejax.cost._gpu_efficiency import GPUFit as GPUFit
from moejax.cost._gpu_efficiency import fit_gpu_efficiency as fit_gpu_efficiency
from moejax.cost._gpu_efficiency import gpu_efficiency as gpu_efficiency
from moejax.cost._pim_table import PIMCostTable as PIMCostTable
from moejax.cost._roofline import Work as Work
from moejax.cost._roofline import attainable_flops_per_s as attainable_flops_per_s
from moejax.cost._roofline import pim_roofline_time as pim_roofline_time
from moejax.cost._roofline import ridge_point as ridge_point
from moejax.cost._roofline import roofline_time as roofline_time
from moejax.cost._work import attended as attended
from moejax.cost._work import attention_counts as attention_counts
from moejax.cost._work import attention_work as attention_work
from moejax.cost._work import cache_bytes as cache_bytes
from moejax.cost._work import expert_work as expert_work
from moejax.cost._work import head_work as head_work
from moejax.cost._work import projection_work as projection_work
from moejax.cost._work import router_work as router_work


__all__ = [
    "GPU_EFFICIENCIES",
    "GPUEfficiency",
    "GPUFit",
    "PIMCostTable",
    "Work",
    "all_gather_time",
    "all_reduce_time",
    "attainable_flops_per_s",
    "attended",
    "attention_counts",
    "attention_work",
    "cache_bytes",
    "dispatch_traffic",
    "dram",
    "expected_remote_gpus",
    "expert_comm_time",
    "expert_work",
    "fit_gpu_efficiency",
    "gpu_efficiency",
    "gpu_of_expert",
    "gpu_of_token",
    "head_work",
    "pim_roofline_time",
    "projection_work",
    "ridge_point",
    "roofline_time",
    "router_work",
]
