"""Several systems as one batched system, for `jax.vmap`."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.hardware._system import System


def stack(systems: Sequence[System]) -> System:
    """One `System` whose arrays have a leading axis [systems]: one compilation serves them all.

    **Arguments:** `systems`: equal in everything static (GPUs, kinds of PIM, orders) but names.

    **Raises:** `ValueError` for none, or for systems that differ in more than numbers.
    """
    if not systems:
        raise ValueError("stack: allowed is at least one system")
    unnamed = [_unnamed(system) for system in systems]
    structures = [jax.tree.structure(system) for system in unnamed]
    for system, structure in zip(systems, structures, strict=True):
        if structure != structures[0]:
            raise ValueError(
                f"stack: {system.name} differs from {systems[0].name} in more than numbers "
                "(number of GPUs, kind of PIM, order, layout, ...)"
            )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *unnamed)


def _unnamed(system: System) -> System:
    return dataclasses.replace(system, gpu=system.gpu.replace(name="stacked"), name="stacked")
