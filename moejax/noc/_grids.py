"""Two-dimensional mesh and torus. Node id = row * cols + col, drawn at x = col, y = row."""

import functools
from typing import Any

import numpy as np

from moejax.noc._assemble import Tables, assemble, follow, topology_of, whole_sizes
from moejax.noc._topology import Topology


def mesh(
    rows: int, cols: int, *, bandwidth: Any, hop_latency: Any = 0.0, port_bandwidth: Any = None
) -> Topology:
    """A mesh with dimension-order routes: first the row coordinate changes, then the column.

    HDA-MoE (arXiv 2609.08682), section IV-B. Links between neighbors in both directions, sorted
    by (from, to): 2 (rows (cols - 1) + cols (rows - 1)).

    **Arguments:**

    - `rows`, `cols`: static, at least 1.
    - `bandwidth`: scalar or [links], B/s. May be traced; 0 is a dead link.
    - `hop_latency`: scalar or [links], s.
    - `port_bandwidth`: scalar or [nodes], B/s into and out of every node; `None` for no ports.

    **Raises:** `ValueError` for sizes below 1, rates that are negative or NaN, or wrong shapes.
    """
    sizes = whole_sizes("mesh", rows=rows, cols=cols)
    tables = _tables("mesh", *sizes, port_bandwidth is not None)
    return topology_of(tables, bandwidth, hop_latency, port_bandwidth)


def torus(
    rows: int, cols: int, *, bandwidth: Any, hop_latency: Any = 0.0, port_bandwidth: Any = None
) -> Topology:
    """A mesh whose rows and columns are rings, with dimension-order routes as in `mesh`.

    HDA-MoE (arXiv 2609.08682), section IV-B. Along each axis of n a route takes the shorter way
    round, and on a tie the one of growing coordinates: forward where
    (destination - here) mod n <= (here - destination) mod n.

    Links sorted by (from, to): 4 rows * cols where both axes have at least 3. Where an axis has 2,
    both ways round lead to the same neighbor, and there is one link to it (by the tie rule the
    other would never be used); where it has 1, there is none.

    **Arguments and errors:** as for `mesh`.
    """
    sizes = whole_sizes("torus", rows=rows, cols=cols)
    tables = _tables("torus", *sizes, port_bandwidth is not None)
    return topology_of(tables, bandwidth, hop_latency, port_bandwidth)


@functools.lru_cache(maxsize=32)
def _tables(kind: str, rows: int, cols: int, ports: bool) -> Tables:
    move = toward if kind == "mesh" else toward_on_ring
    row, col = np.divmod(np.arange(rows * cols), cols)
    next_row, next_col = move(row[:, None], row, rows), move(col[:, None], col, cols)
    same_row = row[:, None] == row
    next_vertex = np.where(same_row, row, next_row) * cols
    next_vertex += np.where(same_row, next_col, col[:, None])
    return assemble(
        kind,
        (rows, cols),
        grid_links(rows, cols, wrap=kind == "torus"),
        follow(next_vertex),
        coordinates=np.stack([col, row], axis=1),
        ports=ports,
    )


def toward(here: np.ndarray, goal: np.ndarray, size: int) -> np.ndarray:
    """The coordinate one step on along a line."""
    return here + np.sign(goal - here)


def toward_on_ring(here: np.ndarray, goal: np.ndarray, size: int) -> np.ndarray:
    """The coordinate one step on round a ring of `size`, forward on a tie."""
    forward, backward = (goal - here) % size, (here - goal) % size
    step = np.where(forward <= backward, 1, -1) * (here != goal)
    return (here + step) % size


def grid_links(rows: int, cols: int, *, wrap: bool) -> np.ndarray:
    """Links [links, 2] between neighbors, sorted by (from, to), each once."""
    row, col = np.divmod(np.arange(rows * cols), cols)
    links = set()
    for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        to_row, to_col = row + down, col + right
        if wrap:
            to_row, to_col = to_row % rows, to_col % cols
        inside = (to_row >= 0) & (to_row < rows) & (to_col >= 0) & (to_col < cols)
        pairs = np.stack([row * cols + col, to_row * cols + to_col], axis=1)[inside]
        links.update((u, v) for u, v in pairs.tolist() if u != v)
    return np.array(sorted(links), np.int64).reshape(-1, 2)
