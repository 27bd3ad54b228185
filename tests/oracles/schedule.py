"""Dynamic scheduling written out literally: loops over nodes, experts and tokens, no JAX."""

import math

import numpy as np


def broadcast_time(chunk, payload, alpha, bandwidth, num_broadcast, num_nodes):
    """Pipelined over 2 sqrt(D) hops: starts of every hop and chunk, then the bytes of both."""
    hops = 2 * math.sqrt(num_nodes)
    return alpha * (hops + payload / chunk) + num_broadcast * (payload + chunk * hops) / bandwidth


def best_chunk(payload, alpha, bandwidth, num_broadcast, num_nodes):
    """(chunk, time) of the least time, by bisection on the ratio of two neighboring times."""
    time = lambda chunk: broadcast_time(chunk, payload, alpha, bandwidth, num_broadcast, num_nodes)
    low, high = 1e-6, 1e15
    for _ in range(300):
        one, two = low * (high / low) ** 0.4, low * (high / low) ** 0.6
        low, high = (low, two) if time(one) < time(two) else (one, high)
    return math.sqrt(low * high), time(math.sqrt(low * high))


def prebroadcast_count(payload, alpha, bandwidth, num_nodes, budget, most):
    """Tries one expert more until the best chunk takes too long."""
    count = 0
    while count < most and best_chunk(payload, alpha, bandwidth, count + 1, num_nodes)[1] < budget:
        count += 1
    return count


def node_loads(share, counts, without=()):
    """Expert-tokens on each node, some experts left out."""
    loads = [0.0] * len(share[0])
    for expert, row in enumerate(share):
        for node, part in enumerate(row):
            if expert not in without:
                loads[node] += float(part) * float(counts[expert])
    return loads


def priority(share, load, count):
    """Experts to broadcast, one after the other; fewer than `count` where nothing is left."""
    chosen = []
    for _ in range(count):
        loads = node_loads(share, load, chosen)
        congested = loads.index(max(loads))
        best, relief = None, 0.0
        for expert, row in enumerate(share):
            part = float(row[congested]) * float(load[expert])
            if expert not in chosen and part > 0 and part >= relief:
                best, relief = expert, part
        if best is None:
            break
        chosen.append(best)
    return chosen


def dispatch(expert_ids, share, broadcast, only_partners=False):
    """(node of each slot or -1, loads, slots whose node has no other work of the token)."""
    counts = [0] * len(share)
    for token in expert_ids:
        for expert in token:
            if expert >= 0:
                counts[expert] += 1
    loads = node_loads(share, counts, [e for e, sent in enumerate(broadcast) if sent])
    nodes, visits = [], []
    for token in expert_ids:
        hosts = lambda experts: {
            n for e in experts for n, part in enumerate(share[e]) if part > 1e-6
        }
        routed = [expert for expert in token if expert >= 0]
        partners = hosts([expert for expert in routed if not broadcast[expert]])
        candidates = hosts(routed)
        if only_partners and partners:
            candidates = partners
        nodes.append([])
        visits.append([])
        for expert in token:
            if expert < 0 or not broadcast[expert]:
                nodes[-1].append(-1)
                visits[-1].append(False)
                continue
            node = min(sorted(candidates), key=lambda n: loads[n])
            loads[node] += 1
            nodes[-1].append(node)
            visits[-1].append(node not in partners)
    return np.array(nodes), np.array(loads), np.array(visits)


def transition_scores(trace_ids, valid, num_experts, present, smoothing=1.0):
    """[experts] log-probability of each expert of the next layer, after the present ones.

    `trace_ids` are two layers [2][tokens][k] of the trace it is fitted on.
    """
    pairs = [[0] * num_experts for _ in range(num_experts)]
    for token, ok in enumerate(valid):
        for i in trace_ids[0][token]:
            for j in trace_ids[1][token]:
                pairs[i][j] += ok
    total = [sum(pairs[i][j] for i in range(num_experts)) + 1 for j in range(num_experts)]
    chance = [value / sum(total) for value in total]
    scores = []
    for j in range(num_experts):
        score = math.log(chance[j])
        for i in present:
            row = [pairs[i][m] + smoothing * chance[m] for m in range(num_experts)]
            score += math.log(row[j] / sum(row) / chance[j])
        scores.append(score)
    return scores


def accuracy(predicted, actual):
    """Mean over tokens of the share of chosen experts that were predicted."""
    shares = [len(set(p) & set(a)) / len(a) for p, a in zip(predicted, actual)]
    return sum(shares) / len(shares)
