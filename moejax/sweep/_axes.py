"""Axes: a name, the values that a sweep takes it through, and how `fn` gets them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from moejax._checks import nearest
from moejax.sweep._values import digest, is_number, split


def logspace(low: float, high: float, count: int) -> np.ndarray:
    """`count` numbers from `low` to `high`, both included, each the same factor from the last.

    **Raises:** `ValueError` unless 0 < low, 0 < high and count is at least 1.
    """
    if not (0 < low < np.inf and 0 < high < np.inf and count >= 1):
        raise ValueError(
            f"logspace({low}, {high}, {count}): allowed are positive numbers, count 1+"
        )
    return np.geomspace(low, high, count)


class Ends(NamedTuple):
    """`low:high` of a command line: the ends of what is sampled, and not two values."""

    low: Any
    high: Any

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


class Axis:
    """One quantity of a sweep and its values.

    **Arguments:**

    - `name`: its column and its key in the `config` of `fn`. A dotted name changes a field of
        another axis' module: `Axis("system.pim.contention", [0.0, 1.0])`.
    - `values`: numbers or truth values, text, pytrees (modules, traces), or a dict of label to
        value, whose labels stand in the column.
    - `static`: `fn` gets the value itself, a constant of the program, and every value is compiled.
        Otherwise its numbers are traced, and all values of one structure share a compilation.
    - `inner`: `fn` gets all values at once (an array, a stacked pytree, a tuple of texts) and
        returns arrays with a dimension for each inner axis: one draw then serves them all. With
        `static`, numbers are a NumPy array and everything else is a tuple.
    - `resolve`: from a value to what `fn` gets, such as `hardware.get` for names of presets.

    Text that is neither static, inner nor resolved is for the host alone: `prepare` and `about` see
    it, `fn` does not.

    **Raises:** `ValueError` for no values, kinds that do not mix, or NaN; in all but `zipped` for
    equal ones.
    """

    def __init__(
        self,
        name: str,
        values: Iterable[Any] | Mapping[str, Any],
        static: bool = False,
        *,
        inner: bool = False,
        resolve: Callable[[Any], Any] | None = None,
    ):
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"Axis: name {name!r}: allowed are names like 'batch', 'system.pim.x'")
        if inner and "." in name:
            raise ValueError(f"axis {name!r}: a nested field can not be inner")
        self.name, self.static, self.inner, self.resolve = name, static, inner, resolve
        self.named = dict(values) if isinstance(values, Mapping) else None
        given = list(self.named) if self.named is not None else _as_list(name, values)
        if not len(given):
            raise ValueError(f"axis {name!r} has no values")
        seen = given if self.named is None else list(self.named.values())
        self.seen: Any = seen if resolve is None else [resolve(value) for value in seen]
        self.labels = given if isinstance(given, np.ndarray) else _labels(name, given)
        self.is_number = resolve is None and self.named is None and is_number(given[0])
        if self.is_number:
            self.seen = self.labels
            self._check_fits()

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, {len(self)} values)"

    @property
    def is_text(self) -> bool:
        """Whether what `fn` would get is text."""
        return any(isinstance(value, str) for value in self.seen[:1])

    @property
    def kind(self) -> str:
        """`"static"`, `"inner"`, `"host"` (text that `fn` does not see) or `"traced"`."""
        if self.inner or self.static:
            return "inner" if self.inner else "static"
        return "host" if self.is_text else "traced"

    def with_values(self, values: Any) -> "Axis":
        """The same axis through other values; labels pick from those it knows."""
        if isinstance(values, Ends):
            raise ValueError(
                f"axis {self.name!r} = {values} is not sampled: allowed are values with commas "
                "between them, or low:high:count"
            )
        values = [values] if isinstance(values, str) or is_number(values) else values
        if self.named is not None and not isinstance(values, Mapping):
            for value in values:
                if value not in self.named:
                    known = ", ".join(map(str, self.named))
                    hint = nearest(str(value), map(str, self.named))
                    raise ValueError(f"axis {self.name!r} has no {value!r}{hint} (known: {known})")
            values = {value: self.named[value] for value in values}
        if self.is_number and not all(map(is_number, values)):
            raise ValueError(f"axis {self.name!r}: {values!r:.60}: allowed are numbers")
        if self.is_number and self.labels.dtype.kind == "f":
            values = np.asarray(values, np.float64)
        options: dict[str, Any] = dict(static=self.static, inner=self.inner, resolve=self.resolve)
        return Axis(self.name, values, **options)

    def code_of(self, label: Any) -> int | None:
        """Position of a value by its label."""
        found = np.flatnonzero(self.labels == label)
        return int(found[0]) if len(found) else None

    def describe(self) -> dict[str, Any]:
        """What a config says of it: values where they are few, and their content."""
        about: dict[str, Any] = {"name": self.name, "kind": self.kind}
        labels = self.labels.tolist()
        few = len(labels) <= 1000
        about |= (
            {"values": labels} if few else {"count": len(labels), "ends": [labels[0], labels[-1]]}
        )
        if not few or not self.is_number:
            about["content"] = self.content()
        return about

    def content(self) -> str:
        """SHA-256 of all values."""
        return digest(self.labels if self.is_number else [list(self.labels), list(self.seen)])

    def _check_fits(self) -> None:
        """Before a large whole number is cut without a word, or NaN is a row's configuration."""
        if np.isnan(self.labels).any():
            raise ValueError(f"axis {self.name!r} has nan: allowed are numbers")
        try:
            split(self.labels)
        except ValueError:
            worst = self.labels[np.argmax(np.abs(self.labels))]
            if not self.static:
                raise ValueError(
                    f"axis {self.name!r} = {worst}: allowed are whole numbers below 2^31; write it "
                    "as a float"
                ) from None

    def check_different(self) -> None:
        """Raises `ValueError` where two values are equal, which only a zip allows."""
        values, counts = np.unique(self.labels, return_counts=True)
        if (counts > 1).any():
            twice = values[counts > 1][0]
            raise ValueError(f"axis {self.name!r} has {twice} more than once")


