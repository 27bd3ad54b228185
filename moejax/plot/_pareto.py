"""Throughput per GPU against interactivity, one line per policy."""

from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._policies import PolicyStyle, policy_style
from moejax.plot._style import (
    dress,
    legend_beside,
    log_ticks,
    note,
    require_matplotlib,
    write,
)
from moejax.plot._table import Table, check_unique, drawable, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


X, Y = "interactivity_tok_s", "throughput_per_gpu_tok_s"
BOUNDS = [f"{name}_{end}" for name in (X, Y) for end in ("low", "high")]


def throughput_interactivity(
    table: Table,
    ax: "Axes",
    *,
    title: str = "Throughput against interactivity",
    legend: bool = True,
) -> "Axes":
    """Draws throughput per GPU against interactivity, one line per policy over batch sizes.

    A gray line joins the policies at one batch size, and is labelled with it. Both axes are
    logarithmic: every factor between two policies then has one length.

    **Arguments:**

    - `table`: columns `policy`, `batch`, `interactivity_tok_s` [tok/s/user] and
        `throughput_per_gpu_tok_s` [tok/s/GPU]; one row for each policy and batch size. Optionally
        the ends of 95 % intervals, `interactivity_tok_s_low`, `..._high`, and likewise for
        throughput.
    - `title`: what is seen, for example the model and the system.
    - `legend`: whether to put a legend right of the axes; see `shared_legend` for several axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, or two rows of one policy and
    batch size.

    Metrics after Sieve (arXiv 2605.11277), its figure of Pareto curves.
    """
    owner = "throughput_interactivity"
    require_matplotlib()
    bounds = [name for name in BOUNDS if name in table]
    rows = read(table, owner, floats=["batch", X, Y, *bounds], names=["policy"])
    check_unique(rows, ("policy", "batch"), owner)
    rows, dropped = drawable(rows, [X, Y], owner)

    _batch_lines(rows, ax)
    for policy in sorted(set(rows["policy"]), key=lambda name: (policy_style(name).order, name)):
        mine = {name: values[rows["policy"] == policy] for name, values in rows.items()}
        order = np.argsort(mine["batch"])
        _policy_line({k: v[order] for k, v in mine.items()}, ax, policy_style(policy))

    ax.set_xscale("log")
    ax.set_yscale("log")
    log_ticks(ax.xaxis, rows[X].min(), rows[X].max())
    log_ticks(ax.yaxis, rows[Y].min(), rows[Y].max())
    ax.margins(x=0.10, y=0.09)
    better = "upper right is better ↗"
    if bounds:
        better += " · shaded: 95 % CI"
    dress(ax, title=title, subtitle=better + note(dropped), x=X, y=Y)
    if legend:
        legend_beside(ax)
    return ax


def _policy_line(rows: dict[str, np.ndarray], ax: "Axes", style: PolicyStyle) -> None:
    ax.plot(
        rows[X],
        rows[Y],
        color=style.color,
        linestyle=style.dash,
        linewidth=style.width,
        marker=style.marker,
        markersize=style.size,
        markeredgecolor=style.color if style.marker in "x+" else "white",
        markeredgewidth=1.0 if style.marker in "x+" else 0.6,
        label=style.label,
        zorder=2 + style.order / 100,
    )
    if any(name in rows for name in BOUNDS):
        _whiskers(rows, ax, style)


def _whiskers(rows: dict[str, np.ndarray], ax: "Axes", style: PolicyStyle) -> None:
    from matplotlib.collections import LineCollection

    # At one batch size both metrics are multiples of 1 / tbt, so they rise and fall together: the
    # interval of a point is one slanted segment, not a cross.
    low, high = (
        np.stack([rows.get(f"{name}_{end}", rows[name]) for name in (X, Y)], axis=-1)
        for end in ("low", "high")
    )
    segments = np.stack([low, high], axis=1)
    kept = segments[np.all(np.isfinite(segments) & (segments > 0), axis=(1, 2))]
    lines = LineCollection(
        list(kept), colors=style.color, linewidths=5, alpha=0.25, capstyle="butt"
    )
    lines.set_zorder(1.5)
    lines.set_label("_interval")
    ax.add_collection(lines)


def _batch_lines(rows: dict[str, np.ndarray], ax: "Axes") -> None:
    batches = np.unique(rows["batch"])
    # About five labels: the smallest and the largest always, powers of four between them as a rule.
    labelled = set(batches[:: -max(1, round(len(batches) / 5))]) | {batches[0]}
    for batch in batches:
        at = rows["batch"] == batch
        order = np.argsort(rows[X][at])
        x, y = rows[X][at][order], rows[Y][at][order]
        ax.plot(x, y, color="#C3CAD2", linewidth=0.8, zorder=1.2, label="_batch")
        if batch in labelled:
            write(ax, f"B={batch:g}", (x[-1], y[-1]), xytext=(5, 3))
