"""Collectives of a group of nodes, simulated step by step and in closed form.

All nodes of a group do the same in every step, and a step starts when the last message of the one
before it has arrived. So a collective is the messages of one step and the number of steps.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, check_range
from moejax._status import is_traced
from moejax._typing import Array, FloatLike, FloatScalar, Int
from moejax.noc._messages import Messages
from moejax.noc._simulate import simulate
from moejax.noc._topology import Topology


Group: TypeAlias = int | Sequence[int] | Int[Array, " group"]
"""The nodes that take part, in ring order; a number n stands for nodes 0 .. n - 1."""


class Collective(eqx.Module):
    """`num_steps` times the same `messages`, with a barrier after each step."""

    messages: Messages
    num_steps: int = eqx.field(static=True)


def ring_all_reduce(group: Group, bytes: FloatLike) -> Collective:
    """Sums a vector of `bytes` B over a group of D: D - 1 steps of reduce-scatter, D - 1 of
    all-gather, in each of which every node sends 1/D of the vector to the next one.

    **Arguments:**

    - `group`: an int n for nodes 0 .. n - 1, or distinct node ids in ring order.
    - `bytes`: B, the vector that every node holds before and after.

    **Raises:** `ValueError` for an empty group, a node listed twice, or negative bytes.
    """
    nodes = _nodes(group)
    return _ring(nodes, _size(bytes) / nodes.shape[0], 2 * (nodes.shape[0] - 1))


def ring_reduce_scatter(group: Group, bytes: FloatLike) -> Collective:
    """The first half of `ring_all_reduce`: each node ends with one part of the sum."""
    nodes = _nodes(group)
    return _ring(nodes, _size(bytes) / nodes.shape[0], nodes.shape[0] - 1)


def ring_all_gather(group: Group, bytes: FloatLike) -> Collective:
    """Every node ends with the parts of all, D - 1 steps. `bytes`: B of *one* node's part."""
    nodes = _nodes(group)
    return _ring(nodes, _size(bytes), nodes.shape[0] - 1)


def direct_all_reduce(group: Group, bytes: FloatLike) -> Collective:
    """The sum in two steps: reduce-scatter and all-gather, each with one message of 1/D of the
    vector from every node to every other. Arguments as `ring_all_reduce`."""
    return Collective(all_to_all(group, bytes).messages, 2)


def all_to_all(group: Group, bytes: FloatLike) -> Collective:
    """One step: each node sends 1/D of its `bytes` B to every other one (a part stays at home)."""
    nodes = _nodes(group)
    size = nodes.shape[0]
    source, destination = jnp.repeat(nodes, size), jnp.tile(nodes, size)
    part = jnp.broadcast_to(_size(bytes) / size, source.shape)
    return Collective(Messages(source, destination, part, source != destination), 1)


def collective_time(topology: Topology, collective: Collective, **options: Any) -> FloatScalar:
    """Seconds that a collective takes on a network that is otherwise idle: the number of steps
    times the simulated time of one. `options` and errors are those of `simulate`."""
    return collective.num_steps * simulate(topology, collective.messages, **options).makespan


def ring_all_reduce_time(
    num_nodes: int,
    bytes: FloatLike,
    *,
    bandwidth: FloatLike,
    latency: FloatLike = 0.0,
    endpoint_delay: FloatLike = 0.0,
    resolution: FloatLike | None = None,
    memory_bandwidth: FloatLike = np.inf,
) -> FloatLike:
    """2(D - 1)(latency + bytes / (D bandwidth)): `ring_all_reduce` where each node has a link to
    the next one.

    The last three arguments reproduce the analytical network of ASTRA-sim to the nanosecond (with
    a resolution of 1e-9 s, and bandwidths in its unit of 2^30 B/s): k steps of m bytes take
    k floor(latency + m / bandwidth) + (k + 1) endpoint_delay, and the reduction of a part
    3 floor(m / memory_bandwidth) for each other node (there in decimal GB/s).

    **Arguments:**

    - `num_nodes`: D, the size of the ring.
    - `bytes`: B, the vector that every node holds before and after.
    - `bandwidth`, `latency`: B/s and s of a link.
    - `endpoint_delay`: s before the first step and after each.
    - `resolution`: s, the clock that each step is rounded down to. Default: no rounding.
    - `memory_bandwidth`: B/s at which the parts are added up.

    **Returns:** seconds. Plain numbers are worked out in double precision on the host, arrays with
    `jax.numpy` in their own.

    **Raises:** `ValueError` for fewer than one node or a negative size, rate or time.
    """
    check_range("collective", "memory_bandwidth", memory_bandwidth, 0, np.inf, open_low=True)
    part, steps = _part(num_nodes, bytes), 2 * (num_nodes - 1)
    time = _stepwise(steps, part, bandwidth, latency, endpoint_delay, resolution)
    return time + 3 * (num_nodes - 1) * _floor(part / memory_bandwidth, resolution)


