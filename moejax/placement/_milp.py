"""Node Balance by HiGHS: the paper's formulation, and the choice between it and host sets.

Host only: numpy in, numpy out.
"""

import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from moejax.noc import Topology
from moejax.placement import _host_set_milp as host_set_milp
from moejax.placement._costs import NodeCosts, load_time, traffic_time
from moejax.placement._estimate import TRANSFERS
from moejax.placement._fat_tree import Tree, tree_of
from moejax.placement._highs import highs
from moejax.placement._statistics import Statistics


SOLVER_DUST = 1e-5
"""Shares below this are the solver's tolerance, not a decision."""
MOST_EXPERTS = 10
"""Experts up to which all host sets are listed."""


class Limits(NamedTuple):
    """When to stop: seconds, and total / bound - 1."""

    time_limit: float
    relative_gap: float


class Solved(NamedTuple):
    """`share` is `None` where the time did not suffice for any placement. `bound` in s."""

    share: np.ndarray | None
    bound: float
    finished: bool


class Layer(NamedTuple):
    """The problem in numpy float64; costs in s per unit of load and of traffic."""

    frequency: np.ndarray
    groups: list[list[tuple[list[int], float]]]
    load_cost: float
    traffic_cost: float
    memory_cap: float
    load_cap: float
    num_nodes: int


def solve(
    statistics: Statistics,
    costs: NodeCosts,
    memory_factor: float,
    load_cap: float,
    num_nodes: int,
    topology: Topology | None,
    limits: Limits,
) -> Solved:
    """Solves a layer, `statistics` with a leading scenario axis; infinite caps are none."""
    deadline = time.monotonic() + limits.time_limit
    layer = _layer(statistics, costs, memory_factor, load_cap, num_nodes)
    tree = tree_of(topology, costs.bandwidth)
    single = len(layer.frequency) == 1 and tree is None
    if single and layer.frequency.shape[1] <= MOST_EXPERTS:
        return Solved(
            *host_set_milp.solve(
                layer.frequency[0],
                layer.groups[0],
                layer.load_cost,
                layer.traffic_cost,
                num_nodes,
                memory_cap=layer.memory_cap,
                load_cap=layer.load_cap,
                time_limit=limits.time_limit,
                relative_gap=limits.relative_gap,
            )
        )
    return _solve_paper(layer, tree, deadline, limits.relative_gap)


def _layer(statistics, costs, memory_factor, load_cap, num_nodes) -> Layer:
    groups = []
    for ids, weights in zip(statistics.groups, statistics.group_frequency, strict=True):
        rows = zip(np.asarray(ids).tolist(), np.asarray(weights, np.float64).tolist(), strict=True)
        groups.append([([e for e in row if e >= 0], w) for row, w in rows if w > 0])
    frequency = np.asarray(statistics.frequency, np.float64)
    return Layer(
        frequency,
        groups,
        float(load_time(costs)),
        float(TRANSFERS * traffic_time(costs)),
        memory_factor * frequency.shape[1] / num_nodes,
        load_cap,
        num_nodes,
    )


class _Rows:
    """Rows of a mixed-integer program under construction, and its columns by name."""

    def __init__(self) -> None:
        self.num_columns, self.num_rows = 0, 0
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.low: list[np.ndarray] = []
        self.high: list[np.ndarray] = []

    def columns(self, *shape: int) -> np.ndarray:
        """New columns, as an array of their indices."""
        start = self.num_columns
        self.num_columns += int(np.prod(shape))
        return np.arange(start, self.num_columns).reshape(shape)

    def add(self, *terms: tuple[np.ndarray | float, np.ndarray], low=-np.inf, high=0.0) -> None:
        """Rows low <= sum of coefficient * column <= high. The terms of a row lie along the last
        axis; all other axes are rows, and broadcast between terms."""
        shape = np.broadcast_shapes(*(column.shape[:-1] for _, column in terms))
        count = int(np.prod(shape))
        row = self.num_rows + np.arange(count)
        for coefficient, column in terms:
            full = np.broadcast_to(column, (*shape, column.shape[-1]))
            value = np.broadcast_to(coefficient, full.shape)
            at = np.broadcast_to(row.reshape(*shape, 1), full.shape)
            self.entries.append((value.ravel(), at.ravel(), full.ravel()))
        self.num_rows += count
        self.low.append(np.full(count, low))
        self.high.append(np.full(count, high))

    def matrix(self) -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
        """The sparse matrix, and the lower and upper limits of its rows."""
        from scipy import sparse

        value, row, column = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        shape = (self.num_rows, self.num_columns)
        matrix = sparse.csr_matrix((value, (row, column)), shape=shape)
        return matrix, (np.concatenate(self.low), np.concatenate(self.high))


