"""Node Balance of few experts, exactly: how many nodes host which set of experts.

Nodes are alike, so a placement is a number of nodes x_S for every set S of hosted experts, and
within a set all nodes may hold the same. For a threshold t of traffic only sets with traffic up to
t are allowed, and the smallest load T of the busiest node follows from a program in x that is
linear once it is divided by T:

    maximize u = 1 / T   with   sum_S q_Si = u,   sum_i f_i q_Si <= x_S,   sum_S x_S = D,   x whole,

where q_Si = u * share of expert i on all nodes of set S together. Load falls with t, so thresholds
are searched by branch and bound: an interval of thresholds (t, t'] costs at least T(t') and the
next traffic after t. A memory cap, sum_i q_Si <= u M x_S, is not linear; T is then found by
bisection on whether some x exists.
"""

import heapq
import time
from typing import Any, NamedTuple

import numpy as np

from moejax.placement._highs import highs


NO_LOAD = 1e-6
"""Part of the mean that an expert without load counts with, so that it gets a host."""
MOST_BISECTIONS = 40


class _Least(NamedTuple):
    """Bounds of the smallest load at a threshold, and shares [experts, nodes] that reach `high`."""

    low: float
    high: float
    share: np.ndarray | None


class _Layer(NamedTuple):
    frequency: np.ndarray
    traffic: np.ndarray
    num_nodes: int
    memory_cap: float
    load_cap: float
    deadline: float
    relative_gap: float


def solve(
    frequency: np.ndarray,
    groups: list[tuple[list[int], float]],
    load_cost: float,
    traffic_cost: float,
    num_nodes: int,
    *,
    memory_cap: float,
    load_cap: float,
    time_limit: float,
    relative_gap: float,
) -> tuple[np.ndarray | None, float, bool]:
    """(share, lower bound of the total, finished)."""
    total = frequency.sum()
    least = NO_LOAD * (total if total > 0 else 1.0) / len(frequency)
    layer = _Layer(
        np.maximum(frequency, least),
        traffic_of_sets(len(frequency), groups),
        num_nodes,
        memory_cap,
        load_cap,
        time.monotonic() + time_limit,
        relative_gap,
    )
    return _branch_and_bound(layer, load_cost, traffic_cost)


def traffic_of_sets(num_experts: int, groups: list[tuple[list[int], float]]) -> np.ndarray:
    """[2 ** experts] share of tokens with an expert in the set that the bits of the index name."""
    sets = np.arange(2**num_experts)
    traffic = np.zeros(len(sets))
    for experts, weight in groups:
        traffic += weight * ((sets & sum(1 << e for e in experts)) > 0)
    return traffic


def _branch_and_bound(layer: _Layer, load_cost: float, traffic_cost: float):
    steps = np.unique(np.round(layer.traffic, 12))
    busiest = max(layer.traffic[1 << e] for e in range(len(layer.frequency)))
    steps = steps[steps >= busiest - 1e-12]
    known: dict[int, _Least] = {}
    best, best_share = np.inf, None
    proven = np.inf

    def look(i: int) -> _Least:
        nonlocal best, best_share, proven
        if i not in known:
            known[i] = _least_load(layer, steps[i])
            proven = min(proven, load_cost * known[i].low + traffic_cost * steps[i])
            found = load_cost * known[i].high + traffic_cost * steps[i]
            if found < best:
                best, best_share = found, known[i].share
        return known[i]

    ideal = load_cost * layer.frequency.sum() / layer.num_nodes
    look(0)
    last = len(steps) - 1
    look(last)
    # Entries are (lower bound, low end, high end) of thresholds strictly between looked-at ends.
    bound = lambda p, q: load_cost * known[q].low + traffic_cost * steps[min(p + 1, last)]
    queue = [(bound(0, last), 0, last)] if last > 1 else []
    while queue and time.monotonic() < layer.deadline:
        lower, p, q = heapq.heappop(queue)
        if lower >= best / (1 + layer.relative_gap):
            queue = [(lower, p, q)]
            break
        # Thresholds that even perfect balance would not save are cut off first.
        worth = np.searchsorted(ideal + traffic_cost * steps[p + 1 : q], best)
        middle = p + 1 + int(min(worth, q - p - 1)) // 2
        middle = min(max(middle, p + 1), q - 1)
        look(middle)
        for ends in ((p, middle), (middle, q)):
            if ends[1] - ends[0] > 1:
                heapq.heappush(queue, (bound(*ends), *ends))
    left = min((entry[0] for entry in queue), default=np.inf)
    proven = min(proven, left, best)
    return best_share, proven, best <= proven * (1 + layer.relative_gap) * (1 + 1e-9)


def _least_load(layer: _Layer, threshold: float) -> _Least:
    """The smallest load of the busiest node with sets whose traffic is at most `threshold`."""
    sets = maximal_sets(np.flatnonzero(layer.traffic <= threshold + 1e-12))
    program = _Program(layer, sets)
    mean = layer.frequency.sum() / layer.num_nodes
    level, share, bound = program.balance(layer.load_cap)
    if share is None:
        return _Least(max(mean, 1 / bound if bound > 0 else np.inf), np.inf, None)
    low = max(mean, 1 / bound)
    if not np.isfinite(layer.memory_cap):
        return _Least(low, 1 / level, share)
    return _bisect(layer, program, low)


