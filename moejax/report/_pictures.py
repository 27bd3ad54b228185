"""Pictures of any sweep: which columns go on which axis, and the rows that they need."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax import plot
from moejax.report._average import group_ids, half_width
from moejax.report._best import objectives
from moejax.report._rows import Rows
from moejax.sweep import pareto_mask


KINDS = ("line", "heat", "pareto")
MOST_LINES, MOST_PANELS = 12, 9
# Results that people look at first, where a sweep has them.
FIRST = (
    "tbt_ms",
    "tbt_us",
    "makespan_us",
    "time_us",
    "total_ms",
    "speedup",
    "throughput_per_gpu_tok_s",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns of a picture. `value` is the color of a heat map, `by` the lines, `panel` the axes
    side by side; `maximize` says which of x and y are better when larger (of a Pareto front)."""

    kind: str
    x: str
    y: str
    by: str | None = None
    panel: str | None = None
    value: str | None = None
    maximize: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All that are named."""
        named = (self.x, self.y, self.by, self.panel, self.value)
        return tuple(name for name in named if name is not None)


def draw(rows: Rows, layout: Layout, over: Sequence[str] = (), *, title: str = "") -> Any:
    """A figure of the rows that did not fail.

    **Arguments:**

    - `rows`: not averaged; that is done here, with intervals, over the axes `over`.
    - `layout`: what goes where.

    **Raises:** `ValueError` for unknown columns, for too many lines or panels, and where rows of
    one point differ in an axis that is neither drawn nor averaged over.
    """
    for name in layout.columns:
        rows[name]
    rows = rows.take(rows.okay)
    if not len(rows):
        raise ValueError("all rows failed: nothing to draw")
    if layout.kind != "pareto":
        _check_rest(rows, layout, over)
    panels = _values(rows, layout.panel, MOST_PANELS, "panel")
    # A heat map needs room for words and a color bar of its own.
    most = 2 if layout.kind == "heat" or len(panels) == 4 else 3
    many = min(len(panels), most)
    lines = -(-len(panels) // many)
    size = (11.0 if layout.kind == "heat" else 9.0) if many > 1 else 8.0, 0.6 + 3.7 * lines
    figure, axes = plot.figure(lines, many, size)
    for i, value in enumerate(panels):
        here = rows if value is None else rows.take(rows[str(layout.panel)] == value)
        words = title if value is None else str(value)
        _draw(here, layout, over, axes.flat[i], words, legend=len(panels) == 1)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    if len(panels) > 1 and layout.by and layout.kind != "heat":
        plot.shared_legend(figure, axes.flat[: len(panels)])
    return figure


def _values(rows: Rows, name: str | None, most: int, what: str) -> list[Any]:
    if name is None:
        return [None]
    column = rows[name]
    found = list(dict.fromkeys(column.tolist())) if column.dtype.kind == "U" else None
    found = np.unique(column).tolist() if found is None else found
    if len(found) > most:
        raise ValueError(
            f"--{what} {name}: {len(found)} values, at most {most} are drawn: choose with --where"
        )
    return found


def _check_rest(rows: Rows, layout: Layout, over: Sequence[str]) -> None:
    """Raises where an axis that varies is neither drawn nor averaged over."""
    drawn = [name for name in layout.columns if name in rows.axes]
    points = group_ids([rows.columns[name] for name in drawn], len(rows))
    for name in rows.axes:
        if name in drawn or name in over:
            continue
        both = group_ids([points, rows.columns[name]], len(rows))
        if both.max() > points.max():
            values = [f"{value}" for value in np.unique(rows.columns[name])[:4].tolist()]
            raise ValueError(
                f"rows of one point differ in {name} ({', '.join(values)}, ...): choose with "
                f"--where '{name} == ...', draw it with --by or --panel, or average with --over"
            )


def _draw(rows: Rows, layout: Layout, over, ax, title: str, *, legend: bool) -> None:
    if layout.kind == "line":
        if layout.by:
            _values(rows, layout.by, MOST_LINES, "by")
        table = _means(rows, [layout.x, layout.by], layout.y)
        kinds: dict[str, Any] = dict(
            x=layout.x, y=layout.y, by=layout.by, title=title, legend=legend
        )
        plot.lines(table, ax, **kinds)
    elif layout.kind == "heat":
        value = str(layout.value)
        table = _means(rows, [layout.x, layout.y], value)
        plot.heat_map(table, ax, x=layout.x, y=layout.y, value=value, title=title)
    else:
        _draw_pareto(rows, layout, over, ax, title, legend)


def _means(rows: Rows, keys: Sequence[str | None], value: str) -> dict[str, np.ndarray]:
    """Means of a column by keys; with their intervals where several rows went into each."""
    named = [name for name in keys if name]
    if rows[value].dtype.kind not in "biuf":
        raise ValueError(f"column {value!r} holds text, not numbers")
    group = group_ids([rows[name] for name in named], len(rows))
    first = np.unique(group, return_index=True)[1]
    table = {name: rows[name][first] for name in named}
    count = np.bincount(group)
    table[value] = np.bincount(group, rows[value].astype(np.float64)) / count
    if count.min() > 1:
        half = half_width(rows[value], group)
        table |= {f"{value}_low": table[value] - half, f"{value}_high": table[value] + half}
    return table


def _draw_pareto(rows: Rows, layout: Layout, over, ax, title: str, legend: bool) -> None:
    from moejax.report._average import average

    if layout.by:
        _values(rows, layout.by, MOST_LINES, "by")
    if over:
        rows = average(rows, over)
    names = [layout.x, layout.y]
    values, usable = objectives(rows, names)
    more = layout.x in layout.maximize, layout.y in layout.maximize
    if not usable.any():
        raise ValueError(f"no row has {' and '.join(names)}")
    front = np.asarray(pareto_mask(values, maximize=more, valid=usable))
    table = {name: rows[name] for name in layout.columns if name != layout.panel}
    kinds: dict[str, Any] = dict(x=layout.x, y=layout.y, by=layout.by, title=title, legend=legend)
    plot.pareto(table | {"front": front}, ax, more=more, **kinds)


def choose(rows: Rows, over: Sequence[str] = ()) -> Layout | None:
    """A line picture where nobody says what to draw: the axis of most numbers along x, a first
    result up, axes of few values as lines and panels. None where no axis or no number is there."""
    free = [name for name in rows.varied if name not in over]
    numbers = [name for name in free if rows[name].dtype.kind in "iuf"]
    distinct = {name: len(np.unique(rows[name])) for name in free}
    results = [name for name in FIRST if name in rows.numbers]
    results += [name for name in rows.numbers if name not in results]
    if not free or not results:
        return None
    x = max(numbers or free, key=lambda name: distinct[name])
    rest = [name for name in free if name != x]
    text = [name for name in rest if rows[name].dtype.kind == "U"]
    few = lambda names, most: [name for name in names if distinct[name] <= most]
    policy = [name for name in text if name in ("policy", "method", "gate", "placement")]
    by = next(iter(few(policy, MOST_LINES) + few(text, MOST_LINES) + few(rest, MOST_LINES)), None)
    panel = next(iter(few([name for name in rest if name != by], MOST_PANELS)), None)
    return Layout("line", x, results[0], by, panel)


def narrowed(rows: Rows, layout: Layout, over: Sequence[str] = ()) -> tuple[Rows, dict[str, Any]]:
    """The rows where every axis that is neither drawn nor averaged over has its first value, and
    those values: for pictures that nobody asked for."""
    fixed = {}
    for name in rows.varied:
        if name in layout.columns or name in over:
            continue
        # What depends on an axis that is drawn, such as the system on the model, stays with it.
        drawn = group_ids([rows[key] for key in layout.columns if key in rows.axes], len(rows))
        first = np.unique(drawn, return_index=True)[1]
        keep = rows[name] == rows[name][first][drawn]
        if keep.all():
            continue
        rows = rows.take(keep)
        values = np.unique(rows[name]).tolist()
        fixed[name] = values[0] if len(values) == 1 else "the first"
    return rows, fixed


def png(figure: Any, dpi: float = 110.0) -> bytes:
    """A figure as the bytes of a PNG, the same for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return stream.getvalue()
