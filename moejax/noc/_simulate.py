"""`simulate`: when the last message of a batch arrives, and what held it up."""

import functools
from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import lookup
from moejax._status import Status, flag, merge
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, IntScalar
from moejax.noc._checked import blank, check_messages, check_rates, sane
from moejax.noc._critical import critical_path
from moejax.noc._load import dead_link, resource_times
from moejax.noc._messages import Messages
from moejax.noc._packets import check_packets, join, split
from moejax.noc._run import Bookings, run
from moejax.noc._topology import Topology


Switching: TypeAlias = Literal["store_and_forward", "cut_through"]
SWITCHING = {"store_and_forward": False, "cut_through": True}


class LinkReport(eqx.Module):
    """What `simulate` returns. Times in s.

    - `makespan`: when the last message has arrived, from time 0. Infinite where one crosses a
        link of no bandwidth (`Status.DEAD_LINK`), NaN where the status says that input was wrong.
    - `finish_time`: [messages], 0 for padding.
    - `link_occupancy`: [links], how long each link is in use; over `makespan`: its utilization.
    - `port_occupancy`: [2, nodes] for injection and ejection, None without ports.
    - `critical_messages`, `critical_links`: [messages], [links]: which lie on the critical path.
        Speeding up anything else does not change the makespan.
    - `iterations`: rounds until the slowest circle of links settled; 0 without circles.
    - `status`: a `moejax.Status`.
    """

    makespan: FloatScalar
    finish_time: Float[Array, " messages"]
    link_occupancy: Float[Array, " links"]
    port_occupancy: Float[Array, "2 nodes"] | None
    critical_messages: Bool[Array, " messages"]
    critical_links: Bool[Array, " links"]
    iterations: IntScalar
    status: IntScalar

    @property
    def link_utilization(self) -> Float[Array, " links"]:
        """[links], the share of the makespan that each link is in use; 0 where nothing moves."""
        moving = self.makespan > 0
        return jnp.where(moving, self.link_occupancy / jnp.where(moving, self.makespan, 1), 0)


def simulate(
    topology: Topology,
    messages: Messages,
    *,
    switching: Switching = "store_and_forward",
    packet_bytes: FloatLike | None = None,
    max_packets: int | None = None,
    max_iterations: int = 1000,
) -> LinkReport:
    """Sends messages over a network whose links serve one message at a time.

    Exactly the schedule of the discrete-event simulation in HD-MoE (arXiv 2509.09420, Alg. 1), as
    one program for `jax.jit`, `jax.vmap` and `jax.grad`: every link, and port if the topology has
    them, serves in the order of ready times.

    - ``"store_and_forward"``: a message is ready for its next link when all of it has crossed the
        last one, and that link's `hop_latency` has passed. Ties in the ready time go to the
        smaller message, then the smaller remaining path, compared hop by hop as (from, to)
        vertex ids, then the lower index.
    - ``"cut_through"``: ready for the next resource `hop_latency` after it started to cross the
        last one. Ties go to the lower index. Agrees with BookSim 2 where routers do not block.

    **Arguments:**

    - `topology`, `messages`: one network, one set of messages; batches by `jax.vmap`.
    - `switching`: as above.
    - `packet_bytes`: B; cuts every message into packets of this size, in order of index.
    - `max_packets`: static room for the packets of one message; needed under tracing.
    - `max_iterations`: cap on rounds over circles of links (torus, custom graphs); what has not
        settled by then is NaN with `Status.NOT_CONVERGED`.

    **Returns:** a `LinkReport`. `makespan` and `finish_time` are differentiable in bytes, start
    times, bandwidths and latencies (the derivative along the critical path).

    **Raises:** `ValueError` naming an unknown node, a negative size, too many packets, or an
    unknown option; under tracing a status says so.
    """
    packets = _check(topology, messages, switching, packet_bytes, max_packets, max_iterations)
    return _simulate(
        topology, messages, packet_bytes, SWITCHING[switching], packets, max_iterations
    )


def bookings(
    topology: Topology,
    messages: Messages,
    *,
    switching: Switching = "store_and_forward",
    max_iterations: int = 1000,
) -> Bookings:
    """Every use of a link by a message, for time-lines. Arguments and errors as `simulate`."""
    _check(topology, messages, switching, None, None, max_iterations)
    return _bookings(topology, messages, SWITCHING[switching], max_iterations)


def _check(topology, messages, switching, packet_bytes, max_packets, max_iterations) -> int:
    lookup("switching", switching, SWITCHING)
    if max_iterations < 1:
        raise ValueError(f"simulate.max_iterations = {max_iterations}: allowed is 1 or more")
    check_messages(messages, topology)
    check_rates(topology)
    if packet_bytes is None:
        if max_packets is not None:
            raise ValueError(
                f"simulate.max_packets = {max_packets} has no effect without packet_bytes"
            )
        return 1
    return check_packets(messages, packet_bytes, max_packets)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _bookings(topology: Topology, messages: Messages, cut_through: bool, cap: int) -> Bookings:
    return run(topology, sane(messages, topology)[0], cut_through, cap).bookings


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _simulate(
    topology: Topology,
    messages: Messages,
    packet_bytes: FloatLike | None,
    cut_through: bool,
    max_packets: int,
    max_iterations: int,
) -> LinkReport:
    safe, status = sane(messages, topology)
    if packet_bytes is not None:
        safe = split(safe, packet_bytes, max_packets)
        status = merge(status, safe.status)
    done = run(topology, safe, cut_through, max_iterations)
    times = resource_times(topology, safe)
    status = merge(status, dead_link(times), flag(~done.settled, Status.NOT_CONVERGED))
    finish = jnp.max(join(jnp.where(safe.valid, done.arrival, 0), max_packets), axis=1)
    on_path, crossed = critical_path(done, topology.num_resources)
    num_links = topology.num_links
    ports = times[num_links:].reshape(2, -1) if topology.num_resources > num_links else None
    return LinkReport(
        makespan=blank(jnp.max(finish, initial=0), status),
        finish_time=blank(finish, status),
        link_occupancy=blank(times[:num_links], status),
        port_occupancy=None if ports is None else blank(ports, status),
        critical_messages=jnp.any(join(on_path, max_packets), axis=1),
        critical_links=crossed[:num_links],
        iterations=done.iterations,
        status=status,
    )
