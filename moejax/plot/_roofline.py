"""Rooflines of GPU and PIM with experts as dots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moejax._checks import lookup
from moejax._units import TERA
from moejax.plot._style import (
    DEVICE_COLORS,
    DEVICE_LABELS,
    INK,
    TICK,
    dress,
    legend_beside,
    log_ticks,
    note,
    require_matplotlib,
    write,
)
from moejax.plot._table import Table, drawable, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


X, Y = "arithmetic_intensity", "flops_per_s"
CELLS_PER_DECADE = 10  # dots nearer than this in both directions would cover each other


def roofline(
    table: Table,
    machines: Sequence[Mapping[str, Any]],
    ax: "Axes",
    *,
    title: str = "Experts on the rooflines of GPU and PIM",
    legend: bool = True,
) -> "Axes":
    """Draws attainable FLOP/s against arithmetic intensity, with experts as dots.

    Experts that would cover each other share one dot, whose area grows with their number; the
    number of tokens is written at some dots. A hollow diamond marks each ridge point.

    **Arguments:**

    - `table`: columns `arithmetic_intensity` [FLOP/B], `flops_per_s` [FLOP/s] (reached),
        `tokens` (of the expert) and `runs_on` (`"gpu"` or `"pim"`); one row per expert computation.
        Dots are easiest to compare with an intensity that counts weights once, whichever machine
        runs the expert: it is then about the number of tokens.
    - `machines`: dicts with `name`, `flops_per_s` [FLOP/s], `bandwidth` [B/s], and optionally
        `runs_on`; without it a name with "pim" in it is a PIM.
    - `title`: what is seen, for example the model and the batch size.
    - `legend`: whether to put a legend right of the axes; see `shared_legend` for several axes.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, no machine, a machine without
    rates, or another place to run.

    Roofline after Williams, Waterman and Patterson (2009), as in Sieve (arXiv 2605.11277).
    """
    owner = "roofline"
    require_matplotlib()
    rows = read(table, owner, floats=[X, Y, "tokens"], names=["runs_on"])
    for name in np.unique(rows["runs_on"]):
        lookup("runs_on", str(name), DEVICE_COLORS)
    rows, dropped = drawable(rows, [X, Y, "tokens"], owner)
    if not machines:
        raise ValueError("roofline: no machines; allowed is one or more")
    lines = [_machine(machine) for machine in machines]

    ridges = [peak / bandwidth for _, peak, bandwidth, _ in lines]
    low = min([*rows[X], *ridges]) / 3
    high = max([*rows[X], *ridges]) * 4
    for name, peak, bandwidth, device in lines:
        _draw_machine(ax, name, peak, bandwidth, DEVICE_COLORS[device], (low, high))
    dots = {}
    for device in np.unique(rows["runs_on"]):
        here = rows["runs_on"] == device
        dots[str(device)] = _merge({name: values[here] for name, values in rows.items()})
    largest = max(dot.number.max() for dot in dots.values())
    areas = {device: 22 + 200 * dot.number / max(largest, 50) for device, dot in dots.items()}
    for device, dot in dots.items():
        _draw_experts(ax, dot, device, areas[device])
    _label_tokens(ax, dots, areas)

    peaks = [peak / TERA for _, peak, _, _ in lines]
    bottom, top = min(rows[Y] / TERA) / 3, max([*peaks, *(rows[Y] / TERA)]) * 8
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(bottom, top)
    log_ticks(ax.xaxis, low, high)
    log_ticks(ax.yaxis, bottom, top)
    subtitle = f"{len(rows[X])} experts; larger dot = more experts; N = tokens per expert"
    dress(ax, title=title, subtitle=subtitle + note(dropped), x=X, y=Y)
    if legend:
        legend_beside(ax)
    return ax


def _machine(machine: Mapping[str, Any]) -> tuple[str, float, float, str]:
    values = [lookup("key of a machine", key, machine) for key in ("flops_per_s", "bandwidth")]
    name = str(lookup("key of a machine", "name", machine))
    device = machine.get("runs_on", "pim" if "pim" in name.lower() else "gpu")
    lookup("runs_on", device, DEVICE_COLORS)
    peak, bandwidth = (float(value) for value in values)
    for key, value in (("flops_per_s", peak), ("bandwidth", bandwidth)):
        if not 0 < value < np.inf:
            raise ValueError(f"machine {name!r}: {key} = {value}; allowed is above 0 and finite")
    return name, peak, bandwidth, device


def _draw_machine(
    ax: "Axes", name: str, peak: float, bandwidth: float, color: str, span: tuple[float, float]
) -> None:
    ridge = peak / bandwidth
    x = np.array([min(span[0], ridge / 10), ridge, max(span[1], ridge)])
    y = np.minimum(peak, x * bandwidth) / TERA
    ax.plot(x, y, color=color, linewidth=1.5, solid_joinstyle="round", zorder=2, label=f"_{name}")
    ax.plot([ridge], [peak / TERA], "D", c=color, mfc="white", ms=5.5, zorder=4, label="_ridge")
    ax.axvline(ridge, color=color, lw=0.8, ls=(0, (1, 2)), zorder=1.5, label="_drop")
    top = {"xycoords": ("data", "axes fraction"), "va": "top"}
    write(ax, f"ridge\n{ridge:.3g} FLOP/B", (ridge, 1), xytext=(3, -2), color=color, **top)
    end = (span[1], peak / TERA)
    rates = f"{peak / TERA:.4g} TFLOP/s, {bandwidth / TERA:.3g} TB/s"
    write(ax, rates, end, xytext=(-4, 4), ha="right", color=color)
    write(ax, name, end, xytext=(-4, 14), ha="right", color=color, weight="bold", fontsize=TICK + 1)


class Dots(NamedTuple):
    """Experts of one device that would cover each other, as one dot."""

    x: np.ndarray
    y: np.ndarray  # FLOP/s
    number: np.ndarray  # of experts
    fewest: np.ndarray  # tokens
    most: np.ndarray


def _merge(rows: dict[str, np.ndarray]) -> Dots:
    cells = np.stack([np.round(CELLS_PER_DECADE * np.log10(rows[name])) for name in (X, Y)])
    _, cell, number = np.unique(cells, axis=1, return_inverse=True, return_counts=True)
    cell = cell.ravel()
    x, y = (np.exp(np.bincount(cell, np.log(rows[name])) / number) for name in (X, Y))
    fewest, most = np.full(len(number), np.inf), np.zeros(len(number))
    np.minimum.at(fewest, cell, rows["tokens"])
    np.maximum.at(most, cell, rows["tokens"])
    return Dots(x, y, number, fewest, most)


def _draw_experts(ax: "Axes", dots: Dots, device: str, area: np.ndarray) -> None:
    look = {"color": DEVICE_COLORS[device], "alpha": 0.65, "edgecolor": "white", "linewidth": 0.8}
    ax.scatter(dots.x, dots.y / TERA, s=area, zorder=5, **look)
    ax.scatter([], [], s=45, label=f"experts on {DEVICE_LABELS[device]}", **look)


def _label_tokens(ax: "Axes", dots: dict[str, Dots], areas: dict[str, np.ndarray]) -> None:
    # Where there is room: above the slope that a GPU's dots climb, below the dots of a PIM.
    labelled: list[tuple[float, float]] = []
    for device in sorted(dots, reverse=True):
        x, y, number, fewest, most = dots[device]
        pim = device == "pim"
        for dot in _spread(np.log10(x), np.log10(y), number, pim, labelled):
            text = f"N={fewest[dot]:g}" + (f"–{most[dot]:g}" if most[dot] > fewest[dot] else "")
            at, radius = (x[dot], y[dot] / TERA), np.sqrt(areas[device][dot]) / 2
            if pim:
                write(ax, text, at, xytext=(0, -radius - 2), ha="center", va="top", color=INK)
            else:
                write(ax, text, at, xytext=(-radius, 0.7 * radius), ha="right", color=INK)


def _spread(
    x: np.ndarray,
    y: np.ndarray,
    number: np.ndarray,
    pim: bool,
    taken: list[tuple[float, float]],
    apart: float = 0.45,
) -> list[int]:
    """Dots to label: the ends first, then the most populous ones that stand `apart` decades.

    On a PIM, whose labels stand below, a column of dots has one label, at its lowest.
    """
    height = 0 if pim else 1
    first, last, rank = (3 * x + y, 3 * x - y, y) if pim else (x + y, x + y, -number)
    chosen = []
    for dot in [int(np.argmin(first)), int(np.argmax(last)), *np.argsort(rank).tolist()]:
        if all(
            np.hypot(x[dot] - other[0], height * (y[dot] - other[1])) >= apart for other in taken
        ):
            taken.append((float(x[dot]), float(y[dot])))
            chosen.append(dot)
    return chosen
