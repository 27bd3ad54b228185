"""Batches as the last axis: what `jax.vmap` puts in front, this kernel wants at the back.

A token loop is sequential, so all its parallelism is the batch of layers and settings. XLA's CPU
backend vectorizes a reduction over experts or nodes several times better when the batch is the
contiguous axis. A function called through `in_lanes` therefore sees arrays with one trailing axis
more, the lanes, and every enclosing `jax.vmap`, however nested, multiplies into that one axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from moejax._typing import Array


def in_lanes(kernel: Callable[[Any], Any], tree: Any) -> Any:
    """`kernel(tree)` with a trailing lane axis on every array, of its argument and its result.

    An array that no `jax.vmap` batches keeps one lane and is left to broadcasting; what the kernel
    returns has all lanes. No gradient passes: the argument must not carry tangents.
    """

    @custom_vmap
    def run(tree):
        return kernel(tree)

    @run.def_vmap
    def rule(axis_size, in_batched, tree):
        (batched,) = in_batched
        inner = max(leaf.shape[-1] for leaf in jax.tree.leaves(tree))
        merge = lambda leaf, flag: _merge(leaf, flag, inner, axis_size)
        result = run(jax.tree.map(merge, tree, batched))
        split = lambda leaf: jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], axis_size, inner), -2, 0)
        return jax.tree.map(split, result), jax.tree.map(lambda _: True, result)

    result = run(jax.tree.map(lambda leaf: jnp.asarray(leaf)[..., None], tree))
    return jax.tree.map(lambda leaf: leaf[..., 0], result)


def _merge(leaf: Array, is_batched: bool, inner: int, axis_size: int) -> Array:
    """[axis, ..., lanes] or [..., lanes] to [..., axis * lanes]; one lane stays one lane."""
    if not is_batched and leaf.shape[-1] == 1:
        return leaf
    outer = jnp.moveaxis(leaf, 0, -2) if is_batched else leaf[..., None, :]
    spread = jnp.broadcast_to(outer, (*outer.shape[:-2], axis_size, inner))
    return spread.reshape(*spread.shape[:-2], axis_size * inner)
