"""Expert placements: who carries how much, which node holds what, and how a search got there."""

from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._style import (
    INK,
    SOFT_INK,
    TICK,
    dress,
    legend_beside,
    note,
    require_matplotlib,
    write,
)
from moejax.plot._table import Table, check_unique, column, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


COMPUTE, COMMUNICATION, BUSIEST = "#3B5BA5", "#E69F00", "#1F2933"
# From nothing to a whole expert; the root below keeps small shares apart from none.
SHARES = ("#FFFFFF", "#CFE0F1", "#6E9AD0", "#27508F", "#101F3C")
ROOT = 0.4
NOTHING = 1e-6  # a smaller share is rounding
LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#1F2933")


def node_loads(
    table: Table, ax: "Axes", *, title: str = "Load of the nodes", legend: bool = True
) -> "Axes":
    """Draws one bar per node: time to compute up, time to communicate down.

    Only the longest bar of each kind counts, because all nodes wait for it: a line marks it, and a
    number how much longer it is than the mean.

    **Arguments:**

    - `table`: columns `node` and `comp_us`, optionally `comm_us`; one row per node.
    - `title`: what is seen, for example the placement.
    - `legend`: whether to put a legend right of the axes; see `shared_legend` for several axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, two rows of one node, or a time
    that is negative or not finite.
    """
    owner = "node_loads"
    require_matplotlib()
    kinds = {"comp_us": (1, "compute", COMPUTE)}
    if "comm_us" in table:
        kinds["comm_us"] = (-1, "communication", COMMUNICATION)
    rows = read(table, owner, floats=["node", *kinds])
    check_unique(rows, ("node",), owner)
    _check_times(rows, kinds, owner)

    worst = []
    for name, (sign, label, color) in kinds.items():
        time = rows[name]
        ax.bar(rows["node"], sign * time, 0.86, color=color, label=label, zorder=2)
        ax.axhline(sign * time.max(), color=BUSIEST, linewidth=1.0, zorder=3)
        if time.max() > 0:
            worst.append(f"{time.max() / time.mean():.2f} {label}")
    first, last = rows["node"].min(), rows["node"].max()
    ax.axhline(0, color=SOFT_INK, linewidth=0.8, zorder=3)
    ax.set_xlim(first - 0.8, last + 0.8)
    ax.margins(y=0.08)
    ax.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    subtitle = f"max/mean: {', '.join(worst)}" if worst else "nothing to do"
    dress(ax, title=title, subtitle=subtitle, x="node", y="time_us")
    ax.grid(False, axis="x")
    if legend:
        legend_beside(ax)
    return ax


def expert_shares(
    table: Table, ax: "Axes", *, title: str = "Which node holds what", colorbar: bool = True
) -> "Axes":
    """Draws experts by nodes: the darker a cell, the more of the expert lies on the node.

    **Arguments:**

    - `table`: columns `expert`, `node`, `share` (in [0, 1]); one row per expert and node that
        hosts it. Pairs without a row hold nothing, so rows of 0 may be left out, except to say how
        many experts and nodes there are.
    - `title`: what is seen, for example the placement.
    - `colorbar`: whether to add one right of the axes; all of them have one scale, 0 to 1.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, two rows of one expert and node,
    ids that are no whole numbers from 0, or shares outside [0, 1].
    """
    owner = "expert_shares"
    require_matplotlib()
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    rows = read(table, owner, floats=["expert", "node", "share"])
    check_unique(rows, ("expert", "node"), owner)
    expert, node = (_ids(rows[name], name, owner) for name in ("expert", "node"))
    bad = ~((rows["share"] >= 0) & (rows["share"] <= 1 + 1e-4))
    if bad.any():
        where = f"expert={expert[bad][0]}, node={node[bad][0]}"
        raise ValueError(f"{owner}: share = {rows['share'][bad][0]} at {where}; allowed is [0, 1]")
    picture = np.zeros((expert.max() + 1, node.max() + 1))
    picture[expert, node] = rows["share"]

    drawn = ax.pcolormesh(
        np.arange(picture.shape[1] + 1) - 0.5,
        np.arange(picture.shape[0] + 1) - 0.5,
        picture,
        cmap=LinearSegmentedColormap.from_list("shares", SHARES),
        norm=PowerNorm(ROOT, 0, 1),
        edgecolors="#E4E8EC",
        linewidth=0.2,
    )
    ax.set_ylim(picture.shape[0] - 0.5, -0.5)
    copies = np.count_nonzero(picture > NOTHING) / len(picture)
    subtitle = f"an expert on {copies:.3g} nodes on average"
    dress(ax, title=title, subtitle=subtitle, x="node", y="expert")
    ax.grid(False)
    if colorbar:
        _share_bar(drawn, ax)
    return ax


