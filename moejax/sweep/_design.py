"""How axes combine: products, zips, conditions and samples, as one table of value codes.

A table holds, for each axis, the position of the value that every configuration takes: arrays of
small integers, however many configurations there are.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from moejax._checks import nearest
from moejax.sweep._axes import Axis
from moejax.sweep._samples import Samples


Table: TypeAlias = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Product:
    """Every combination, the first part slowest."""

    parts: tuple[Any, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for part in self.parts for axis in axes_of(part))

    def describe(self) -> Any:
        return {"product": [part.describe() for part in self.parts]}


@dataclasses.dataclass(frozen=True)
class Zipped:
    """Values that go together, one configuration for each position."""

    axes: tuple[Axis, ...]
    codes: tuple[np.ndarray, ...]

    def describe(self) -> Any:
        return {"zipped": [axis.describe() for axis in self.axes]}


@dataclasses.dataclass(frozen=True)
class Conditional:
    """An axis that varies only where earlier ones have some values."""

    axis: Axis
    varied: int
    otherwise: int
    when: dict[str, tuple[Any, ...]]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    def describe(self) -> Any:
        when = {name: list(values) for name, values in self.when.items()}
        label = self.axis.labels[self.otherwise].item()
        return {"conditional": self.axis.describe(), "otherwise": label, "when": when}


def product(*parts: Any) -> Product:
    """Every combination of axes, or of what `zipped`, `conditional`, `samples` and `product` give.

    A list of axes given to `Sweep` is one already.
    """
    for part in parts:
        if not isinstance(part, Axis | Product | Zipped | Conditional | Samples):
            raise ValueError(f"{part!r:.60} is a {type(part).__name__}: allowed are axes")
        if isinstance(part, Axis):
            part.check_different()
    flat = (part.parts if isinstance(part, Product) else (part,) for part in parts)
    return Product(tuple(itertools.chain.from_iterable(flat)))


def zipped(*axes: Axis) -> Zipped:
    """Axes that advance together: the first values, the second values, and so on.

    **Raises:** `ValueError` for fewer than two axes, inner ones, unequal lengths, or a combination
    that is there twice.
    """
    if len(axes) < 2 or not all(isinstance(axis, Axis) for axis in axes):
        raise ValueError("zipped: allowed are two axes or more")
    _refuse_inner("zipped", axes)
    lengths = {axis.name: len(axis) for axis in axes}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"zipped: axes of unequal length {lengths}")
    codes = tuple(_first_of(axis) for axis in axes)
    if len(set(zip(*(of.tolist() for of in codes)))) < len(axes[0]):
        raise ValueError(f"zipped: two configurations of {', '.join(lengths)} are equal")
    return Zipped(axes, codes)


def conditional(axis: Axis, otherwise: Any, **when: Any) -> Conditional:
    """An axis that varies only in some configurations.

    **Arguments:**

    - `otherwise`: its value everywhere else.
    - `when`: values of earlier axes, one or a tuple of them each, where it varies.

    **Raises:** `ValueError` without a condition, or for an inner axis.
    """
    if not isinstance(axis, Axis) or not when:
        raise ValueError("conditional: allowed is an axis and at least one condition")
    _refuse_inner("conditional", (axis,))
    wanted = {
        name: tuple(values) if isinstance(values, tuple | list) else (values,)
        for name, values in when.items()
    }
    axis.check_different()
    code, varied = axis.code_of(otherwise), len(axis)
    if code is None:
        more = axis.named if axis.named is not None else axis.labels.tolist()
        if axis.named is not None or not (axis.is_number or axis.resolve or axis.static):
            raise ValueError(f"conditional: otherwise = {otherwise!r} is no value of {axis.name!r}")
        axis, code = axis.with_values([*more, otherwise]), varied
    return Conditional(axis, varied, code, wanted)


def axes_of(part: Any) -> tuple[Axis, ...]:
    """All axes in a part of a design."""
    return (part,) if isinstance(part, Axis) else part.axes


def table_of(part: Any, table: Table, num_rows: int) -> tuple[Table, int]:
    """The table of `part` for every row of `table`: (codes by name, rows)."""
    if isinstance(part, Product):
        for inner in part.parts:
            table, num_rows = table_of(inner, table, num_rows)
        return table, num_rows
    if isinstance(part, Conditional):
        return _conditional(part, table, num_rows)
    if isinstance(part, Samples | Zipped):
        own = {axis.name: codes for axis, codes in zip(part.axes, part.codes)}
        count = len(part.codes[0])
    else:
        count = len(axes_of(part)[0])
        own = {axis.name: np.arange(count, dtype=np.int32) for axis in axes_of(part)}
    table = {name: np.repeat(codes, count) for name, codes in table.items()}
    own = {name: np.tile(codes, num_rows) for name, codes in own.items()}
    return table | own, num_rows * count


def _conditional(part: Conditional, table: Table, num_rows: int) -> tuple[Table, int]:
    varies = np.ones(num_rows, bool)
    for name, codes in part.when.items():
        varies &= np.isin(table[name], codes)
    counts = np.where(varies, part.varied, 1)
    rows = np.repeat(np.arange(num_rows), counts)
    step = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    own = np.where(varies[rows], step, part.otherwise).astype(np.int32)
    return {name: codes[rows] for name, codes in table.items()} | {part.axis.name: own}, len(rows)


def bound(part: Any, earlier: dict[str, Axis]) -> Any:
    """The part with its conditions as codes of earlier axes; adds its axes to `earlier`."""
    if isinstance(part, Product):
        return Product(tuple(bound(inner, earlier) for inner in part.parts))
    if isinstance(part, Conditional):
        codes = {name: _codes(name, values, earlier) for name, values in part.when.items()}
        part = dataclasses.replace(part, when=codes)
    earlier |= {axis.name: axis for axis in axes_of(part)}
    return part


def _codes(name: str, labels: tuple[Any, ...], earlier: dict[str, Axis]) -> tuple[int, ...]:
    outer = {name: axis for name, axis in earlier.items() if not axis.inner}
    if name not in outer:
        known = ", ".join(outer) or "none"
        raise ValueError(f"conditional: no earlier axis {name!r}{nearest(name, outer)} ({known})")
    codes = tuple(outer[name].code_of(label) for label in labels)
    for label, code in zip(labels, codes):
        if code is None:
            raise ValueError(f"conditional: axis {name!r} has no value {label!r}")
    return codes  # pyright: ignore[reportReturnType]


def changed(part: Any, changes: Mapping[str, Any]) -> Any:
    """The part with other values for some axes."""
    if isinstance(part, Axis):
        return part.with_values(changes[part.name]) if part.name in changes else part
    if isinstance(part, Product):
        return Product(tuple(changed(inner, changes) for inner in part.parts))
    if isinstance(part, Zipped):
        return zipped(*(changed(axis, changes) for axis in part.axes))
    if isinstance(part, Samples):
        return part.changed(changes)
    if part.axis.name not in changes:
        return part
    axis = part.axis.with_values(changes[part.axis.name])
    return conditional(axis, part.axis.labels[part.otherwise].item(), **part.when)


def _first_of(axis: Axis) -> np.ndarray:
    """The code of each value: that of the first one equal to it."""
    _, first, inverse = np.unique(axis.labels, return_index=True, return_inverse=True)
    return first.astype(np.int32)[inverse.reshape(-1)]


def _refuse_inner(owner: str, axes: Sequence[Axis]) -> None:
    for axis in axes:
        if axis.inner:
            raise ValueError(f"{owner}: axis {axis.name!r} is inner; allowed are others")
