"""The policies that Sieve is compared with (Sieve, arXiv 2605.11277, evaluation)."""

import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Bool, FloatScalar, Int, IntScalar
from moejax.partition._base import Partition, PartitionCosts, times
from moejax.partition._score import channel_load, load_of, scored
from moejax.partition._validate import checked, eager_errors


@eager_errors
def no_exp(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> Partition:
    """NoExp: every active expert on the GPU, PIM runs attention only. See `sieve`."""
    counts, status = checked(tokens_per_expert, costs)
    return scored(counts > 0, counts, costs, status)


@eager_errors
def all_exp(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> Partition:
    """AllExp: every active expert on PIM, the decode policy of PAPI and Stratum. See `sieve`."""
    counts, status = checked(tokens_per_expert, costs)
    return scored(counts < 0, counts, costs, status)


@eager_errors
def few_tokens(
    tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts, *, at_most: int = 4
) -> Partition:
    """A fixed rule: experts with `at_most` tokens or fewer run on PIM (Sieve calls those
    memory-bound), the others on the GPU. See `sieve` for arguments and errors."""
    if at_most < 0:
        raise ValueError(f"at_most = {at_most}: allowed is 0 or more")
    counts, status = checked(tokens_per_expert, costs)
    return scored(counts > at_most, counts, costs, status)


@eager_errors
def pimoe_threshold(tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts) -> Partition:
    """PIMoE's static rule: an expert runs on the GPU from the smallest token count at which it
    is faster there *in isolation* than on PIM; attention and communication play no part.

    Arguments, returns and errors as `sieve`.
    """
    counts, status = checked(tokens_per_expert, costs)
    return scored(counts >= isolated_threshold(costs), counts, costs, status)


def isolated_threshold(costs: PartitionCosts) -> IntScalar:
    """The smallest token count whose expert is faster alone on the GPU than alone on PIM;
    `max_tokens + 1` if there is none. int32."""
    tokens = jnp.arange(1, costs.max_tokens + 1)
    load_time = costs.expert_bytes / costs.hbm_bandwidth
    gpu_time = jnp.maximum(load_time, tokens * costs.flops_per_token / costs.flops_per_s)
    faster = gpu_time < costs.pim_time_by_tokens[1:]
    first = jnp.argmax(faster).astype(jnp.int32) + 1 if costs.max_tokens else jnp.int32(1)
    return jnp.where(jnp.any(faster), first, costs.max_tokens + 1)


@eager_errors
def pimoe_channel(
    tokens_per_expert: Int[Array, " experts"], costs: PartitionCosts, *, num_groups: int = 8
) -> Partition:
    """PIMoE's dynamic rule, with experts dealt out over groups of PIM channels.

    All experts start on PIM, expert e wholly in channel group `e mod num_groups`. While the GPU
    is not the slower side, the busiest group gives up its most popular expert. The decision
    leaves out attention and communication; the returned times contain both.

    **Arguments:** as `sieve`; `costs.channel_time_by_tokens` is required. `num_groups`: the
    number of channel groups (not published; 8 = one per HBM stack of a B200).

    **Returns:** `Partition` whose `pim_time` is attention + the busiest group.

    **Raises:** as `sieve`, and for `num_groups` below 1.
    """
    if num_groups < 1:
        raise ValueError(f"num_groups = {num_groups}: allowed is 1 or more")
    counts, status = checked(tokens_per_expert, costs)
    on_gpu = _relieve_channels(counts, costs, num_groups)
    return scored(on_gpu, counts, costs, status, num_groups)


def _relieve_channels(
    counts: Int[Array, " experts"], costs: PartitionCosts, num_groups: int
) -> Bool[Array, " experts"]:
    # Reverse-mode does not reach through while_loop, and need not: the choice is discrete.
    costs = lax.stop_gradient(costs)
    active = counts > 0
    group = jnp.arange(counts.shape[0]) % num_groups

    def busiest(on_gpu: Bool[Array, " experts"]) -> tuple[IntScalar, FloatScalar]:
        load = channel_load(active & ~on_gpu, counts, costs, num_groups)
        return jnp.argmax(load), jnp.max(load)

    def unbalanced(on_gpu: Bool[Array, " experts"]) -> Bool[Array, ""]:
        component = times(load_of(on_gpu, counts, costs, num_groups), costs)
        gpu_time = jnp.maximum(component.offchip, component.compute)
        return jnp.any(active & ~on_gpu) & (gpu_time <= busiest(on_gpu)[1])

    def move(on_gpu: Bool[Array, " experts"]) -> Bool[Array, " experts"]:
        candidates = active & ~on_gpu & (group == busiest(on_gpu)[0])
        return on_gpu.at[jnp.argmax(jnp.where(candidates, counts, -1))].set(True)

    return lax.while_loop(unbalanced, move, jnp.zeros_like(active))