def reduce_scatter_time(
    num_nodes: int,
    bytes: FloatLike,
    *,
    bandwidth: FloatLike,
    latency: FloatLike = 0.0,
    endpoint_delay: FloatLike = 0.0,
    resolution: FloatLike | None = None,
) -> FloatLike:
    """`ring_reduce_scatter` in closed form: D - 1 steps of bytes / D. As `ring_all_reduce_time`."""
    part, steps = _part(num_nodes, bytes), num_nodes - 1
    return _stepwise(steps, part, bandwidth, latency, endpoint_delay, resolution)


def all_gather_time(
    num_nodes: int,
    bytes: FloatLike,
    *,
    bandwidth: FloatLike,
    latency: FloatLike = 0.0,
    endpoint_delay: FloatLike = 0.0,
    resolution: FloatLike | None = None,
) -> FloatLike:
    """`ring_all_gather` in closed form: D - 1 steps of `bytes`, one node's part. As
    `ring_all_reduce_time`."""
    part, steps = _part(num_nodes, bytes) * num_nodes, num_nodes - 1
    return _stepwise(steps, part, bandwidth, latency, endpoint_delay, resolution)


def all_to_all_time(
    num_nodes: int,
    bytes: FloatLike,
    *,
    bandwidth: FloatLike,
    latency: FloatLike = 0.0,
    endpoint_delay: FloatLike = 0.0,
    resolution: FloatLike | None = None,
) -> FloatLike:
    """An all-to-all of parts of bytes / D passed on around a ring in one direction.

    The part for the node at distance d takes d steps, D(D - 1)/2 together. This is how ASTRA-sim
    runs it on a ring; `all_to_all` sends all parts at once instead. As `ring_all_reduce_time`.
    """
    part, steps = _part(num_nodes, bytes), num_nodes * (num_nodes - 1) // 2
    return _stepwise(steps, part, bandwidth, latency, endpoint_delay, resolution)


def _ring(nodes: Int[Array, " group"], part: FloatScalar, num_steps: int) -> Collective:
    following = jnp.roll(nodes, -1)
    sent = jnp.broadcast_to(part, nodes.shape)
    return Collective(Messages(nodes, following, sent, nodes != following), num_steps)


def _nodes(group: Group) -> Int[Array, " group"]:
    if is_traced(group):
        return jnp.asarray(group, jnp.int32)
    nodes = np.arange(group) if isinstance(group, int | np.integer) else np.asarray(group)
    if nodes.ndim != 1 or not nodes.size or nodes.dtype.kind not in "iu":
        raise ValueError(f"group = {group}: allowed is a number or a list of node ids, not empty")
    ids, counts = np.unique(nodes, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"group lists node {ids[np.argmax(counts > 1)]} twice")
    return jnp.asarray(nodes, jnp.int32)


def _size(bytes: FloatLike) -> FloatScalar:
    check_non_negative("collective", "bytes", bytes)
    return as_float(bytes)


def _part(num_nodes: int, bytes: FloatLike) -> FloatLike:
    if num_nodes < 1:
        raise ValueError(f"num_nodes = {num_nodes}: allowed is 1 or more")
    check_non_negative("collective", "bytes", bytes)
    return bytes / num_nodes


def _stepwise(
    steps: int,
    part: FloatLike,
    bandwidth: FloatLike,
    latency: FloatLike,
    endpoint_delay: FloatLike,
    resolution: FloatLike | None,
) -> FloatLike:
    """Seconds for `steps` messages of `part` B one after the other."""
    check_range("collective", "bandwidth", bandwidth, 0, np.inf, open_low=True)
    for name, value in dict(latency=latency, endpoint_delay=endpoint_delay).items():
        check_non_negative("collective", name, value)
    step = _floor(latency + part / bandwidth, resolution)
    return steps * step + (steps + 1) * endpoint_delay


def _floor(time: FloatLike, resolution: FloatLike | None) -> FloatLike:
    """`time` rounded down to a multiple of `resolution`."""
    if resolution is None:
        return time
    check_range("collective", "resolution", resolution, 0, np.inf, open_low=True)
    ticks = time / resolution
    # A quotient that ought to be whole may come out a few units in the last place below.
    if isinstance(ticks, jax.Array):
        return jnp.floor(ticks * (1 + 4 * jnp.finfo(ticks.dtype).eps)) * resolution
    return np.floor(ticks * (1 + 4 * np.finfo(float).eps)) * resolution
