"""What is asked of a system: a batch of requests, their contexts, and their routing."""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Bool, Float, FloatScalar, Int, IntScalar, PRNGKeyArray
from moejax.models import MODELS, MoEModel
from moejax.routing import (
    NOT_ROUTED,
    AbstractPopularity,
    RoutingTrace,
    calibrated,
    decode_batch,
    sample_expert_ids,
)


class Workload(eqx.Module):
    """One iteration: every decode request of the batch gets one more token, and the prompts that
    join it (colocated prefill) are processed whole.

    Build with `Workload(batch, context, *, max_batch=None, routing=None, correlation=0.0,
    reuse=False, prefill=0, prefill_length=1024)`.
    """

    batch: IntScalar
    context: Float[Array, "*requests"]
    max_batch: int = eqx.field(static=True)
    routing: RoutingTrace | AbstractPopularity | None
    correlation: FloatScalar | None
    reuse: bool = eqx.field(static=True)
    prefill: int = eqx.field(static=True)
    prefill_length: int = eqx.field(static=True)

    def __init__(
        self,
        batch: Any,
        context: Any,
        *,
        max_batch: int | None = None,
        routing: RoutingTrace | AbstractPopularity | None = None,
        correlation: Any = 0.0,
        reuse: bool = False,
        prefill: int = 0,
        prefill_length: int = 1024,
    ):
        """**Arguments:**

        - `batch`: requests in the whole system. Traced: many batch sizes share a compilation.
        - `context`: tokens already in the cache, a scalar or [max_batch], one per request;
            `context_lengths` draws them from a distribution.
        - `max_batch`: static bound on `batch` that arrays are padded to; `batch` itself by
            default, which then has to be a number. Results do not depend on it, but a trace has
            to have that many sequences.
        - `routing`: a `RoutingTrace` of the same model, whose decode batches are drawn; or a
            popularity family to draw from; or `None` for the family that is calibrated to the
            model (`moejax.routing.calibrated`).
        - `correlation`: in [0, 1), how alike the tokens of a synthetic batch choose. The field is
            `None` for a plain 0, which saves the random numbers it would take.
        - `reuse`: whether a trace may give several tokens of one sequence to a batch.
        - `prefill`: requests of the batch that are prompts of `prefill_length` tokens each (Sieve,
            arXiv 2605.11277, colocated batches); the other `batch - prefill` decode. Static. Their
            tokens are drawn like others, and dealt out over the GPUs one by one.

        **Raises:** `ValueError` for a batch outside 1 .. max_batch, a context that is negative,
        infinite or of another shape, a correlation out of range, more prompts than requests, or
        prompts with the routing of a trace, which holds decode tokens.
        """
        if max_batch is None:
            if is_traced(batch) or np.ndim(batch):
                raise ValueError("Workload: batch is traced, so give max_batch (static)")
            max_batch = max(int(batch), 1)
        try:
            self.max_batch = operator.index(max_batch)
        except TypeError:
            raise ValueError(f"Workload.max_batch = {max_batch}: allowed is an int") from None
        if routing is not None and not isinstance(routing, (RoutingTrace, AbstractPopularity)):
            raise ValueError(
                f"Workload.routing is a {type(routing).__name__}: allowed are None, a RoutingTrace "
                "(moejax.routing.load) and a popularity family"
            )
        batch = batch if isinstance(batch, jax.Array) else np.asarray(batch)
        if not jnp.issubdtype(batch.dtype, jnp.integer):
            raise ValueError(f"Workload.batch = {batch}: allowed is a whole number")
        if batch.ndim and not is_traced(batch):
            raise ValueError(f"Workload.batch = {batch}: allowed is one number (batches: jax.vmap)")
        if not is_traced(batch) and not 1 <= int(batch) <= self.max_batch:
            # Before int64 is cut to int32.
            raise ValueError(
                f"Workload.batch = {batch}: allowed is 1 .. max_batch = {self.max_batch}"
            )
        # One dtype, or Python and NumPy integers would compile a program each.
        self.batch = jnp.asarray(batch, jnp.int32)
        self.context = as_float(context)
        self.routing = routing
        self.correlation = None if _is_plain_zero(correlation) else as_float(correlation)
        self.reuse = reuse
        self.prefill, self.prefill_length = prefill, prefill_length
        self._check_prefill()
        self._check()

    def _check_prefill(self) -> None:
        for name, least in (("prefill", 0), ("prefill_length", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Workload.{name} = {value!r}: allowed is an int from {least}")
        least_batch = self.max_batch if is_traced(self.batch) else int(self.batch)
        if self.prefill > least_batch:
            raise ValueError(
                f"Workload.prefill = {self.prefill}: allowed is up to the batch, {least_batch}"
            )
        if self.prefill and isinstance(self.routing, RoutingTrace):
            raise ValueError(
                f"Workload.prefill = {self.prefill}: allowed with synthetic routing only"
            )

    def _check(self) -> None:
        if not is_traced(self.context) and not np.all(_possible(np.asarray(self.context))):
            raise ValueError(f"Workload.context = {self.context}: allowed is 0 or more tokens")
        if self.correlation is not None and not is_traced(self.correlation):
            shared = np.asarray(self.correlation)
            if not np.all((shared >= 0) & (shared < 1)):
                raise ValueError(f"Workload.correlation = {shared}: allowed is [0, 1)")

    @property
    def num_slots(self) -> int:
        """Static room for tokens: `max_batch` requests that decode, then those of the prompts."""
        return self.max_batch + self.prefill * self.prefill_length

    @property
    def decoding(self) -> IntScalar:
        """Requests that decode."""
        return self.batch - self.prefill

    @property
    def valid(self) -> Bool[Array, " slots"]:
        """Which of the `num_slots` hold a token."""
        slot = jnp.arange(self.num_slots)
        return (slot < self.decoding) | (slot >= self.max_batch)

    @property
    def contexts(self) -> Float[Array, " requests"]:
        """Context of every decode slot, [max_batch]; 0 in empty ones."""
        if self.context.shape not in ((), (self.max_batch,)):
            raise ValueError(
                f"Workload.context has shape {self.context.shape}: allowed are () and "
                f"({self.max_batch},) (use jax.vmap for batches of workloads)"
            )
        return jnp.where(self.valid[: self.max_batch], self.context, 0.0)

    @property
    def status(self) -> IntScalar:
        """What `__init__` could not look at under tracing."""
        return merge(
            flag((self.batch < 1) | (self.batch < self.prefill), Status.EMPTY_BATCH),
            flag(self.batch > self.max_batch, Status.BATCH_ABOVE_MAX),
            flag(~jnp.all(_possible(self.context)), Status.BAD_COST),
        )


def _possible(context: Any) -> Any:
    """Where a number of tokens is one."""
    return (context >= 0) & (context < np.inf)


def _is_plain_zero(correlation: Any) -> bool:
    if correlation is None:
        return True
    return not is_traced(correlation) and np.ndim(correlation) == 0 and correlation == 0


def route(
    model: MoEModel, workload: Workload, *, key: PRNGKeyArray
) -> Int[Array, "layers slots top_k"]:
    """Draws the expert choices of one iteration, for all `num_slots` slots.

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
        workload.num_slots,
        key=key,
        correlation=0.0 if workload.correlation is None else workload.correlation,
        num_groups=model.router.num_groups,
        top_groups=model.router.top_groups,
    )


def routing_status(
    workload: Workload, expert_ids: Int[Array, "layers slots top_k"], num_experts: int
) -> IntScalar:
    """Whether every request of the batch was routed, and to experts that are there: a trace can
    run out of sequences, and a family whose numbers make no sense draws nothing."""
    missing = expert_ids == NOT_ROUTED
    # Tokens of a trace may well have been dropped, but not by every layer.
    over = jnp.all if isinstance(workload.routing, RoutingTrace) else jnp.any
    unrouted = over(missing, axis=(0, 2)) & workload.valid
    outside = jnp.any((expert_ids < NOT_ROUTED) | (expert_ids >= num_experts))
    return flag(jnp.any(unrouted) | outside, Status.INVALID_ROUTING)


def routing_source(model: MoEModel, workload: Workload) -> str:
    """Where the routing of a workload comes from, one line for people."""
    if isinstance(workload.routing, RoutingTrace):
        return f"trace of {workload.routing.model or 'an unnamed model'}"
    if workload.routing is None:
        stored = calibrated(model.name)
        return f"synthetic, {type(stored.popularity).__name__}: {stored.source}"
    return f"synthetic, {type(workload.routing).__name__} given by the caller"


def check_routing(model: MoEModel, workload: Workload) -> None:
    """What can be seen of a trace before it is traced, and its sequences counted no more.

    **Raises:** `ValueError` for the trace of another model, or one too short for the batch.
    """
    trace = workload.routing
    if not isinstance(trace, RoutingTrace):
        return
    _check_trace(model, trace)
    if is_traced(trace):
        return
    # NumPy, because inside jit even jnp operations on concrete arrays are traced.
    tokens = np.flatnonzero(np.asarray(trace.valid))
    if workload.reuse:
        available, what = len(tokens), "valid tokens"
    else:
        starts = np.asarray(trace.sequence_start)
        available = len(np.unique(np.searchsorted(starts, tokens, side="right")))
        what = "sequences with a valid token (reuse=True draws more than one token of each)"
    if workload.max_batch > available:
        raise ValueError(
            f"max_batch = {workload.max_batch} is more than the trace's {available} {what}"
        )


def _check_trace(model: MoEModel, trace: RoutingTrace) -> None:
    found = (trace.expert_ids.shape[0], trace.num_experts, trace.expert_ids.shape[2])
    wanted = (model.num_moe_layers, model.num_experts, model.top_k)
    if found != wanted:
        raise ValueError(
            f"trace of {trace.model or 'an unnamed model'} has (MoE layers, experts, top_k) = "
            f"{found}, but {model.name} has {wanted}"
        )
    if trace.model in MODELS and model.name in MODELS and trace.model != model.name:
        raise ValueError(f"the trace is of {trace.model}, not of {model.name}")
