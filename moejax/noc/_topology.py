"""What a network is to the simulator: rates to sweep, and route tables whose shape is static."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import Array, Float, Int


NO_LINK = -1
"""Padding of route tables: no resource here."""


class Stage(NamedTuple):
    """Columns `start` to `stop - 1` of the route tables.

    Not `cyclic`: every column is one level of the acyclic dependency graph of resources, to be
    served in order. `cyclic`: one layer of dependency rings, served to a fixed point; the hops of
    a route stand left-aligned in hop order.
    """

    start: int
    stop: int
    cyclic: bool


def _as_float_or_none(value: Any) -> Array | None:
    return None if value is None else as_float(value)


class Topology(eqx.Module):
    """A network with fixed routes.

    Vertices are the endpoints 0 .. `num_nodes - 1` ("nodes"), then the switches. Links are
    directed. A *resource* serves one message at a time: link l is resource l; where there are
    ports, `links + node` is the injection and `links + nodes + node` the ejection port of a node.
    A route is a sequence of resources: injection port, links, ejection port. The pair of a source
    and a destination is `source * num_nodes + destination`; a node's route to itself is empty.

    Columns of the route tables are ordered so that whatever decides when a resource is free to
    take a message lies in an earlier column, except inside a cyclic `Stage`.

    **Arguments:** (the builders `mesh`, `torus`, `fat_tree`, `custom` make the tables)

    - `link_bandwidth`: [links] B/s. 0 is a dead link.
    - `hop_latency`: [links] s from the end of a link to readiness at what follows.
    - `injection_bandwidth`, `ejection_bandwidth`: [nodes] B/s of the ports, or both `None`.
    - `links`: [links, 2], from and to.
    - `num_routes`: [pairs], equal-cost routes to choose from; 1 where source is destination.
    - `route_resource`: [columns, choices, pairs] resource ids, `NO_LINK` where a route uses none.
    - `route_rank`: [columns, choices, pairs], order of the path that remains from this hop on among
        all that cross the resource, dense from 0. Paths compare hop by hop as (from, to), and one
        that ends comes before those that go on. 0 where there is no hop.
    - `segment`: [resources], place of a resource among those of its level (its stage, if cyclic),
        dense from 0; 0 for resources that no route uses.
    - `coordinates`: [vertices, 2] for drawing, x to the right and y down.
    - `segment_bits`, `rank_bits`: static widths. All segments and ranks fit, and the segment of
        all ones stays free.

    **Raises:** `ValueError` for rates or latencies that are negative or NaN, or of wrong shape.
    """

    link_bandwidth: Float[Array, " links"] = eqx.field(converter=as_float)
    hop_latency: Float[Array, " links"] = eqx.field(converter=as_float)
    injection_bandwidth: Float[Array, " nodes"] | None = eqx.field(converter=_as_float_or_none)
    ejection_bandwidth: Float[Array, " nodes"] | None = eqx.field(converter=_as_float_or_none)
    links: Int[Array, "links 2"]
    num_routes: Int[Array, " pairs"]
    route_resource: Int[Array, "columns choices pairs"]
    route_rank: Int[Array, "columns choices pairs"]
    segment: Int[Array, " resources"]
    coordinates: Float[Array, "vertices 2"]
    kind: str = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    num_nodes: int = eqx.field(static=True)
    num_vertices: int = eqx.field(static=True)
    stages: tuple[Stage, ...] = eqx.field(static=True)
    segment_bits: int = eqx.field(static=True)
    rank_bits: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if (self.injection_bandwidth is None) != (self.ejection_bandwidth is None):
            raise ValueError("Topology: give both injection_bandwidth and ejection_bandwidth")
        self._check("link_bandwidth", "links", self.num_links)
        self._check("hop_latency", "links", self.num_links)
        if self.injection_bandwidth is not None:
            self._check("injection_bandwidth", "nodes", self.num_nodes)
            self._check("ejection_bandwidth", "nodes", self.num_nodes)

    def _check(self, field: str, axis: str, length: int) -> None:
        value = getattr(self, field)
        if value.shape != (length,):
            raise ValueError(
                f"Topology.{field} has shape {value.shape}, expected [{axis}] = ({length},) "
                "(use jax.vmap for batches)"
            )
        if is_traced(value, self.links):
            return
        array = np.asarray(value)
        finite = field == "hop_latency"
        fine = (array >= 0) & (array < np.inf) if finite else array >= 0
        if bad := np.flatnonzero(~fine).tolist():
            at = bad[0] if axis == "nodes" else " -> ".join(map(str, self.links[bad[0]].tolist()))
            raise ValueError(
                f"Topology.{field} of {axis[:-1]} {at} = {array[bad[0]]}: allowed is "
                + ("finite, 0 or more" if finite else "0 or more (at 0 nothing gets through)")
            )

    @property
    def num_links(self) -> int:
        return self.links.shape[0]

    @property
    def num_resources(self) -> int:
        return self.segment.shape[0]

    @property
    def resource_bandwidth(self) -> Float[Array, " resources"]:
        """B/s of links, then injection ports, then ejection ports."""
        if self.injection_bandwidth is None or self.ejection_bandwidth is None:
            return self.link_bandwidth
        return jnp.concatenate(
            [self.link_bandwidth, self.injection_bandwidth, self.ejection_bandwidth]
        )

    @property
    def resource_latency(self) -> Float[Array, " resources"]:
        """Seconds after a resource before the next is reached: `hop_latency`, none at a port."""
        ports = self.num_resources - self.num_links
        return jnp.concatenate([self.hop_latency, jnp.zeros(ports, self.hop_latency.dtype)])

    def link_id(self, u: int, v: int) -> int:
        """The id of the link from vertex `u` to vertex `v`. `ValueError` if there is none."""
        found = np.flatnonzero((np.asarray(self.links) == (u, v)).all(axis=1))
        if not found.size:
            raise ValueError(f"no link {u} -> {v} in this {self.kind} of {self.num_links} links")
        return int(found[0])

    def route(self, source: int, destination: int, choice: int = 0) -> list[int]:
        """The vertices a message passes, ends included.

        **Raises:** `ValueError` for a node outside the topology or a choice that does not exist.
        """
        for name, node in (("source", source), ("destination", destination)):
            if not 0 <= node < self.num_nodes:
                raise ValueError(f"{name} = {node}: allowed is 0 .. {self.num_nodes - 1}")
        pair = source * self.num_nodes + destination
        if not 0 <= choice < (count := int(np.asarray(self.num_routes)[pair])):
            raise ValueError(f"choice = {choice}: {source} -> {destination} has {count} route(s)")
        resources = np.asarray(self.route_resource)[:, choice, pair]
        hops = resources[(resources != NO_LINK) & (resources < self.num_links)]
        return [source, *np.asarray(self.links)[hops, 1].tolist()]