def _as_list(name: str, values: Any) -> list[Any] | np.ndarray:
    """A list, or an array of numbers in the widest type of its kind."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"axis {name!r}: values {values!r:.60}: allowed is a list, array or dict")
    if not isinstance(values, np.ndarray):
        return list(values)
    if values.ndim != 1:
        raise ValueError(f"axis {name!r}: values of shape {values.shape}: allowed is one dimension")
    wide = {"i": np.int64, "u": np.int64, "f": np.float64, "b": bool}.get(values.dtype.kind)
    return values.tolist() if wide is None else values.astype(wide)


def _labels(name: str, values: list[Any]) -> np.ndarray:
    """What stands in the column: numbers, text, or the names (else the positions) of pytrees."""
    if all(isinstance(value, bool | np.bool_) for value in values):
        return np.array(values, bool)
    if any(isinstance(value, bool | np.bool_) for value in values):
        raise ValueError(f"axis {name!r} mixes truth values with others")
    if all(map(is_number, values)):
        plain = [np.asarray(value)[()] for value in values]
        whole = all(np.issubdtype(np.asarray(value).dtype, np.integer) for value in plain)
        return np.array(plain, np.int64 if whole else np.float64)
    if all(isinstance(value, str) for value in values):
        return np.array(values)
    if any(isinstance(value, str) or is_number(value) for value in values):
        raise ValueError(f"axis {name!r} mixes numbers, text or pytrees")
    names = [getattr(value, "name", None) for value in values]
    if all(isinstance(label, str) for label in names) and len(set(names)) == len(names):
        return np.array(names)
    contents = {digest(value) for value in values}
    if len(contents) < len(values):
        raise ValueError(f"axis {name!r} has two equal values")
    return np.arange(len(values))