def _bisect(layer: _Layer, program: "_Program", low: float) -> _Least:
    """The smallest load under a memory cap, by trying loads."""
    high, share, tried = np.inf, None, low
    for _ in range(MOST_BISECTIONS):
        if time.monotonic() > layer.deadline:
            break
        found, proven = program.fits(tried)
        if found is not None:
            high = min(tried, (layer.frequency @ found).max())
            share = found
        elif proven:
            low = tried
            if low >= layer.load_cap:
                return _Least(np.inf, np.inf, None)
        else:
            break
        if high <= low * (1 + layer.relative_gap / 4):
            break
        grown = low + 2 * max(tried - low, 0.02 * low)
        tried = (low + high) / 2 if np.isfinite(high) else min(grown, layer.load_cap)
    return _Least(low, high, share)


def maximal_sets(sets: np.ndarray) -> np.ndarray:
    """The nonempty sets that no other of `sets` contains: hosting more never raises the load."""
    sets = sets[sets > 0]
    inside = (sets[:, None] & sets) == sets[:, None]
    return sets[inside.sum(1) == 1]


class _Program:
    """The mixed-integer program of one threshold. Columns: u, then x of each set, then q."""

    def __init__(self, layer: _Layer, sets: np.ndarray):
        self.layer, self.sets = layer, sets
        num_experts = len(layer.frequency)
        from scipy import sparse

        hosted = (sets[:, None] >> np.arange(num_experts)) & 1
        self.set_of, self.expert_of = np.nonzero(hosted)
        self.num_sets, self.num_parts = len(sets), len(self.set_of)
        part = np.arange(self.num_parts)
        ones = np.ones(self.num_parts)
        by = lambda value, row, rows: sparse.csr_matrix(
            (value, (row, part)), shape=(rows, self.num_parts)
        )
        self.of_expert = by(ones, self.expert_of, num_experts)
        self.load = by(layer.frequency[self.expert_of], self.set_of, self.num_sets)
        self.memory = by(ones, self.set_of, self.num_sets)
        self.number = -sparse.identity(self.num_sets, format="csr")
        self.level = -sparse.csr_matrix(np.ones((num_experts, 1)))
        self.zero = sparse.csr_matrix((self.num_sets, 1))

    def balance(self, load_cap: float) -> tuple[float, np.ndarray | None, float]:
        """(u, share, upper bound of u) without a memory cap."""
        most = self.layer.num_nodes / self.layer.frequency.sum()
        result = self._solve(
            [[self.level, None, self.of_expert], [self.zero, self.number, self.load]],
            first=(1 / load_cap if np.isfinite(load_cap) else 0.0, most),
            cost=-1.0,
        )
        bound = most if result.mip_dual_bound is None else min(most, -result.mip_dual_bound)
        if result.status == 2:
            return 0.0, None, 0.0
        if result.x is None or result.x[0] <= 0:
            return 0.0, None, bound
        return result.x[0], self._share(result.x), bound

    def fits(self, load: float) -> tuple[np.ndarray | None, bool]:
        """(share whose loads and memory stay within the caps, or whether there is none)."""
        result = self._solve(
            [
                [self.level, None, self.of_expert],
                [self.zero, self.number, self.load / load],
                [self.zero, self.number, self.memory / self.layer.memory_cap],
            ],
            first=(1.0, 1.0),
            cost=0.0,
        )
        if result.x is None:
            return None, result.status == 2
        return self._share(result.x), True

    def _solve(self, blocks, first: tuple[float, float], cost: float) -> Any:
        from scipy import sparse

        num_experts, num_nodes = len(self.layer.frequency), self.layer.num_nodes
        columns = 1 + self.num_sets + self.num_parts
        rows: Any = sparse.bmat(blocks, format="csr")
        num_rows = rows.shape[0]
        count = np.r_[0.0, np.ones(self.num_sets), np.zeros(self.num_parts)]
        matrix = sparse.vstack([rows, count.reshape(1, -1)], format="csr")
        low = np.r_[np.zeros(num_experts), np.full(num_rows - num_experts, -np.inf), num_nodes]
        high = np.r_[np.zeros(num_rows), num_nodes]
        lower, upper = np.zeros(columns), np.full(columns, np.inf)
        lower[0], upper[0] = first
        upper[1 : 1 + self.num_sets] = num_nodes
        return highs(
            np.r_[cost, np.zeros(columns - 1)],
            matrix,
            (low, high),
            (lower, upper),
            whole=count,
            time_limit=max(self.layer.deadline - time.monotonic(), 0.01),
            relative_gap=self.layer.relative_gap / 10,
        )

    def _share(self, columns: np.ndarray) -> np.ndarray:
        """Shares [experts, nodes]: the nodes of a set hold the same."""
        number = np.round(columns[1 : 1 + self.num_sets]).astype(int)
        part = np.maximum(columns[1 + self.num_sets :], 0.0) * (number[self.set_of] > 0)
        per_set = np.zeros((len(self.layer.frequency), self.num_sets))
        per_set[self.expert_of, self.set_of] = part / np.maximum(number[self.set_of], 1)
        share = np.repeat(per_set, number, axis=1)
        return share / share.sum(1, keepdims=True)