def convergence(
    table: Table,
    ax: "Axes",
    *,
    title: str = "Best placement so far",
    legend: bool = True,
) -> "Axes":
    """Draws the best total of a search after every step, one line per search, and its bound.

    **Arguments:**

    - `table`: columns `step` and `total_us`; optionally `search`, a name, and `bound_us`, the same
        in all rows of a search: no placement is better.
    - `title`: what is seen.
    - `legend`: whether to put a legend right of the axes; see `shared_legend` for several axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, two rows of one search and step,
    or no finite total at all.
    """
    owner = "convergence"
    require_matplotlib()
    table = {"search": np.full(len(column(table, "step", owner)), "search"), **table}
    bounded = ["bound_us"] if "bound_us" in table else []
    rows = read(table, owner, floats=["step", "total_us", *bounded], names=["search"])
    check_unique(rows, ("search", "step"), owner)
    keep = np.isfinite(rows["total_us"])
    if not keep.any():
        raise ValueError(f"{owner}: no row has a finite total_us")
    rows = {name: values[keep] for name, values in rows.items()}

    for i, search in enumerate(dict.fromkeys(rows["search"].tolist())):
        mine = {name: values[rows["search"] == search] for name, values in rows.items()}
        order, color = np.argsort(mine["step"]), LINES[i % len(LINES)]
        step, total = mine["step"][order], mine["total_us"][order]
        ax.plot(step, total, color=color, linewidth=1.6, label=search, drawstyle="steps-post")
        write(ax, f"{total[-1]:.4g}", (step[-1], total[-1]), xytext=(4, 0), va="center_baseline")
        if bounded:
            bound = mine["bound_us"][0]
            ax.plot(
                step[[0, -1]], [bound, bound], color=color, linewidth=1.0, linestyle=(0, (4, 3))
            )
    subtitle = "dashed: no placement is better" if bounded else "the lower the better"
    dress(ax, title=title, subtitle=subtitle + note(int((~keep).sum())), x="step", y="time_us")
    ax.margins(x=0.08)
    if legend:
        legend_beside(ax)
    return ax


def _share_bar(drawn, ax: "Axes") -> None:
    scale = ax.figure.colorbar(drawn, ax=ax, shrink=0.8, pad=0.01, aspect=25)
    scale.set_label("Share of the expert", fontsize=TICK, color=INK)
    scale.set_ticks(
        [0, 1 / 32, 1 / 8, 1 / 4, 1 / 2, 1], labels=["0", "1/32", "1/8", "1/4", "1/2", "1"]
    )
    scale.ax.tick_params(labelsize=TICK, colors=SOFT_INK, length=0)
    scale.ax.minorticks_off()
    scale.outline.set_visible(False)


def _ids(values: np.ndarray, name: str, owner: str) -> np.ndarray:
    whole = np.isfinite(values) & (values >= 0) & (values == np.round(values))
    if not whole.all():
        raise ValueError(
            f"{owner}: {name} = {values[~whole][0]:g}; allowed is a whole number from 0"
        )
    return values.astype(int)


def _check_times(rows: dict[str, np.ndarray], kinds, owner: str) -> None:
    for name in kinds:
        bad = ~((rows[name] >= 0) & (rows[name] < np.inf))
        if bad.any():
            value, node = rows[name][bad][0], rows["node"][bad][0]
            raise ValueError(f"{owner}: {name} = {value} at node={node:g}; allowed is 0 or more")
