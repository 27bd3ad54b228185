"""How much each link carries, whatever the order: incidence algebra instead of a simulation."""

import jax
import jax.numpy as jnp
from jax import lax

from moejax._checks import check_positive
from moejax._status import Status, flag, merge
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int
from moejax.noc._checked import blank, check_messages, check_rates, sane
from moejax.noc._messages import Messages
from moejax.noc._run import route_index
from moejax.noc._topology import NO_LINK, Topology


# Entries of a routes-by-resources matrix that is still cheaper than following each message.
DENSE_ENTRIES = 2**23


def link_load_bound(
    topology: Topology, messages: Messages, *, temperature: FloatLike | None = None
) -> FloatScalar:
    """The time that the busiest link (or port) is in use, in s: no schedule can be faster.

    max over links of bytes / bandwidth. On the expert traffic of a real model it is 0.96 to 1.0 of
    the simulated makespan, at a hundredth of its price. Start times and latencies do not count.
    (Cut-through over links of unequal bandwidth may report less: there a message has arrived when
    its last link has passed it on, though a slower one before may still be busy.)

    **Arguments:**

    - `topology`, `messages`: one network, one set of messages; batches by `jax.vmap`.
    - `temperature`: in s; replaces the maximum by temperature * log(sum(exp(time / temperature))),
        which is smooth, never below the maximum, and at most temperature * log(links) above it.
        The limit 0 is the maximum. Default: the maximum, whose gradient is a subgradient.

    **Returns:** seconds; infinite where traffic crosses a link of no bandwidth, NaN under tracing
    where a message makes no sense. Differentiable in bytes and bandwidths.

    **Raises:** `ValueError` naming the first message that can not be sent.
    """
    check_messages(messages, topology)
    check_rates(topology)
    if temperature is not None:
        check_positive("link_load_bound", "temperature", temperature)
    return _bound(topology, messages, temperature)


@jax.jit
def _bound(topology: Topology, messages: Messages, temperature: FloatLike | None) -> FloatScalar:
    safe, status = sane(messages, topology)
    times = resource_times(topology, safe)
    if times.shape[0] == 0:
        return blank(jnp.zeros((), times.dtype), status)
    if temperature is None:
        return blank(jnp.max(times), status)
    dead = jnp.any(jnp.isinf(times))
    scaled = jnp.where(dead, 0, times) / temperature
    return blank(jnp.where(dead, jnp.inf, temperature * jax.nn.logsumexp(scaled)), status)


def resource_times(topology: Topology, messages: Messages) -> Float[Array, " resources"]:
    """Seconds that each link, then each port, is in use."""
    load = resource_bytes(topology, messages)
    bandwidth = topology.resource_bandwidth
    time = load / jnp.where(bandwidth > 0, bandwidth, 1)
    return jnp.where(bandwidth > 0, time, jnp.where(load > 0, jnp.inf, 0))


def resource_bytes(topology: Topology, messages: Messages) -> Float[Array, " resources"]:
    """Bytes that cross each link, then each port."""
    route = route_index(topology, messages)
    sent = jnp.where(messages.valid, messages.bytes, 0)
    num_columns, num_choices, num_pairs = topology.route_resource.shape
    table = topology.route_resource.reshape(num_columns, num_choices * num_pairs)
    if table.shape[1] * topology.num_resources <= DENSE_ENTRIES:
        by_route = jnp.zeros(table.shape[1], sent.dtype).at[route].add(sent)
        matrix = incidence(table, topology.num_resources, sent.dtype)
        return jnp.matmul(by_route, matrix, precision=lax.Precision.HIGHEST)

    def column(load, resource):
        return load.at[_or_last(resource[route], topology.num_resources)].add(sent), None

    load = jnp.zeros(topology.num_resources + 1, sent.dtype)
    return lax.scan(column, load, table)[0][:-1]


def incidence(
    table: Int[Array, "columns routes"], num_resources: int, dtype: jnp.dtype
) -> Float[Array, "routes resources"]:
    """1 where a route crosses a resource."""
    num_routes = table.shape[1]
    matrix = jnp.zeros((num_routes, num_resources + 1), dtype)
    rows = jnp.broadcast_to(jnp.arange(num_routes), table.shape)
    return matrix.at[rows, _or_last(table, num_resources)].set(1)[:, :-1]


def _or_last(resource: Array, num_resources: int) -> Array:
    return jnp.where(resource == NO_LINK, num_resources, resource)


def dead_link(times: Float[Array, " resources"]) -> Array:
    """`Status.DEAD_LINK` where traffic waits for a resource that never carries it."""
    return merge(flag(jnp.any(jnp.isinf(times)), Status.DEAD_LINK))
