"""The language model: bytes and hashed byte n-grams in, MoE blocks, next-byte logits out."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array, Float, Int, PRNGKeyArray
from moejax.zoo._attention import Attention, rms_norm
from moejax.zoo._experts import Experts, Gate, top_k_gate


NUM_BYTES = 256
# Odd multipliers of a multiplicative hash, one for each byte of the n-gram (splitmix64 constants).
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0xD3A2646D)


@dataclasses.dataclass(frozen=True)
class ZooConfig:
    """Shape of a zoo model; everything static.

    **Arguments:**

    - `hidden`, `heads`: width of the residual stream, and attention heads.
    - `windows`: attention window of each layer in tokens; its length is the number of layers.
    - `num_experts`, `top_k`, `intermediate`: routed experts, experts per token, expert width.
    - `ngrams`: (n, rows) of each table of hashed byte n-grams.
    - `ngram_dim`: columns of each of those tables.
    """

    hidden: int = 128
    heads: int = 2
    windows: tuple[int, ...] = (128, 512, 128, 512)
    num_experts: int = 32
    top_k: int = 4
    intermediate: int = 64
    ngrams: tuple[tuple[int, int], ...] = ((2, 4096), (3, 12288), (4, 16384), (5, 12288))
    ngram_dim: int = 32


class NGramEmbedding(eqx.Module):
    """A byte's own embedding plus those of the n-grams that end on it.

    The tables are what a counted n-gram model would hold, hashed and trained: on a CPU they cost
    a gather, where the same knowledge in dense layers costs matrix products.
    """

    byte: Float[Array, "bytes hidden"]
    tables: tuple[Float[Array, "rows dim"], ...]
    project: Float[Array, "all_dims hidden"]
    orders: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, config: ZooConfig, *, key: PRNGKeyArray):
        byte_key, table_key, project_key = jax.random.split(key, 3)
        self.byte = jax.random.normal(byte_key, (NUM_BYTES, config.hidden))
        keys = jax.random.split(table_key, len(config.ngrams))
        self.tables = tuple(
            0.5 * jax.random.normal(k, (rows, config.ngram_dim))
            for k, (_, rows) in zip(keys, config.ngrams)
        )
        width = len(config.ngrams) * config.ngram_dim
        self.project = jax.random.normal(project_key, (width, config.hidden)) * width**-0.5
        self.orders = tuple(n for n, _ in config.ngrams)

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length hidden"]:
        tokens = tokens.astype(jnp.uint32)
        gathered = []
        for order, table in zip(self.orders, self.tables):
            value = jnp.zeros_like(tokens)
            for back, multiplier in zip(range(order), _MULTIPLIERS):
                # Bytes before the start count as 0, which text does not contain.
                past = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
                value = (value ^ (past + back + 1)) * jnp.uint32(multiplier)
                value = value ^ (value >> 15)
            gathered.append(table[value % jnp.uint32(table.shape[0])])
        return self.byte[tokens] + jnp.concatenate(gathered, axis=-1) @ self.project


class Block(eqx.Module):
    """Attention, then routed experts, each on the normalized residual stream."""

    attention: Attention
    router: Float[Array, "hidden experts"]
    experts: Experts

    def __init__(self, config: ZooConfig, window: int, *, key: PRNGKeyArray):
        attention_key, router_key, expert_key = jax.random.split(key, 3)
        self.attention = Attention(config.hidden, config.heads, window, key=attention_key)
        shape = (config.hidden, config.num_experts)
        self.router = jax.random.normal(router_key, shape) * config.hidden**-0.5
        self.experts = Experts(
            config.hidden, config.intermediate, config.num_experts, key=expert_key
        )


class Record(eqx.Module):
    """Everything the forward pass shows of its routing, one row per layer.

    `gate_inputs[l]` is the normalized hidden state that layer `l`'s router multiplies, so
    `gate_inputs[l] @ routers[l + 1]` is the usual guess at the next layer's choices.
    """

    logits: Float[Array, "tokens bytes"]
    router_logits: Float[Array, "layers tokens experts"]
    gate_inputs: Float[Array, "layers tokens hidden"]
    expert_ids: Int[Array, "layers tokens top_k"]
    gate_weights: Float[Array, "layers tokens top_k"]


class ByteMoE(eqx.Module):
    """A decoder-only byte-level MoE language model.

    Calling it takes one sequence `tokens [T]` of byte values and returns next-byte logits
    `[T, 256]`; batch with `jax.vmap`, or `forward` for a batch in one sort of the tokens.
    """

    embedding: NGramEmbedding
    blocks: tuple[Block, ...]
    head: Float[Array, "hidden bytes"]
    config: ZooConfig = eqx.field(static=True)

    def __init__(self, config: ZooConfig, *, key: PRNGKeyArray):
        embedding_key, block_key, head_key = jax.random.split(key, 3)
        self.embedding = NGramEmbedding(config, key=embedding_key)
        keys = jax.random.split(block_key, len(config.windows))
        self.blocks = tuple(Block(config, w, key=k) for k, w in zip(keys, config.windows))
        shape = (config.hidden, NUM_BYTES)
        self.head = 0.1 * config.hidden**-0.5 * jax.random.normal(head_key, shape)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        *,
        gate: Gate | None = None,
        return_router: bool = False,
    ) -> Any:
        """Next-byte logits of one sequence.

        **Arguments:**

        - `tokens`: byte values, shape `[T]`.
        - `gate`: replaces the gate in every layer: from router logits `[T, experts]` to expert ids
            and weights, `[T, k]` each. A negative id adds nothing.
        - `return_router`: whether to return the router logits too.

        **Returns:** logits `[T, 256]`; with `return_router` also router logits
        `[layers, T, experts]`.
        """
        record = self.record(tokens, gate)
        return (record.logits, record.router_logits) if return_router else record.logits

    def record(self, tokens: Int[Array, " tokens"], gate: Gate | None = None) -> Record:
        """One sequence, with everything there is to see of its routing.

        **Raises:** `ValueError` for tokens that are not a row of byte values.
        """
        # NumPy's minimum, because inside jit even jnp operations on concrete arrays are traced.
        seen = np.zeros(1) if is_traced(tokens) or not np.size(tokens) else np.asarray(tokens)
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 1 or tokens.size == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens is {tokens.dtype} {tokens.shape}: allowed is a row of whole numbers "
                "(batches: jax.vmap, or forward)"
            )
        if not 0 <= seen.min() <= seen.max() < NUM_BYTES:
            raise ValueError(f"tokens = {seen.min()} .. {seen.max()}: allowed is 0 .. 255")
        return self.forward(tokens[None], gate)

    @property
    def routers(self) -> Float[Array, "layers hidden experts"]:
        """The router matrix of every layer."""
        return jnp.stack([block.router for block in self.blocks])

    def forward(self, tokens: Int[Array, "batch length"], gate: Gate | None = None) -> Record:
        """A batch of sequences. The record's token axis is `batch * length`, row-major."""
        choose = gate or (lambda logits: top_k_gate(logits, self.config.top_k))
        x = self.embedding(tokens)
        batch, length, hidden = x.shape
        x = rms_norm(x)
        rows = []
        for block in self.blocks:
            x = x + block.attention(rms_norm(x))
            gate_input = rms_norm(x).reshape(batch * length, hidden)
            router_logits = gate_input @ block.router
            expert_ids, gate_weights = choose(router_logits)
            x = x + block.experts(gate_input, expert_ids, gate_weights).reshape(x.shape)
            rows.append((router_logits, gate_input, expert_ids, gate_weights))
        logits = rms_norm(x).reshape(batch * length, hidden) @ self.head
        return Record(logits, *(jnp.stack(column) for column in zip(*rows)))
