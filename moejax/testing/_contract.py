"""Promises, one by one: what is kept, what is broken and how, and one message about all of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class ContractError(AssertionError):
    """Some promise of an extension is broken.

    Fields: `broken`, a dict of promise to what is wrong; `kept`, the promises that hold.
    """

    def __init__(self, what: str, broken: dict[str, str], kept: tuple[str, ...]):
        self.broken, self.kept = broken, kept
        number = "1 promise" if len(broken) == 1 else f"{len(broken)} promises"
        lines = [f"{what} breaks {number}:"]
        lines += [f"  {promise}: {why}" for promise, why in broken.items()]
        super().__init__("\n".join(lines + ["kept: " + (", ".join(kept) or "none")]))


class Kept(NamedTuple):
    """What a check returns: `what` was looked at, and the `promises` it keeps."""

    what: str
    promises: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} keeps {', '.join(self.promises)}"


class Broken(Exception):
    """Raised inside a promise: what is wrong, in one line."""


# What a person did who sees one of these, by the name of the error.
_HINTS = {
    "TracerBoolConversionError": "an `if`, `and` or `while` on a traced value; use jnp.where",
    "TracerArrayConversionError": "NumPy on a traced value; use jax.numpy",
    "TracerIntegerConversionError": "a traced value as a Python index or size",
    "ConcretizationTypeError": "float(), int() or a size taken from a traced value",
    "NonConcreteBooleanIndexError": "indexing with a traced mask; use jnp.where",
    "UnexpectedTracerError": "a traced value kept in a global or an attribute",
}


class Contract:
    """Collects promises about one object; see `promise` and `settle`."""

    def __init__(self, what: str):
        self._what = what
        self._kept: list[str] = []
        self._broken: dict[str, str] = {}

    @contextmanager
    def promise(self, name: str, *, first: bool = False) -> Iterator[None]:
        """Whatever is raised inside breaks the promise; where it is the `first`, which the others
        rest on, that is all that is said."""
        try:
            yield
        except Exception as error:
            self._broken[name] = _why(error)
            if first:
                self.settle()
        else:
            self._kept.append(name)

    def settle(self) -> Kept:
        """What is kept. **Raises:** `ContractError` where something is broken."""
        if self._broken:
            raise ContractError(self._what, self._broken, tuple(self._kept))
        return Kept(self._what, tuple(self._kept))


def _why(error: Exception) -> str:
    if isinstance(error, Broken):
        return str(error)
    kind = type(error).__name__
    said = (str(error).strip().splitlines() or [""])[0]
    return f"raises {kind} ({_HINTS[kind]})" if kind in _HINTS else f"raises {kind}: {said:.200}"


def require(condition: Any, why: str) -> None:
    """Raises `Broken` unless the condition holds."""
    if not condition:
        raise Broken(why)


def require_same(found: Any, wanted: Any, why: str, *, rtol: float = 0.0) -> None:
    """Raises `Broken` naming the first leaf of a tree that differs: by more than `rtol` of the
    largest number in it, for numbers; NaN equals NaN."""
    leaves, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, wanted))
    if [path for path, _ in leaves] != [path for path, _ in expected]:
        raise Broken(f"{why}: the results have different parts")
    for (path, a), (_, b) in zip(leaves, expected):
        a, b = np.asarray(a), np.asarray(b)
        name = named(path) or "the result"
        if a.shape != b.shape:
            raise Broken(f"{why}: {name} has shape {a.shape}, not {b.shape}")
        if not _close(a, b, rtol):
            raise Broken(f"{why}: {name} is {_short(a)}, not {_short(b)}")


def named(path: tuple[Any, ...]) -> str:
    """`total_time` or `gpu.hbm_bandwidth`, for a path of whatever kinds of keys."""
    parts = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))) for key in path)
    return ".".join(map(str, parts))


def _close(a: np.ndarray, b: np.ndarray, rtol: float) -> bool:
    if a.dtype.kind not in "fc":
        return bool(np.array_equal(a, b))
    finite = np.abs(b[np.isfinite(b)])
    return bool(np.allclose(a, b, rtol=rtol, atol=rtol * finite.max(initial=0), equal_nan=True))


def _short(value: np.ndarray) -> str:
    if value.dtype.kind == "U":
        return str(value)
    text = np.array2string(value, precision=4, threshold=6, edgeitems=2).replace("\n", "")
    return f"{text:.80}"


def require_finite(tree: Any, why: str) -> None:
    """Raises `Broken` naming the first leaf that holds NaN or infinity."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = np.asarray(leaf)
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise Broken(" ".join(filter(None, [why, named(path), "is", _short(leaf)])))


def require_error(call: Callable[[], Any], why: str) -> None:
    """Raises `Broken` unless the call raises `ValueError`."""
    try:
        call()
    except ValueError:
        return
    raise Broken(why)


def stack(trees: list[Any]) -> Any:
    """Trees of one structure as one, with a leading axis. On the host, where it compiles nothing
    (keys of random numbers have to stay where they are)."""

    def join(*leaves):
        is_key = jnp.issubdtype(jnp.result_type(leaves[0]), jax.dtypes.prng_key)
        return jnp.stack(leaves) if is_key else jnp.asarray(np.stack(leaves))

    return jax.tree.map(join, *trees)


def row(tree: Any, index: int) -> Any:
    """One row of a batch, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def shapes(tree: Any) -> Any:
    """Shape and dtype of every leaf, as text to compare."""
    return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)} {list(jnp.shape(leaf))}", tree)
