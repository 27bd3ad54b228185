"""Placements in plain Python loops: the estimator, statistics, baselines and bytes, no JAX."""

import itertools
from collections import Counter


HOSTING = 1e-6


def statistics(tokens, num_experts):
    """(frequency of each expert, {sorted tuple of experts: share of the tokens})."""
    routed = [tuple(sorted(e for e in token if e >= 0)) for token in tokens]
    routed = [token for token in routed if token]
    frequency = [sum(e in token for token in routed) / len(routed) for e in range(num_experts)]
    return frequency, {g: n / len(routed) for g, n in Counter(routed).items()}


def evaluate(share, frequency, groups, costs):
    """(compute, communication, total) in s of a placement; `groups` maps experts to frequency."""
    num_experts, num_nodes = len(share), len(share[0])
    compute = communication = 0.0
    for node in range(num_nodes):
        load = 0.0
        for expert in range(num_experts):
            load += share[expert][node] * frequency[expert]
        work = load * costs["batch"] * costs["flops_per_token"]
        compute = max(compute, work / costs["flops_per_s"])
        touched = 0.0
        for group, how_often in groups.items():
            if any(share[expert][node] > HOSTING for expert in group):
                touched += how_often
        sent = touched * costs["batch"] * costs["bytes_per_token"]
        communication = max(communication, costs["gamma"] * sent / costs["bandwidth"])
    return compute, communication, compute + 2 * communication


def evaluate_batch(share, tokens, costs):
    """The same for one batch: a token at a time, every node counting its work and its bytes."""
    num_nodes = len(share[0])
    work, sent = [0.0] * num_nodes, [0.0] * num_nodes
    for token in tokens:
        for node in range(num_nodes):
            parts = [share[expert][node] for expert in token if expert >= 0]
            work[node] += sum(parts) * costs["flops_per_token"]
            if any(part > HOSTING for part in parts):
                sent[node] += costs["bytes_per_token"]
    compute = max(work) / costs["flops_per_s"]
    communication = costs["gamma"] * max(sent) / costs["bandwidth"]
    return compute, communication, compute + 2 * communication


def best_region_load(load, size):
    """The smallest possible load of the busiest region per node, over all assignments."""
    best = float("inf")
    for choice in itertools.product(range(len(size)), repeat=len(load)):
        total = [0.0] * len(size)
        for expert, region in enumerate(choice):
            total[region] += load[expert]
        best = min(best, max(t / s for t, s in zip(total, size, strict=True)))
    return best


def pack(load, num_packs):
    """Heaviest first into the lightest pack with room: item lists."""
    packs, totals = [[] for _ in range(num_packs)], [0.0] * num_packs
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        room = [p for p in range(num_packs) if len(packs[p]) < len(load) // num_packs]
        lightest = min(room, key=lambda p: totals[p])
        packs[lightest].append(item)
        totals[lightest] += load[item]
    return packs


def copies(load, slots):
    """Copies of each expert: one more to the largest load per copy, until the slots are full."""
    count = [1] * len(load)
    for _ in range(slots - len(load)):
        expert = min(range(len(load)), key=lambda e: (-load[e] / count[e], count[e], e))
        count[expert] += 1
    return count


def replicate_and_pack(load, num_replicas, num_groups, num_nodes, num_gpus):
    """Expert of each slot, GPU by GPU."""
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    width = len(load) // num_groups
    groups = [list(range(g * width, (g + 1) * width)) for g in range(num_groups)]
    slots = []
    for members in pack([sum(load[e] for e in group) for group in groups], num_nodes):
        experts = [e for group in members for e in groups[group]]
        count = copies([load[e] for e in experts], num_replicas // num_nodes)
        # First one of each, then the further copies in the order in which they were made.
        made = list(experts)
        for room in range(len(experts), num_replicas // num_nodes):
            before = copies([load[e] for e in experts], room)
            after = copies([load[e] for e in experts], room + 1)
            made += [e for e, b, a in zip(experts, before, after, strict=True) if a > b]
        weight = [load[e] / count[experts.index(e)] for e in made]
        for gpu in pack(weight, num_gpus // num_nodes):
            slots += [made[i] for i in gpu]
    return slots


def node_bytes(layers, expert_bytes, whole_copies):
    """Bytes of weights on each node, over a list of [experts][nodes] placements."""
    stored = [0.0] * len(layers[0][0])
    for share in layers:
        for row, size in zip(share, expert_bytes, strict=True):
            for node, part in enumerate(row):
                stored[node] += (
                    (1.0 if part > HOSTING else 0.0) * size if whole_copies else (part * size)
                )
    return stored
