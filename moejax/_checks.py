"""Errors that name the field, the value and what is allowed; and `replace` for nested modules."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array


M = TypeVar("M", bound=eqx.Module)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or an empty string where nothing is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def lookup(kind: str, name: str, registry: Mapping[str, Any]) -> Any:
    """`registry[name]`, or a `ValueError` that suggests the nearest name and lists all."""
    if name in registry:
        return registry[name]
    known = ", ".join(registry)
    raise ValueError(f"unknown {kind} {name!r}{nearest(str(name), registry)} (known: {known})")


def as_float(value: Any) -> Array:
    """Converter for rates, times and sizes: a floating array, so that it can be swept.

    Arrays of at least 32 bits keep their precision; half precision holds no counts above 2048.
    """
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
        return value if value.dtype.itemsize >= 4 else value.astype(jnp.float32)
    return jnp.asarray(value, dtype=jnp.result_type(float))


def as_count(value: Any) -> Array:
    """Converter for whole numbers that only scale time: an int32 array.

    Raises `ValueError` for a concrete value that is not a whole number below 2^31.
    """
    if not is_traced(value):
        array = np.asarray(value)
        if not np.all((array == np.round(array)) & (np.abs(array) < 2**31)):
            raise ValueError(f"{value!r} is not a whole number below 2^31")
    return jnp.asarray(value).astype(jnp.int32)


def check_range(
    owner: str, field: str, value: Any, low: float, high: float, *, open_low: bool
) -> None:
    """Raises `ValueError` where a concrete value is NaN or outside the range. Tracers pass."""
    if is_traced(value):
        return
    array = np.asarray(value)
    inside = (array > low if open_low else array >= low) & (array <= high)
    if not np.all(inside):
        bracket = "(" if open_low else "["
        raise ValueError(f"{owner}.{field} = {value}: allowed is {bracket}{low:g}, {high:g}]")


def check_positive(owner: str, field: str, value: Any) -> None:
    """A finite number above zero."""
    check_range(owner, field, value, 0.0, float(np.finfo(np.float32).max), open_low=True)


def check_non_negative(owner: str, field: str, value: Any) -> None:
    """A finite number, zero allowed."""
    check_range(owner, field, value, 0.0, float(np.finfo(np.float32).max), open_low=False)


def replace(module: M, **changes: Any) -> M:
    """A copy of `module` with some fields changed.

    **Arguments:**

    - `changes`: new values by field name. A dict changes the fields of the module that stands
        there, to any depth: `replace(system, pim=dict(contention=1))`.

    **Raises:** `ValueError` naming the nearest field for an unknown one.
    """
    names = [field.name for field in dataclasses.fields(module)]
    resolved = {}
    for name, value in changes.items():
        if name not in names:
            owner = type(module).__name__
            raise ValueError(
                f"{owner} has no field {name!r}{nearest(name, names)} (fields: {', '.join(names)})"
            )
        old = getattr(module, name)
        nested = isinstance(value, Mapping) and isinstance(old, eqx.Module)
        resolved[name] = replace(old, **value) if nested else value
    return dataclasses.replace(module, **resolved)
