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
