"""Topologies: whether the route tables say what they must, and the simulator agrees."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status
from moejax.noc import NO_LINK, LinkReport, Messages, Topology, link_load_bound, simulate
from moejax.testing._contract import (
    Broken,
    Contract,
    Kept,
    require,
    require_error,
    require_finite,
    require_same,
    row,
    stack,
)
from moejax.testing._routes import check_ranks, check_routes, check_tables


ROUNDING = 1e-5
BANDWIDTH = 2.0**36
BYTES = 4096.0
MESSAGES = 24
GOOD = 3


def check_topology(topology: Topology | Callable[..., Topology]) -> Kept:
    """Tries a network of your own: a `moejax.noc.Topology`, or better what builds it, a function
    of the keyword `bandwidth` (B/s, scalar).

    The promises, in this order:

    - `shape`: links, nodes and route tables fit each other.
    - `routes`: every route leads from its source to its destination over links that are there,
        each resource once, through the ports where there are any; a node's own is empty.
    - `order`: ranks, segments and stages are those that the simulator sorts by, found anew from
        the routes.
    - `time`: every message alone takes the sum over its route, and no batch less than its busiest
        link.
    - `jit`: a builder makes the same network from a traced bandwidth, and from a batch of them.
    - `vmap`: the same makespan in a compiled batch of bandwidths.
    - `grad`: the derivative of the makespan in every link's bandwidth is finite.
    - `units`: twice the bandwidth and half the latency is half the makespan, to the bit.
    - `determinism`: built and asked twice, the same bits.
    - `status`: traffic over a link of bandwidth 0 is infinite with a status, a negative bandwidth
        a status where traced; a builder raises `ValueError` for one.

    Meant for networks of tens of nodes: all pairs are looked at, on the host.

    **Returns:** `Kept`, which prints as a sentence.

    **Raises:** `ContractError` naming every promise that is broken.
    """
    build = None if isinstance(topology, Topology) else topology
    maker = getattr(topology, "func", topology)  # of a functools.partial
    name = getattr(topology, "kind", None) or getattr(maker, "__name__", "custom")
    contract = Contract(f"topology {name!r}")
    with contract.promise("shape", first=True):
        net = _network(topology)
    with contract.promise("routes", first=True):
        check_routes(net)
    with contract.promise("order"):
        check_ranks(net)
    messages = _messages(net)
    time = lambda net: simulate(net, messages).makespan
    if build is not None:
        with contract.promise("jit"):
            _check_builder(build)
    rates, routes = _rates(net, messages), _every_route(net)
    with contract.promise("vmap", first=True):
        # One compilation for this promise and three others.
        rows, gradients = _rows(net, *_batch(net, rates, messages, routes))
        for i in range(GOOD):
            alone = time(_with_rates(net, rates[i]))
            require_same(rows.makespan[i], alone, f"row {i} of a batch", rtol=ROUNDING)
    with contract.promise("time"):
        _check_alone(net, routes, np.asarray(rows.makespan[len(rates) :]))
        makespan, bound = time(net), link_load_bound(net, messages)
        require(makespan >= bound * (1 - ROUNDING), f"makespan {makespan} below bound {bound}")
    with contract.promise("grad"):
        require_finite(gradients[:GOOD], "the derivative of the makespan in bandwidth:")
    with contract.promise("units"):
        require_same(2 * time(_scaled(net, 2.0)), time(net), "twice as fast: twice its makespan")
    with contract.promise("determinism"):
        again = net if build is None else build(bandwidth=BANDWIDTH)
        require_same(again, net, "built again")
        require_same(simulate(again, messages), simulate(net, messages), "simulated again")
    with contract.promise("status"):
        _check_status(build, rows)
    return contract.settle()


def _network(topology: Any) -> Topology:
    net = topology if isinstance(topology, Topology) else topology(bandwidth=BANDWIDTH)
    require(isinstance(net, Topology), f"is a {type(net).__name__}, no moejax.noc.Topology")
    check_tables(net)
    require(net.num_nodes > 1, f"has {net.num_nodes} node: nothing to send")
    require(not np.any(np.asarray(net.link_bandwidth) <= 0), "has a link without bandwidth")
    return net


def _messages(net: Topology) -> Messages:
    """A batch between drawn pairs, of powers of two in bytes."""
    rng = np.random.default_rng(0)
    source, destination = rng.integers(0, net.num_nodes, (2, MESSAGES))
    size = jnp.asarray(BYTES * 2.0 ** rng.integers(-2, 3, MESSAGES))
    ends = jnp.asarray(source), jnp.asarray(destination)
    return Messages(*ends, size, jnp.ones(MESSAGES, bool), flow=jnp.arange(MESSAGES))


def _rates(net: Topology, messages: Messages) -> list[Any]:
    """Bandwidths of three good networks, of one whose used links are dead, and negative ones."""
    rates, used = net.link_bandwidth, simulate(net, messages).link_occupancy > 0
    return [rates, rates * 0.5, rates * 3.0, jnp.where(used, 0.0, rates), -rates]


class _Routes(NamedTuple):
    """All routes there are. Each [routes]."""

    source: np.ndarray
    destination: np.ndarray
    choice: np.ndarray


def _every_route(net: Topology) -> _Routes:
    choices = net.route_resource.shape[1]
    pair, choice = np.divmod(np.arange(net.num_nodes**2 * choices), choices)
    there = choice < np.asarray(net.num_routes)[pair]
    return _Routes(*np.divmod(pair[there], net.num_nodes), choice[there])


def _batch(net: Topology, rates: list[Any], messages: Messages, routes: _Routes):
    """Rows of (bandwidths, messages): the whole batch at each of `rates`, then every route with
    one message alone and the others masked."""
    first = np.arange(messages.num_messages) == 0
    alone = [_only(first, *route) for route in zip(*routes)]
    every = stack([*rates, *[net.link_bandwidth] * len(alone)])
    return every, stack([*[messages] * len(rates), *alone])


def _only(first: np.ndarray, source: int, destination: int, choice: int) -> Messages:
    """One message, and padding."""
    full = lambda value, dtype: np.full(len(first), value, dtype)
    ids = [jnp.asarray(full(node, np.int32)) for node in (source, destination, choice)]
    size = jnp.asarray(full(BYTES, np.float32))
    return Messages(*ids[:2], bytes=size, valid=jnp.asarray(first), flow=ids[2])


@jax.jit
def _rows(net: Topology, rates: Any, messages: Messages) -> tuple[LinkReport, Any]:
    """Reports, and derivatives of the makespan in the bandwidths."""

    def makespan(rates, messages):
        report = simulate(_with_rates(net, rates), messages)
        return report.makespan, report

    gradients, reports = jax.vmap(jax.grad(makespan, has_aux=True))(rates, messages)
    return reports, gradients


def _check_alone(net: Topology, routes: _Routes, found: np.ndarray) -> None:
    """What a message crosses, added up."""
    pair = routes.source * net.num_nodes + routes.destination
    resource = np.asarray(net.route_resource)[:, routes.choice, pair]
    held = BYTES / np.asarray(net.resource_bandwidth) + np.asarray(net.resource_latency)
    wanted = np.where(resource != NO_LINK, held[resource], 0).sum(axis=0)
    wrong = np.flatnonzero(~np.isclose(found, wanted, rtol=ROUNDING, atol=0))
    if wrong.size:
        i = wrong[0]
        raise Broken(
            f"{BYTES:g} B from {routes.source[i]} to {routes.destination[i]} alone take "
            f"{found[i]:.4g} s, its route adds up to {wanted[i]:.4g} s"
        )


def _with_rates(net: Topology, rates: Any) -> Topology:
    return eqx.tree_at(lambda n: n.link_bandwidth, net, rates)


def _scaled(net: Topology, factor: float) -> Topology:
    """All rates by a factor, latencies by its inverse."""
    net = _with_rates(net, net.link_bandwidth * factor)
    net = eqx.tree_at(lambda n: n.hop_latency, net, net.hop_latency / factor)
    if net.injection_bandwidth is None:
        return net
    ports = lambda n: (n.injection_bandwidth, n.ejection_bandwidth)
    return eqx.tree_at(ports, net, tuple(rate * factor for rate in ports(net)))


def _check_builder(build: Callable[..., Topology]) -> None:
    of = lambda bandwidth: build(bandwidth=bandwidth)
    some = [BANDWIDTH, 3 * BANDWIDTH]
    require_same(jax.jit(of)(some[1]), of(some[1]), "built with a traced bandwidth")
    batch = jax.jit(jax.vmap(of))(jnp.array(some))
    for i, bandwidth in enumerate(some):
        require_same(row(batch, i), of(bandwidth), f"row {i} of a batch of bandwidths")


def _check_status(build: Callable[..., Topology] | None, rows: LinkReport) -> None:
    for i, what in ((GOOD, "links without bandwidth"), (GOOD + 1, "a negative bandwidth")):
        require(int(rows.status[i]) != Status.OK, f"status is 0 with {what}")
        require(not jnp.isfinite(rows.makespan[i]), f"makespan is {rows.makespan[i]} with {what}")
    dead = Status(int(rows.status[GOOD])).name
    require(dead == "DEAD_LINK", f"status is {dead} where it should be DEAD_LINK")
    if build is not None:
        require_error(lambda: build(bandwidth=-1.0), "no ValueError for bandwidth = -1")
