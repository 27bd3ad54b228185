"""The simulation itself: stage after stage of the topology, all queues of a level at once.

Routes that never turn back make the links depend on each other without cycles, so they can be
handled level by level: when a level is served, all ready times of the next one are known. Where
links do depend on each other in a circle (the rings of a torus), the hops inside that circle are
served together, again and again, until their ready times no longer change: each round settles at
least the next event in time, so the fixed point is the event-by-event schedule and the only one.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Bool, BoolScalar, Float, Int, IntScalar
from moejax.noc._messages import Messages
from moejax.noc._order import Field, dense_rank, stable_order
from moejax.noc._queue import NO_ITEM, Served, serve
from moejax.noc._settle import follow, settle
from moejax.noc._topology import NO_LINK, Stage, Topology


class Bookings(eqx.Module):
    """Every use of a resource by a message. [columns, messages], `NO_LINK` where there is none.

    - `resource`: the link (or, numbered behind the links, the port) in use.
    - `start`, `end`: when, in s.
    - `before`: flat index (column * messages + message) of the booking waited for, or `NO_ITEM`.
    """

    resource: Int[Array, "columns messages"]
    start: Float[Array, "columns messages"]
    end: Float[Array, "columns messages"]
    before: Int[Array, "columns messages"]


class Run(eqx.Module):
    """Arrivals in s [messages], the bookings, rounds that the slowest cycle took to settle."""

    arrival: Float[Array, " messages"]
    bookings: Bookings
    iterations: IntScalar
    settled: BoolScalar


class _Hops(eqx.Module):
    """What the messages do in one stage. [messages, hops], hops in order, inactive ones last."""

    resource: Int[Array, "messages hops"]
    rank: Int[Array, "messages hops"]
    active: Bool[Array, "messages hops"]
    service: Float[Array, "messages hops"]  # s a resource is held
    latency: Float[Array, "messages hops"]  # s beyond it


class _Moving(eqx.Module):
    """Where the messages stand between stages, in s: ready for the next hop, arrived if none."""

    ready: Float[Array, " messages"]
    arrival: Float[Array, " messages"]


def run(topology: Topology, messages: Messages, cut_through: bool, max_iterations: int) -> Run:
    """Serves messages whose ids and bytes are known to make sense."""
    network = _Network(topology, messages, cut_through)
    moving = _Moving(messages.start_time, messages.start_time)
    bookings = [network.none()]
    rounds, settled = jnp.int32(0), jnp.array(True)
    for stage in topology.stages:
        if stage.cyclic:
            moving, booked, count, done = network.cycle(stage, moving, max_iterations)
            rounds, settled = jnp.maximum(rounds, count), settled & done
        else:
            moving, booked = network.levels(stage, moving)
        bookings.append(booked)
    booked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *bookings)
    return Run(moving.arrival, booked, rounds, settled)


def route_index(topology: Topology, messages: Messages) -> Int[Array, " messages"]:
    """The row of the route tables, choices * pairs long, that each message follows."""
    pair = messages.source * topology.num_nodes + messages.destination
    if messages.flow is None or topology.route_resource.shape[1] == 1:
        return pair
    choice = messages.flow % topology.num_routes[pair]
    return choice * topology.num_routes.shape[0] + pair


class _Network:
    """One topology under one set of messages; what does not change from stage to stage."""

    def __init__(self, topology: Topology, messages: Messages, cut_through: bool):
        self.topology = topology
        self.messages = messages
        self.cut_through = cut_through
        self.route = route_index(topology, messages)
        self.size_rank = None if cut_through else dense_rank(messages.bytes)

    def none(self) -> Bookings:
        """No bookings at all, so that a network of one node needs no case of its own."""
        times = jnp.zeros((0, *self.messages.bytes.shape), self.messages.bytes.dtype)
        ids = jnp.zeros(times.shape, jnp.int32)
        return Bookings(ids, times, times, ids)

    def levels(self, stage: Stage, moving: _Moving) -> tuple[_Moving, Bookings]:
        """Levels without cycles: one pass each, as a scan over columns of the route tables."""

        def level(moving, column):
            index, resource, rank = column
            hops = self.hops(resource[:, None], rank[:, None])
            served = self.serve(hops, moving.ready[:, None])
            return self.onward(hops, served, moving), self.booked(hops, served, index)

        columns = jnp.arange(stage.start, stage.stop, dtype=jnp.int32)
        tables = [table[:, self.route] for table in self.tables(stage)]
        moving, bookings = lax.scan(level, moving, (columns, *tables))
        return moving, jax.tree.map(lambda x: x[:, 0], bookings)

    def cycle(self, stage: Stage, moving: _Moving, max_iterations: int):
        """All hops of a stage together, until their ready times settle."""
        hops = self.hops(*(table[:, self.route].T for table in self.tables(stage)))
        held = lax.stop_gradient((self.topology, hops, moving))

        # Ties do not change from round to round: sorted once, they leave shorter keys.
        order = stable_order(self.ties(hops)) if self.size_rank is not None else None

        def again(ready, hops=hops, first=moving.ready):
            step, _ = self.passed(hops, self.serve(hops, ready, order))
            ready = jnp.concatenate([first[:, None], step[:, :-1]], axis=1)
            return jnp.where(hops.active, ready, 0)

        frozen = lambda ready: again(ready, held[1], held[2].ready)
        alone = hops.latency if self.cut_through else hops.latency + hops.service
        guess = moving.ready[:, None] + jnp.cumsum(alone, axis=1) - alone
        guess = jnp.where(hops.active & jnp.isfinite(guess), guess, 0)
        ready, rounds, done = settle(again, guess, max_iterations)
        served = self.serve(hops, follow(again, frozen, ready), order)
        return (
            self.onward(hops, served, moving),
            self.booked(hops, served, stage.start),
            rounds,
            done,
        )

    def tables(self, stage: Stage) -> list[Int[Array, "hops routes"]]:
        """Resource and tie rank of every route in the columns of a stage."""
        columns = slice(stage.start, stage.stop)
        tables = (self.topology.route_resource, self.topology.route_rank)
        return [table[columns].reshape(stage.stop - stage.start, -1) for table in tables]

    def hops(self, resource: Int[Array, "messages hops"], rank: Array) -> _Hops:
        active = self.messages.valid[:, None] & (resource != NO_LINK)
        bandwidth = self.topology.resource_bandwidth[resource]
        bytes = self.messages.bytes[:, None]
        time = jnp.where(bandwidth > 0, bytes / jnp.where(bandwidth > 0, bandwidth, 1), jnp.inf)
        service = jnp.where(active & (bytes > 0), time, 0)
        latency = jnp.where(active, self.topology.resource_latency[resource], 0)
        return _Hops(resource, jnp.maximum(rank, 0), active, service, latency)

    def serve(
        self,
        hops: _Hops,
        ready: Float[Array, "messages hops"],
        order: Int[Array, " items"] | None = None,
    ) -> Served:
        """Serves all hops at once; what does not hop stands in a queue of its own, the last."""
        nowhere = 2**self.topology.segment_bits - 1
        segment = jnp.where(hops.active, self.topology.segment[hops.resource], nowhere)
        queue = Field(segment.reshape(-1), self.topology.segment_bits)
        ties = self.ties(hops) if order is None else ()
        served = serve(queue, ready.reshape(-1), hops.service.reshape(-1), ties, order)
        return Served(*(part.reshape(segment.shape) for part in served))

    def ties(self, hops: _Hops) -> list[Field]:
        """Store-and-forward: the smaller message, then the smaller path. Cut-through: neither."""
        if self.size_rank is None:
            return []
        size = jnp.broadcast_to(self.size_rank.value[:, None], hops.rank.shape)
        rank = Field(hops.rank.reshape(-1), self.topology.rank_bits)
        return [Field(size.reshape(-1), self.size_rank.bits), rank]

    def passed(self, hops: _Hops, served: Served) -> tuple[Array, Array]:
        """When messages may start their next hop, and when all of them has passed this one."""
        arrival = served.end + hops.latency
        return (served.start + hops.latency if self.cut_through else arrival), arrival

    def onward(self, hops: _Hops, served: Served, moving: _Moving) -> _Moving:
        """The state after the last hop that a message has in this stage, if it has any."""
        last = jnp.maximum(jnp.sum(hops.active, axis=1, keepdims=True) - 1, 0)
        ready, arrival = (
            jnp.take_along_axis(x, last, axis=1)[:, 0] for x in self.passed(hops, served)
        )
        moved = hops.active[:, 0]
        return _Moving(
            jnp.where(moved, ready, moving.ready), jnp.where(moved, arrival, moving.arrival)
        )

    def booked(self, hops: _Hops, served: Served, first_column: int | IntScalar) -> Bookings:
        """Bookings by column, and `before` by its place among all of them."""
        num_messages, num_hops = hops.active.shape
        column = first_column + served.before % num_hops
        before = column * num_messages + served.before // num_hops
        before = jnp.where(hops.active & (served.before != NO_ITEM), before, NO_ITEM)
        resource = jnp.where(hops.active, hops.resource, NO_LINK)
        return Bookings(resource.T, served.start.T, served.end.T, before.T)
