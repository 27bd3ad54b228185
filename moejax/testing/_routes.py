"""The route tables of a topology against their definitions, written out slowly on the host."""

import numpy as np

from moejax.noc import NO_LINK, Topology
from moejax.testing._contract import Broken, require


def check_tables(net: Topology) -> None:
    """Shapes, and ids in range. **Raises:** `Broken`."""
    pairs, ports = net.num_nodes**2, 0 if net.injection_bandwidth is None else 2 * net.num_nodes
    columns, choices = net.route_resource.shape[0], net.route_resource.shape[1]
    wanted = {
        "links": (net.num_links, 2),
        "num_routes": (pairs,),
        "route_resource": (columns, choices, pairs),
        "route_rank": (columns, choices, pairs),
        "segment": (net.num_links + ports,),
        "coordinates": (net.num_vertices, 2),
    }
    for name, shape in wanted.items():
        found = getattr(net, name).shape
        require(found == shape, f"{name} has shape {found}, not {shape}")
    ranges = {
        "links": (0, net.num_vertices),
        "num_routes": (1, choices + 1),
        "route_resource": (NO_LINK, net.num_links + ports),
    }
    for name, (low, high) in ranges.items():
        ids = np.asarray(getattr(net, name))
        if ids.size and not (ids.min() >= low and ids.max() < high):
            bounds = f"{ids.min()} .. {ids.max()}"
            raise Broken(f"{name} holds {bounds}, allowed is {low} .. {high - 1}")
    ends = [stage.start for stage in net.stages] + [columns]
    starts = [0] + [stage.stop for stage in net.stages]
    require(
        ends == starts, f"stages {[tuple(s) for s in net.stages]} do not cover {columns} columns"
    )


def check_routes(net: Topology) -> None:
    """Every route is a path from its source to its destination. **Raises:** `Broken`."""
    links, ports = np.asarray(net.links), net.injection_bandwidth is not None
    for source, destination, choice, hops in routes(net):
        where = f"route {choice} from {source} to {destination}"
        if source == destination:
            require(not hops, f"{where} is not empty: {hops}")
            continue
        if ports:
            ends = net.num_links + source, net.num_links + net.num_nodes + destination
            through = (hops[:1], hops[-1:]) == ([ends[0]], [ends[1]])
            require(through, f"{where} does not start and end with its ports: {hops}")
            hops = hops[1:-1]
        require(all(hop < net.num_links for hop in hops), f"{where} has a port inside: {hops}")
        require(len(set(hops)) == len(hops), f"{where} crosses a link twice: {hops}")
        here = source
        for start, end in links[hops].tolist():
            require(start == here, f"{where} is at {here}, its next link starts at {start}")
            here = end
        require(here == destination, f"{where} ends at {here}")


def routes(net: Topology):
    """(source, destination, choice, resources in order) of every route."""
    table, count = np.asarray(net.route_resource), np.asarray(net.num_routes)
    for pair in range(net.num_nodes**2):
        for choice in range(count[pair]):
            column = table[:, choice, pair]
            yield *divmod(pair, net.num_nodes), choice, column[column != NO_LINK].tolist()


def check_ranks(net: Topology) -> None:
    """Ranks, segments and the order of columns, from the routes. **Raises:** `Broken`."""
    _check_columns(net)
    table, ranks = np.asarray(net.route_resource), np.asarray(net.route_rank)
    remaining: dict[int, dict[tuple, int]] = {}
    for source, destination, choice, hops in routes(net):
        pair = source * net.num_nodes + destination
        places = np.flatnonzero(table[:, choice, pair] != NO_LINK)
        for i, column in enumerate(places):
            path = tuple(_place(net, hop) for hop in hops[i:])
            rank = int(ranks[column, choice, pair])
            known = remaining.setdefault(hops[i], {}).setdefault(path, rank)
            require(known == rank, f"resource {hops[i]}: one path has ranks {known} and {rank}")
    for resource, paths in remaining.items():
        wanted = [paths[path] for path in sorted(paths)]
        require(
            wanted == list(range(len(paths))),
            f"route_rank of the paths over resource {resource}, in order, is {wanted}",
        )
    require(ranks.max(initial=0) < 2**net.rank_bits, f"rank_bits = {net.rank_bits} are too few")


def _place(net: Topology, resource: int) -> tuple[int, int, int]:
    """How paths compare at a hop: one that ends, which an ejection port does, comes first."""
    if resource < net.num_links:
        return (2, *np.asarray(net.links)[resource].tolist())
    port = resource - net.num_links
    return (1, port, 0) if port < net.num_nodes else (0, port - net.num_nodes, 0)


def _check_columns(net: Topology) -> None:
    """Outside circles each resource has one column, and within a level a segment of its own."""
    table, segment = np.asarray(net.route_resource), np.asarray(net.segment)
    seen: set[int] = set()
    for stage in net.stages:
        columns = range(stage.start, stage.stop)
        levels = [columns] if stage.cyclic else [range(c, c + 1) for c in columns]
        for level in levels:
            used = np.unique(table[list(level)])
            used = used[used != NO_LINK]
            twice = seen & set(used.tolist())
            require(not twice, f"resource {min(twice, default=0)} is used in two levels")
            seen |= set(used.tolist())
            wanted = list(range(len(used)))
            found = sorted(segment[used].tolist())
            require(found == wanted, f"segments in columns {level} are {found}, not dense from 0")
            high = 2**net.segment_bits - 1
            require(len(used) <= high, f"segment_bits = {net.segment_bits} are too few")
