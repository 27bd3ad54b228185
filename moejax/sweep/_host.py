"""Host functions of a sweep, called by the names of their parameters, once per distinct content."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from moejax._checks import nearest, replace
from moejax.sweep._axes import Axis
from moejax.sweep._values import split


SEED = "seed"
KEPT_BYTES = 1 << 30
"""Of prepared values that stay in memory."""


class Calls:
    """All calls of `fn`: which value of which axis each of them has.

    Fields: `axes` by name, `codes` by name (the position of a value, for each call; those of the
    seed among them), `seeds`, `owned` (the nested fields of an axis that are axes themselves).
    """

    def __init__(
        self, axes: Mapping[str, Axis], codes: Mapping[str, np.ndarray], seeds: np.ndarray
    ):
        self.axes, self.codes, self.seeds = dict(axes), dict(codes), seeds
        self.inner = {name: axis for name, axis in self.axes.items() if axis.inner}
        self.owned: dict[str, list[str]] = {}
        for name in self.axes:
            if "." in name:
                self.owned.setdefault(name.split(".")[0], []).append(name)

    def __len__(self) -> int:
        return len(self.codes[SEED])

    @property
    def known(self) -> list[str]:
        """Names that a host function may ask for."""
        return [*(name for name in self.axes if "." not in name), SEED]

    def depends_on(self, name: str) -> list[str]:
        """The columns of codes that decide a value."""
        return [] if name in self.inner else [name, *self.owned.get(name, ())]

    def raw(self, name: str, call: int) -> Any:
        """The value of an outer axis, nested fields as they were."""
        return _plain(self.axes[name].seen[self.codes[name][call]])

    def value(self, name: str, call: int) -> Any:
        """What the host sees: the value of a call, nested fields changed; all of an inner axis."""
        if name == SEED:
            return int(self.seeds[self.codes[SEED][call]])
        axis = self.axes[name]
        if axis.inner:
            return axis.labels if axis.is_number else list(axis.seen)
        value = self.raw(name, call)
        changes = {path: self.raw(path, call) for path in self.owned.get(name, ())}
        return with_fields(value, changes) if changes else value


def with_fields(value: Any, changes: Mapping[str, Any]) -> Any:
    """A module with nested fields changed, by dotted path from the name of its axis."""
    nested: dict[str, Any] = {}
    for path, change in changes.items():
        _, *owners, field = path.split(".")
        node = nested
        for owner in owners:
            node = node.setdefault(owner, {})
        node[field] = _plain(change)
    return replace(value, **nested)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def combine(columns: Iterable[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Equal rows get equal numbers: (number of each row, first row of each number)."""
    ids, first = np.zeros(count, np.int64), np.zeros(1, np.int64)
    for column in columns:
        ids = ids * (int(column.max()) + 1) + column
        _, first, ids = np.unique(ids, return_index=True, return_inverse=True)
    return ids.reshape(-1), first


class HostFunction:
    """A function of some axes, and of what earlier functions made, cached by content.

    Fields: `columns`, the columns of codes that decide its result; `ids`, equal for calls with the
    same result; `first`, one call of each.

    **Raises:** `ValueError` for a parameter that is no axis, naming the nearest.
    """

    def __init__(
        self, role: str, fn: Callable[..., Any], calls: Calls, earlier: "Mapping[str, HostFunction]"
    ):
        self._role, self._fn, self._calls, self._earlier = role, fn, calls, dict(earlier)
        self._found: OrderedDict[int, Any] = OrderedDict()
        self._bytes, self._names = 0, None
        self._parameters = check_parameters(role, fn, [*calls.known, *earlier])
        columns: dict[str, None] = {}
        for name in self._parameters:
            made = self._earlier.get(name)
            columns |= dict.fromkeys(made.columns if made else calls.depends_on(name))
        self.columns = list(columns)
        self.ids, self.first = combine((calls.codes[name] for name in columns), len(calls))

    def __call__(self, call: int) -> Any:
        """The result for one call. A `ValueError` is raised again for every call like it."""
        at = int(self.ids[call])
        if at not in self._found:
            try:
                arguments = {name: self._argument(name, call) for name in self._parameters}
                self._found[at] = self._checked(self._fn(**arguments))
            except ValueError as error:
                self._found[at] = error
            self._bytes += _size(self._found[at])
        found = self._found[at]
        self._found.move_to_end(at)
        while self._bytes > KEPT_BYTES and len(self._found) > 1:
            self._bytes -= _size(self._found.popitem(last=False)[1])
        if isinstance(found, ValueError):
            raise found
        return found

    def name_results(self) -> list[str]:
        """Names of what it makes, those of its first result; from now on others are refused.

        **Raises:** `ValueError` where that is no dict.
        """
        found = self.any_result()
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise ValueError(f"{self._role} gave a {type(found).__name__}: allowed is a dict")
        self._names = list(found)
        return self._names

    def _checked(self, found: Any) -> Any:
        if self._names is not None and (not isinstance(found, dict) or {*found} != {*self._names}):
            gave = list(found) if isinstance(found, dict) else f"a {type(found).__name__}"
            raise ValueError(f"{self._role} gave {gave}: the first result has {self._names}")
        return found

    def _argument(self, name: str, call: int) -> Any:
        made = self._earlier.get(name)
        return made(call)[name] if made else self._calls.value(name, call)

    def any_result(self) -> Any:
        """The result of the first call that has one; raises the last error where none has."""
        for call in self.first[:-1]:
            try:
                return self(int(call))
            except ValueError:
                continue
        return self(int(self.first[-1]))


class Prepared:
    """What `prepare` adds to the config: one function after the other, later ones see earlier ones.

    `steps`: the functions. `made`: by name of a result, the one that makes it.
    """

    def __init__(self, functions: tuple[Callable[..., Any], ...], calls: Calls):
        self.steps: list[HostFunction] = []
        self.made: dict[str, HostFunction] = {}
        for fn in functions:
            step = HostFunction("prepare", fn, calls, self.made)
            found = step.name_results()
            for name in found:
                if name in calls.known or name in self.made:
                    raise ValueError(f"prepare gave {name!r}, which is there already")
            self.made |= dict.fromkeys(found, step)
            self.steps.append(step)


def check_parameters(role: str, fn: Callable[..., Any], known: list[str]) -> list[str]:
    """Names of the parameters of a host function.

    **Raises:** `ValueError` for one that is not known, and for a function that takes anything, so
    that nobody knows what it needs.
    """
    if not callable(fn):
        raise ValueError(f"{role} = {fn!r:.60}: allowed is a function")
    parameters = inspect.signature(fn).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{role}: parameter {parameter}: allowed are names of axes")
        if parameter.name not in known:
            hint = nearest(parameter.name, known)
            raise ValueError(
                f"{role}: no axis {parameter.name!r}{hint} (known: {', '.join(known)})"
            )
    return [parameter.name for parameter in parameters]


def _size(found: Any) -> int:
    return 0 if isinstance(found, ValueError) else 64 + split(found).structure.num_bytes
