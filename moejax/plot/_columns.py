"""Columns that a caller names, as axes of a figure: labels, places, colors and scales."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax._units import TERA
from moejax.plot._policies import POLICIES, PolicyStyle, policy_style
from moejax.plot._style import INK, LABEL, compact, dress
from moejax.plot._table import Table, column, numbers


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The end of a column's name is its unit.
UNITS = {
    "tok_s": "tok/s", "gb_s": "GB/s", "tb_s": "TB/s", "flops_per_s": "FLOP/s", "ms": "ms",
    "us": "us", "ns": "ns", "s": "s", "gb": "GB", "mb": "MB", "j": "J", "mj": "mJ", "w": "W",
    "mm2": "mm²", "bytes": "B", "bandwidth": "B/s", "time": "s", "latency": "s",
}  # fmt: skip
_WORDS_THAT_STAY = ("bytes", "bandwidth", "time", "latency", "flops_per_s")
LOG_FROM = 10.0  # a positive axis that spans more than this factor is logarithmic
COLORS = ("#3B5BA5", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5230", "#5B2A86")


def label_of(name: str) -> str:
    """`tbt_ms` as `tbt (ms)`: the unit that a column's name ends in, in parentheses."""
    for ending, unit in UNITS.items():
        if re.search(rf"(^|[_.]){ending}$", name):
            stem = name if ending in _WORDS_THAT_STAY else name[: -len(ending)].rstrip("_.")
            return f"{(stem or name).replace('_', ' ')} ({unit})"
    return name.replace("_", " ")


def points(table: Table, x: str, y: str, by: str | None, owner: str):
    """Columns of a figure, x as places where it is text, and then its words."""
    if len({x, y, by}) < 3:
        raise ValueError(f"{owner}: x, y and by are {x}, {y}, {by}: allowed are different columns")
    rows = {y: numbers(table, y, owner)}
    along, ticks = column(table, x, owner), []
    if along.dtype.kind in "US":
        ticks = list(dict.fromkeys(along.tolist()))
        along = np.array([ticks.index(word) for word in along.tolist()])
    rows[x] = along.astype(np.float64)
    if by:
        rows[by] = column(table, by, owner)
    for end in (f"{y}_low", f"{y}_high"):
        if end in table:
            rows[end] = numbers(table, end, owner)
    lengths = {name: len(values) for name, values in rows.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{owner}: columns of unequal length {lengths}")
    if not lengths[x]:
        raise ValueError(f"{owner}: the table is empty")
    return rows, ticks


def finite(rows: dict[str, np.ndarray], names: tuple[str, ...], owner: str):
    """The rows that have numbers, and how many have none."""
    keep = np.all([np.isfinite(rows[name]) for name in names], axis=0)
    if not keep.any():
        raise ValueError(f"{owner}: no row has finite {' and '.join(names)}")
    return {name: values[keep] for name, values in rows.items()}, int((~keep).sum())


def styles(rows: dict[str, np.ndarray], by: str | None) -> list[tuple[Any, PolicyStyle]]:
    """Each value of `by` with its look: that of policies, or of a sequence of colors."""
    if by is None:
        return [(None, PolicyStyle("", COLORS[0]))]
    if rows[by].dtype.kind in "US":
        names = list(dict.fromkeys(rows[by].tolist()))
        if any(name in POLICIES for name in names):
            found = [(name, policy_style(name)) for name in names]
            return sorted(found, key=lambda pair: pair[1].order)
    else:
        names = np.unique(rows[by]).tolist()
    many = len(names) > len(COLORS)
    shade = lambda i: _ramp(i / max(len(names) - 1, 1)) if many else COLORS[i]
    word = lambda name: f"{name:.4g}" if isinstance(name, float) else str(name)
    markers = "osD^vP<>"
    return [
        (name, PolicyStyle(word(name), shade(i), markers[i % len(markers)]))
        for i, name in enumerate(names)
    ]


def _ramp(share: float) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](0.9 * share))


def look_of(style: PolicyStyle, zorder: float) -> dict[str, Any]:
    """Options of `Axes.plot`."""
    hollow = style.marker in "x+"
    return dict(
        color=style.color, linewidth=style.width, marker=style.marker, markersize=style.size,
        markeredgecolor=style.color if hollow else "white", markeredgewidth=1.0 if hollow else 0.6,
        zorder=zorder,
    )  # fmt: skip


def is_log(values: np.ndarray) -> bool:
    """Whether an axis of these numbers is logarithmic."""
    return bool(values.size) and values.min() > 0 and values.max() > LOG_FROM * values.min()


def short_ticks(axis: Any) -> None:
    """`8T` and `1.5k` as tick labels, also where an axis is linear."""
    from matplotlib.ticker import FuncFormatter

    tera = lambda value: f"{value / TERA:.4g}T" if abs(value) >= TERA else compact(value)
    axis.set_major_formatter(FuncFormatter(lambda value, _: tera(value)))


def tilt(ax: "Axes", words: list[str]) -> None:
    """Slanted labels where straight ones would run into each other."""
    if sum(map(len, words)) > 60 or max(map(len, words), default=0) > 14:
        for label in ax.get_xticklabels():
            label.set(rotation=25, ha="right", rotation_mode="anchor")


def dress_columns(ax: "Axes", title: str, said: str, x: str, y: str) -> None:
    """`dress` with columns for axes."""
    dress(ax, title=title, subtitle=said, x="place", y="place")
    ax.set_xlabel(label_of(x), fontsize=LABEL, color=INK)
    ax.set_ylabel(label_of(y), fontsize=LABEL, color=INK)
