"""The report: one HTML file about one sweep, section by section."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import plot
from moejax._status import Status
from moejax.report import _html as h
from moejax.report._average import average
from moejax.report._best import best, worth_showing
from moejax.report._limits import Limits, Part, limits_of, main_axes, parts, shares
from moejax.report._pictures import Layout, choose, draw, narrowed, png
from moejax.report._rows import STATUS, Rows
from moejax.report._select import averaged_axes


# What is better when less, and when more, where a sweep has it and nobody says.
LESS = ("tbt_ms", "tbt_us", "makespan_us", "time_us", "total_ms", "kl")
MORE = ("throughput_per_gpu_tok_s", "speedup", "interactivity_tok_s")
TOP = 10
MOST_GROUPS = 30


def report(
    rows: Rows,
    *,
    minimize: Sequence[str] = (),
    maximize: Sequence[str] = (),
    over: Sequence[str] | None = None,
    conditions: Sequence[str] = (),
    pictures: Sequence[Path] = (),
    config: Any = None,
) -> str:
    """A self-contained page about a sweep: it loads nothing and can be sent around.

    **Arguments:**

    - `rows`: as read, not averaged.
    - `minimize`, `maximize`: objectives of the table of best rows and of the Pareto front. Without
        any: the results that people usually look at, where the sweep has them.
    - `over`: axes that are averaged over; the seed by default.
    - `conditions`: what the rows were chosen by, to be said.
    - `pictures`: PNG files to show beside those that are drawn here. Without matplotlib these are
        all, and everything else is there.
    - `config`: the resolved configuration.

    **Returns:** HTML. **Raises:** `ValueError` for an objective that is no column of numbers.
    """
    over = averaged_axes(rows, over)
    if not minimize and not maximize:
        minimize = [name for name in LESS if name in rows.numbers][:1]
        maximize = [name for name in MORE if name in rows.numbers][: 2 - len(minimize)]
    body = [*_head(rows, conditions), *_failed(rows)]
    if rows.okay.any():
        body += _best(rows, minimize, maximize, over)
        limits = limits_of(rows)
        body += [] if limits is None else _limits(rows, limits, over)
        body += _pictures(rows, [*minimize, *maximize], tuple(maximize), over, pictures)
        body += _results(rows)
    body += [*_axes(rows), *_provenance(rows, config)]
    return h.page(f"{rows.name}: moejax report", body)


def _head(rows: Rows, conditions: Sequence[str]) -> list[str]:
    manifest, failed = rows.manifest, int(np.count_nonzero(~rows.okay))
    said = f"{len(rows):,} rows, {len(rows.axes)} axes, {failed:,} failed"
    body = [h.tag("h1", rows.name), h.tag("p", said, "soft")]
    facts = [manifest.get("file"), manifest.get("created")]
    body += [h.tag("p", " · ".join(str(fact) for fact in facts if fact), "soft")]
    if conditions:
        body.append(h.tag("p", "rows where " + " and ".join(conditions)))
    if not rows.complete:
        total = manifest.get("rows", "all")
        body.append(h.tag("p", f"The sweep has not finished: {len(rows)} of {total} rows.", "warn"))
    return body


def _failed(rows: Rows) -> list[str]:
    """Rows that failed by status, and where: in each axis, the value that most of them have."""
    if rows.okay.all():
        return []
    failed = rows.take(~rows.okay)
    words, code, number = np.unique(
        failed[STATUS].astype(str), return_inverse=True, return_counts=True
    )
    known = {status.name.lower(): status.message for status in Status}
    lines, order = [], np.argsort(-number, kind="stable").tolist()
    for i in order[:MOST_GROUPS]:
        here = failed.take(code == i)
        where = []
        for axis in rows.varied:
            values, counts = np.unique(here[axis], return_counts=True)
            among = np.count_nonzero(rows[axis] == values[np.argmax(counts)]) / len(rows)
            share = counts.max() / len(here)
            if share > 0.5 and share > 1.5 * among:
                where.append(f"{axis} = {values[np.argmax(counts)]} ({share:.0%})")
        word = str(words[i])
        lines.append((word, int(number[i]), known.get(word, ""), ", ".join(where) or "anywhere"))
    if rest := int(number[order[MOST_GROUPS:]].sum()):
        lines.append((f"{len(order) - MOST_GROUPS} others", rest, "", ""))
    text = "Their numbers are not among those below; all other rows are right."
    table = h.table(("status", "rows", "what it means", "mostly where"), lines)
    return [h.tag("h2", "Failed rows"), h.tag("p", text, "soft"), table]


def _best(rows: Rows, minimize, maximize, over) -> list[str]:
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


def _limits(rows: Rows, limits: Limits, over) -> list[str]:
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
    """Two axes: what limits most rows of each cell, the paler the fewer."""
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


def _pictures(rows: Rows, names, maximize, over, files: Sequence[Path]) -> list[str]:
    body = []
    if importlib.util.find_spec("matplotlib") is None:
        said = "Install matplotlib (pip install moejax[plots]) for more of them."
        body.append(h.tag("p", said, "soft"))
    else:
        for words, figure in _drawn(rows, names, maximize, over):
            body += [] if figure is None else [h.picture(png(figure), words)]
            body.append(h.tag("p", words, "soft"))
    for path in files:
        body += [h.tag("h3", path.stem), h.picture(path.read_bytes(), path.stem)]
    return [h.tag("h2", "Pictures"), *body] if body else []


def _drawn(rows: Rows, names, maximize, over):
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


def _results(rows: Rows) -> list[str]:
    fine = rows.take(rows.okay)
    lines = []
    for name in rows.numbers:
        column = fine[name].astype(np.float64)
        finite = column[np.isfinite(column)]
        if finite.size:
            low, middle, high = np.quantile(finite, (0, 0.5, 1)).tolist()
            lines.append((plot.label_of(name), low, middle, high, len(column) - finite.size))
    header = ("result", "least", "median", "most", "rows without")
    return [h.tag("h2", "Results"), h.table(header, lines)] if lines else []


def _axes(rows: Rows) -> list[str]:
    kinds = {axis["name"]: axis["kind"] for axis in rows.manifest.get("axes", ())}
    lines = []
    for name in rows.axes:
        values = list(dict.fromkeys(rows[name].tolist()))
        shown = ", ".join(h.number(value) for value in values[:8])
        more = ", ..." if len(values) > 8 else ""
        lines.append((name, len(values), kinds.get(name, ""), shown + more))
    header = ("axis", "values", "kind", "which")
    return [h.tag("h2", "Axes"), h.table(header, lines)]


def _provenance(rows: Rows, config: Any) -> list[str]:
    """Where the numbers come from: columns that say so, versions, the resolved configuration."""
    lines = []
    for name in rows.about:
        values, counts = np.unique(rows[name].astype(str), return_counts=True)
        lines += [(name, v, c) for v, c in zip(values[:12].tolist(), counts[:12].tolist())]
    body = [h.tag("h2", "Where it comes from")]
    body += [h.table(("", "", "rows"), lines)] if lines else []
    facts = dict(rows.manifest.get("versions", {}))
    facts |= {"config hash": rows.manifest["config_hash"]} if rows.manifest else {}
    body += [h.table(("", ""), [(k, str(v)) for k, v in facts.items()])] if facts else []
    for title, data in (("Configuration", config), ("Manifest", rows.manifest or None)):
        if data is not None:
            text = h.escape(json.dumps(data, indent=1, ensure_ascii=False))
            body.append(f"<details><summary>{title}</summary><pre>{text}</pre></details>")
    return body
