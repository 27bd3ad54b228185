"""Node Balance written out: the paper's rows as they are printed, and exhaustive search.

Everything is plain numbers; `groups` maps tuples of experts to how often they are chosen. Times are
`load_cost * load` and `traffic_cost * traffic`, the latter for both directions.
"""

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp


def total(share, frequency, groups, load_cost, traffic_cost, tree=None):
    """The objective of a placement; `tree` as in `tree_rows`."""
    num_experts, num_nodes = len(share), len(share[0])
    loads = [sum(share[i][c] * frequency[i] for i in range(num_experts)) for c in range(num_nodes)]
    hosted = [{i for i in range(num_experts) if share[i][c] > 1e-6} for c in range(num_nodes)]
    traffic = [sum(f for g, f in groups.items() if hosted[c] & set(g)) for c in range(num_nodes)]
    rows = tree_rows(hosted, groups, tree) if tree else []
    return load_cost * max(loads) + traffic_cost * max(traffic + rows)


def tree_rows(hosted, groups, tree):
    """Relative time of every row of a fat-tree. `tree`: pods, leaves a pod, endpoints a leaf, and
    the bandwidth of a node over that of all endpoint links of a leaf, of its uplinks, of all links
    between leaves and aggregations of a pod, of its core links, and of all links down from cores.
    """
    pods, leaves, endpoints = tree["shape"]
    rows, at_core = [], 0.0
    for pod in range(pods):
        pod_leaves = range(pod * leaves, (pod + 1) * leaves)
        several = outside_pod = 0.0
        for leaf in pod_leaves:
            touches = outside = 0.0
            for group, f in groups.items():
                on = touched_leaves(hosted, group, endpoints)
                touches += f * (leaf in on)
                outside += f * (leaf in on and len(on) > 1)
            rows += [touches * tree["leaf_endpoints"], outside * tree["leaf_uplinks"]]
        for group, f in groups.items():
            on = touched_leaves(hosted, group, endpoints)
            here = [leaf for leaf in on if leaf in pod_leaves]
            several += f * (len(here) > 1)
            outside_pod += f * (len(here) > 0 and len(here) < len(on))
        rows += [several * tree["pod_leaves"], outside_pod * tree["pod_cores"]]
        at_core += outside_pod
    return [*rows, at_core * tree["core"]]


def touched_leaves(hosted, group, endpoints):
    return {c // endpoints for c in range(len(hosted)) if hosted[c] & set(group)}


def best_by_enumeration(
    frequency, groups, load_cost, traffic_cost, num_nodes, memory_cap=None, load_cap=None, tree=None
):
    """The smallest total: every choice of hosts, and for each the linear program of its shares."""
    num_experts = len(frequency)
    best = np.inf
    sets = range(1, 2**num_nodes)
    for choice in itertools.product(sets, repeat=num_experts):
        hosts = [[c for c in range(num_nodes) if choice[i] >> c & 1] for i in range(num_experts)]
        load = least_load(frequency, hosts, num_nodes, memory_cap, load_cap)
        if load is None:
            continue
        share = [[1.0 * (c in hosts[i]) for c in range(num_nodes)] for i in range(num_experts)]
        traffic = total(share, frequency, groups, 0.0, traffic_cost, tree)
        best = min(best, load_cost * load + traffic)
    return best


def least_load(frequency, hosts, num_nodes, memory_cap=None, load_cap=None):
    """The load of the busiest node with the best shares, experts only on their hosts."""
    parts = [(i, c) for i, nodes in enumerate(hosts) for c in nodes]
    upper, limit = [], []
    for c in range(num_nodes):
        upper.append([frequency[i] * (d == c) for i, d in parts] + [-1.0])
        limit.append(0.0)
        if memory_cap is not None:
            upper.append([1.0 * (d == c) for _, d in parts] + [0.0])
            limit.append(memory_cap)
    equal = [[1.0 * (j == i) for j, _ in parts] + [0.0] for i in range(len(frequency))]
    found = linprog(
        [0.0] * len(parts) + [1.0], upper, limit, equal, [1.0] * len(frequency),
        bounds=[(0, 1)] * len(parts) + [(0, load_cap)],
    )  # fmt: skip
    return found.fun if found.status == 0 else None


def paper(
    frequency, groups, load_cost, traffic_cost, num_nodes, memory_cap=None, load_cap=None,
    relaxed=False,
):  # fmt: skip
    """HD-MoE (arXiv 2509.09420), Eq. 5-12, row by row: (total, lower bound).

    Columns are P_ic, Z_ic, Y_gc, t_comp, t_comm. `relaxed`: no column need be whole, and the rows
    of a group are split by expert, which is what makes the relaxation worth anything.
    """
    experts, nodes = range(len(frequency)), range(num_nodes)
    names = [("P", i, c) for i in experts for c in nodes]
    names += [("Z", i, c) for i in experts for c in nodes]
    names += [("Y", g, c) for g in groups for c in nodes] + ["comp", "comm"]
    column = {name: n for n, name in enumerate(names)}
    rows, low, high = [], [], []

    def add(terms, lower, upper):
        row = np.zeros(len(names))
        for name, value in terms:
            row[column[name]] += value
        rows.append(row)
        low.append(lower)
        high.append(upper)

    for i in experts:
        add([(("P", i, c), 1.0) for c in nodes], 1.0, 1.0)
    for c in nodes:
        for group in groups:
            terms = [(("Z", i, c), 1 / len(group)) for i in group]
            for part in [[(name, 1.0)] for name, _ in terms] if relaxed else [terms]:
                add([*part, (("Y", group, c), -1.0)], -np.inf, 0.0)
        for i in experts:
            add([(("P", i, c), 1.0), (("Z", i, c), -1.0)], -np.inf, 0.0)
        sent = [(("Y", g, c), traffic_cost * f) for g, f in groups.items()]
        add([*sent, ("comm", -1.0)], -np.inf, 0.0)
        work = [(("P", i, c), load_cost * frequency[i]) for i in experts]
        add([*work, ("comp", -1.0)], -np.inf, 0.0)
        if memory_cap is not None:
            add([(("P", i, c), 1.0) for i in experts], -np.inf, memory_cap)
        if load_cap is not None:
            add([(("P", i, c), frequency[i]) for i in experts], 0.0, load_cap)
    cost = np.zeros(len(names))
    cost[-2:] = 1.0
    whole = np.array([0.0 if relaxed else float(name[0] in "ZY") for name in names])
    whole[-2:] = 0.0
    upper = np.ones(len(names))
    upper[-2:] = np.inf
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=whole,
        bounds=Bounds(0.0, upper),
        options={"mip_rel_gap": 1e-9},
    )
    return found.fun, found.fun if relaxed else found.mip_dual_bound
