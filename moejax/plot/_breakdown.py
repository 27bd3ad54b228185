"""What a time consists of, as stacked bars; and how evenly policies use the channels of PIM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._policies import policy_style
from moejax.plot._style import INK, TICK, dress, legend_beside, log_ticks, note, require_matplotlib
from moejax.plot._table import Table, check_unique, drawable, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


PART_COLORS = {
    "compute": "#0072B2",
    "communication": "#009E73",
    "memory": "#56B4E9",
    "hbm": "#56B4E9",
    "pim": "#C8453B",
    "comm": "#009E73",
    "scheduler": "#8A8F98",
    "experts": "#D55E00",
    "other_arithmetic": "#0072B2",
}
CHARACTERS = 60  # of labels side by side; where they would take more they are turned


def breakdown(
    table: Table,
    ax: "Axes",
    *,
    parts: Sequence[str],
    title: str = "Where the time goes",
    unit: str = "ms",
    legend: bool = True,
) -> "Axes":
    """Draws one stacked bar per row, from left to right in the table's order.

    **Arguments:**

    - `table`: columns `name` (below the bar) and `PART_UNIT` of every part, for example
        `compute_ms`.
    - `parts`: from the bottom up.
    - `unit`: of the columns, and of the axis.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, no part, or a negative time.
    """
    owner = "breakdown"
    require_matplotlib()
    if not parts:
        raise ValueError(f"{owner}: parts is empty: allowed is one or more")
    columns = [f"{part}_{unit}" for part in parts]
    rows = read(table, owner, floats=columns, names=["name"])
    heights = np.stack([rows[column] for column in columns])
    if np.any(heights < 0):
        raise ValueError(f"{owner}: {np.min(heights):g} {unit}: allowed is 0 or more")
    place = np.arange(heights.shape[1])
    below = np.zeros(heights.shape[1])
    for part, height in zip(parts, heights, strict=True):
        color = PART_COLORS.get(part, "#CC79A7")
        ax.bar(
            place,
            height,
            bottom=below,
            color=color,
            width=0.72,
            label=part.replace("_", " "),
            zorder=2,
        )
        below = below + height
    for x, total in zip(place, below, strict=True):
        ax.text(x, total, f"{total:.3g}", ha="center", va="bottom", fontsize=TICK - 1, color=INK)
    longest = max(len(line) for name in rows["name"] for line in name.split("\n"))
    ax.set_xticks(place, rows["name"])
    if longest * len(place) > CHARACTERS:
        for label in ax.get_xticklabels():
            label.set(rotation=35, ha="right")
    dress(ax, title=title, subtitle=f"time in {unit}, total above", x="place", y="place")
    ax.grid(False, axis="x")
    ax.set_ylim(0, 1.1 * float(np.max(below)) or 1)
    if legend:
        legend_beside(ax)
    return ax


def channel_utilization(
    table: Table,
    ax: "Axes",
    *,
    title: str = "How evenly the channels of PIM are busy",
    legend: bool = True,
) -> "Axes":
    """Draws mean over peak busy time of PIM's channel groups against batch size, one line per
    policy (Sieve, arXiv 2605.11277, figure of channel utilization).

    **Arguments:**

    - `table`: columns `policy`, `batch`, `channel_utilization` in [0, 1]; one row for each policy
        and batch size.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, or two rows of one policy and
    batch size.
    """
    owner = "channel_utilization"
    require_matplotlib()
    rows = read(table, owner, floats=["batch", "channel_utilization"], names=["policy"])
    check_unique(rows, ("policy", "batch"), owner)
    rows, dropped = drawable(rows, ["batch", "channel_utilization"], owner)
    for policy in sorted(set(rows["policy"]), key=lambda name: (policy_style(name).order, name)):
        mine = rows["policy"] == policy
        order = np.argsort(rows["batch"][mine])
        style = policy_style(policy)
        ax.plot(
            rows["batch"][mine][order],
            100 * rows["channel_utilization"][mine][order],
            color=style.color,
            linestyle=style.dash,
            linewidth=style.width,
            marker=style.marker,
            markersize=style.size,
            label=style.label,
        )
    ax.set_xscale("log")
    log_ticks(ax.xaxis, rows["batch"].min(), rows["batch"].max())
    ax.set_ylim(0, 105)
    subtitle = "mean over peak busy time of channel groups, %" + note(dropped)
    dress(ax, title=title, subtitle=subtitle, x="batch", y="place")
    if legend:
        legend_beside(ax)
    return ax
