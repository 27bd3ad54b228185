"""Which message uses which link when."""

from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._style import dress, require_matplotlib, write
from moejax.plot._table import Table, flags, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


USED, CRITICAL = "#8FA3BF", "#D55E00"


def link_timeline(
    table: Table, ax: "Axes", *, title: str = "The busiest links over time"
) -> "Axes":
    """Draws one bar per use of a link by a message, links from top to bottom in the table's order.

    Bars of the critical path stand out; at the right end stands the share of the makespan that the
    link is in use. A bar without end goes on to the last finite one.

    **Arguments:**

    - `table`: one row per use, columns `name` and `utilization` (of the link, in [0, 1]),
        `start_us` and `end_us`; optionally `critical`. `moejax.noc.timeline_rows` makes one.
    - `title`: what is seen.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, or a use that ends before it
    starts.
    """
    owner = "link_timeline"
    require_matplotlib()
    rows = read(table, owner, floats=["start_us", "end_us", "utilization"], names=["name"])
    start, end = rows["start_us"], rows["end_us"]
    if np.any(bad := ~(end >= start)):
        name = rows["name"][bad][0]
        raise ValueError(
            f"{owner}: a use of {name} starts at {start[bad][0]:g} and ends at {end[bad][0]:g} us"
        )
    critical = flags(table, "critical", len(start), owner)
    names, first = np.unique(rows["name"], return_index=True)
    names, first = names[np.argsort(first)].tolist(), np.sort(first)
    lane = np.array([names.index(name) for name in rows["name"]])
    last = np.max(end[np.isfinite(end)], initial=0)

    begun = np.isfinite(start)
    _draw_bars(ax, lane[begun], start[begun], np.minimum(end, last)[begun], critical[begun])
    for i, share in enumerate(rows["utilization"][first]):
        write(ax, f"{share:.0%}", (last, i), xytext=(5, 0), va="center_baseline")
    ax.set_xlim(0, last * 1.06 or 1)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), [name.replace(">", " → ") for name in names])
    subtitle = (
        "one bar per message, orange: critical path · at the end: share of the makespan in use"
    )
    dress(ax, title=title, subtitle=subtitle, x="time_us", y="link")
    ax.grid(False, axis="y")
    return ax


def _draw_bars(ax: "Axes", lane, start, end, critical) -> None:
    from matplotlib.collections import PolyCollection

    half = 0.38
    for mark, color, label in ((False, USED, "message"), (True, CRITICAL, "on the critical path")):
        mine = critical == mark
        low, high, y = start[mine], end[mine], lane[mine]
        corners = [(low, y - half), (high, y - half), (high, y + half), (low, y + half)]
        outlines = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
        bars = PolyCollection(
            list(outlines), facecolors=color, edgecolors="white", linewidths=0.3, zorder=2 + mark
        )
        bars.set_label(label)
        ax.add_collection(bars)
