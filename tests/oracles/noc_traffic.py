"""Traffic of experts, collectives and broadcasts by literal loops: plain Python, no JAX."""

import math


DUST = 1e-6


def hosting_nodes(expert, share, position):
    """Logical nodes with a part of an expert and a cell to send from, ascending."""
    return [n for n, part in enumerate(share[expert]) if part > DUST and position[n] >= 0]


def experts_that_count(token, share, position):
    """The listed experts of a token that some placed node hosts, in order, with repetitions."""
    return [e for e in token if e >= 0 and hosting_nodes(e, share, position)]


def sources(token, share, position):
    """Logical nodes that take part in a token, ascending, each once."""
    found = set()
    for expert in experts_that_count(token, share, position):
        found.update(hosting_nodes(expert, share, position))
    return sorted(found)


def aggregator(expert, share, position):
    """The cell where results meet if this expert aggregates."""
    return position[hosting_nodes(expert, share, position)[0]]


def expert_traffic(expert_ids, share, position, bytes_of_token, expected=False):
    """(token, slot, node, source, destination, bytes) of each message, in order of index."""
    messages = []
    for t, token in enumerate(expert_ids):
        counted = [i for i, e in enumerate(token) if e in experts_that_count([e], share, position)]
        for slot in counted if expected else counted[:1]:
            part = bytes_of_token[t] / (len(counted) if expected else 1)
            cell = aggregator(token[slot], share, position)
            for node in sources(token, share, position):
                messages.append((t, slot, node, position[node], cell, part))
    return messages


def traffic_matrix(messages, num_nodes):
    """Bytes from row to column of (source, destination, bytes)."""
    matrix = [[0.0] * num_nodes for _ in range(num_nodes)]
    for source, destination, size in messages:
        matrix[source][destination] += size
    return matrix


def estimate(expert_ids, share, weight, vector_bytes, bandwidth):
    """Seconds for the busiest node to send a vector for every token it takes part in."""
    anywhere = list(range(len(share[0])))
    touches = [0.0] * len(share[0])
    for token, times in zip(expert_ids, weight, strict=True):
        for node in sources(token, share, anywhere):
            touches[node] += times
    return max(touches) * vector_bytes / bandwidth


def least_squares(x, y):
    """(slope, intercept, R^2) by the sums of the textbook."""
    n, mean_x, mean_y = len(x), math.fsum(x) / len(x), math.fsum(y) / len(y)
    sxy = math.fsum((x[i] - mean_x) * (y[i] - mean_y) for i in range(n))
    sxx = math.fsum((a - mean_x) ** 2 for a in x)
    syy = math.fsum((b - mean_y) ** 2 for b in y)
    slope = sxy / sxx
    return slope, mean_y - slope * mean_x, sxy**2 / (sxx * syy)


def stepwise_ticks(steps, part, ticks_per_byte, latency, endpoint_delay):
    """Clock ticks of `steps` messages of `part` B one after the other, each rounded down."""
    time = endpoint_delay
    for _ in range(steps):
        time += math.floor(latency + part * ticks_per_byte) + endpoint_delay
    return time


def ring_sums(order, vectors, num_steps):
    """What the nodes of a ring hold after so many steps of an all-reduce.

    In step s the i-th node of the ring passes on part i - s; in the first D - 1 steps the next
    one adds it to its own, then it replaces its own by it.
    """
    size = len(order)
    held = {node: list(vectors[node]) for node in order}
    for step in range(num_steps):
        moving = {i: held[order[i]][(i - step) % size] for i in range(size)}
        for i in range(size):
            after, part = order[(i + 1) % size], (i - step) % size
            added = held[after][part] if step < size - 1 else 0
            held[after][part] = added + moving[i]
    return held


def tree_of_routes(routes, num_nodes):
    """parent[node] from routes[node], the vertices from the root to each node."""
    parent = {}
    for node, route in routes.items():
        if len(route) > 1:
            parent[node] = [v for v in route[:-1] if v < num_nodes][-1]
    return parent


def broadcast_arrivals(parent, root, chunks, part, bandwidth, latency):
    """arrival[node, chunk] down a tree of links; bandwidth and latency by (from, to)."""

    def arrival(node, chunk):
        return 0.0 if node == root else sent(node, chunk) + latency[parent[node], node]

    def sent(node, chunk):
        """When the last byte of a chunk has left for `node`."""
        before = sent(node, chunk - 1) if chunk else 0.0
        return max(arrival(parent[node], chunk), before) + part / bandwidth[parent[node], node]

    nodes = [root, *parent]
    return {(node, chunk): arrival(node, chunk) for node in nodes for chunk in range(chunks)}
