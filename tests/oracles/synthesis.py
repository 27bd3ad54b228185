"""Plain-Python twins of synthetic routing: choosing without replacement, one token at a time."""

import itertools

import numpy as np


def inclusion_probabilities(popularity, top_k):
    """Exact, by walking through every ordered choice of `top_k` experts."""
    inclusion = [0.0] * len(popularity)
    for choice in itertools.permutations(range(len(popularity)), top_k):
        chance, left = 1.0, sum(popularity)
        for expert in choice:
            chance *= popularity[expert] / left
            left -= popularity[expert]
        for expert in choice:
            inclusion[expert] += chance
    return inclusion


def bimodality(popularity, top_k, batch, draws, seed):
    """Mean shares N = 1, 2, 3-4, > 4 of active experts and active fraction, by simulation."""
    rng = np.random.default_rng(seed)
    totals = np.zeros(5)
    for _ in range(draws):
        counts = [0] * len(popularity)
        for _ in range(batch):
            for expert in rng.choice(len(popularity), top_k, replace=False, p=popularity):
                counts[expert] += 1
        busy = [n for n in counts if n > 0]
        bins = [
            sum(n == 1 for n in busy),
            sum(n == 2 for n in busy),
            sum(3 <= n <= 4 for n in busy),
            sum(n > 4 for n in busy),
        ]
        totals += [b / len(busy) for b in bins] + [len(busy) / len(counts)]
    return totals / draws


def inside_best_groups(scores, num_groups, top_groups):
    """Experts that one token may choose, as DeepSeek-V3 limits them: groups by their best two."""
    size = len(scores) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    score = [sum(sorted((scores[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(num_groups), key=lambda g: score[g], reverse=True)[:top_groups]
    return sorted(e for g in best for e in groups[g])
