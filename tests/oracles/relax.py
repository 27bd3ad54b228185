"""Soft choices and layer times written out literally: bisection, loops, plain sums in float64."""

import math


def fermi(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def soft_top_k(scores, k, temperature):
    """Occupations of one row of scores, the boundary found by halving an interval."""
    finite = [s for s in scores if s > -math.inf]
    if len(finite) <= k:
        return [1.0 if s > -math.inf else 0.0 for s in scores]
    low, high = min(finite) - 100 * temperature, max(finite) + 100 * temperature
    for _ in range(200):
        middle = (low + high) / 2
        taken = math.fsum(fermi((s - middle) / temperature) for s in finite)
        low, high = (middle, high) if taken > k else (low, middle)
    return [fermi((s - low) / temperature) for s in scores]


def hard_top_k(scores, k):
    """Ones above the k-th largest score, what is left shared by those that equal it."""
    last = sorted(scores, reverse=True)[k - 1]
    above = sum(s > last for s in scores)
    tied = sum(s == last for s in scores)
    share = lambda s: 1.0 if s > last else (k - above) / tied if s == last else 0.0
    return [share(s) if s > -math.inf else 0.0 for s in scores]


def smooth_makespan(load, temperature):
    if temperature == 0:
        return max(load)
    mean = math.fsum(math.exp((x - max(load)) / temperature) for x in load) / len(load)
    return max(load) + temperature * math.log(mean)


def layer_penalty(logits, share, k, token_time, visit_time, temperature, sharpness):
    """(loss, time of a layer in s) from loops over tokens, experts and nodes."""
    nodes = len(share[0])
    load, visits = [0.0] * nodes, [0.0] * nodes
    for row in logits:
        p = soft_top_k(row, k, temperature)
        for c in range(nodes):
            missed = 1.0
            for i, part in enumerate(share):
                load[c] += p[i] * part[c]
                missed *= 1 - p[i] if part[c] > 1e-6 else 1
            visits[c] += 1 - missed
    even = k * len(logits) / nodes
    smooth = lambda x: smooth_makespan([v / even for v in x], 1 / sharpness)
    whole = token_time + visit_time
    loss = (token_time * smooth(load) + visit_time * smooth(visits)) / whole
    return loss, token_time * max(load) + visit_time * max(visits)


def layer_time(expert_ids, share, token_time, visit_time):
    """Time of a layer with real choices."""
    nodes = len(share[0])
    load = [sum(share[i][c] for row in expert_ids for i in row if i >= 0) for c in range(nodes)]
    visits = [
        sum(any(i >= 0 and share[i][c] > 1e-6 for i in row) for row in expert_ids)
        for c in range(nodes)
    ]
    return token_time * max(load) + visit_time * max(visits)
