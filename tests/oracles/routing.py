"""Literal twins of `moejax.routing`: nested loops over lists, nothing shared with the package."""

from collections import Counter


def tokens_per_expert(ids, num_experts, valid=None):
    """`ids`: [tokens][k] of one layer. -1 is no expert."""
    counts = [0] * num_experts
    for token, experts in enumerate(ids):
        for expert in experts:
            if expert >= 0 and (valid is None or valid[token]):
                counts[expert] += 1
    return counts


def bimodality(counts):
    """Shares of N = 1, 2, 3-4 and > 4 among active experts, and the active fraction."""
    active = [n for n in counts if n > 0]
    bins = [0, 0, 0, 0]
    for n in active:
        bins[0 if n == 1 else 1 if n == 2 else 2 if n <= 4 else 3] += 1
    return [b / len(active) if active else 0.0 for b in bins] + [len(active) / len(counts)]


def co_activation(ids, num_experts):
    """Tokens that chose both i and j."""
    return [
        [sum(i in experts and j in experts for experts in ids) for j in range(num_experts)]
        for i in range(num_experts)
    ]


def co_activation_groups(ids):
    """{sorted experts: relative frequency} over tokens routed at all."""
    sets = Counter(tuple(sorted(experts)) for experts in ids if max(experts) >= 0)
    return {group: count / sum(sets.values()) for group, count in sets.items()}


def next_layer_transitions(ids, num_experts, valid):
    """`ids`: [layers][tokens][k]."""
    table = [[[0] * num_experts for _ in range(num_experts)] for _ in ids[1:]]
    for layer in range(len(ids) - 1):
        for token, ok in enumerate(valid):
            for i in ids[layer][token]:
                for j in ids[layer + 1][token]:
                    if ok and i >= 0 and j >= 0:
                        table[layer][i][j] += 1
    return table


def sequence_id(starts, num_tokens):
    """The last sequence that starts at or before each token."""
    return [max(s for s, start in enumerate(starts) if start <= t) for t in range(num_tokens)]
