"""The links of a network on its plan: how busy each one is."""

from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._style import INK, SOFT_INK, TICK, dress, require_matplotlib
from moejax.plot._table import Table, check_unique, flags, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# From idle to saturated, darker all the way, so that it survives gray print.
HEAT = ("#E4E8EC", "#F7D9A0", "#EF9B4A", "#D55E00", "#7A1F0B")
DEAD = "#5B2A86"

# In units of the distance between the closest two vertices.
ASIDE, WIDTH, HEAD, GAP, STUB, RADIUS = 0.085, 0.10, 0.16, 0.20, 0.42, 0.19


def link_heat_map(
    table: Table, ax: "Axes", *, title: str = "Links in use", colorbar: bool = True
) -> "Axes":
    """Draws every directed link as an arrow, the darker the more of the makespan it is in use.

    Links keep to the right, as traffic does on roads. Switches are squares. A link that would run
    over other nodes, such as the one that closes a ring of a torus, is drawn as its two ends. Dark
    rims mark the critical path, dashes a link for which a message waits without end.

    **Arguments:**

    - `table`: one row per link, columns `name`, `from`, `to`, `from_x`, `from_y`, `to_x`, `to_y`,
        `utilization` (in [0, 1]; NaN: never done) and `gb_s` [GB/s]; optionally `critical`,
        `from_switch` and `to_switch`. `moejax.noc.link_rows` makes one.
    - `title`: what is seen, for example the topology and the traffic.
    - `colorbar`: whether to add one right of the axes; all of them have one scale, 0 to 100 %.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, two rows of one link, or a
    utilization outside [0, 1].
    """
    owner = "link_heat_map"
    require_matplotlib()
    places = ["from", "to", "from_x", "from_y", "to_x", "to_y"]
    rows = read(table, owner, floats=[*places, "utilization", "gb_s"], names=["name"])
    check_unique(rows, ("from", "to"), owner)
    _check_utilization(rows, owner)
    critical = flags(table, "critical", len(rows["name"]), owner)

    arrows, unit = _arrows(rows)
    _draw_arrows(ax, arrows, rows["utilization"], critical, colorbar)
    _draw_vertices(ax, table, rows, unit, owner)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    (x0, y0), (x1, y1) = _extent(rows, unit)
    ax.set_xlim(x0, x1)
    ax.set_ylim(y1, y0)
    dress(ax, title=title, subtitle=_busiest(rows), x="place", y="place")
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)
    return ax


def _check_utilization(rows: dict[str, np.ndarray], owner: str) -> None:
    share = rows["utilization"]
    bad = (share < 0) | (share > 1 + 1e-4)
    if bad.any():
        name, value = rows["name"][bad][0], share[bad][0]
        raise ValueError(f"{owner}: utilization of link {name} = {value}: allowed is [0, 1] or NaN")


def _busiest(rows: dict[str, np.ndarray]) -> str:
    share = np.where(np.isnan(rows["utilization"]), -1, rows["utilization"])
    at = int(np.argmax(share))
    if share[at] <= 0:
        return "no traffic"
    name = rows["name"][at].replace(">", " → ")
    return f"busiest {name}: {share[at]:.0%} of the time, {rows['gb_s'][at]:.3g} GB/s"


def _arrows(rows: dict[str, np.ndarray]) -> tuple[list[list[np.ndarray]], float]:
    """One or two polygons per link, and the distance between the closest two vertices."""
    tail = np.stack([rows["from_x"], rows["from_y"]], axis=1)
    head = np.stack([rows["to_x"], rows["to_y"]], axis=1)
    vertices = np.unique(np.concatenate([tail, head]), axis=0)
    apart = np.linalg.norm(vertices[:, None] - vertices, axis=-1)
    unit = float(np.min(apart[apart > 0], initial=np.inf))
    unit = unit if np.isfinite(unit) else 1.0
    arrows = []
    for start, end in zip(tail, head):
        along = (end - start) / max(float(np.linalg.norm(end - start)), 1e-12) * unit
        first, last = start + GAP * along, end - GAP * along
        pieces = [(first, last)]
        if _runs_over(start, end, vertices, unit):
            # It leaves on the far side and comes in from there.
            out, back = start - GAP * along, end + GAP * along
            pieces = [(out, out - STUB * along), (back + STUB * along, back)]
        arrows.append([_arrow(*piece, unit) for piece in pieces])
    return arrows, unit


