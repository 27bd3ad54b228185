"""Fields that check themselves, and dotted paths into nested hardware modules."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import equinox as eqx
import jax
import numpy as np

from moejax._checks import as_count, as_float, check_range, lookup, nearest, replace
from moejax._status import is_traced
from moejax._typing import Array


M = TypeVar("M", bound=eqx.Module)

_LARGEST = float(np.finfo(np.float32).max)
_MOST = 1e9


def _within(low: float, high: float, *, open_low: bool) -> dict[str, Callable]:
    def check(owner: str, field: str, value: Any) -> None:
        check_range(owner, field, value, low, high, open_low=open_low)

    return {"check": check}


def _check_count(owner: str, field: str, value: Any) -> None:
    if is_traced(value):
        return
    # NumPy, because inside jit even jnp operations on concrete arrays are traced.
    array = np.asarray(value)
    if not (np.issubdtype(array.dtype, np.integer) and np.all((array >= 1) & (array <= _MOST))):
        raise ValueError(f"{owner}.{field} = {value}: allowed is a whole number in [1, {_MOST:g}]")


def one_of(*allowed: Any) -> dict[str, Callable]:
    """Metadata of a static field that takes one of a few values."""

    def check(owner: str, field: str, value: Any) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            names = [choice for choice in allowed if isinstance(choice, str)]
            hint = nearest(value, names) if isinstance(value, str) else ""
            known = ", ".join(map(repr, allowed))
            raise ValueError(f"{owner}.{field} = {value!r}: allowed is one of {known}{hint}")

    return {"check": check}


POSITIVE = _within(0.0, _LARGEST, open_low=True)
NON_NEGATIVE = _within(0.0, _LARGEST, open_low=False)
SHARE = _within(0.0, 1.0, open_low=False)
EFFICIENCY = _within(0.0, 1.0, open_low=True)
COUNT = {"check": _check_count}


def whole(value: Any) -> Array:
    """Converter for counts: int32. A fraction stays a float, for the check that knows its name."""
    try:
        return as_count(value)
    except ValueError:
        return as_float(value)


class AbstractHardware(eqx.Module):
    """Base of all hardware modules: checks concrete fields when built, and has `replace`."""

    def __check_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "check" in field.metadata:
                field.metadata["check"](type(self).__name__, field.name, getattr(self, field.name))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; a dict changes fields of the module that stands there.

        `system.replace(pim=dict(contention=1, timing=dict(faw=16e-9)), num_gpus=8)`.

        **Raises:** `ValueError` for an unknown field, naming the nearest, or a value out of range.
        """
        return replace(self, **changes)


def numeric_fields(module: eqx.Module) -> dict[str, Array]:
    """Every array inside `module` by dotted path, such as `"pim.timing.ccd_long"`.

    Floating arrays are rates, times and factors; int32 arrays are counts that only scale time.
    """
    leaves = jax.tree_util.tree_leaves_with_path(module)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): leaf for path, leaf in leaves}


def set_fields(module: M, changes: Mapping[str, Any]) -> M:
    """A copy of `module` with fields changed by dotted path, static fields included.

    **Arguments:**

    - `module`: usually a `System`.
    - `changes`: for example `{"pim.contention": 1.0, "pim.order": "matrix_outer"}`.

    **Raises:** `ValueError` for an unknown path, naming the nearest, or a value out of range.
    """
    known = _settable(module)
    nested: dict[str, Any] = {}
    for path, value in changes.items():
        if eqx.is_array(lookup("field", path, known)) and isinstance(value, str):
            raise ValueError(f"{path} = {value!r}: allowed is a number")
        *owners, field = path.split(".")
        node = nested
        for owner in owners:
            node = node.setdefault(owner, {})
        node[field] = value
    return replace(module, **nested)


def _settable(module: eqx.Module, prefix: str = "") -> dict[str, Any]:
    paths = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        path = prefix + field.name
        paths |= _settable(value, path + ".") if isinstance(value, eqx.Module) else {path: value}
    return paths
