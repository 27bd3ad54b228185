"""What the prompts of a colocated batch cost beside their tokens' weights."""

import jax.numpy as jnp

from moejax._typing import FloatLike
from moejax.cost import Work, attention_counts, projection_work
from moejax.models import Attention, MoEModel


def prefill_attention_work(attention: Attention, model: MoEModel, length: FloatLike) -> Work:
    """Attention of one causal prompt of `length` tokens in one layer, on a GPU.

    - Grouped-query: FLOPs `2 l^2 n_q h` (Sieve, arXiv 2605.11277, T_comp); with a sliding window w
        `4 n_q h (l w - w^2 / 2)`.
    - MLA, not absorbed: `l^2 n_q (h_n + r + h_v)`.
    - Gated delta-net: `6 n_v h_k h_v` a token.

    Bytes: queries, keys and values are read once, as a fused kernel does.
    """
    length = jnp.asarray(length, jnp.result_type(float))
    precision = model.precision
    written = projection_work(attention, model.hidden, 1.0, precision).bytes
    moved = (written - projection_work(attention, model.hidden, 0.0, precision).bytes) * length
    if attention.kind == "gqa":
        seen = length if attention.window is None else jnp.minimum(length, attention.window)
        pairs = length * seen - seen**2 / 2
        flops = 4.0 * attention.heads * attention.head_dim * pairs
    elif attention.kind == "mla":
        width = attention.nope_dim + attention.rope_dim + attention.value_dim
        flops = float(attention.heads * width) * length**2
    else:
        flops = attention_counts(attention)[0] * length
    return Work(flops, moved)
