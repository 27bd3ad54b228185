"""What a near-memory system spends beside the routed experts: attention, shared experts, memory.

The time between tokens in the authors' form is (HDA-MoE, arXiv 2609.08682, section VI; public
code) `sum over layers of (compute + communication) + attention + memory`, nothing overlapping.
The first two depend on the placement; the last two are here.
"""

from typing import NamedTuple

import jax.numpy as jnp

from moejax._checks import check_non_negative, check_positive, lookup
from moejax._status import is_traced
from moejax._typing import FloatLike, FloatScalar
from moejax.cost import (
    Work,
    attention_work,
    expert_work,
    head_work,
    projection_work,
    router_work,
)
from moejax.hardware import NMPSystem
from moejax.models import MoEModel


class NearMemoryTime(NamedTuple):
    """Seconds of one decode step of all layers that no placement of experts changes."""

    attention: FloatScalar
    """Computing everything but the routed experts."""
    memory: FloatScalar
    """Reading caches, activations and all weights, the routed experts' included."""


# (projections / h^2, cached values of a token / h) of a layer, as the authors' code has them. The
# former are not the models' own: Mixtral's keys and values are as wide as its queries, and Qwen2's
# output projection is a quarter.
_GROUPED = {"mixtral-8x7b": (4.0, 2.0), "qwen2-57b-a14b": (1.75, 0.5)}
_LATENT = "deepseek-v2-lite"


def published_work(model: MoEModel, batch: FloatLike, context: FloatLike = 64) -> Work:
    """FLOPs and bytes of one MoE layer beside its routed experts, in the form of the authors' code
    (HDA-MoE, arXiv 2609.08682; the code's end-to-end script), which counts one operation a weight
    in attention, two in shared experts of two matrices, and one byte a value. With h, IS, E and s
    shared experts, of width s IS together:

    - grouped queries: `A = p B h^2 + 2 s IS B h + c B h L` and
        `Q = c B h L + p h (B + h) + 2 (E + s) IS h + B (IS + h)`, with (p, c) = (4, 2) for
        Mixtral and (1.75, 0.5) for Qwen2;
    - latent attention (DeepSeek-V2-Lite): `A` with the projections' weights in place of `p h^2` and
        `4 B h L` for the cache, `Q = h (w_q + B) + h (h + B) + w_kv + 2 c_kv L + 2 (E + s) IS h +
        B (IS + h)`, where w_q is the width of all queries and w_kv the number of weights that
        widen the latent, of width c_kv.

    **Arguments:**

    - `model`: `mixtral-8x7b`, `deepseek-v2-lite` or `qwen2-57b-a14b`, or one made from them by
        `replace`. `counted_work` does any model.
    - `batch`: B tokens, one of each request.
    - `context`: L cached tokens of each; the authors' 64 by default.

    **Returns:** `cost.Work` of one layer; NaN under tracing for a batch or context out of range.

    **Raises:** `ValueError` for another model, or a batch or context out of range.
    """
    lookup("model with a published form", model.name, {**_GROUPED, _LATENT: None})
    batch, context = _checked("published_work", batch, context)
    h, inner = float(model.hidden), float(model.moe_intermediate)
    shared = float(model.shared_intermediate)
    experts = 2 * (model.num_experts * inner + shared) * h + batch * (inner + h)
    if model.name == _LATENT:
        block = model.layers[-1]
        queries = float(block.heads * (block.nope_dim + block.rope_dim))
        widen = float(block.kv_rank * block.heads * (block.nope_dim + block.value_dim))
        flops = batch * (h * h + widen + h * queries + 4 * h * context)
        moved = h * (queries + h + 2 * batch) + widen + 2.0 * block.kv_rank * context
    else:
        projections, cached = _GROUPED[model.name]
        flops = batch * (projections * h * h + cached * h * context)
        moved = cached * batch * h * context + projections * h * (batch + h)
    return Work(flops + 2 * shared * batch * h, moved + experts)


def counted_work(model: MoEModel, batch: FloatLike, context: FloatLike) -> Work:
    """FLOPs and bytes of one decode step of any model beside its routed experts' arithmetic.

    Every layer's attention, router, shared experts or dense FFN, and the LM head, at the model's
    own precision, two FLOPs a multiply-add; bytes include the weights of all routed experts, once.

    **Arguments:**

    - `model`: any.
    - `batch`: tokens, one of each request.
    - `context`: cached tokens of each.

    **Returns:** `cost.Work` of the whole step; NaN under tracing for a batch or context out of
    range.

    **Raises:** `ValueError` for a batch or context out of range.
    """
    batch, context = _checked("counted_work", batch, context)
    precision, hidden = model.precision, model.hidden
    zero = jnp.zeros_like(batch)
    total = head_work(hidden, model.vocab, batch, precision)
    for block in model.layers:
        seen = attention_work(block, context, precision)
        total += projection_work(block, hidden, batch, precision)
        total += Work(batch * seen.flops, batch * seen.bytes)
    # Shared experts and dense FFNs are stored like the rest of the model, not like the routed ones.
    for width, layers in (
        (model.shared_intermediate, model.num_moe_layers),
        (model.dense_intermediate, model.num_dense_layers),
    ):
        ffn = expert_work(hidden, width, batch, precision) if width else Work(zero, zero)
        weights = 3.0 * hidden * width * (precision.weight_bits - precision.expert_weight_bits) / 8
        total += Work(layers * ffn.flops, layers * (ffn.bytes + weights))
    router = router_work(hidden, model.num_experts, batch, precision)
    experts = model.num_experts * model.expert_bytes
    moe = model.num_moe_layers
    return total + Work(moe * router.flops, moe * (router.bytes + experts))


def near_memory_time(work: Work, system: NMPSystem, num_layers: int = 1) -> NearMemoryTime:
    """Attention and memory terms of the time between tokens (HDA-MoE, arXiv 2609.08682):
    `layers A / (D C)` and `layers Q / (D BW_mem)`, all nodes sharing evenly.

    **Arguments:**

    - `work`: of one layer (`published_work`, with `num_layers=model.num_moe_layers`) or of all
        (`counted_work`).
    - `system`: D nodes of C FLOP/s, with BW_mem B/s of DRAM each.

    **Returns:** `NearMemoryTime(attention, memory)` in s.
    """
    each = num_layers / system.num_nodes
    attention = each * (work.flops / system.flops_per_s)
    return NearMemoryTime(attention, each * (work.bytes / system.dram_bandwidth))


def _checked(owner: str, batch: FloatLike, context: FloatLike):
    """Both as floats, NaN under tracing where they are out of range."""
    check_positive(owner, "batch", batch)
    check_non_negative(owner, "context", context)
    batch, context = (jnp.asarray(value, jnp.result_type(float)) for value in (batch, context))
    if is_traced(batch, context):
        inside = (batch > 0) & (context >= 0)
        batch, context = (jnp.where(inside, value, jnp.nan) for value in (batch, context))
    return batch, context