def _runs_over(start: np.ndarray, end: np.ndarray, vertices: np.ndarray, unit: float) -> bool:
    """Whether some other vertex lies on the straight line from start to end."""
    along = end - start
    square = along @ along
    if not square:
        return False
    share = (vertices - start) @ along / square
    off = np.linalg.norm(vertices - start - share[:, None] * along, axis=1)
    near = unit / np.sqrt(square) / 2
    return bool(np.any((share > near) & (share < 1 - near) & (off < unit / 10)))


def _arrow(start: np.ndarray, end: np.ndarray, unit: float) -> np.ndarray:
    """A bar with a point, moved to its own right hand (y grows downwards)."""
    along = (end - start) / max(np.linalg.norm(end - start), 1e-12)
    right = np.array([-along[1], along[0]])
    middle, half = right * unit * ASIDE, right * unit * WIDTH / 2
    neck = end - along * min(unit * HEAD, float(np.linalg.norm(end - start)))
    outline = [start - half, start + half, neck + half, end, neck - half]
    return np.array(outline) + middle


def _draw_arrows(ax: "Axes", arrows, share: np.ndarray, critical: np.ndarray, bar: bool) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap

    # The busier, the later: where links cross, the busiest one is seen.
    order = np.argsort(np.where(np.isnan(share), 2, share) + critical, kind="stable")
    owner = np.repeat(order, [len(arrows[link]) for link in order])
    outlines = [outline for link in order for outline in arrows[link]]
    heat = LinearSegmentedColormap.from_list("heat", HEAT)
    dead = np.isnan(share)[owner]
    drawn = PolyCollection(
        outlines,
        array=np.ma.masked_invalid(share[owner]),
        cmap=heat,
        edgecolors=[DEAD if d else INK if c else "none" for d, c in zip(dead, critical[owner])],
        linewidths=np.where(dead | critical[owner], 0.9, 0),
        linestyles=[(0, (2, 1)) if d else "solid" for d in dead],
        zorder=2,
    )
    drawn.set_clim(0, 1)
    ax.add_collection(drawn)
    if bar:
        scale = ax.figure.colorbar(drawn, ax=ax, shrink=0.8, pad=0.01, aspect=25)
        scale.set_label("Share of the makespan in use (%)", fontsize=TICK, color=INK)
        scale.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
        scale.ax.tick_params(labelsize=TICK, colors=SOFT_INK, length=0)
        scale.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _draw_vertices(ax: "Axes", table: Table, rows, unit: float, owner: str) -> None:
    """Each vertex once: endpoints as circles with their ids, switches as squares."""
    seen: dict[int, tuple[float, float, bool]] = {}
    for side in ("from", "to"):
        switch = flags(table, f"{side}_switch", len(rows["name"]), owner)
        found = zip(rows[side], rows[f"{side}_x"], rows[f"{side}_y"], switch)
        seen |= {int(vertex): (x, y, bool(s)) for vertex, x, y, s in found}
    from matplotlib.patches import Circle, Rectangle

    radius = RADIUS * unit
    span = np.ptp([[x, y] for x, y, _ in seen.values()], axis=0).max() / unit
    size = np.clip(140 / max(span, 1), 4, TICK - 2)
    look = {"facecolor": "white", "edgecolor": SOFT_INK, "linewidth": 0.8, "zorder": 3}
    for vertex, (x, y, switch) in seen.items():
        if switch:
            ax.add_patch(Rectangle((x - radius, y - radius), 2 * radius, 2 * radius, **look))
        else:
            ax.add_patch(Circle((x, y), radius, **look))
        text = {"ha": "center", "va": "center_baseline", "color": INK, "fontsize": size}
        ax.text(x, y, str(vertex), zorder=4, **text)


def _extent(rows: dict[str, np.ndarray], unit: float) -> tuple[np.ndarray, np.ndarray]:
    ends = [np.stack([rows[f"{side}_x"], rows[f"{side}_y"]], axis=1) for side in ("from", "to")]
    corners = np.concatenate(ends)
    room = unit * (GAP + STUB + 0.1)
    return corners.min(axis=0) - room, corners.max(axis=0) + room
