"""One decode iteration of a model on a near-memory system under a placement of its experts."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax import placement as placements
from moejax._checks import lookup
from moejax._status import Status, flag, is_traced, merge, raise_if_bad
from moejax._typing import Array, BoolScalar, FloatScalar, Int, IntScalar, PRNGKeyArray
from moejax._units import GB
from moejax.hardware import NMPSystem
from moejax.models import MoEModel
from moejax.noc import (
    SWITCHING,
    Switching,
    Topology,
    expert_traffic,
    fat_tree,
    mesh,
    simulate,
    tensor_parallel_time,
    torus,
)
from moejax.placement import NodeCosts, Placement, memory_use
from moejax.serving._accounting import ACCOUNTING, BYTE, Accounting
from moejax.serving._inputs import check_required
from moejax.serving._memory import cached_bytes
from moejax.serving._near_memory import near_memory_time
from moejax.serving._workload import Workload, check_routing, route, routing_status


class NearMemoryReport(eqx.Module):
    """One decode iteration on a near-memory system. Scalars; times in s, sums over all layers.

    Nothing overlaps, so the times add up to `tbt` (HDA-MoE, arXiv 2609.08682, section VI).
    Everything is NaN where `status` is not 0.

    Fields:

    - `tbt`: time between tokens; `interactivity`: tokens per s and user; `throughput`: tokens per
        s of the whole system.
    - `comp_time`: routed experts on the busiest node; `comm_time`: dispatch and gather.
    - `attention_time`: all other arithmetic; `memory_time`: reading weights and caches.
    - `load_imbalance`: busiest node over the mean, mean over layers.
    - `memory_bytes`: expert weights of the fullest node, with its even part of everything else and
        of all caches; `memory_fits`: whether a node's DRAM holds them.
    - `status`: int32, see `moejax.Status`.
    """

    tbt: FloatScalar
    interactivity: FloatScalar
    throughput: FloatScalar
    comp_time: FloatScalar
    comm_time: FloatScalar
    attention_time: FloatScalar
    memory_time: FloatScalar
    load_imbalance: FloatScalar
    memory_bytes: FloatScalar
    memory_fits: BoolScalar
    status: IntScalar

    @property
    def breakdown(self) -> dict[str, FloatScalar]:
        """What `tbt` is the sum of, s by kind."""
        return {
            "compute": self.comp_time + self.attention_time,
            "communication": self.comm_time,
            "memory": self.memory_time,
        }


def network_of(system: NMPSystem) -> Topology:
    """The network of a near-memory system, as `moejax.noc` simulates it.

    **Raises:** `ValueError` for a network of the user's own with another number of nodes.
    """
    rates = dict(bandwidth=system.link_bandwidth, hop_latency=system.hop_latency)
    if callable(system.network):
        network = system.network(**rates)
        if network.num_nodes != system.num_nodes:
            raise ValueError(
                f"NMPSystem.network gives {network.num_nodes} nodes, but shape = {system.shape}"
            )
        return network
    if system.network == "fat_tree":
        pods, leaves, endpoints = system.shape
        sizes = dict(pods=pods, leaves_per_pod=leaves, endpoints_per_leaf=endpoints)
        return fat_tree(**rates, **sizes)
    return {"mesh": mesh, "torus": torus}[system.network](*system.shape, **rates)


def evaluate_placement(
    model: MoEModel,
    system: NMPSystem,
    workload: Workload,
    placement: Placement,
    *,
    key: PRNGKeyArray,
    accounting: str = "counted",
    switching: Switching = "store_and_forward",
    must_fit: bool = False,
) -> NearMemoryReport:
    """Times of one decode iteration, the communication simulated on the system's network.

    `tbt = sum over layers (comp + comm) + attention + memory` (HDA-MoE, arXiv 2609.08682): the
    routed experts on their busiest node; dispatch and gather, twice the simulated gather with
    random aggregators, or four times the estimate for placements that all-reduce; all other
    arithmetic and all memory traffic spread evenly over the nodes.

    **Arguments:**

    - `model`, `system`, `workload`, `placement`: one of each; batch them with `jax.vmap`.
    - `key`: draws the routing, as in `moejax.evaluate`, and the aggregators of tokens.
    - `accounting`: static; `"counted"`, or `"published"` for the papers' own units (`ACCOUNTING`).
    - `switching`: static, of `noc.simulate`.
    - `must_fit`: weights and caches have to fit into the nodes' memory, as `moejax.evaluate` wants
        it. Static; by default `memory_fits` only says so, because few placements look at memory.

    **Returns:** `NearMemoryReport`, differentiable in the rates of the system.

    **Raises:** `ValueError` for a placement of other sizes, the trace of another model, prompts in
    the batch, impossible numbers, and with `must_fit` what memory does not hold; a `status` for the
    latter two under tracing.
    """
    check_required(
        model=(model, MoEModel),
        system=(system, NMPSystem),
        workload=(workload, Workload),
        placement=(placement, Placement),
        must_fit=(must_fit, bool),
    )
    if workload.prefill:
        raise ValueError(
            f"Workload.prefill = {workload.prefill}: allowed is 0 on near-memory systems"
        )
    lookup("accounting", accounting, ACCOUNTING)
    lookup("switching", switching, SWITCHING)
    found = placement.share.shape
    wanted = (model.num_moe_layers, model.num_experts, system.num_nodes)
    if found != wanted:
        raise ValueError(
            f"placement {placement.name!r} has (layers, experts, nodes) = {found}, but "
            f"{model.name} on {system.name} has {wanted}"
        )
    check_routing(model, workload)
    static = _Static(accounting, switching, must_fit)
    report = _evaluate(model, system, workload, placement, key, static)
    if not is_traced(report):
        raise_if_bad(f"{model.name} on {system.name}", report.status, _detail(report, system))
    return report


class _Static(NamedTuple):
    """What is fixed before compilation."""

    accounting: str
    switching: Switching
    must_fit: bool


def _detail(report: NearMemoryReport, system: NMPSystem) -> str:
    if int(report.status) != Status.OUT_OF_MEMORY:
        return ""
    return (
        f"the fullest node needs {float(report.memory_bytes) / GB:.4g} GB, allowed is "
        f"{float(system.dram_bytes) / GB:.4g} GB (must_fit=False times it all the same)"
    )


@functools.partial(jax.jit, static_argnames="static")
def _evaluate(model, system, workload, placement, key, static: _Static) -> NearMemoryReport:
    accounting, switching, must_fit = static
    units = ACCOUNTING[accounting](model, workload)
    routed = route(model, workload, key=key)
    expert_ids = jnp.where(workload.valid[:, None], routed, -1)
    layers = _layers(system, placement, units, expert_ids, key, switching)
    status = merge(
        workload.status,
        routing_status(workload, routed, model.num_experts),
        jnp.max(layers.status),
        flag(~(system.flops_per_s > 0) | ~(system.dram_bandwidth > 0), Status.BAD_RATE),
    )
    comm = layers.comm
    if placement.all_reduce:
        comm = model.num_moe_layers * tensor_parallel_time(
            workload.batch,
            model.hidden,
            bandwidth=system.link_bandwidth,
            bytes_per_element=units.all_reduce_bytes_per_element,
        )
    rest = near_memory_time(units.rest, system)
    comp, comm = jnp.sum(layers.comp), jnp.sum(comm)
    tbt = comp + comm + rest.attention + rest.memory
    fixed = model.num_fixed_parameters / BYTE * model.precision.weight_bits / system.num_nodes
    cache = cached_bytes(model, workload) / system.num_nodes
    stored = jnp.max(memory_use(placement.share, model.expert_bytes).node_bytes) + fixed + cache
    fits = stored <= system.dram_bytes
    if must_fit:
        full = flag(~fits, Status.OUT_OF_MEMORY)
        status = jnp.where(status == Status.OK, full, status)
    report = NearMemoryReport(
        tbt=tbt,
        interactivity=1 / tbt,
        throughput=workload.batch / tbt,
        comp_time=comp,
        comm_time=comm,
        attention_time=rest.attention,
        memory_time=rest.memory,
        load_imbalance=jnp.mean(layers.imbalance),
        memory_bytes=stored,
        memory_fits=fits,
        status=status,
    )
    okay = status == Status.OK
    poison = lambda x: jnp.where(okay, x, jnp.nan) if eqx.is_inexact_array(x) else x
    kept = report.memory_bytes  # says how much it is that does not fit
    return eqx.tree_at(lambda r: r.memory_bytes, jax.tree.map(poison, report), kept)


class _Layers(NamedTuple):
    """Of each layer: times in s, busiest node over the mean, status."""

    comp: Array
    comm: Array
    imbalance: Array
    status: Array


def _layers(
    system: NMPSystem,
    placement: Placement,
    units: Accounting,
    expert_ids: Int[Array, "layers requests top_k"],
    key: PRNGKeyArray,
    switching: Switching,
) -> _Layers:
    network = network_of(system)
    costs = NodeCosts(units.expert_flops, system.flops_per_s, 0.0, system.link_bandwidth, 1.0, 1.0)

    def layer(index, share, position, ids):
        times = placements.evaluate_batch(share, ids, costs)
        mean = jnp.mean(times.node_comp_time)
        ratio = jnp.where(mean > 0, times.comp_time / jnp.where(mean > 0, mean, 1), 1)
        if placement.all_reduce:
            return _Layers(times.comp_time, jnp.zeros_like(mean), ratio, times.status)
        messages = expert_traffic(
            ids,
            share,
            position,
            bytes_per_token=units.message_bytes,
            key=jax.random.fold_in(key, index),
        )
        sent = simulate(network, messages, switching=switching)
        return _Layers(times.comp_time, 2 * sent.makespan, ratio, merge(times.status, sent.status))

    index = jnp.arange(placement.num_layers)
    return jax.vmap(layer)(index, placement.share, placement.node_position, expert_ids)
