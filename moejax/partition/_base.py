"""What a partition costs: the inputs of every policy, its result, and the score of any choice."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge, raise_if_bad
from moejax._typing import Array, Bool, Float, FloatScalar, Int, IntScalar


class PartitionCosts(eqx.Module):
    """What one MoE layer costs on one GPU with its PIM stacks (Sieve, arXiv 2605.11277, Eq. 1).

    **Arguments:** all times in s, sizes in bytes, rates per s; every field is traced.

    - `pim_time_by_tokens`: [max_tokens + 1], time of one expert with n tokens on PIM.
    - `attention_time`: PIM time that is spent whatever the partition (decode attention).
    - `comm_time`: dispatch and combine over the GPU interconnect.
    - `expert_bytes`: weights of one expert, read by the GPU if the expert runs there.
    - `token_bytes`: activations in and out of one token of an expert on the GPU.
    - `flops_per_token`: FLOPs of one token in one expert.
    - `fixed_bytes`, `fixed_flops`: what the GPU moves and computes whatever the partition.
    - `hbm_bandwidth`: external bandwidth between GPU and HBM, B/s.
    - `flops_per_s`: the GPU's rate.
    - `pim_token_bytes`: bytes over the external bus for one token of an expert on PIM.
    - `contention`: 0 where PIM and GPU accesses proceed together (dual row buffers), 1 where
        they exclude each other.
    - `channel_time_by_tokens`: [max_tokens + 1], time of one expert that lies wholly in one group
        of PIM channels; only policies with `num_groups` read it.
    """

    pim_time_by_tokens: Float[Array, " counts"] = eqx.field(converter=as_float)
    attention_time: FloatScalar = eqx.field(converter=as_float)
    comm_time: FloatScalar = eqx.field(converter=as_float)
    expert_bytes: FloatScalar = eqx.field(converter=as_float)
    token_bytes: FloatScalar = eqx.field(converter=as_float)
    flops_per_token: FloatScalar = eqx.field(converter=as_float)
    fixed_bytes: FloatScalar = eqx.field(converter=as_float)
    fixed_flops: FloatScalar = eqx.field(converter=as_float)
    hbm_bandwidth: FloatScalar = eqx.field(converter=as_float)
    flops_per_s: FloatScalar = eqx.field(converter=as_float)
    pim_token_bytes: FloatScalar = eqx.field(converter=as_float, default=0.0)
    contention: FloatScalar = eqx.field(converter=as_float, default=0.0)
    channel_time_by_tokens: Float[Array, " counts"] | None = eqx.field(
        converter=lambda value: None if value is None else as_float(value), default=None
    )

    @property
    def max_tokens(self) -> int:
        """The largest token count that the PIM time table covers."""
        return self.pim_time_by_tokens.shape[0] - 1


class Partition(eqx.Module):
    """Which experts run on the GPU, and what that takes.

    Fields: `on_gpu` bool [experts] (an expert without tokens is on neither side), `num_gpu`
    int32, `gpu_time`, `pim_time`, `comm_time`, `total_time` in s, `status` int32 (see
    `moejax.Status`; the times are NaN unless it is 0).
    """

    on_gpu: Bool[Array, " experts"]
    num_gpu: IntScalar
    gpu_time: FloatScalar
    pim_time: FloatScalar
    comm_time: FloatScalar
    total_time: FloatScalar
    status: IntScalar


class Load(eqx.Module):
    """Everything that the time of a partition depends on: three sums and the PIM experts' time.

    Fields: `gpu_experts` and `gpu_tokens` (summed over experts on the GPU), `pim_tokens` and
    `pim_expert_time` in s (summed over experts on PIM).
    """

    gpu_experts: FloatScalar
    gpu_tokens: FloatScalar
    pim_tokens: FloatScalar
    pim_expert_time: FloatScalar


class Times(eqx.Module):
    """Component times of one layer in s: external memory, compute, PIM, communication, total."""

    offchip: FloatScalar
    compute: FloatScalar
    pim: FloatScalar
    comm: FloatScalar
    total: FloatScalar


def times(load: Load, costs: PartitionCosts) -> Times:
    """Component times of a layer (Sieve, Eq. 1 and its T_offchip, T_comp, T_PIM).

    `total = max(comm, compute, max(offchip, pim) + contention * min(offchip, pim))`.
    """
    moved = (
        costs.fixed_bytes
        + costs.expert_bytes * load.gpu_experts
        + costs.token_bytes * load.gpu_tokens
        + costs.pim_token_bytes * load.pim_tokens
    )
    offchip = moved / costs.hbm_bandwidth
    compute = (costs.fixed_flops + costs.flops_per_token * load.gpu_tokens) / costs.flops_per_s
    pim = costs.attention_time + load.pim_expert_time
    memory = jnp.maximum(offchip, pim) + costs.contention * jnp.minimum(offchip, pim)
    total = jnp.maximum(jnp.maximum(costs.comm_time, compute), memory)
    return Times(offchip, compute, pim, costs.comm_time, total)


def partition_from(
    on_gpu: Bool[Array, " experts"],
    num_gpu: IntScalar,
    component: Times,
    status: IntScalar,
) -> Partition:
    """Assembles a `Partition`, with NaN times and nothing placed where the status is not okay."""
    okay = status == Status.OK
    poison = lambda time: jnp.where(okay, time, jnp.nan)
    return Partition(
        on_gpu=on_gpu & okay,
        num_gpu=jnp.where(okay, num_gpu, 0),
        gpu_time=poison(jnp.maximum(component.offchip, component.compute)),
        pim_time=poison(component.pim),
        comm_time=poison(component.comm),
        total_time=poison(component.total),
        status=status,
    )


def load_of(
    on_gpu: Bool[Array, " experts"],
    tokens_per_expert: Int[Array, " experts"],
    costs: PartitionCosts,
    num_groups: int | None = None,
) -> Load:
    """The `Load` of an arbitrary choice.

    With `num_groups`, expert e lies wholly in channel group `e mod num_groups` and PIM is as slow
    as its busiest group; without, every expert is spread over all channels and they queue.
    """
    active = tokens_per_expert > 0
    gpu, pim = on_gpu & active, ~on_gpu & active
    tokens = tokens_per_expert.astype(costs.pim_time_by_tokens.dtype)
    if num_groups is None:
        pim_expert_time = jnp.sum(jnp.where(pim, costs.pim_time_by_tokens[tokens_per_expert], 0))
    else:
        pim_expert_time = jnp.max(channel_load(pim, tokens_per_expert, costs, num_groups))
    return Load(
        gpu_experts=jnp.sum(gpu).astype(tokens.dtype),
        gpu_tokens=jnp.sum(jnp.where(gpu, tokens, 0)),
        pim_tokens=jnp.sum(jnp.where(pim, tokens, 0)),
        pim_expert_time=pim_expert_time,
    )


def channel_load(
    on_pim: Bool[Array, " experts"],
    tokens_per_expert: Int[Array, " experts"],
    costs: PartitionCosts,
    num_groups: int,
) -> Float[Array, " groups"]:
    """Busy time in s of each group of PIM channels, expert e in group `e mod num_groups`."""
    if costs.channel_time_by_tokens is None:
        raise ValueError("costs.channel_time_by_tokens is None: expert parallel PIM needs it")
    time = jnp.where(on_pim, costs.channel_time_by_tokens[tokens_per_expert], 0)
    group = jnp.arange(tokens_per_expert.shape[0]) % num_groups
    return jnp.zeros(num_groups, time.dtype).at[group].add(time)


def score(
    on_gpu: Bool[Array, " experts"],
    tokens_per_expert: Int[Array, " experts"],
    costs: PartitionCosts,
    *,
    num_groups: int | None = None,
) -> Partition:
    """What any choice of experts costs, for instance one that was made on other costs.

    **Arguments:**

    - `on_gpu`: bool [experts]; entries of experts without tokens are ignored.
    - `tokens_per_expert`: int [experts].
    - `costs`: `PartitionCosts`, the true ones.
    - `num_groups`: `None` where every expert uses all PIM channels; else the number of channel
        groups over which experts are dealt out, `expert mod num_groups`.

    **Returns:** `Partition`.

    **Raises:** `ValueError` for impossible counts or costs, eagerly; a `status` under tracing.
    """
    tokens_per_expert, status = checked(tokens_per_expert, costs, "score")
    load = load_of(on_gpu, tokens_per_expert, costs, num_groups)
    on_gpu = on_gpu & (tokens_per_expert > 0)
    return partition_from(on_gpu, jnp.sum(on_gpu), times(load, costs), status)


def checked(
    tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts, where: str
) -> tuple[Int[Array, " experts"], IntScalar]:
    """Counts that are safe to use as table indices, and the status that says whether they were.

    Raises eagerly, so that a status other than okay is only ever seen under tracing.
    """
    tokens_per_expert = jnp.asarray(tokens_per_expert)
    _check_shapes(tokens_per_expert, costs, where)
    if tokens_per_expert.dtype.itemsize < 4 or tokens_per_expert.dtype.kind == "u":
        tokens_per_expert = tokens_per_expert.astype(jnp.int32)
    status = merge(count_status(tokens_per_expert, costs.max_tokens), cost_status(costs))
    if not is_traced(status):
        low, high = int(jnp.min(tokens_per_expert)), int(jnp.max(tokens_per_expert))
        raise_if_bad(where, status, f"counts {low} to {high}, table 0 to {costs.max_tokens}")
    return jnp.clip(tokens_per_expert, 0, costs.max_tokens), status


def _check_shapes(tokens_per_expert: Array, costs: PartitionCosts, where: str) -> None:
    if tokens_per_expert.ndim != 1 or tokens_per_expert.shape[0] == 0:
        raise ValueError(
            f"{where}: tokens_per_expert has shape {tokens_per_expert.shape}, expected [experts] "
            "with at least one expert (use jax.vmap for batches)"
        )
    if not jnp.issubdtype(tokens_per_expert.dtype, jnp.integer):
        raise ValueError(f"{where}: tokens_per_expert is {tokens_per_expert.dtype}, not an integer")
    if costs.pim_time_by_tokens.ndim != 1 or costs.max_tokens < 0:
        raise ValueError(
            f"{where}: pim_time_by_tokens has shape {costs.pim_time_by_tokens.shape}, expected "
            "[max_tokens + 1] (use jax.vmap for batches)"
        )


def count_status(tokens_per_expert: Int[Array, " experts"], max_tokens: int) -> IntScalar:
    """Negative counts, and counts that the table does not cover."""
    # A bitwise or is negative if any entry is: several times faster than any() on a CPU.
    any_negative = lambda x: lax.reduce(x, x.dtype.type(0), lax.bitwise_or, (0,)) < 0
    return merge(
        flag(any_negative(tokens_per_expert), Status.NEGATIVE_COUNT),
        flag(any_negative(max_tokens - tokens_per_expert), Status.COUNT_BEYOND_TABLE),
    )


def cost_status(costs: PartitionCosts) -> IntScalar:
    """Rates that are not above zero, and times or sizes that are negative or not finite."""
    bad_rate = ~(costs.hbm_bandwidth > 0) | ~(costs.flops_per_s > 0)
    table = costs.channel_time_by_tokens
    amounts = [
        costs.pim_time_by_tokens,
        costs.pim_time_by_tokens[:0] if table is None else table,
        costs.attention_time,
        costs.comm_time,
        costs.expert_bytes,
        costs.token_bytes,
        costs.flops_per_token,
        costs.fixed_bytes,
        costs.fixed_flops,
        costs.pim_token_bytes,
        costs.contention,
    ]
    bad_cost = costs.contention > 1
    for amount in amounts:
        bad_cost |= ~jnp.all((amount >= 0) & jnp.isfinite(amount))
    return merge(flag(bad_rate, Status.BAD_RATE), flag(bad_cost, Status.BAD_COST))
