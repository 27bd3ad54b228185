"""What is asked of a system: a batch of requests, their contexts, and their routing."""

import operator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Bool, Float, Int, IntScalar, PRNGKeyArray
from moejax.models import MoEModel
from moejax.routing import (
    AbstractPopularity,
    RoutingTrace,
    calibrated,
    decode_batch,
    sample_expert_ids,
)


class Workload(eqx.Module):
    """One decode iteration: every request of the batch gets one more token.

    Build with `Workload(batch, context, *, max_batch=None, routing=None, correlation=0.0,
    reuse=False)`.
    """

    batch: IntScalar
    context: Float[Array, "*requests"]
    max_batch: int = eqx.field(static=True)
    routing: RoutingTrace | AbstractPopularity | None
    correlation: Any
    reuse: bool = eqx.field(static=True)

    def __init__(
        self,
        batch: Any,
        context: Any,
        *,
        max_batch: int | None = None,
        routing: RoutingTrace | AbstractPopularity | None = None,
        correlation: Any = 0.0,
        reuse: bool = False,
    ):
        """**Arguments:**

        - `batch`: requests in the whole system. Traced: many batch sizes share a compilation.
        - `context`: tokens already in the cache, a scalar or [max_batch], one per request.
        - `max_batch`: static bound on `batch` that arrays are padded to; `batch` itself by
            default, which then has to be a number. Results do not depend on it.
        - `routing`: a `RoutingTrace` of the same model, whose decode batches are drawn; or a
            popularity family to draw from; or `None` for the family that is calibrated to the
            model (`moejax.routing.calibrated`).
        - `correlation`: in [0, 1), how alike the tokens of a synthetic batch choose.
        - `reuse`: whether a trace may give several tokens of one sequence to a batch.

        **Raises:** `ValueError` for a batch outside 1 .. max_batch, a negative context or a
        context of another shape.
        """
        if max_batch is None:
            if is_traced(batch) or np.ndim(batch):
                raise ValueError("Workload: batch is traced, so give max_batch (static)")
            max_batch = int(batch)
        self.max_batch = operator.index(max_batch)
        self.batch = jnp.asarray(batch)
        self.context = as_float(context)
        self.routing = routing
        self.correlation = correlation
        self.reuse = reuse
        self._check()

    def _check(self) -> None:
        if not jnp.issubdtype(self.batch.dtype, jnp.integer):
            raise ValueError(f"Workload.batch = {self.batch}: allowed is a whole number")
        if not is_traced(self.batch) and not np.all(
            (np.asarray(self.batch) >= 1) & (np.asarray(self.batch) <= self.max_batch)
        ):
            allowed = f"1 .. max_batch = {self.max_batch}"
            raise ValueError(f"Workload.batch = {self.batch}: allowed is {allowed}")
        if not is_traced(self.context) and not np.all(np.asarray(self.context) >= 0):
            raise ValueError(f"Workload.context = {self.context}: allowed is 0 or more tokens")

    @property
    def valid(self) -> Bool[Array, " requests"]:
        """Which of the `max_batch` slots hold a request."""
        return jnp.arange(self.max_batch) < self.batch

    @property
    def contexts(self) -> Float[Array, " requests"]:
        """Context of every slot, [max_batch]; 0 in empty ones."""
        if self.context.shape not in ((), (self.max_batch,)):
            raise ValueError(
                f"Workload.context has shape {self.context.shape}: allowed are () and "
                f"({self.max_batch},) (use jax.vmap for batches of workloads)"
            )
        return jnp.where(self.valid, self.context, 0.0)

    @property
    def status(self) -> IntScalar:
        """What `__init__` could not look at under tracing."""
        return merge(
            flag(self.batch < 1, Status.EMPTY_BATCH),
            flag(self.batch > self.max_batch, Status.BATCH_ABOVE_MAX),
            flag(~jnp.all(self.context >= 0), Status.BAD_COST),
        )


def route(
    model: MoEModel, workload: Workload, *, key: PRNGKeyArray
) -> Int[Array, "layers requests top_k"]:
    """Draws the expert choices of one iteration, for all `max_batch` slots.

    The first b slots are the same whatever `max_batch` is, and do not depend on `batch`: a sweep
    over batch sizes adds requests, and two policies with one key see the same routing.

    **Raises:** `ValueError` for a trace that was taken from a model of another shape.
    """
    routing = workload.routing
    if isinstance(routing, RoutingTrace):
        _check_trace(model, routing)
        return decode_batch(routing, workload.max_batch, key=key, reuse=workload.reuse)
    popularity = calibrated(model.name).popularity if routing is None else routing
    return sample_expert_ids(
        popularity,
        model.num_experts,
        model.top_k,
        model.num_moe_layers,
        workload.max_batch,
        key=key,
        correlation=workload.correlation,
        num_groups=model.router.num_groups,
        top_groups=model.router.top_groups,
    )


def routing_source(model: MoEModel, workload: Workload) -> str:
    """Where the routing of a workload comes from, one line for people."""
    if isinstance(workload.routing, RoutingTrace):
        return f"trace of {workload.routing.model or 'an unnamed model'}"
    if workload.routing is None:
        stored = calibrated(model.name)
        return f"synthetic, {type(stored.popularity).__name__}: {stored.source}"
    return f"synthetic, {type(workload.routing).__name__} given by the caller"


def _check_trace(model: MoEModel, trace: RoutingTrace) -> None:
    found = (trace.expert_ids.shape[0], trace.num_experts, trace.expert_ids.shape[2])
    wanted = (model.num_moe_layers, model.num_experts, model.top_k)
    if found != wanted:
        raise ValueError(
            f"trace of {trace.model or 'an unnamed model'} has (MoE layers, experts, top_k) = "
            f"{found}, but {model.name} has {wanted}"
        )
