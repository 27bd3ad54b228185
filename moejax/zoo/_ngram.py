"""Counted byte n-gram models, interpolated by Witten-Bell: what the zoo's loss is compared with."""

import numpy as np


def _keys(text: np.ndarray, order: int) -> np.ndarray:
    """The `order` bytes that end at each position as one integer, newest lowest; zeros before."""
    keys = np.zeros(len(text), np.uint64)
    for back in range(order):
        shifted = np.zeros(len(text), np.uint64)
        shifted[back:] = text[: len(text) - back]
        keys += shifted << np.uint64(8 * back)
    return keys


def _count(table: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> np.ndarray:
    known, counts = table
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, counts[at], 0)


def ngram_losses(train: np.ndarray, heldout: np.ndarray, max_order: int = 5) -> dict[int, float]:
    """Held-out loss of interpolated byte n-gram models of order 1 to `max_order`.

    With `c` counts, `u(h)` the number of different bytes seen after context `h`, and `h'` the
    context one byte shorter: `P(b | h) = (c(hb) + u(h) P(b | h')) / (c(h) + u(h))` (Witten and
    Bell, IEEE Trans. Inf. Theory 37(4), 1991), down to the uniform distribution over 256 bytes.

    **Arguments:**

    - `train`, `heldout`: byte values, shape `[length]`.
    - `max_order`: longest n-gram, at most 8 bytes.

    **Returns:** `{order: nats per byte}`.
    """
    probability = np.full(len(heldout), 1 / 256)
    losses = {}
    for order in range(1, max_order + 1):
        known, counts = np.unique(_keys(train, order), return_counts=True)
        contexts, first = np.unique(known >> np.uint64(8), return_index=True)
        # The newest byte is the lowest of a key, so equal contexts stand side by side.
        distinct = np.diff(np.append(first, len(known)))
        totals = np.add.reduceat(counts, first)
        keys = _keys(heldout, order)
        seen = _count((known, counts), keys)
        context = keys >> np.uint64(8)
        total, unique = _count((contexts, totals), context), _count((contexts, distinct), context)
        backed_off = np.maximum(total + unique, 1)
        mixed = (seen + unique * probability) / backed_off
        probability = np.where(total > 0, mixed, probability)
        losses[order] = float(-np.mean(np.log(probability)))
    return losses
