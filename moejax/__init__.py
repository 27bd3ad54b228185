"""moejax: vectorized batch sweeps of Mixture-of-Experts inference on memory-centric hardware.

Start at `evaluate`: one model on one system under one workload and policy, a pure function that
`jax.jit`, `jax.vmap` and `jax.grad` take. Models and systems by name: `moejax.models.get`,
`moejax.hardware.get`. Times in s, sizes in bytes, rates per s throughout.
"""

from importlib.metadata import version

from moejax import cost as cost
from moejax import gating as gating
from moejax import hardware as hardware
from moejax import metrics as metrics
from moejax import models as models
from moejax import noc as noc
from moejax import partition as partition
from moejax import placement as placement
from moejax import routing as routing
from moejax import schedule as schedule
from moejax import serving as serving
from moejax import sweep as sweep
from moejax import zoo as zoo
from moejax._status import Status as Status
from moejax.serving import POLICIES as POLICIES
from moejax.serving import Policy as Policy
from moejax.serving import Report as Report
from moejax.serving import Workload as Workload
from moejax.serving import compare as compare
from moejax.serving import evaluate as evaluate
from moejax.serving import sensitivity as sensitivity


__version__ = version("moejax")

__all__ = [
    "POLICIES",
    "Policy",
    "Report",
    "Status",
    "Workload",
    "__version__",
    "compare",
    "cost",
    "evaluate",
    "gating",
    "hardware",
    "metrics",
    "models",
    "noc",
    "partition",
    "placement",
    "routing",
    "schedule",
    "sensitivity",
    "serving",
    "sweep",
    "zoo",
]
