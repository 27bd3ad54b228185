"""Metrics: any number from arrays, be it fidelity of a routing or a figure of a report."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.testing._contract import (
    Contract,
    Kept,
    require,
    require_finite,
    require_same,
    row,
    stack,
)


ROUNDING = 1e-5
VARIANTS = 3
SCALE = 4.0


def check_metric(
    metric: Callable[..., Any],
    *arguments: Any,
    power: Mapping[int, float] | None = None,
) -> Kept:
    """Tries a metric on examples of its arguments.

    The promises, in this order:

    - `shape`: an array, or a tree of them, whose shape does not depend on the values.
    - `jit`, `vmap`: the same numbers compiled, and for a batch of other examples of one shape.
    - `grad`: finite in every floating argument (where the metric has one and gives floats).
    - `mask`: where the metric takes an argument `mask`, what it leaves out may be anything, and
        where nothing counts the result is NaN, not a number that looks like one.
    - `units`: where `power` is given.
    - `determinism`: the same input twice gives the same bits.

    **Arguments:**

    - `metric`: a function. Bind static options first: `functools.partial(metric, top_k=4)`.
    - `arguments`: arrays or trees of them. The first axis of whole numbers and truth values is
        rolled, and floats are scaled, to make other examples.
    - `power`: by position of an argument, how the metric follows its unit: `{0: 1, 1: -1}` for
        bytes over bandwidth, `{0: 0}` where only relative sizes matter.

    **Returns:** `Kept`, which prints as a sentence.

    **Raises:** `ContractError` naming every promise that is broken; `ValueError` for a position in
    `power` that is no argument.

        testing.check_metric(metrics.top_k_overlap, original_ids, adjusted_ids)
        testing.check_metric(lambda report: report.tbt * report.pim_energy, report)
    """
    for position in power or {}:
        if not 0 <= position < len(arguments):
            raise ValueError(f"power: no argument {position}; there are {len(arguments)}")
    name = getattr(metric, "__name__", type(metric).__name__)
    contract = Contract(f"metric {name!r}")
    arguments = jax.tree.map(jnp.asarray, arguments)
    examples = [_variant(arguments, i) for i in range(VARIANTS)]
    with contract.promise("shape", first=True):
        alone = [metric(*example) for example in examples]
        _check_shape(alone)
    with contract.promise("jit"):
        compiled = jax.jit(metric)
        for i, example in enumerate(examples):
            require_same(compiled(*example), alone[i], f"compiled, example {i}", rtol=ROUNDING)
    with contract.promise("vmap"):
        batch = jax.jit(jax.vmap(metric))(*stack(examples))
        for i, wanted in enumerate(alone):
            require_same(row(batch, i), wanted, f"row {i} of a batch", rtol=ROUNDING)
    if any(map(_is_float, jax.tree.leaves(arguments))) and any(
        map(_is_float, jax.tree.leaves(alone[0]))
    ):
        with contract.promise("grad"):
            _check_grad(metric, arguments)
    if "mask" in _parameters(metric):
        with contract.promise("mask"):
            _check_mask(metric, arguments)
    if power:
        with contract.promise("units"):
            _check_units(metric, arguments, alone[0], power)
    with contract.promise("determinism"):
        for example, wanted in zip(examples, alone):
            require_same(metric(*example), wanted, "called again with the same input")
    return contract.settle()


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)


def _parameters(metric: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(metric).parameters
    except (TypeError, ValueError):
        return {}


def _variant(arguments: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    def change(leaf):
        if _is_float(leaf):
            return leaf * (1 + i / 4)
        # Keys of random numbers and scalars stay.
        plain = leaf.ndim and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jnp.roll(leaf, i, axis=0) if plain else leaf

    return jax.tree.map(change, arguments)


def _check_shape(alone: list[Any]) -> None:
    for result in alone:
        leaves = jax.tree.leaves(result)
        require(leaves, "returns nothing")
        for leaf in leaves:
            is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)
            require(is_array, f"returns {type(leaf).__name__}, not arrays")
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(result)] for result in alone]
    require(
        all(shape == shapes[0] for shape in shapes),
        f"the shape of the result depends on the values: {shapes[0]}, then {shapes[-1]}",
    )


def _check_grad(metric: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    leaves, structure = jax.tree.flatten(arguments)
    at = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def total(floats):
        given = list(leaves)
        for i, value in zip(at, floats):
            given[i] = value
        results = jax.tree.leaves(metric(*jax.tree.unflatten(structure, given)))
        return sum(jnp.sum(x) for x in results if _is_float(x))

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
    gradients = jax.jit(jax.grad(total))([leaves[i] for i in at])
    for i, gradient in zip(at, gradients):
        require_finite(gradient, f"the gradient in argument {jax.tree_util.keystr(paths[i])}")


def _check_mask(metric: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    positions = len(jax.tree.leaves(arguments[0])[0]) if arguments else 0
    shape = _mask_shape(metric, arguments)
    half = jnp.broadcast_to(
        (jnp.arange(positions) % 2 == 0).reshape(-1, *[1] * (len(shape) - 1)), shape
    )

    def spoil(leaf):
        if leaf.ndim < len(shape) or leaf.shape[: len(shape)] != shape:
            return leaf
        counts = half.reshape(shape + (1,) * (leaf.ndim - len(shape)))
        junk = jnp.nan if _is_float(leaf) else jnp.zeros((), leaf.dtype)
        return jnp.where(counts, leaf, junk)

    clean, junk = metric(*arguments, mask=half), metric(*jax.tree.map(spoil, arguments), mask=half)
    require_same(junk, clean, "other values where mask is False", rtol=ROUNDING)
    for leaf in jax.tree.leaves(metric(*arguments, mask=jnp.zeros(shape, bool))):
        if _is_float(leaf):
            require(bool(jnp.all(jnp.isnan(leaf))), f"where nothing counts it is {leaf}, not NaN")


def _mask_shape(metric: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """The longest shape of leading axes that the metric takes a mask of."""
    leading = jax.tree.leaves(arguments)[0].shape
    for axes in range(len(leading), 0, -1):
        try:
            metric(*arguments, mask=jnp.ones(leading[:axes], bool))
        except (TypeError, ValueError):
            continue
        return leading[:axes]
    raise ValueError(f"takes no mask of leading axes of {leading}")


def _check_units(
    metric: Callable[..., Any], arguments: tuple[Any, ...], once: Any, power: Mapping[int, float]
) -> None:
    for position, exponent in power.items():
        given = list(arguments)
        given[position] = _floats_times(given[position], SCALE)
        why = f"argument {position} times {SCALE:g} (its power: {exponent:g})"
        wanted = _floats_times(once, SCALE**exponent)
        require_same(metric(*given), wanted, why, rtol=ROUNDING)


def _floats_times(tree: Any, factor: float) -> Any:
    return jax.tree.map(lambda x: x * factor if _is_float(x) else x, tree)
