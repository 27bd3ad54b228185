"""Any sweep: lines and Pareto fronts of columns that the caller names."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.plot._columns import (
    dress_columns,
    finite,
    is_log,
    label_of,
    look_of,
    points,
    short_ticks,
    styles,
    tilt,
)
from moejax.plot._style import INK, legend_beside, log_ticks, note, require_matplotlib
from moejax.plot._table import Table, check_unique, flags


if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_MARKERS = 40  # on one line; more would hide it


def lines(
    table: Table,
    ax: "Axes",
    *,
    x: str,
    y: str,
    by: str | None = None,
    title: str = "",
    legend: bool = True,
) -> "Axes":
    """Draws one column against another, one line for each value of a third.

    **Arguments:**

    - `table`: columns `x` and `y`, one row for each point of a line; optionally `by`, and the ends
        of intervals `Y_low`, `Y_high`, which are shaded. Text on the x axis stands in order of
        appearance and is not joined by lines.
    - `title`: what is seen. `legend`: whether to put one right of the axes.

    **Returns:** `ax`. An axis that spans more than a factor of 10 above 0 is logarithmic.

    **Raises:** `ValueError` for a missing column, an empty table, two rows of one point, or where
    no row has numbers.
    """
    owner = "lines"
    require_matplotlib()
    rows, ticks = points(table, x, y, by, owner)
    check_unique(rows, (x, by) if by else (x,), owner)
    rows, dropped = finite(rows, (x, y), owner)
    for i, (name, style) in enumerate(styles(rows, by)):
        mine = {key: values[rows[by] == name] if by else values for key, values in rows.items()}
        order = np.argsort(mine[x], kind="stable")
        mine = {key: values[order] for key, values in mine.items()}
        look = look_of(style, 2 + i / 100)
        dash = "none" if ticks else style.dash
        if len(order) > MOST_MARKERS and not ticks:
            look["marker"] = "none"
        ax.plot(mine[x], mine[y], linestyle=dash, label=style.label, **look)
        low, high = (mine.get(f"{y}_{end}") for end in ("low", "high"))
        if low is not None and high is not None:
            _shade(ax, mine[x], low, high, style.color, bool(ticks))
    said = "shaded: 95 % CI" if f"{y}_low" in rows else ""
    _finish(ax, rows, (x, y), ticks, title, said + note(dropped))
    if legend and by:
        legend_beside(ax, title=label_of(by))
    return ax


def pareto(
    table: Table,
    ax: "Axes",
    *,
    x: str,
    y: str,
    front: str = "front",
    by: str | None = None,
    more: tuple[bool, bool] = (False, False),
    title: str = "",
    legend: bool = True,
) -> "Axes":
    """Draws rows as dots in the plane of two objectives, those of the front joined by steps.

    **Arguments:**

    - `table`: columns `x`, `y` and the truth values `front` (see `moejax.sweep.pareto_mask`);
        optionally `by`, whose values have colors.
    - `more`: whether more is better, for x and for y.

    **Returns:** `ax`, axes logarithmic as in `lines`. The steps bound what some row reaches.

    **Raises:** `ValueError` as `lines`, and where no row is on the front.
    """
    owner = "pareto"
    require_matplotlib()
    rows, ticks = points(table, x, y, by, owner)
    if ticks:
        raise ValueError(f"{owner}: column {x!r} holds text, not numbers")
    rows[front] = flags(table, front, len(rows[x]), owner)
    rows, dropped = finite(rows, (x, y), owner)
    best = rows[front]
    if not best.any():
        raise ValueError(f"{owner}: no row has {front}")
    for i, (name, style) in enumerate(styles(rows, by)):
        mine = rows[by] == name if by else np.ones(len(best), bool)
        look: dict[str, Any] = look_of(style, 2 + i / 100) | {"linestyle": "none"}
        faint: dict[str, Any] = look | {"alpha": 0.35, "markersize": 3.0, "markeredgewidth": 0.0}
        ax.plot(rows[x][mine & ~best], rows[y][mine & ~best], label="_beaten", **faint)
        ax.plot(rows[x][mine & best], rows[y][mine & best], label=style.label, **look)
    order = np.lexsort((rows[y][best], rows[x][best]))
    # A step goes through what both neighbors reach, so never through what no row does.
    where = "pre" if more[0] else "post"
    ax.step(
        rows[x][best][order], rows[y][best][order], where=where, color=INK, linewidth=1.0,
        zorder=1.8, label="_front",
    )  # fmt: skip
    corner = ("lower", "upper")[more[1]], ("left", "right")[more[0]]
    arrow = {"lower left": "↙", "lower right": "↘", "upper left": "↖", "upper right": "↗"}
    said = f"{arrow[' '.join(corner)]} is better · {best.sum()} of {len(best)} on the front"
    _finish(ax, rows, (x, y), [], title, said + note(dropped))
    if legend and by:
        legend_beside(ax, title=label_of(by))
    return ax


def _shade(ax: "Axes", x, low, high, color: str, apart: bool) -> None:
    if apart:
        ax.vlines(x, low, high, color=color, linewidth=4, alpha=0.25, label="_interval")
    else:
        ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0, label="_interval")


def _finish(ax: "Axes", rows, names: tuple[str, str], ticks: list[str], title, said: str) -> None:
    for axis, name, scale in zip((ax.xaxis, ax.yaxis), names, (ax.set_xscale, ax.set_yscale)):
        if not (axis is ax.xaxis and ticks) and is_log(rows[name]):
            scale("log")
            log_ticks(axis, rows[name].min(), rows[name].max())
            short_ticks(axis)
        elif np.ptp(rows[name]) > 0.02 * np.abs(rows[name]).max():  # else they would be all alike
            short_ticks(axis)
    dress_columns(ax, title, said, *names)
    if ticks:
        ax.set_xticks(range(len(ticks)), ticks)
        tilt(ax, ticks)
