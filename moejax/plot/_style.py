"""The one look of all figures: a figure made, dressed, labelled and saved."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend


INK, SOFT_INK, GRID = "#1F2933", "#66727F", "#E4E8EC"
DEVICE_COLORS = {"gpu": "#3B5BA5", "pim": "#C8453B"}
DEVICE_LABELS = {"gpu": "GPU", "pim": "PIM"}

TITLE, SUBTITLE, LABEL, TICK = 10.0, 8.0, 8.5, 8.0

AXIS_LABELS = {
    "arithmetic_intensity": "Arithmetic intensity (FLOP/B)",
    "flops_per_s": "Performance (TFLOP/s)",
    "batch": "Batch size (requests)",
    "share": "Share of active experts (%)",
    "interactivity_tok_s": "Interactivity (tok/s/user)",
    "throughput_per_gpu_tok_s": "Throughput (tok/s/GPU)",
    "time_us": "Time (us)",
    "link": "Link",
    "node": "Node",
    "expert": "Expert",
    "step": "Step",
    "place": "",
}

# What a file of each kind would otherwise record about the day and the tool: the same table then
# gives the same bytes, and a picture in a repository changes only when it looks different.
FILE_METADATA = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def require_matplotlib() -> None:
    """Raises `ValueError` that says how to install it, where matplotlib is absent."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError("figures need matplotlib: pip install moejax[plots]") from None


def figure(
    nrows: int = 1, ncols: int = 1, size: tuple[float, float] | None = None
) -> "tuple[Figure, np.ndarray]":
    """An empty figure and its axes.

    **Arguments:**

    - `nrows`, `ncols`: grid of axes.
    - `size`: width and height in inches. The default is 9 wide, which is 900 px in a README.

    **Returns:** the figure, and an object array of axes [nrows, ncols].
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    fig = Figure(figsize=size or (9.0, 0.4 + 3.2 * nrows), layout="constrained", facecolor="white")
    fig.get_layout_engine().set(w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.05)  # pyright: ignore
    return fig, fig.subplots(nrows, ncols, squeeze=False)


def save(fig: "Figure", path: str | Path, *, dpi: float = 200.0) -> Path:
    """Writes the figure as `.png`, `.svg` or `.pdf`, making folders as needed.

    **Arguments:**

    - `dpi`: dots per inch of a PNG; the default is twice the size in a README.

    **Returns:** the path.

    **Raises:** `ValueError` for another file ending.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in FILE_METADATA:
        raise ValueError(f"save: {path.name!r} must end in one of {', '.join(FILE_METADATA)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=dpi, facecolor="white", metadata=FILE_METADATA[ending])
    return path


def dress(ax: "Axes", *, title: str, subtitle: str, x: str, y: str) -> None:
    """Title, axis labels, grid and spines, set one by one so that any axes will do."""
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
    below.set_in_layout(False)  # else a long line would squeeze the axes
    ax.set_xlabel(AXIS_LABELS[x], fontsize=LABEL, color=INK)
    ax.set_ylabel(AXIS_LABELS[y], fontsize=LABEL, color=INK)
    ax.tick_params(which="both", labelsize=TICK, colors=SOFT_INK, length=0, pad=4)
    ax.set_facecolor("white")
    ax.set_axisbelow(True)
    ax.grid(True, which="major", color=GRID, linewidth=0.8)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#AEB7C0")


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks such as 50, 100, 200, 1k: the fewer decades there are, the more of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    decades = np.log10(high / low)
    steps = {0.4: (), 1.0: (1, 1.5, 2, 3, 4, 5, 7), 2.6: (1, 2, 5)}
    subs = next((subs for most, subs in steps.items() if decades < most), (1,))
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=99) if subs else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axis.set_minor_formatter(NullFormatter())


def compact(value: float) -> str:
    """`1500` -> `1.5k`, as short as a tick label should be."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def write(ax: "Axes", text: str, at: tuple[float, float], **options: Any) -> None:
    """A small text at a data point, with a white rim so that a line under it does not hide it.

    **Arguments:**

    - `options`: of `Axes.annotate`; `xytext` is an offset in points.
    """
    from matplotlib.patheffects import withStroke

    options = {"fontsize": TICK - 1, "color": SOFT_INK, "zorder": 6, "xytext": (0, 0)} | options
    rim = [withStroke(linewidth=2.0, foreground="white")]
    ax.annotate(text, at, textcoords="offset points", path_effects=rim, **options)


def note(dropped: int) -> str:
    """What a subtitle adds where rows could not be drawn."""
    rows = "row" if dropped == 1 else "rows"
    return f" ({dropped} {rows} without a number left out)" if dropped else ""


def legend_beside(ax: "Axes", **options: Any) -> "Legend":
    """A legend right of the axes, so that it never covers data."""
    legend = ax.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        frameon=False,
        fontsize=TICK,
        labelcolor=INK,
        handlelength=2.6,
        alignment="left",
        title_fontsize=TICK,
        **options,
    )
    legend.get_title().set_color(SOFT_INK)
    return legend


def shared_legend(
    fig: "Figure", axes: "Iterable[Axes] | np.ndarray", *, ncols: int | None = None
) -> "Legend":
    """One legend for several axes below the figure: each label once, in order of appearance.

    **Arguments:**

    - `axes`: axes drawn with `legend=False`, in any nesting that numpy can flatten.
    - `ncols`: columns; by default as many as fit a width of 9 inches.
    """
    entries: dict[str, Any] = {}
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        for handle, label in zip(*ax.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    if not entries:
        raise ValueError("shared_legend: nothing in these axes has a label")
    return fig.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=ncols or min(len(entries), 5),
        frameon=False,
        fontsize=TICK,
        labelcolor=INK,
        handlelength=3.0,
        columnspacing=1.8,
    )
