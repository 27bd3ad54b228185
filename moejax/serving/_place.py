"""From a model, a near-memory system and a trace to a placement."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moejax import placement as placements
from moejax._checks import lookup
from moejax._status import is_traced
from moejax._typing import PRNGKeyArray
from moejax.hardware import NMPSystem
from moejax.models import MoEModel
from moejax.placement import Placement, Statistics
from moejax.routing import RoutingTrace
from moejax.serving._accounting import node_costs
from moejax.serving._near_memory_evaluate import network_of
from moejax.serving._workload import Workload, check_routing, route


SYNTHETIC_TOKENS = 2048
"""Tokens that a placement is fitted to where there is no trace."""

MOST_GROUPS = 1024
"""Sets of experts chosen together that a placement is fitted to, the commonest ones."""


def place(
    model: MoEModel,
    system: NMPSystem,
    workload: Workload,
    method: str,
    *,
    key: PRNGKeyArray,
    fit: RoutingTrace | None = None,
    accounting: str = "counted",
    gamma: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Placement:
    """Fits a placement of the experts of `model` to the nodes of `system`. Works on the host.

    **Arguments:**

    - `workload`: its batch weighs computation against communication.
    - `method`: one of `placement.METHODS`.
    - `fit`: trace to fit to. Default: the routing of the workload, a trace's every token, or
        `SYNTHETIC_TOKENS` drawn from its popularity.
    - `accounting`, `gamma`: of the estimate that is minimized, see `node_costs`.
    - `progress`: of `placement.place`.

    **Returns:** `Placement` for `evaluate`.

    **Raises:** `ValueError` for an unknown method, the trace of another model, or traced values: a
    placement is made once, outside of `jax.jit`.
    """
    lookup("placement", method, placements.METHODS)
    if is_traced(system, workload):
        raise ValueError(
            f"placement {method!r} is fitted on the host: call moejax.serving.place outside of "
            "jit and vmap, and evaluate the Placement that it returns"
        )
    statistics = _statistics(model, workload, fit, key)
    costs = node_costs(model, system, int(workload.batch), accounting=accounting, gamma=gamma)
    found = placements.place(
        method, statistics, network_of(system), costs, key=key, progress=progress
    )
    return jax.block_until_ready(found)


def _statistics(model, workload, fit: RoutingTrace | None, key) -> Statistics:
    trace = workload.routing if fit is None else fit
    if isinstance(trace, RoutingTrace):
        # A batch of one, which every trace of the model can serve.
        check_routing(model, Workload(1, 0.0, routing=trace, reuse=True))
        return placements.trace_statistics(trace, max_groups=MOST_GROUPS)
    drawn = Workload(SYNTHETIC_TOKENS, 0.0, routing=trace, correlation=workload.correlation)
    ids = np.asarray(jax.jit(lambda key: route(model, drawn, key=key))(key))
    return placements.statistics(jnp.asarray(ids), model.num_experts, max_groups=MOST_GROUPS)
