"""Maps of nodes to endpoints, all of them tried: plain Python, no JAX."""

import itertools

from tests.oracles import noc as network
from tests.oracles import noc_routes, noc_traffic


def gather_and_dispatch(share, groups, bytes_of_group, route, bandwidth, switching, position):
    """Event by event times of the mean traffic: a message for each group, aggregator and sender,
    and then the other way.

    `route(source, destination)` lists vertices; every link has the same `bandwidth`.
    """
    sent = noc_traffic.expert_traffic(groups, share, position, bytes_of_group, expected=True)
    sizes, times = [size for *_, size in sent], []
    for ends in ([(s, d) for *_, s, d, _ in sent], [(d, s) for *_, s, d, _ in sent]):
        paths = [tuple(noc_routes.links_of(route(*pair))) for pair in ends]
        links = {link: bandwidth for path in paths for link in path}
        found = network.heap_simulate(paths, sizes, links, switching=switching)
        times.append(found.makespan)
    return times


def busiest_link(traffic, position, routes, bandwidth):
    """Time of the busiest link for a matrix of bytes between nodes, split evenly over `routes`."""
    time = {}
    for source, row in enumerate(traffic):
        for destination, size in enumerate(row):
            found = routes(position[source], position[destination])
            for route in found:
                for link in noc_routes.links_of(route):
                    time[link] = time.get(link, 0.0) + size / len(found) / bandwidth
    return max(time.values(), default=0.0)


def least(time_of, num_nodes):
    """The smallest time over all maps."""
    return min(time_of(position) for position in itertools.permutations(range(num_nodes)))
