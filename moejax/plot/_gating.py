"""Hardware-aware gating: what speed costs, which coefficients do it, which choices move."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.plot._style import (
    GRID,
    INK,
    LABEL,
    SOFT_INK,
    SUBTITLE,
    TICK,
    TITLE,
    legend_beside,
    note,
    require_matplotlib,
    write,
)
from moejax.plot._table import Table, check_unique, flags, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# One order of hues for gates, told apart without color by their markers.
COLORS = ("#7A8793", "#3B5BA5", "#2E8B74", "#C8453B", "#8A5FB0", "#B07D2B")
MARKERS = ("o", "s", "^", "D", "v", "P")
GAIN, LOST = "#2E8B74", "#C8453B"


def speedup_fidelity(
    table: Table,
    ax: "Axes",
    *,
    loss: str = "kl",
    label: str = "KL on held-out text (nats)",
    title: str = "What speed costs",
    legend: bool = True,
) -> "Axes":
    """Draws loss of fidelity against speed-up, one line per gate; lower right is better.

    **Arguments:**

    - `table`: columns `gate` (text), `speedup` and the loss; one row for each gate and setting.
        Optionally `published`, true for rows to mark with a star: coefficients printed somewhere.
    - `loss`, `label`: the column to draw, and what to call it. The axis is logarithmic.
    - `legend`: whether to put a legend right of the axes; see `shared_legend` for several axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, or no loss above 0.
    """
    owner = "speedup_fidelity"
    require_matplotlib()
    rows = read(table, owner, floats=["speedup", loss], names=["gate"])
    marked = flags(table, "published", len(rows["gate"]), owner)
    # A loss of 0 is a gate that changes nothing: there is no place for it on the axis.
    shown = np.isfinite(rows["speedup"]) & np.isfinite(rows[loss]) & (rows[loss] > 0)
    if not shown.any():
        raise ValueError(f"{owner}: no row has a finite speedup and {loss} above 0")
    dropped = int((~np.isfinite(rows["speedup"]) | ~np.isfinite(rows[loss])).sum())
    for i, gate in enumerate(dict.fromkeys(rows["gate"].tolist())):
        mine = (rows["gate"] == gate) & shown
        order = np.argsort(rows["speedup"][mine])
        x, y = rows["speedup"][mine][order], rows[loss][mine][order]
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        look: dict[str, Any] = dict(
            color=color, marker=marker, markersize=4.5, linewidth=1.4, zorder=2.5
        )
        ax.plot(x, y, markeredgecolor="white", markeredgewidth=0.6, label=gate, **look)
        stars = mine & marked
        if stars.any():
            ax.plot(
                rows["speedup"][stars], rows[loss][stars], color=color, marker="*", markersize=13,
                linestyle="none", markeredgecolor="white", zorder=4, label="_published",
            )  # fmt: skip
            at = (rows["speedup"][stars][0], rows[loss][stars][0])
            write(ax, "published", at, xytext=(8, -10))
    ax.set_yscale("log")
    ax.axvline(1, color="#AEB7C0", linewidth=0.8, zorder=1)
    _dress(
        ax, title, "lower right is better ↘" + note(dropped), "Speed-up of the MoE layers", label
    )
    if legend:
        legend_beside(ax)
    return ax


def coefficient_map(
    table: Table,
    ax: "Axes",
    *,
    value: str = "speedup",
    label: str = "Speed-up",
    title: str = "Coefficients of the gate",
) -> "Axes":
    """Draws a number over the grid of both coefficients as a heat map with a color bar.

    **Arguments:**

    - `table`: columns `r_comp` (score units per s), `r_comm` (score units per node) and `value`;
        one row for each pair, every pair of the values that occur. Optionally `published`, true
        for the pair to mark.
    - `value`, `label`: the column to draw, and what to call it.

    **Returns:** `ax`. Cells without a number are hatched.

    **Raises:** `ValueError` for a missing column, an empty table, or pairs that are missing or
    there twice.
    """
    owner = "coefficient_map"
    require_matplotlib()
    rows = read(table, owner, floats=["r_comp", "r_comm", value])
    check_unique(rows, ("r_comp", "r_comm"), owner)
    marked = flags(table, "published", len(rows[value]), owner)
    comp, comm = (np.unique(-rows[name]) for name in ("r_comp", "r_comm"))
    if len(rows[value]) != len(comp) * len(comm):
        raise ValueError(
            f"{owner}: {len(rows[value])} rows are no grid of {len(comp)} x {len(comm)} pairs"
        )
    x, y = np.searchsorted(comp, -rows["r_comp"]), np.searchsorted(comm, -rows["r_comm"])
    grid = np.full((len(comm), len(comp)), np.nan)
    grid[y, x] = rows[value]
    ax.set_facecolor(GRID)
    image = ax.imshow(grid, origin="lower", aspect="auto", cmap="cividis")
    for row, column in np.argwhere(~np.isfinite(grid)):
        ax.text(column, row, "×", ha="center", va="center", color=SOFT_INK, fontsize=TICK)
    if marked.any():
        ax.plot(
            x[marked], y[marked], "*", color="white", markersize=13, markeredgecolor=INK, zorder=4
        )
    subtitle = "star: published" if marked.any() else ""
    _dress(ax, title, subtitle, "−r_comp (score / s)", "−r_comm (score / node)")
    ax.grid(False)
    for axis, ticks in ((ax.xaxis, comp), (ax.yaxis, comm)):
        few = np.unique(np.linspace(0, len(ticks) - 1, min(len(ticks), 6)).round().astype(int))
        axis.set_ticks(few, [f"{ticks[i]:.2g}" for i in few])
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(label, fontsize=LABEL, color=INK)
    bar.ax.tick_params(labelsize=TICK, colors=SOFT_INK, length=0)
    bar.outline.set_visible(False)  # pyright: ignore
    return ax


def moved_choices(
    table: Table, ax: "Axes", *, title: str = "Choices that moved", legend: bool = True
) -> "Axes":
    """Draws choices of a batch by the load of their node and by their score: who gave way to whom.

    **Arguments:**

    - `table`: columns `load_us` (of the node that the choice is on, original choices, in us),
        `score` of the choice, and the truth values `original` and `adjusted`: whether it is among
        the choices without and with the gate. Rows in neither are not drawn.
    - `legend`: whether to put a legend right of the axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column or an empty table.
    """
    owner = "moved_choices"
    require_matplotlib()
    rows = read(table, owner, floats=["load_us", "score", "original", "adjusted"])
    before, after = rows["original"] != 0, rows["adjusted"] != 0
    kinds: tuple[tuple[str, np.ndarray, dict[str, Any]], ...] = (
        ("kept", before & after, dict(color="#AEB7C0", marker="o", s=9)),
        ("lost", before & ~after, dict(color=LOST, marker="x", s=26, linewidth=1.3)),
        ("gained", ~before & after, dict(color=GAIN, marker="+", s=34, linewidth=1.3)),
    )
    for i, (name, which, look) in enumerate(kinds):
        ax.scatter(
            rows["load_us"][which],
            rows["score"][which],
            label=f"{name} ({which.sum()})",
            zorder=2 + i,
            **look,
        )
    ax.set_yscale("log")
    _dress(ax, title, "lost on busy nodes, gained on idle ones", "Load of the node (us)", "Score")
    if legend:
        legend_beside(ax)
    return ax


def _dress(ax, title: str, subtitle: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=INK, pad=18)
    below = ax.annotate(
        subtitle,
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=SUBTITLE,
        color=SOFT_INK,
        annotation_clip=False,
    )
    below.set_in_layout(False)
    ax.set_xlabel(x, fontsize=LABEL, color=INK)
    ax.set_ylabel(y, fontsize=LABEL, color=INK)
    ax.tick_params(which="both", labelsize=TICK, colors=SOFT_INK, length=0, pad=4)
    ax.set_axisbelow(True)
    ax.grid(True, which="major", color=GRID, linewidth=0.8)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#AEB7C0")
