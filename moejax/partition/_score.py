"""The score of any choice of experts, however it was made."""

import jax.numpy as jnp

from moejax._typing import Array, Bool, Float, Int
from moejax.partition._base import Load, Partition, PartitionCosts, partition_from, times
from moejax.partition._validate import checked, eager_errors


@eager_errors
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
    counts, status = checked(tokens_per_expert, costs)
    on_gpu = jnp.asarray(on_gpu)
    if on_gpu.shape != counts.shape or on_gpu.dtype != bool:
        raise ValueError(f"on_gpu is {on_gpu.dtype} {on_gpu.shape}: allowed is bool {counts.shape}")
    if num_groups is not None and num_groups < 1:
        raise ValueError(f"num_groups = {num_groups}: allowed is None, or 1 or more")
    return scored(on_gpu, counts, costs, status, num_groups)


def scored(on_gpu, counts, costs, status, num_groups: int | None = None) -> Partition:
    """`score` for counts that are already checked."""
    component = times(load_of(on_gpu, counts, costs, num_groups), costs)
    on_gpu = on_gpu & (counts > 0)
    return partition_from(on_gpu, jnp.sum(on_gpu, dtype=jnp.int32), component, status)


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
