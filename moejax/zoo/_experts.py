"""Routed experts without dropped tokens: rows sorted by expert, then one batched matrix product.

XLA's CPU `ragged_dot` runs two orders of magnitude below its dense products at these sizes. Here
every expert's rows are padded to whole blocks instead, and each block is multiplied by its own
expert's weights: static shapes, no capacity factor, at most one partly empty block per expert.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, Int, PRNGKeyArray


Gate: TypeAlias = Callable[
    [Float[Array, "tokens experts"]],
    tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]],
]


def top_k_gate(
    router_logits: Float[Array, "tokens experts"], top_k: int
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """The gate the model was trained with: softmax, the `top_k` largest, renormalized to sum one.

    **Returns:** expert ids in order of falling probability, and their weights.
    """
    # Renormalizing after the choice makes this the softmax over the chosen logits alone.
    chosen, expert_ids = jax.lax.top_k(router_logits, top_k)
    return expert_ids, jax.nn.softmax(chosen, axis=-1)


class _Layout(NamedTuple):
    """Where each (token, choice) row stands among the padded blocks, and back."""

    row_of_slot: Int[Array, " slots"]  # number of rows = empty slot
    slot_of_row: Int[Array, " rows"]
    expert_of_block: Int[Array, " blocks"]


def _layout(expert_of_row: Int[Array, " rows"], num_experts: int, block: int) -> _Layout:
    rows = expert_of_row.shape[0]
    num_blocks = -(-rows // block) + num_experts
    order = jnp.argsort(expert_of_row).astype(jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert_of_row].add(1)
    padded_end = jnp.cumsum(-(-counts // block) * block)
    # What to add to a row's rank in sorted order to get its slot: all padding before its expert.
    shift = (padded_end - (-(-counts // block) * block)) - (jnp.cumsum(counts) - counts)
    slot_in_order = jnp.arange(rows, dtype=jnp.int32) + shift[expert_of_row[order]]
    row_of_slot = jnp.full(num_blocks * block, rows, jnp.int32).at[slot_in_order].set(order)
    slot_of_row = jnp.zeros(rows, jnp.int32).at[order].set(slot_in_order)
    starts = jnp.arange(num_blocks, dtype=jnp.int32) * block
    expert_of_block = jnp.searchsorted(padded_end, starts, side="right")
    return _Layout(row_of_slot, slot_of_row, jnp.minimum(expert_of_block, num_experts - 1))


# Both moves are permutations with padding, so each one's transpose is a gather too. Left to
# autodiff they would be scatter-adds, which XLA's CPU backend runs serially.
@jax.custom_vjp
def _spread(x, layout):
    top_k = layout.slot_of_row.shape[0] // x.shape[0]
    return x.at[layout.row_of_slot // top_k].get(mode="fill", fill_value=0)


def _spread_fwd(x, layout):
    return _spread(x, layout), (layout, x.shape[0])


def _spread_bwd(residuals, dy):
    layout, tokens = residuals
    return dy[layout.slot_of_row].reshape(tokens, -1, dy.shape[-1]).sum(axis=1), None


_spread.defvjp(_spread_fwd, _spread_bwd)


@jax.custom_vjp
def _collect(y, layout):
    return y[layout.slot_of_row]


def _collect_fwd(y, layout):
    return _collect(y, layout), layout


def _collect_bwd(layout, dx):
    return dx.at[layout.row_of_slot].get(mode="fill", fill_value=0), None


_collect.defvjp(_collect_fwd, _collect_bwd)


class Experts(eqx.Module):
    """`num_experts` two-matrix feed-forward experts with a squared ReLU between."""

    up: Float[Array, "experts hidden intermediate"]
    down: Float[Array, "experts intermediate hidden"]

    def __init__(self, hidden: int, intermediate: int, num_experts: int, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        self.up = jax.random.normal(up_key, (num_experts, hidden, intermediate)) * hidden**-0.5
        self.down = (
            0.1
            * intermediate**-0.5
            * jax.random.normal(down_key, (num_experts, intermediate, hidden))
        )

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        expert_ids: Int[Array, "tokens top_k"],
        gate_weights: Float[Array, "tokens top_k"],
    ) -> Float[Array, "tokens hidden"]:
        """The weighted sum of each token's experts. A negative id (NOT_ROUTED) adds nothing."""
        tokens, top_k = expert_ids.shape
        num_experts = self.up.shape[0]
        gate_weights = jnp.where(expert_ids < 0, 0, gate_weights)
        block = 128 if tokens * top_k >= 256 * num_experts else 16
        layout = _layout(jnp.maximum(expert_ids, 0).reshape(-1), num_experts, block)
        blocks = _spread(x, layout).reshape(-1, block, x.shape[1])
        inner = jnp.einsum("bth,bhi->bti", blocks, self.up[layout.expert_of_block])
        inner = jnp.square(jax.nn.relu(inner))
        out = jnp.einsum("bti,bih->bth", inner, self.down[layout.expert_of_block])
        rows = _collect(out.reshape(-1, x.shape[1]), layout).reshape(tokens, top_k, -1)
        return jnp.einsum("tk,tkh->th", gate_weights, rows)
