"""Routes written out one hop at a time: lists of vertex ids, both ends included. No JAX."""


def mesh(rows, cols, source, destination):
    """First the row coordinate goes to the destination's, then the column."""
    row, col = divmod(source, cols)
    to_row, to_col = divmod(destination, cols)
    path = [source]
    while row != to_row:
        row += 1 if to_row > row else -1
        path.append(row * cols + col)
    while col != to_col:
        col += 1 if to_col > col else -1
        path.append(row * cols + col)
    return path


def torus(rows, cols, source, destination):
    """As `mesh`, each axis the shorter way round, forward (growing) on a tie."""
    row, col = divmod(source, cols)
    to_row, to_col = divmod(destination, cols)
    path = [source]
    while row != to_row:
        row = (row + _step(row, to_row, rows)) % rows
        path.append(row * cols + col)
    while col != to_col:
        col = (col + _step(col, to_col, cols)) % cols
        path.append(row * cols + col)
    return path


def _step(here, there, size):
    forward, backward = (there - here) % size, (here - there) % size
    return 1 if forward <= backward else -1


def fat_tree(source, destination, pods=4, leaves=4, endpoints=2, aggregations=2, cores=4):
    """All candidates in order. Vertices: endpoints, leaves, aggregations, cores, pod by pod."""
    first_leaf = pods * leaves * endpoints
    first_aggregation = first_leaf + pods * leaves
    first_core = first_aggregation + pods * aggregations
    if source == destination:
        return [[source]]
    leaf, to_leaf = source // endpoints, destination // endpoints
    if leaf == to_leaf:
        return [[source, first_leaf + leaf, destination]]
    pod, to_pod = leaf // leaves, to_leaf // leaves
    candidates = []
    for aggregation in range(aggregations):
        up = [source, first_leaf + leaf, first_aggregation + pod * aggregations + aggregation]
        if pod == to_pod:
            candidates.append([*up, first_leaf + to_leaf, destination])
            continue
        for core in range(cores):
            down = first_aggregation + to_pod * aggregations + core % aggregations
            candidates.append([*up, first_core + core, down, first_leaf + to_leaf, destination])
    return candidates


def shortest(links, source, destination):
    """The smallest vertex sequence among those of fewest hops, or None. `links` are directed."""
    best = {source: [source]}  # of every vertex reached so far
    frontier = [source]
    while frontier and destination not in best:
        found = {}
        for u in frontier:
            for v in sorted(there for here, there in links if here == u):
                if v not in best:
                    found[v] = min(found.get(v, best[u] + [v]), best[u] + [v])
        best |= found
        frontier = list(found)
    return best.get(destination)


def links_of(path):
    """A path as the list of its directed links."""
    return list(zip(path[:-1], path[1:]))
