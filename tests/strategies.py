"""Hypothesis strategies and random generators for small systems."""

import numpy as np
from hypothesis import strategies as st

from moejax.partition import PartitionCosts


def random_partition_problem(rng, kind, num_experts=24, max_tokens=20):
    """(counts, costs as a dict of plain numbers) of one layer, in four flavors.

    0: a rising PIM table, as in hardware. 1: an arbitrary table. 2: the same, with bus traffic
    for tokens on PIM and contention, where the greedy order has local minima. 3: small whole
    numbers, full of ties.
    """
    counts = np.minimum(rng.geometric(rng.uniform(0.05, 0.9), num_experts) - 1, max_tokens)
    counts = (counts * (rng.random(num_experts) < rng.uniform(0.2, 1))).astype(np.int32)
    table = np.cumsum(rng.uniform(0.2, 1, max_tokens)) * rng.uniform(0.1, 3)
    if kind in (1, 2):
        table = rng.uniform(0.1, 3, max_tokens)
    costs = dict(
        pim_time_by_tokens=np.concatenate([[0], table]),
        attention_time=rng.uniform(0, 3),
        comm_time=rng.uniform(0, 5) if rng.random() < 0.5 else 0.0,
        expert_bytes=rng.uniform(0, 2),
        token_bytes=rng.uniform(0, 0.1),
        flops_per_token=rng.uniform(0, 2),
        fixed_bytes=rng.uniform(0, 3),
        fixed_flops=rng.uniform(0, 3),
        hbm_bandwidth=rng.uniform(0.3, 3),
        flops_per_s=rng.uniform(0.3, 8),
        pim_token_bytes=rng.uniform(0, 0.2) if kind == 2 else 0.0,
        contention=rng.uniform(0, 1) if kind == 2 else 0.0,
    )
    if kind == 3:
        costs = {name: np.round(2 * value) for name, value in costs.items()}
        costs |= dict(hbm_bandwidth=1.0, flops_per_s=1.0)
        costs |= dict(contention=float(rng.integers(2)), pim_token_bytes=float(rng.integers(2)))
    return counts, costs


def in_dtype(costs, dtype):
    """The same numbers, rounded to `dtype`."""
    return {name: np.asarray(value, dtype)[()] for name, value in costs.items()}


def stack_problems(problems):
    """(counts [problems, experts], batched `PartitionCosts`) of several problems."""
    counts = np.stack([counts for counts, _ in problems])
    names = problems[0][1]
    stacked = {name: np.stack([costs[name] for _, costs in problems]) for name in names}
    return counts, PartitionCosts(**stacked)


@st.composite
def partition_problems(draw, max_experts=8, max_tokens=6, kinds=(0, 1, 2, 3)):
    """One small problem, drawn through a seed so that shrinking keeps it plausible."""
    seed, kind = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(kinds))
    rng = np.random.default_rng(seed)
    return random_partition_problem(rng, kind, draw(st.sampled_from((1, max_experts))), max_tokens)
