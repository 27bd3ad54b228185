"""Sections of the report that look into the rows: the best, what limits where, pictures."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import plot
from moejax.report import _html as h
from moejax.report._average import average
from moejax.report._best import best, worth_showing
from moejax.report._limits import Limits, Part, main_axes, parts, shares
from moejax.report._pictures import Layout, choose, draw, narrowed, png
from moejax.report._rows import Rows


TOP = 10
MOST_GROUPS = 30


def best_rows(
    rows: Rows, minimize: Sequence[str], maximize: Sequence[str], over: Sequence[str]
) -> list[str]:
    """The best rows of one objective, or the first of the front of several."""
    if not minimize and not maximize:
        return []
    means = average(rows, over) if over else rows
    found = best(means, minimize, maximize, top=TOP if len([*minimize, *maximize]) < 2 else 1000)
    names = [*minimize, *maximize]
    title = "Best rows" if len(names) < 2 else "Rows that no other beats"
    goal = ", ".join([f"least {name}" for name in minimize] + [f"most {name}" for name in maximize])
    text = goal + (f"; means over {', '.join(over)}" if over else "")
    shown = found.take(np.arange(min(len(found), TOP)))
    columns = worth_showing(shown, names)
    lines = [[_cell(shown[name][i]) for name in columns] for i in range(len(shown))]
    if len(found) > len(shown):
        text += f"; {len(shown)} of {len(found)}"
    return [h.tag("h2", title), h.tag("p", text, "soft"), h.table(columns, lines)]


def _cell(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def what_limits(rows: Rows, limits: Limits, over: Sequence[str]) -> list[str]:
    """Shares of rows that each component limits: in all, along each axis, and over two of them."""
    axes = [name for name in rows.varied if name not in over]
    body = [h.tag("h2", "What limits where"), h.legend(limits.names)]
    text = f"Share of rows where each is the largest ({limits.source})."
    if axes:
        text += " First the axes that decide most of it."
    everything = h.bar(limits.names, shares(limits, np.ones(len(rows), bool)))
    body += [h.tag("p", text, "soft"), h.table(("", ""), [("all rows", everything)])]
    axes = main_axes(rows, limits, axes)
    for axis in axes:
        lines = [
            (part.label, h.bar(limits.names, shares(limits, part.rows)))
            for part in parts(rows[axis])[:MOST_GROUPS]
        ]
        body += [h.table((axis, ""), lines)]
    if len(axes) > 1:
        body += _map(rows, limits, axes[0], axes[1])
    return body


def _map(rows: Rows, limits: Limits, down: str, across: str) -> list[str]:
    """Two axes: what limits most rows of each cell, and how many of them."""
    columns, lines = parts(rows[across])[:MOST_GROUPS], parts(rows[down])[:MOST_GROUPS]
    cells = lambda line: "".join(_map_cell(limits, line, column) for column in columns)
    body = "".join(h.tag("th", part.label) for part in columns)
    corner = h.tag("th", f"{down} ↓ {across} →")
    body = f"<tr>{corner}{body}</tr>"
    body += "".join(f"<tr>{h.tag('th', line.label)}{cells(line)}</tr>" for line in lines)
    title = f"{down} and {across} together"
    return [h.tag("h3", title), f'<div class="scroll"><table class="map">{body}</table></div>']


def _map_cell(limits: Limits, line: Part, column: Part) -> str:
    share = shares(limits, line.rows & column.rows)
    if not np.isfinite(share).all():
        return '<td class="empty"></td>'
    most = int(np.argmax(share))
    name = limits.names[most]
    color = h.color(name, limits.names)
    return f'<td style="background:{color}">{h.escape(name)} {share[most]:.0%}</td>'


def drawn(
    rows: Rows,
    names: Sequence[str],
    maximize: tuple[str, ...],
    over: Sequence[str],
    files: Sequence[Path],
) -> list[str]:
    """Pictures of the objectives, where matplotlib is there, and those in files."""
    body = []
    if importlib.util.find_spec("matplotlib") is None:
        said = "Install matplotlib (pip install moejax[plots]) for more of them."
        body.append(h.tag("p", said, "soft"))
    else:
        for words, figure in _figures(rows, names, maximize, over):
            body += [] if figure is None else [h.picture(png(figure), words)]
            body.append(h.tag("p", words, "soft"))
    for path in files:
        body += [h.tag("h3", path.stem), h.picture(path.read_bytes(), path.stem)]
    return [h.tag("h2", "Pictures"), *body] if body else []


def _figures(
    rows: Rows, names: Sequence[str], maximize: tuple[str, ...], over: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """(what is seen, figure or None): lines of the first result, a map over two axes, a front."""
    line = choose(rows, over)
    if line is None:
        return
    if names:
        line = Layout("line", line.x, names[0], line.by, line.panel)
    layouts = [line]
    numeric = [name for name in rows.varied if rows[name].dtype.kind in "iuf" and name not in over]
    if len(numeric) > 1:
        second = next(name for name in numeric if name != line.x)
        layouts.append(Layout("heat", line.x, second, value=line.y))
    if len(names) > 1:
        layouts.append(Layout("pareto", names[0], names[1], line.by, line.panel, maximize=maximize))
    for layout in layouts:
        some, fixed = (rows, {}) if layout.kind == "pareto" else narrowed(rows, layout, over)
        said = {"line": "lines of", "heat": "map of", "pareto": "Pareto front of"}[layout.kind]
        shown = layout.value or layout.y
        said = (
            f"{said} {shown} over {layout.x}"
            if layout.kind != "pareto"
            else (f"{said} {layout.x} and {layout.y}")
        )
        said += "".join(f"; {name} = {value}" for name, value in fixed.items())
        try:
            figure = draw(some, layout, over, title=plot.label_of(shown))
        except ValueError as error:
            # A picture that nobody asked for may be impossible; the report is not.
            said, figure = f"no {said}: {error}", None
        yield said, figure
