"""Plain twins of the zoo's parts: loops over tokens, bytes and dictionaries, in float64."""

import math
from collections import Counter, defaultdict

import numpy as np


def experts(x, up, down, expert_ids, gate_weights):
    """Each token through its own experts, one at a time."""
    out = np.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(expert_ids, gate_weights)):
        for expert, weight in zip(ids, weights):
            if expert >= 0:
                inner = np.maximum(x[token] @ up[expert], 0) ** 2
                out[token] += weight * (inner @ down[expert])
    return out


def attention(query, key, value, window):
    """Softmax over the last `window` keys of one head, token by token."""
    out = np.zeros_like(value)
    for t in range(len(query)):
        first = max(0, t - window + 1)
        scores = key[first : t + 1] @ query[t]
        weights = np.exp(scores - scores.max())
        out[t] = weights @ value[first : t + 1] / weights.sum()
    return out


def witten_bell(train: bytes, heldout: bytes, order: int) -> float:
    """Nats per byte of the interpolated model, by dictionaries of following bytes."""
    following = [defaultdict(Counter) for _ in range(order)]
    pad = b"\0" * order
    for at, byte in enumerate(train):
        past = (pad + train)[: at + order]
        for n in range(order):
            following[n][past[len(past) - n :]][byte] += 1
    total = 0.0
    for at, byte in enumerate(heldout):
        past = (pad + heldout)[: at + order]
        probability = 1 / 256
        for n in range(order):
            counts = following[n].get(past[len(past) - n :])
            if counts:
                seen, kinds = sum(counts.values()), len(counts)
                probability = (counts[byte] + kinds * probability) / (seen + kinds)
        total -= math.log(probability)
    return total / len(heldout)
