"""Replicate-and-pack in the shape of DeepSeek's EPLB: whole copies of experts in equal slots.

The algorithm is written from its description (DeepSeek-V3, arXiv 2412.19437, section 3.4).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import Status
from moejax._typing import Array, Float, Int
from moejax.placement._validate import check_count, check_load, load_status


EMPTY = -1


class ReplicaPlan(NamedTuple):
    """Where the copies of experts lie, in the order that EPLB returns.

    With `load` [layers, experts] all have a leading layer axis. Slots are numbered GPU by GPU.

    - `physical_to_logical_map`: int [replicas], expert in each slot.
    - `logical_to_physical_map`: int [experts, most], slots of each expert, then -1. `most` is the
        largest number of copies that the sizes allow, whatever the load.
    - `expert_count`: int [experts], copies of each expert.
    """

    physical_to_logical_map: Int[Array, "*layers replicas"]
    logical_to_physical_map: Int[Array, "*layers experts most"]
    expert_count: Int[Array, "*layers experts"]


def replicate_and_pack(
    load: Float[Array, "*layers experts"],
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
) -> ReplicaPlan:
    """Copies the busiest experts and packs all copies so that GPUs are about equally loaded.

    Where `num_groups` is a multiple of `num_nodes`, groups of experts are first packed into nodes
    and copied within them; otherwise nodes and groups play no part. Each further copy goes to the
    expert with the largest load per copy (ties: fewest copies, lowest id), and packing takes the
    heaviest first to the least loaded place that has room.

    **Arguments:**

    - `load`: tokens of each expert, any unit; one layer or several.
    - `num_replicas`: slots in all, a multiple of `num_gpus` and at least the number of experts.
    - `num_groups`: of consecutive experts, in equal numbers.
    - `num_nodes`: hosts; `num_gpus` is a multiple.
    - `num_gpus`: devices in all.

    **Returns:** `ReplicaPlan`. Works under `jax.jit`, where a layer with a load that is negative
    or not finite has -1 in the maps and counts of 0.

    **Raises:** `ValueError` for sizes that do not divide and, eagerly, such a load.
    """
    load = as_float(load)
    check_load("replicate_and_pack", load, ndim=2 if load.ndim == 2 else 1)
    sizes = _checked_sizes(load.shape[-1], num_replicas, num_groups, num_nodes, num_gpus)
    if load.ndim == 1:
        return _one_layer(load, *sizes)
    return jax.vmap(lambda layer: _one_layer(layer, *sizes))(load)


def replica_share(plan: ReplicaPlan, num_gpus: int) -> Float[Array, "*layers experts nodes"]:
    """The plan as `share`: tokens of an expert spread evenly over its copies, a GPU being a node.

    Copies are whole: for the bytes of this placement pass `whole_copies=True` to `memory_use`.

    **Returns:** [experts, GPUs], with a leading layer axis if the plan has one; rows sum to 1.

    **Raises:** `ValueError` for slots that do not divide among the GPUs.
    """
    check_count("replica_share", "num_gpus", num_gpus)
    slots = plan.physical_to_logical_map.shape[-1]
    if slots % num_gpus:
        raise ValueError(f"replica_share: num_gpus = {num_gpus}: allowed are divisors of {slots}")
    return _replica_share(plan, num_gpus)


@functools.partial(jax.jit, static_argnames="num_gpus")
def _replica_share(plan: ReplicaPlan, num_gpus: int) -> Float[Array, "*layers experts nodes"]:
    slots = plan.physical_to_logical_map.shape[-1]
    gpu = jnp.arange(slots) // (slots // num_gpus)

    def one(expert, count):
        part = 1 / count[expert].astype(jnp.result_type(float))
        share = jnp.zeros((count.shape[0], num_gpus), part.dtype).at[expert, gpu].add(part)
        return jnp.where(jnp.any(expert == EMPTY), jnp.nan, share)

    batched = jnp.vectorize(one, signature="(s),(e)->(e,g)")
    return batched(plan.physical_to_logical_map, plan.expert_count)


def _checked_sizes(
    num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[int, int, int, int]:
    where = "replicate_and_pack"
    for name, value in (("num_groups", num_groups), ("num_nodes", num_nodes)):
        check_count(where, name, value)
    check_count(where, "num_gpus", num_gpus)
    check_count(where, "num_replicas", num_replicas, low=num_experts)
    for name, total, parts, divisor in (
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
        ("experts", num_experts, "num_groups", num_groups),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
    ):
        if total % divisor:
            raise ValueError(
                f"{where}: {name} = {total}: allowed are multiples of {parts} = {divisor}"
            )
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    return num_replicas, num_groups, num_nodes, num_gpus


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _one_layer(
    load: Array, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> ReplicaPlan:
    okay = load_status(load) == Status.OK
    load = jnp.where(okay, load, 0.0)
    num_experts, slots = load.shape[0], num_replicas // num_nodes
    grouped = jnp.arange(num_experts).reshape(num_groups, -1)
    group_at = _pack(load.reshape(grouped.shape).sum(1), num_nodes)
    # [nodes, experts of a node], logical ids.
    experts = grouped[group_at].reshape(num_nodes, -1)

    def node_plan(mine):
        local, copy, count = _replicate(load[mine], slots)
        order = _pack((load[mine] / count)[local], num_gpus // num_nodes).ravel()
        return mine[local[order]], copy[order], count

    logical, copy, count = (array.ravel() for array in jax.vmap(node_plan)(experts))
    count = jnp.zeros(num_experts, jnp.int32).at[experts.ravel()].set(count)
    most = slots - num_experts // num_nodes + 1
    physical = jnp.arange(num_replicas, dtype=jnp.int32)
    reverse = jnp.full((num_experts, most), EMPTY, jnp.int32).at[logical, copy].set(physical)
    return ReplicaPlan(
        jnp.where(okay, logical.astype(jnp.int32), EMPTY),
        jnp.where(okay, reverse, EMPTY),
        jnp.where(okay, count, 0),
    )


def _replicate(
    load: Float[Array, " experts"], slots: int
) -> tuple[Int[Array, " slots"], Int[Array, " slots"], Int[Array, " experts"]]:
    """(expert of each slot, number of this copy, copies of each expert); first one copy of each."""
    num_experts = load.shape[0]

    def add(count, _):
        per_copy = load / count
        ties = per_copy == per_copy.max()
        expert = jnp.argmin(jnp.where(ties, count, slots + 1))
        return count.at[expert].add(1), (expert, count[expert])

    once = jnp.ones(num_experts, jnp.int32)
    count, (more, copy) = jax.lax.scan(add, once, length=slots - num_experts)
    expert = jnp.concatenate([jnp.arange(num_experts), more])
    return expert, jnp.concatenate([jnp.zeros(num_experts, jnp.int32), copy]), count


def _pack(load: Float[Array, " items"], num_packs: int) -> Int[Array, "packs room"]:
    """Items in packs of equal number: heaviest first, into the lightest pack that has room."""
    room = load.shape[0] // num_packs
    order = jnp.argsort(-load, stable=True)

    def place(state, item):
        loads, filled = state
        pack = jnp.argmin(jnp.where(filled < room, loads, jnp.inf))
        state = (loads.at[pack].add(load[item]), filled.at[pack].add(1))
        return state, (pack, filled[pack])

    start = (jnp.zeros(num_packs, load.dtype), jnp.zeros(num_packs, jnp.int32))
    _, where = jax.lax.scan(place, start, order)
    return jnp.zeros((num_packs, room), order.dtype).at[where].set(order)
