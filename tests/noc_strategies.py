"""Small networks, and random traffic on them, for comparing simulators.

Shapes are few and fixed, since each pair of a network and a number of messages is a compilation of
its own: what varies is how many messages are valid, and all rates.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from moejax import noc
from tests.oracles import noc as oracle
from tests.oracles import noc_routes as routes


NUM_MESSAGES = 48
# Two rings of four, joined twice, and a tail: dependencies go round in many ways.
GRAPH = [(0, 1), (1, 2), (2, 3), (3, 0), (3, 4), (4, 5), (5, 6), (6, 7), (7, 4), (1, 6), (7, 8)]
ACYCLIC = ("mesh", "mesh_ports", "tree")
CYCLIC = ("torus", "torus_ports", "graph", "ring_ports")


def network(name):
    """(topology with unit rates, function from (source, destination, flow) to a vertex list)."""
    return _network(name, jnp.result_type(float))


@functools.cache
def _network(name, dtype):
    unit = np.ones((), dtype)  # what is built in one precision stays there
    rates = dict(bandwidth=unit, port_bandwidth=unit if name.endswith("ports") else None)
    kind = name.removesuffix("_ports")
    if kind == "mesh":
        return noc.mesh(3, 4, **rates), lambda s, d, flow: routes.mesh(3, 4, s, d)
    if kind == "torus":
        return noc.torus(4, 5, **rates), lambda s, d, flow: routes.torus(4, 5, s, d)
    if kind == "tree":
        return noc.fat_tree(pods=2, leaves_per_pod=2, cores=2, **rates), tree_route
    edges = GRAPH if kind == "graph" else [(i, (i + 1) % 6) for i in range(6)]
    topology = noc.custom(edges, **rates) if kind == "graph" else noc.ring(6, **rates)
    directed = edges + [(v, u) for u, v in edges]
    return topology, lambda s, d, flow: routes.shortest(directed, s, d)


def tree_route(source, destination, flow):
    """The equal-cost route that a flow takes."""
    candidates = routes.fat_tree(source, destination, pods=2, leaves=2, cores=2)
    return candidates[flow % len(candidates)]


class Problem(NamedTuple):
    """One batch of messages on one network, as numpy arrays."""

    origin: str
    network: str
    source: np.ndarray
    destination: np.ndarray
    bytes: np.ndarray
    valid: np.ndarray
    start_time: np.ndarray
    flow: np.ndarray
    link_bandwidth: np.ndarray
    hop_latency: np.ndarray
    port_bandwidth: np.ndarray  # [2, nodes], used where the network has ports

    def __repr__(self):
        return self.origin  # fifty numbers in each of eight fields say less


# What the numbers look like. "dyadic": small halves and wholes, exact in any order, full of ties.
# "equal": one size and one bandwidth that is no power of two, as expert traffic has. "smooth":
# nothing is equal to anything. "hot": the same, with three destinations.
FLAVORS = ("dyadic", "equal", "smooth", "hot")


def random_problem(seed, name, flavor, dtype=np.float64):
    """One problem. A tenth of the messages stay at home, and a tenth of the sizes are 0."""
    rng = np.random.default_rng(seed)
    topology, _ = network(name)
    links, nodes = topology.num_links, topology.num_nodes
    source, destination = rng.integers(nodes, size=(2, NUM_MESSAGES))
    if flavor in ("equal", "hot"):
        destination = rng.choice(rng.integers(nodes, size=3), NUM_MESSAGES)
    destination = np.where(rng.random(NUM_MESSAGES) < 0.1, source, destination)
    if flavor == "dyadic":
        draw = lambda choices, *size: rng.choice(choices, size)
        numbers = dict(
            bytes=draw([0, 1, 1, 2, 3], NUM_MESSAGES),
            start_time=draw([0, 0, 0, 1, 2], NUM_MESSAGES),
            link_bandwidth=draw([0.5, 1, 1, 2], links),
            hop_latency=draw([0, 0, 0.5, 1], links) * rng.integers(2),
            port_bandwidth=draw([1, 2, 4], 2, nodes),
        )
    elif flavor == "equal":
        numbers = dict(
            bytes=np.full(NUM_MESSAGES, 4096.0),
            start_time=np.zeros(NUM_MESSAGES),
            link_bandwidth=np.full(links, 75e9),
            hop_latency=np.full(links, rng.choice([0, 3e-9])),
            port_bandwidth=np.full((2, nodes), 75e9),
        )
    else:
        size = rng.uniform(100, 5000, NUM_MESSAGES) * (rng.random(NUM_MESSAGES) > 0.1)
        numbers = dict(
            bytes=size,
            start_time=rng.uniform(0, 1e-6, NUM_MESSAGES) * rng.integers(2),
            link_bandwidth=rng.uniform(5e9, 20e9, links),
            hop_latency=rng.uniform(0, 1e-7, links) * rng.integers(2),
            port_bandwidth=rng.uniform(5e9, 40e9, (2, nodes)),
        )
    numbers = {field: np.asarray(value, dtype) for field, value in numbers.items()}
    valid = rng.random(NUM_MESSAGES) < rng.choice([0.3, 0.9, 1.0])
    flow = rng.integers(2**31, size=NUM_MESSAGES).astype(np.int32)
    ends = dict(source=source.astype(np.int32), destination=destination.astype(np.int32))
    origin = f"random_problem({seed}, {name!r}, {flavor!r}, np.{np.dtype(dtype)})"
    return Problem(origin, name, **ends, valid=valid, flow=flow, **numbers)


@st.composite
def problems(draw, name, flavors=FLAVORS, dtype=np.float64):
    """One problem, drawn through a seed so that shrinking keeps it plausible."""
    seed = draw(st.integers(0, 2**32 - 1))
    return random_problem(seed, name, draw(st.sampled_from(flavors)), dtype)


def rated(problem):
    """The problem's topology with its rates."""
    topology, _ = network(problem.network)
    fields, values = (
        ["link_bandwidth", "hop_latency"],
        [problem.link_bandwidth, problem.hop_latency],
    )
    if topology.injection_bandwidth is not None:
        fields += ["injection_bandwidth", "ejection_bandwidth"]
        values += list(problem.port_bandwidth)
    pick = lambda topology: [getattr(topology, field) for field in fields]
    return eqx.tree_at(pick, topology, [jnp.asarray(value) for value in values])


def messages(problem):
    """The problem's messages."""
    names = ("source", "destination", "bytes", "valid", "start_time", "flow")
    return noc.Messages(*(jnp.asarray(getattr(problem, name)) for name in names))


def literal(problem):
    """The problem as `oracle.heap_simulate` wants it: (paths, sizes, rates, other arguments)."""
    topology, route = network(problem.network)
    links = [tuple(link) for link in np.asarray(topology.links).tolist()]
    bandwidth = dict(zip(links, problem.link_bandwidth.tolist()))
    latency = dict(zip(links, problem.hop_latency.tolist()))
    ends = zip(problem.source.tolist(), problem.destination.tolist(), problem.flow.tolist())
    paths = [tuple(routes.links_of(route(*end))) for end in ends]
    if topology.injection_bandwidth is not None:
        paths = [oracle.with_ports(path) for path in paths]
        for kind, rates in zip((oracle.INJECTION, oracle.EJECTION), problem.port_bandwidth):
            bandwidth |= {(kind, node): rate for node, rate in enumerate(rates.tolist())}
    others = dict(start_times=problem.start_time.tolist(), valid=problem.valid.tolist())
    return paths, problem.bytes.tolist(), bandwidth, others | dict(latency=latency)
