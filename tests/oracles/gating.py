"""The gate written out literally: one token after the other, plain arithmetic, no JAX.

Computes in the dtype of what it is given, so that exact arithmetic can be compared exactly.
"""

import numpy as np


HOSTING_SHARE = 1e-6


def top_k(values, k):
    """Ids of the k largest, ties lower id."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def allowed_experts(scores, num_groups, top_groups, group_score):
    """Whether each expert stands in one of the best groups."""
    size = len(scores) // num_groups
    groups = [scores[g * size : (g + 1) * size] for g in range(num_groups)]
    counted = 1 if group_score == "max" else 2
    value = [sum(sorted(group, reverse=True)[:counted]) for group in groups]
    best = top_k(value, top_groups)
    return [expert // size in best for expert in range(len(scores))]


def gate(
    scores,
    share,
    k,
    r_comp,
    r_comm,
    token_time,
    protect=0,
    chunk=1,
    valid=None,
    initial_load=None,
    selection_scores=None,
    extra_cost=None,
    groups=(1, 1, "max"),
    enabled=True,
    ahead=False,
):
    """(expert ids, -1 for padding; final load) of a batch, straight from the formula."""
    tokens, experts = scores.shape
    nodes = share.shape[1]
    selection = scores if selection_scores is None else selection_scores
    extra = (
        np.zeros_like(scores) if extra_cost is None else np.broadcast_to(extra_cost, scores.shape)
    )
    valid = [True] * tokens if valid is None else valid
    load = [scores.dtype.type(0)] * nodes if initial_load is None else list(initial_load)
    ids = [[-1] * k for _ in range(tokens)]
    offered = [
        [s if ok else -np.inf for s, ok in zip(row, allowed_experts(list(row), *groups))]
        if is_valid
        else None
        for row, is_valid in zip(selection, valid)
    ]
    for start in range(0, tokens, chunk):
        seen = list(load)
        for later in range(start + chunk, tokens):
            if ahead and valid[later]:
                for i in top_k(offered[later], k):
                    seen = [seen[c] + share[i, c] * token_time for c in range(nodes)]
        for t in range(start, min(start + chunk, tokens)):
            if not valid[t]:
                continue
            adjusted = []
            for i in range(experts):
                makespan = max(seen[c] + share[i, c] * token_time for c in range(nodes))
                held_by = sum(share[i, c] > HOSTING_SHARE for c in range(nodes))
                cost = r_comp * makespan + r_comm * held_by - extra[t, i]
                adjusted.append(offered[t][i] + (cost if enabled else 0))
            kept = top_k(offered[t], protect)
            others = [a if i not in kept else -np.inf for i, a in enumerate(adjusted)]
            chosen = kept + top_k(others, k - protect)
            ids[t] = sorted(chosen, key=lambda i: (-adjusted[i], i))
        for t in range(start, min(start + chunk, tokens)):
            for i in ids[t]:
                if i >= 0:
                    load = [load[c] + share[i, c] * token_time for c in range(nodes)]
    return np.array(ids), np.array(load)


def numpy_loop(scores, share, k, r_comp, r_comm, token_time):
    """What one would write in NumPy: a loop over tokens, arrays over experts and nodes."""
    time = share * token_time
    dispersion = r_comm * (share > HOSTING_SHARE).sum(1)
    load = np.zeros_like(time[0])
    ids = np.empty((len(scores), k), int)
    for token, score in enumerate(scores):
        adjusted = score + (r_comp * (load + time).max(1) + dispersion)
        ids[token] = np.argsort(-adjusted, kind="stable")[:k]
        load = load + time[ids[token]].sum(0)
    return ids, load


def gate_by_counts(scores, k, cost):
    """Expert ids where `cost(counts)` is a list of experts' costs given the tokens each has."""
    counts = [0] * scores.shape[1]
    ids = []
    for row in scores:
        adjusted = [s - c for s, c in zip(row, cost(counts))]
        ids.append(top_k(adjusted, k))
        for i in ids[-1]:
            counts[i] += 1
    return np.array(ids), counts


def link_costs(counts, traffic, bandwidth, r_link):
    """Busiest link after one more token for each expert, in score units."""
    experts, links = traffic.shape
    load = [sum(counts[i] * traffic[i, link] for i in range(experts)) for link in range(links)]
    after = [
        max((load[link] + traffic[i, link]) / bandwidth[link] for link in range(links))
        for i in range(experts)
    ]
    return [-r_link * x for x in after]


def partition_time(counts, pim, gpu, on_gpu=None):
    """The later of GPU and PIM, each expert where it is faster or where it has to be."""
    place = [gpu[n] < pim[n] if on_gpu is None else on_gpu[i] for i, n in enumerate(counts)]
    on = sum(gpu[n] for n, there in zip(counts, place) if there)
    off = sum(pim[n] for n, there in zip(counts, place) if not there)
    return max(on, off)


def partition_costs(counts, pim, gpu, r_time, on_gpu=None):
    """How much later the layer ends with one more token for each expert, in score units."""
    now = partition_time(counts, pim, gpu, on_gpu)
    costs = []
    for i in range(len(counts)):
        more = [n + (j == i) for j, n in enumerate(counts)]
        costs.append(-r_time * (partition_time(more, pim, gpu, on_gpu) - now))
    return costs
