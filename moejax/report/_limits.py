"""What limits where: which component is the largest, in which part of the space."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.report._rows import Rows


LIMITED_BY = "limited_by"
# Components in the order of a legend, and the columns (without their unit) that are their times.
COMPONENTS = {
    "compute": ("compute", "comp", "computation"),
    "hbm": ("hbm", "memory", "offchip", "dram"),
    "gpu": ("gpu",),
    "pim": ("pim",),
    "comm": ("comm", "communication", "network", "makespan"),
    "scheduler": ("scheduler", "gate"),
    "head": ("head",),
}
_TIMES = ("_s", "_ms", "_us", "_ns")
MOST_PARTS = 12


class Limits(NamedTuple):
    """Component of each row: `names[of_row]`, -1 where nothing is known. `source` says how."""

    names: tuple[str, ...]
    of_row: np.ndarray
    source: str


def limits_of(rows: Rows) -> Limits | None:
    """The largest component of each row, or None where the columns do not say.

    A column `limited_by` says it itself. Else it is the largest of the columns that are times of a
    component by their name, such as `comm_us`; the whole of the GPU counts only where its parts
    are not there. Rows that failed have none.
    """
    if LIMITED_BY in rows.columns:
        words, code = np.unique(rows.columns[LIMITED_BY].astype(str), return_inverse=True)
        order = sorted(range(len(words)), key=lambda i: (_rank(words[i]), words[i]))
        known = [i for i in order if words[i] not in ("-", "", "nan")]
        place = np.full(len(words), -1)
        place[known] = np.arange(len(known))
        found = np.where(rows.okay, place[code], -1)
        return Limits(tuple(str(words[i]) for i in known), found, f"column {LIMITED_BY}")
    columns = _times(rows)
    if len(columns) < 2:
        return None
    times = np.stack([rows.columns[name].astype(np.float64) for name in columns.values()])
    finite = np.isfinite(times).all(axis=0) & rows.okay
    largest = np.argmax(np.where(np.isfinite(times), times, -np.inf), axis=0)
    source = f"the largest of {', '.join(columns.values())}"
    return Limits(tuple(columns), np.where(finite, largest, -1), source)


def _rank(word: str) -> int:
    known = list(COMPONENTS.values())
    return next((i for i, words in enumerate(known) if word in words), len(known))


def kind_of(word: str) -> str:
    """What kind of component a word names: `hbm` for `memory`; itself, where it names none."""
    return next((kind for kind, words in COMPONENTS.items() if word in words), word)


def _times(rows: Rows) -> dict[str, str]:
    """Column by component; all in one unit, since times in two are not compared by their names."""
    for unit in _TIMES:
        stems = {name.removesuffix(unit): name for name in rows.numbers if name.endswith(unit)}
        # Of two names for one component, the first; it is called what its column is.
        named = [next((s for s in known if s in stems), None) for known in COMPONENTS.values()]
        found = {stem: stems[stem] for stem in named if stem is not None}
        if named[0] and named[1]:
            found.pop("gpu", None)
        if len(found) >= 2:
            return found
    return {}


class Part(NamedTuple):
    """Rows with one value, or a range of values, of an axis: `label`, and the rows."""

    label: str
    rows: np.ndarray


def parts(column: np.ndarray) -> list[Part]:
    """An axis in at most `MOST_PARTS` parts: its values, or ranges with about as many values."""
    values, code = np.unique(column, return_inverse=True)
    if len(values) <= MOST_PARTS or column.dtype.kind not in "iuf":
        words = [_word(value) for value in values.tolist()]
        if column.dtype.kind not in "iuf":
            first = np.unique(code, return_index=True)[1]
            order = np.argsort(first, kind="stable")
        else:
            order = np.arange(len(values))
        return [Part(words[i], code == i) for i in order.tolist()]
    edges = np.linspace(0, len(values), MOST_PARTS + 1).round().astype(int)
    words = [_word(value) for value in values.tolist()]
    said = lambda low, high: words[low] if low == high else f"{words[low]} – {words[high]}"
    pairs = zip(edges, edges[1:])
    return [Part(said(a, b - 1), (code >= a) & (code < b)) for a, b in pairs]


def _word(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shares(limits: Limits, which: np.ndarray) -> np.ndarray:
    """[components], the share of some rows that each limits; NaN where nothing is known."""
    found = limits.of_row[which]
    found = found[found >= 0]
    number = np.bincount(found, minlength=len(limits.names))
    return number / len(found) if len(found) else np.full(len(limits.names), np.nan)


def main_axes(rows: Rows, limits: Limits, axes: Sequence[str]) -> list[str]:
    """Axes sorted by how much they decide what limits: by the entropy they take away."""
    whole = limits.of_row >= 0

    def left(axis: str) -> float:
        total = 0.0
        for part in parts(rows.columns[axis]):
            share = shares(limits, part.rows & whole)
            number = np.count_nonzero(part.rows & whole)
            total += number * float(-np.nansum(share * np.log(np.where(share > 0, share, 1))))
        return total

    return sorted(axes, key=lambda axis: (left(axis), list(axes).index(axis)))
