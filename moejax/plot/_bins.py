"""How many tokens active experts get, by batch size."""

from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._style import (
    INK,
    SOFT_INK,
    TICK,
    dress,
    legend_beside,
    require_matplotlib,
)
from moejax.plot._table import Table, check_unique, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# One hue for the experts a GPU runs at the speed of its memory, darkest for a plain matrix-vector
# product; sand for those with tokens enough.
BINS = {
    "share_1": ("1 token", "#27508F"),
    "share_2": ("2 tokens", "#6E9AD0"),
    "share_3_4": ("3–4 tokens", "#B5CFEA"),
    "share_more": ("more than 4 tokens", "#F0D9B0"),
}


def expert_bins(
    table: Table,
    ax: "Axes",
    *,
    title: str = "Tokens per active expert",
    legend: bool = True,
) -> "Axes":
    """Draws stacked bars over batch size: shares of active experts with 1, 2, 3-4, > 4 tokens.

    Each bar is marked with the percentage that get at most 4 tokens, the experts that a GPU runs no
    faster than its memory. Above each bar stands the percentage of all experts that are active.

    **Arguments:**

    - `table`: columns `batch`, `share_1`, `share_2`, `share_3_4`, `share_more` (of active experts,
        in [0, 1]; they add to 1) and `active` (fraction of all experts); one row per batch size.
    - `title`: what is seen, for example the model.
    - `legend`: whether to put a legend right of the axes; see `shared_legend` for several axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, two rows of one batch size,
    shares outside [0, 1], or shares that do not add to 1 (or 0, where no expert is active).

    Bins after Sieve (arXiv 2605.11277), its section on the bimodality of experts.
    """
    owner = "expert_bins"
    require_matplotlib()
    rows = read(table, owner, floats=["batch", *BINS, "active"])
    check_unique(rows, ("batch",), owner)
    _check_shares(rows, owner)
    order = np.argsort(rows["batch"])
    rows = {name: values[order] for name, values in rows.items()}

    places = np.arange(len(order), dtype=float)
    bottom = np.zeros(len(order))
    for name, (label, color) in BINS.items():
        height = 100 * rows[name]
        ax.bar(places, height, 0.84, bottom, color=color, label=label, ec="white", lw=0.7)
        bottom += height
    few = 100 * (rows["share_1"] + rows["share_2"] + rows["share_3_4"])
    for place, top, thick in zip(places.tolist(), few, 100 * rows["share_3_4"]):
        if thick >= 6:
            _write(ax, place, top - 3.5, f"{top:.0f}", INK)
    for place, active in zip(places.tolist(), 100 * rows["active"]):
        _write(ax, place, 107, f"{active:.0f}" if active >= 1 else "<1", SOFT_INK)

    ax.set_xticks(places, [f"{batch:g}" for batch in rows["batch"]])
    ax.set_xlim(-0.6, len(places) - 0.4)
    ax.set_ylim(0, 111)
    ax.set_yticks([0, 25, 50, 75, 100, 107], ["0", "25", "50", "75", "100", "active %"])
    subtitle = "in bars: % with 4 tokens or fewer"
    dress(ax, title=title, subtitle=subtitle, x="batch", y="share")
    ax.grid(False)
    if legend:
        legend_beside(ax, title="Active experts with", reverse=True)
    return ax


def _write(ax: "Axes", x: float, y: float, text: str, color: str) -> None:
    ax.text(x, y, text, color=color, va="center_baseline", ha="center", fontsize=TICK - 1)


def _check_shares(rows: dict[str, np.ndarray], owner: str) -> None:
    for name in (*BINS, "active"):
        bad = ~((rows[name] >= 0) & (rows[name] <= 1 + 1e-4))
        if bad.any():
            value, batch = rows[name][bad][0], rows["batch"][bad][0]
            raise ValueError(f"{owner}: {name} = {value} at batch={batch:g}; allowed is [0, 1]")
    total = np.sum([rows[name] for name in BINS], axis=0)
    bad = (np.abs(total - 1) > 1e-3) & (total != 0)
    if bad.any():
        value, batch = total[bad][0], rows["batch"][bad][0]
        raise ValueError(
            f"{owner}: shares add to {value:.4g} at batch={batch:g}; allowed is 1, or 0 where no "
            "expert is active"
        )
