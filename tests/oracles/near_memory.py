"""The time between tokens on a near-memory system, written out with plain loops."""

from collections import Counter


def node_loads(expert_ids, share):
    """Tokens of the experts that each node computes; ids below 0 are padding."""
    counts = Counter(i for token in expert_ids for i in token if i >= 0)
    return [
        sum(share[expert][node] * tokens for expert, tokens in counts.items())
        for node in range(len(share[0]))
    ]


def comp_time(layers, shares, flops_per_token, flops_per_s):
    """Sum over layers of the busiest node's arithmetic, s."""
    loads = [node_loads(ids, share) for ids, share in zip(layers, shares, strict=True)]
    return sum(max(load) * flops_per_token / flops_per_s for load in loads)


def published_mixtral_rest(batch, context, nodes, flops_per_s, dram_bandwidth):
    """Attention and memory of Mixtral-8x7B as HDA-MoE (arXiv 2609.08682) has them, s."""
    h, inner, experts, layers = 4096, 14336, 8, 32
    r = inner / h
    flops = 4 * batch * h * h + 2 * batch * h * context
    moved = 2 * batch * h * context + 4 * h * (batch + h) + 2 * experts * r * h * h
    moved += batch * h * (r + 1)
    return layers * flops / (nodes * flops_per_s), layers * moved / (nodes * dram_bandwidth)
