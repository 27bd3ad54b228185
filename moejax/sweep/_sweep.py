"""What a sweep is: axes, the function of a configuration, and what the host adds to it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax._checks import nearest
from moejax.sweep._axes import Axis, Ends
from moejax.sweep._code import code, functions_in
from moejax.sweep._design import Product, axes_of, bound, changed, product, table_of
from moejax.sweep._host import SEED, Calls, HostFunction, Prepared, check_parameters, with_fields


class Sweep:
    """A function and the configurations to call it with.

    **Arguments:**

    - `axes`: a list of `Axis` and of what `zipped`, `conditional`, `samples`, `product` give; all
        combinations, the first slowest.
    - `fn`: `fn(config, key)` with `config` a dict from the name of an axis to its value and `key`
        that of the seed, the same for all configurations: pairs share their draws. Pure, so that
        `jax.jit` and `jax.vmap` take it. It returns a dict of numbers, or any pytree.
    - `seeds`: how many (0, 1, ...), or which.
    - `prepare`: work for the host, such as a search for a placement: a function, or several, whose
        parameters are names of axes, `seed`, or results of an earlier one. What it returns, a dict,
        joins `config`. Called once for every distinct content of its arguments.
    - `about`: likewise, but its dict becomes columns that `fn` never sees: sources, names. Values
        may be arrays over the inner axes.
    - `columns`: from the results of `fn` (NumPy, with a leading axis of calls) to a dict of
        columns, where these are not the leaves by name.
    - `where`: parameters likewise; whether a combination is part of the sweep.
    - `bucket`: names of axes by which calls are sorted before they are cut into tiles, so that slow
        ones do not keep fast ones waiting.
    - `width`: calls in a tile, which is what one `jax.vmap` sees. By default as many as share a
        program and large values, at most 64. Rows depend on it in the last bit, so it is part of
        the config.

    **Raises:** `ValueError` for what makes no sense, naming the nearest valid name.
    """

    def __init__(
        self,
        axes: Sequence[Any] | Any,
        fn: Callable[[dict[str, Any], Any], Any],
        seeds: int | Iterable[int] = 1,
        prepare: Callable[..., dict[str, Any]]
        | Sequence[Callable[..., dict[str, Any]]]
        | None = None,
        *,
        about: Callable[..., dict[str, Any]] | None = None,
        columns: Callable[[Any], dict[str, Any]] | None = None,
        where: Callable[..., Any] | None = None,
        bucket: str | Sequence[str] = (),
        width: int | None = None,
    ):
        self.design: Product = product(*axes) if isinstance(axes, list | tuple) else product(axes)
        self.fn, self.columns, self.about, self.where = fn, columns, about, where
        self.prepare = _steps(prepare)
        self.seeds = _seeds(seeds)
        self.bucket = (bucket,) if isinstance(bucket, str) else tuple(bucket)
        self.width = width
        self.options: dict[str, Any] = {}
        self._bound = bound(self.design, {})
        self._check()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, the inner ones among them."""
        return axes_of(self.design)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all axes, and `seed`: outer ones first, as rows are ordered."""
        outer = [axis.name for axis in self.axes if not axis.inner]
        return (*outer, SEED, *(axis.name for axis in self.axes if axis.inner))

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Lengths of the inner axes."""
        return tuple(len(axis) for axis in self.axes if axis.inner)

    @property
    def inner_size(self) -> int:
        """Rows that one call gives."""
        return int(np.prod(self.inner_shape, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows of the whole sweep."""
        return len(self.calls) * self.inner_size

    @functools.cached_property
    def calls(self) -> Calls:
        """Every call of `fn`, as codes."""
        outer = Product(tuple(part for part in self._bound.parts if not _is_inner(part)))
        table, count = table_of(outer, {}, 1)
        seeds = len(self.seeds)
        codes = {name: np.repeat(column, seeds) for name, column in table.items()}
        codes[SEED] = np.tile(np.arange(seeds, dtype=np.int32), count)
        calls = Calls({axis.name: axis for axis in self.axes}, codes, self.seeds)
        if self.where is None:
            return calls
        keep = HostFunction("where", self.where, calls, {})
        kept = np.array([bool(keep(int(first))) for first in keep.first])[keep.ids]
        if not kept.any():
            raise ValueError("where leaves no configuration")
        return Calls(calls.axes, {name: of[kept] for name, of in codes.items()}, self.seeds)

    @property
    def host_names(self) -> set[str]:
        """Names that host functions ask for."""
        functions = (*self.prepare, self.about, self.where)
        asked = [inspect.signature(fn).parameters for fn in functions if fn is not None]
        return set().union(*asked)

    @functools.cached_property
    def functions(self) -> dict[str, str]:
        """SHA-256 of every function by role: as they are before the first of them runs."""
        found = {"fn": self.fn, "columns": self.columns, "about": self.about, "where": self.where}
        found |= {f"prepare.{at}": step for at, step in enumerate(self.prepare)}
        made = {name: code(fn) for name, fn in found.items() if fn is not None}
        for axis in self.axes:
            if not axis.is_number and (content := functions_in(list(axis.seen))):
                made[f"axis {axis.name}"] = content
        return made

    def prepared(self) -> Prepared:
        """A fresh cache of what `prepare` gives."""
        return Prepared(self.prepare, self.calls)

    def set(self, changes: Mapping[str, Any]) -> "Sweep":
        """The same sweep through other values.

        **Arguments:** `changes`: values by name of an axis, of `seeds`, `width` or `bucket`. An
        axis of labels takes labels, a sampled one its two ends.

        **Raises:** `ValueError` for an unknown name, naming the nearest.
        """
        known = [axis.name for axis in self.axes]
        own = ("seeds", "width", "bucket")
        for name in changes:
            if name not in (*known, *own):
                hint = nearest(name, (*known, *own))
                raise ValueError(f"no axis {name!r}{hint} (known: {', '.join((*known, *own))})")
            if name in own and isinstance(changes[name], Ends):
                raise ValueError(f"{name} = {changes[name]}: low:high is for what is sampled")
        options: dict[str, Any] = dict(
            prepare=self.prepare, about=self.about, columns=self.columns, where=self.where
        )
        options |= dict(seeds=self.seeds, bucket=self.bucket, width=self.width)
        options |= {name: changes[name] for name in own if name in changes}
        made = Sweep(list(changed(self.design, changes).parts), self.fn, **options)
        made.options = dict(self.options)
        return made

    def _check(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names:
            raise ValueError("Sweep: no axes")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Sweep: two axes are called {name!r}")
            if name in (SEED, "row", "status"):
                raise ValueError(f"Sweep: {name!r} is a column of every sweep, so no axis")
        self._check_nested()
        try:
            inspect.signature(self.fn).bind({}, None)
        except TypeError:
            raise ValueError(f"Sweep: fn = {self.fn!r:.60}: allowed is fn(config, key)") from None
        if self.width is not None and not (isinstance(self.width, int) and self.width >= 1):
            raise ValueError(f"Sweep: width = {self.width!r}: allowed is a whole number from 1")
        known = [*(name for name in names if "." not in name), SEED]
        if self.where is not None:
            check_parameters("where", self.where, known)
        # What a later one, and `about`, may know besides is seen when the earlier ones have run.
        if self.prepare:
            check_parameters("prepare", self.prepare[0], known)
        elif self.about is not None:
            check_parameters("about", self.about, known)
        outer = [axis.name for axis in self.axes if not axis.inner]
        for name in self.bucket:
            if name not in (*outer, SEED):
                raise ValueError(f"Sweep: bucket: no outer axis {name!r}{nearest(name, outer)}")

    def _check_nested(self) -> None:
        """Fields are there and their values in range: all at once, on the host."""
        by_name = {axis.name: axis for axis in self.axes}
        for axis in self.axes:
            owner = axis.name.split(".")[0]
            if owner == axis.name:
                continue
            if owner not in by_name or by_name[owner].inner:
                hint = nearest(owner, by_name)
                raise ValueError(f"axis {axis.name!r}: no outer axis {owner!r}{hint}")
            for value in by_name[owner].seen:
                if axis.is_number and not axis.static:
                    with_fields(value, {axis.name: axis.labels})
                else:
                    for change in axis.seen:
                        with_fields(value, {axis.name: change})


def _steps(prepare: Any) -> tuple[Callable[..., dict[str, Any]], ...]:
    """None, one or several functions as several."""
    several = prepare if isinstance(prepare, list | tuple) else (prepare,)
    return tuple(step for step in several if step is not None)


def _seeds(seeds: Any) -> np.ndarray:
    """How many, or which, as which."""
    if isinstance(seeds, int | np.integer):
        found: list[Any] = list(range(int(seeds)))
    else:
        found = list(seeds) if np.iterable(seeds) else []
    whole = all(isinstance(seed, int | np.integer) for seed in found)
    if not (found and whole) or len({*found}) < len(found) or min(found) < 0 or max(found) >= 2**31:
        raise ValueError(
            f"Sweep: seeds = {seeds!r:.60}: allowed is how many, or different whole numbers from 0 "
            "below 2^31"
        )
    return np.array(found, np.int64)


def _is_inner(part: Any) -> bool:
    return isinstance(part, Axis) and part.inner
