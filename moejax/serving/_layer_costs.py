"""`PartitionCosts` of any layer and GPU, from a model, a system and a workload."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, FloatScalar
from moejax.cost import PIMCostTable, all_reduce_time, expert_comm_time, expert_work
from moejax.hardware import System, TablePIM
from moejax.models import MoEModel
from moejax.partition import PartitionCosts
from moejax.serving._fixed import Fixed, Requests, by_kind, moe_layer_fixed


class LayerCosts(eqx.Module):
    """All that `PartitionCosts` needs besides the routing of a layer.

    Fields: `fixed` [layers, gpus]; `expert_time` and `channel_time` [slots + 1] in s, the
    latter on one group of channels; `all_reduce_time` in s.
    """

    model: MoEModel
    system: System
    fixed: Fixed
    expert_time: Float[Array, " counts"]
    channel_time: Float[Array, " counts"] | None
    all_reduce_time: FloatScalar

    @classmethod
    def of(
        cls,
        model: MoEModel,
        system: System,
        requests: Requests,
        *,
        num_groups: int | None,
        shared_on_pim: bool,
        attention_on_gpu: bool = False,
    ) -> "LayerCosts":
        """Costs of the MoE layers of `model`, for a policy that deals experts out over
        `num_groups` channel groups (`None`: over none)."""
        where = shared_on_pim, attention_on_gpu
        kind = lambda layer: moe_layer_fixed(layer, model, system, requests, *where)
        max_tokens = requests.num_slots
        channel_time = None
        if num_groups is not None:
            part = system.pim if num_groups == 1 else system.pim.fraction(num_groups)
            channel_time = expert_time_table(model, part, max_tokens)
        return cls(
            model=model,
            system=system,
            fixed=by_kind(model.layers[model.num_dense_layers :], kind),
            expert_time=expert_time_table(model, system.pim, max_tokens),
            channel_time=channel_time,
            all_reduce_time=attention_all_reduce(model, system, requests),
        )

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that an expert can have."""
        return self.expert_time.shape[0] - 1

    def believing(self, table: PIMCostTable) -> "LayerCosts":
        """The same, with the expert times of a cost table."""
        learnt = table.times[: self.expert_time.shape[0]]
        return eqx.tree_at(lambda costs: costs.expert_time, self, learnt)

    def dispatch_time(self, traffic: Float[Array, "gpus gpus"]) -> FloatScalar:
        """Seconds until every token has reached its experts."""
        return expert_comm_time(traffic, vector_bytes(self.model), self.system.link) / 2

    def at(self, fixed: Fixed, traffic: Float[Array, "gpus gpus"]) -> PartitionCosts:
        """Costs of one layer on one GPU, `fixed` being that layer's and GPU's."""
        model, system, precision = self.model, self.system, self.model.precision
        one = expert_work(model.hidden, model.moe_intermediate, 1.0, precision)
        load = expert_work(model.hidden, model.moe_intermediate, 0.0, precision)
        return PartitionCosts(
            pim_time_by_tokens=self.expert_time,
            channel_time_by_tokens=self.channel_time,
            attention_time=fixed.pim_time,
            comm_time=2 * self.dispatch_time(traffic) + self.all_reduce_time,
            expert_bytes=load.bytes,
            token_bytes=one.bytes - load.bytes,
            flops_per_token=one.flops,
            fixed_bytes=fixed.work.bytes,
            fixed_flops=fixed.work.flops,
            hbm_bandwidth=system.gpu.effective_bandwidth,
            flops_per_s=system.gpu.effective_flops_per_s(precision.activation_bits),
            pim_token_bytes=system.pim.token_bytes(
                model.hidden,
                model.moe_intermediate,
                weight_bits=precision.expert_weight_bits,
                activation_bits=precision.activation_bits,
            ),
            contention=system.pim.contention,
        )


def expert_time_table(model: MoEModel, pim, max_tokens: int) -> Float[Array, " counts"]:
    """Time in s of one routed expert on `pim` by token count, [max_tokens + 1]."""
    time = lambda n: pim.expert_time(
        model.hidden,
        model.moe_intermediate,
        n,
        weight_bits=model.precision.expert_weight_bits,
        activation_bits=model.precision.activation_bits,
    )
    return jax.vmap(time)(jnp.arange(max_tokens + 1))


def expert_energy_table(model: MoEModel, pim, max_tokens: int) -> Float[Array, " counts"]:
    """Energy in J of one routed expert by token count; NaN for a PIM that does not know."""
    hidden, inner = model.hidden, model.moe_intermediate
    if not isinstance(pim, TablePIM):
        return jnp.full(max_tokens + 1, jnp.nan)
    energy = lambda n: pim.gemv_energy(2 * inner, hidden, n) + pim.gemv_energy(hidden, inner, n)
    return jax.vmap(energy)(jnp.arange(max_tokens + 1))


def vector_bytes(model: MoEModel) -> FloatScalar:
    """Bytes of one token's hidden state."""
    return model.hidden * model.precision.activation_bits / 8


def attention_all_reduce(model: MoEModel, system: System, requests: Requests) -> FloatScalar:
    """All-reduce after tensor-parallel attention, in s; 0 where `attention_tp` is 1."""
    group = system.attention_tp.astype(requests.count.dtype)
    tokens = jnp.max(requests.pooled(system.attention_tp).count) * group
    message = vector_bytes(model) * tokens
    return all_reduce_time(message, group, system.link)