def _solve_paper(layer: Layer, tree: Tree | None, deadline: float, relative_gap: float) -> Solved:
    """Eq. 5-12 of HD-MoE (arXiv 2509.09420), with Y_gc >= Z_ic for each expert of a group instead
    of their mean: a tighter relaxation, and Y need not be declared whole."""
    num_scenarios, num_experts = layer.frequency.shape
    rows = _Rows()
    share = rows.columns(num_experts, layer.num_nodes)
    host = rows.columns(num_experts, layer.num_nodes)
    comp, comm = rows.columns(num_scenarios, 1), rows.columns(num_scenarios, 1)
    rows.add((1.0, share), low=1.0, high=1.0)
    rows.add((1.0, share[..., None]), (-1.0, host[..., None]))
    if np.isfinite(layer.memory_cap):
        rows.add((1.0, share.T), high=layer.memory_cap)
    if np.isfinite(layer.load_cap):
        rows.add((layer.frequency.mean(0), share.T), high=layer.load_cap)
    scale = _scale(layer)
    for s in range(num_scenarios):
        work = layer.load_cost / scale * layer.frequency[s]
        rows.add((work, share.T), (-1.0, comp[s][None]))
        _add_traffic(rows, layer, s, host, comm[s], tree, scale)
    cost, whole = np.zeros(rows.num_columns), np.zeros(rows.num_columns)
    cost[comp], cost[comm] = 1 / num_scenarios, 1 / num_scenarios
    whole[host] = 1
    upper = np.ones(rows.num_columns)
    upper[comp], upper[comm] = np.inf, np.inf
    matrix, sides = rows.matrix()
    # Building the rows of a large layer takes seconds: they count.
    left = max(deadline - time.monotonic(), 1e-3)
    result = highs(
        cost,
        matrix,
        sides,
        (0.0, upper),
        whole=whole,
        time_limit=left,
        relative_gap=relative_gap,
    )
    bound = 0.0 if result.mip_dual_bound is None else result.mip_dual_bound * scale
    if result.x is None:
        return Solved(None, bound, False)
    found = np.where(result.x[share] > SOLVER_DUST, result.x[share], 0.0)
    return Solved(found / found.sum(1, keepdims=True), bound, result.status == 0)


def _scale(layer: Layer) -> float:
    """About the time of the layer, so that the solver's tolerances mean something."""
    mean = layer.frequency.sum(1).mean() / layer.num_nodes
    total = layer.load_cost * mean + layer.traffic_cost * layer.frequency.max()
    return total if total > 0 else 1.0


def _add_traffic(
    rows: _Rows,
    layer: Layer,
    scenario: int,
    host: np.ndarray,
    comm: np.ndarray,
    tree: Tree | None,
    scale: float,
) -> None:
    """Which groups touch a node, a leaf, a pod, and what that takes, at most `comm`."""
    groups = layer.groups[scenario]
    if not groups:
        return
    weight = np.array([w for _, w in groups]) * layer.traffic_cost / scale
    group = np.array([g for g, (experts, _) in enumerate(groups) for _ in experts], int)
    expert = np.array([e for experts, _ in groups for e in experts], int)
    node = rows.columns(len(groups), layer.num_nodes)
    rows.add((1.0, host[expert][..., None]), (-1.0, node[group][..., None]))
    carried = lambda column, part: rows.add((weight * part, column), (-1.0, comm[None]))
    carried(node.T, 1.0)
    if tree is None:
        return
    num_leaves, num_pods = len(tree.leaf_endpoints), len(tree.pod_leaves)
    leaf, leaf_out = (rows.columns(len(groups), num_leaves) for _ in range(2))
    pod, pod_several, pod_out = (rows.columns(len(groups), num_pods) for _ in range(3))
    per_leaf, per_pod = layer.num_nodes // num_leaves, num_leaves // num_pods
    within = lambda low, high, size: rows.add(
        (1.0, low[..., None]), (-1.0, np.repeat(high, size, axis=1)[..., None])
    )
    within(node, leaf, per_leaf)
    within(leaf, pod, per_pod)
    for a, b in itertools.permutations(range(num_leaves), 2):
        _both(rows, leaf[:, a], leaf[:, b], leaf_out[:, a])
        if a // per_pod == b // per_pod:
            _both(rows, leaf[:, a], leaf[:, b], pod_several[:, a // per_pod])
    for a, b in itertools.permutations(range(num_pods), 2):
        _both(rows, pod[:, a], pod[:, b], pod_out[:, a])
    for column, part in (
        (leaf, tree.leaf_endpoints),
        (leaf_out, tree.leaf_uplinks),
        (pod_several, tree.pod_leaves),
        (pod_out, tree.pod_cores),
    ):
        carried(column.T, np.asarray(part, np.float64)[:, None])
    each = np.repeat(weight, num_pods)
    rows.add((each * float(tree.core), pod_out.reshape(1, -1)), (-1.0, comm[None]))


def _both(rows: _Rows, one: np.ndarray, other: np.ndarray, result: np.ndarray) -> None:
    """result >= one + other - 1."""
    rows.add((1.0, np.stack([one, other], 1)), (-1.0, result[:, None]), high=1.0)
