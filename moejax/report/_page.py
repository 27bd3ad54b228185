"""The report: one HTML file about one sweep, section by section."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import plot
from moejax._status import Status
from moejax.report import _html as h
from moejax.report._limits import limits_of
from moejax.report._rows import STATUS, Rows
from moejax.report._sections import best_rows, drawn, what_limits
from moejax.report._select import averaged_axes


# What is better when less, and when more, where a sweep has it and nobody says.
LESS = ("tbt_ms", "tbt_us", "makespan_us", "time_us", "total_ms", "kl")
MORE = ("throughput_per_gpu_tok_s", "speedup", "interactivity_tok_s")
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
        body += best_rows(rows, minimize, maximize, over)
        limits = limits_of(rows)
        body += [] if limits is None else what_limits(rows, limits, over)
        body += drawn(rows, [*minimize, *maximize], tuple(maximize), over, pictures)
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
