"""What no policy changes: layers without experts, LM head and embedding, memory."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._status import Status, flag
from moejax._typing import FloatScalar, IntScalar
from moejax.cost import Work, head_work
from moejax.hardware import System
from moejax.models import MoEModel
from moejax.partition import Times
from moejax.serving._execution import Execution
from moejax.serving._fixed import Requests, by_kind, dense_layer_fixed
from moejax.serving._layer_costs import attention_all_reduce
from moejax.serving._memory import memory_bytes
from moejax.serving._task_times import Kernels, dense_layer_times


class Shared(eqx.Module):
    """Fields: `requests` of each GPU; `dense`, times of the layers without experts, [layers], of
    the slowest GPU; `head_time` in s; `memory_bytes` of the fullest GPU; `status` of what went
    in."""

    requests: Requests
    dense: Times
    head_time: FloatScalar
    memory_bytes: FloatScalar
    status: IntScalar

    @classmethod
    def of(
        cls,
        model: MoEModel,
        requests: Requests,
        kernels: Kernels,
        execution: Execution,
        status: IntScalar,
    ) -> "Shared":
        """Of one iteration."""
        dense = dense_layers(model, requests, kernels, execution.attention == "gpu")
        if execution.overlap != "ideal":
            # Their tasks follow each other: the total is longer than any component.
            total = dense_layer_times(model, requests, kernels, execution)
            dense = eqx.tree_at(lambda times: times.total, dense, total)
        return cls(
            requests=requests,
            dense=dense,
            head_time=head_time(model, requests, kernels),
            memory_bytes=memory_bytes(model, kernels.system, requests),
            status=status,
        )

    def must_fit(self, system: System) -> "Shared":
        """The same with a status where memory does not hold everything."""
        too_much = ~(self.memory_bytes <= system.gpu.hbm_bytes)
        # What went in comes first: a context of NaN fits nowhere.
        status = jnp.where(
            self.status == Status.OK, flag(too_much, Status.OUT_OF_MEMORY), self.status
        )
        return eqx.tree_at(lambda shared: shared.status, self, status)


def dense_layers(
    model: MoEModel, requests: Requests, kernels: Kernels, attention_on_gpu: bool = False
) -> Times:
    """Layers without experts, [dense layers]; of the slowest GPU."""
    if model.num_dense_layers == 0:
        none = jnp.zeros(0, requests.count.dtype)
        return Times(none, none, none, none, none)
    system = kernels.system
    cost = lambda kind: dense_layer_fixed(kind, model, system, requests, attention_on_gpu)
    fixed = by_kind(model.layers[: model.num_dense_layers], cost)
    offchip = fixed.work.bytes / kernels.bandwidth
    compute, pim = fixed.work.flops / kernels.flops_per_s, fixed.pim_time
    memory = jnp.maximum(offchip, pim) + system.pim.contention * jnp.minimum(offchip, pim)
    comm = jnp.broadcast_to(attention_all_reduce(model, system, requests), memory.shape)
    every = Times(offchip, compute, pim, comm, jnp.maximum(jnp.maximum(comm, compute), memory))
    slowest = jnp.argmax(every.total, axis=1)
    return jax.tree.map(lambda time: jnp.take_along_axis(time, slowest[:, None], 1)[:, 0], every)


def head_time(model: MoEModel, requests: Requests, kernels: Kernels) -> FloatScalar:
    """Embedding rows of the local tokens, and the LM head split over all GPUs by vocabulary: for
    requests that decode, and for the last token of each prompt."""
    share, total = 1 / kernels.system.num_gpus, jnp.sum(requests.sampled)
    work = head_work(model.hidden, model.vocab, total, model.precision)
    embedding = jnp.max(requests.count) * model.hidden * model.precision.weight_bits / 8
    split = Work(work.flops * share, work.bytes * share)
    return kernels.time(split) + embedding / kernels.bandwidth
