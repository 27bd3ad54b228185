"""FLOPs and bytes of the operators of a decoder layer (Sieve, arXiv 2605.11277, roofline section).

`hidden` is d, `intermediate` is f. Sizes are Python ints and every product is a float, because
bytes and FLOPs of a layer pass 2^31. Tokens and context lengths are traced.
"""

import jax.numpy as jnp

from moejax._typing import FloatLike
from moejax.cost._roofline import Work
from moejax.models import Attention, Precision


BITS_PER_BYTE = 8.0


def expert_work(
    hidden: int,
    intermediate: int,
    tokens: FloatLike,
    precision: Precision,
    *,
    spill: bool = False,
) -> Work:
    """One gated FFN expert (gate, up: d to f; down: f to d) on `tokens` tokens on a GPU.

    FLOPs `6 N d f`; bytes are the weights once, and per token its input and output. With `spill`
    the inner activations go through memory too: `2 d + 3 f` values a token instead of `2 d`.
    """
    weights = 3.0 * hidden * intermediate
    values = 2.0 * hidden + (3.0 * intermediate if spill else 0.0)
    return Work(
        flops=2.0 * weights * tokens,
        bytes=(weights * precision.expert_weight_bits + values * precision.activation_bits * tokens)
        / BITS_PER_BYTE,
    )


def projection_work(
    attention: Attention, hidden: int, tokens: FloatLike, precision: Precision
) -> Work:
    """The weight matrices of an attention block: QKV (or latent, or state) and output projections.

    FLOPs are two for each weight and token. Bytes: the weights once, and the queries, keys and
    values that the projections write.
    """
    weights = float(attention.num_weights(hidden))
    values = _written_values(attention)
    return Work(
        flops=2.0 * weights * tokens,
        bytes=(weights * precision.weight_bits + values * precision.activation_bits * tokens)
        / BITS_PER_BYTE,
    )


def _written_values(attention: Attention) -> float:
    if attention.kind == "mla":
        latent = attention.kv_rank + attention.rope_dim
        return float(attention.heads * (attention.nope_dim + attention.rope_dim) + latent)
    if attention.kind == "linear":
        keys = 2 * attention.key_heads * attention.key_head_dim
        return float(keys + 2 * attention.value_heads * attention.value_head_dim)
    return float(attention.head_dim * (attention.heads + 2 * attention.kv_heads))


def attention_work(attention: Attention, context: FloatLike, precision: Precision) -> Work:
    """Decode attention of one new token over `context` cached tokens, one layer.

    GQA: FLOPs `4 l n_q h`, bytes `2 l n_kv h` values; with a sliding window l is at most the
    window. MLA, absorbed: FLOPs `2 l n_q (2 c + r)`, bytes `l (c + r)` values. Gated delta-net:
    FLOPs `6 n_v h_k h_v`, bytes `3 n_v h_k h_v` values, whatever the context.
    """
    flops, values = attention_counts(attention)
    length = attended(attention, context)
    return Work(flops * length, values * length * precision.kv_bits / BITS_PER_BYTE)


def attention_counts(attention: Attention) -> tuple[float, float]:
    """(FLOPs, cached values read) for each attended token; for linear attention, in all."""
    if attention.kind == "mla":
        latent = attention.kv_rank + attention.rope_dim
        return 2.0 * attention.heads * (latent + attention.kv_rank), float(latent)
    if attention.kind == "linear":
        state = float(attention.value_heads * attention.key_head_dim * attention.value_head_dim)
        return 6.0 * state, 3.0 * state
    return 4.0 * attention.heads * attention.head_dim, 2.0 * attention.kv_heads * attention.head_dim


def attended(attention: Attention, context: FloatLike) -> FloatLike:
    """How many cached tokens a new one looks at; 1 for linear attention, which has one state."""
    if attention.kind == "linear":
        return jnp.ones_like(context)
    return context if attention.window is None else jnp.minimum(context, attention.window)


def cache_bytes(attention: Attention, context: FloatLike, precision: Precision) -> FloatLike:
    """What one request of `context` tokens keeps in memory for one layer, bytes."""
    if attention.kind == "linear":
        state = attention.value_heads * attention.key_head_dim * attention.value_head_dim
        return jnp.ones_like(context) * float(state) * precision.kv_bits / BITS_PER_BYTE
    return attention_work(attention, context, precision).bytes


def router_work(hidden: int, num_experts: int, tokens: FloatLike, precision: Precision) -> Work:
    """The router matrix on `tokens` tokens: FLOPs `2 B d K`, bytes of its weights."""
    weights = float(hidden) * num_experts
    return Work(2.0 * weights * tokens, weights * precision.weight_bits / BITS_PER_BYTE)


def head_work(hidden: int, vocab: int, tokens: FloatLike, precision: Precision) -> Work:
    """The output embedding (LM head) on `tokens` tokens."""
    weights = float(hidden) * vocab
    return Work(2.0 * weights * tokens, weights * precision.weight_bits / BITS_PER_BYTE)
