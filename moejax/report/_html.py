"""The few pieces of HTML of a report. Everything that comes from outside is escaped."""

import base64
import html
from collections.abc import Sequence

import numpy as np

from moejax.report._limits import kind_of


COLORS = {
    "compute": "#3B5BA5", "hbm": "#56B4E9", "gpu": "#0072B2", "pim": "#C8453B",
    "comm": "#E69F00", "scheduler": "#8A8F98", "head": "#5B2A86",
}  # fmt: skip
SPARE = ("#009E73", "#CC79A7", "#7A5230", "#999933")

STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #1F2933; background: #fff;
  max-width: 68rem; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.4rem 0 .5rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem } p { margin: .3rem 0 } .soft { color: #66727F }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 }
th, td { padding: .22rem .7rem .22rem 0; text-align: left; white-space: nowrap }
th { border-bottom: 1px solid #AEB7C0; font-weight: 600 } td { border-bottom: 1px solid #EEF1F4 }
.n { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: flex; width: 24rem; height: 1.05rem; background: #F3F5F7 }
.bar span { color: #fff; font-size: 11px; line-height: 1.05rem; overflow: hidden;
  text-align: center } .key { display: inline-block; width: .8rem; height: .8rem;
  margin: 0 .3rem 0 .9rem; vertical-align: -1px } .map td { text-align: center; color: #fff;
  border: 1px solid #fff; padding: .3rem .6rem } .map th { font-weight: 400 }
.map .empty { background: #F3F5F7 } img { max-width: 100%; display: block; margin: .6rem 0 }
.warn { background: #FDF3E1; border-left: 4px solid #E69F00; padding: .5rem .8rem }
pre { font-size: 12px; background: #F7F8FA; padding: .8rem; overflow-x: auto }
"""


def escape(text: object) -> str:
    """Text as it may stand in HTML, quotes too."""
    return html.escape(str(text), quote=True)


def page(title: str, body: Sequence[str]) -> str:
    """The whole document. It loads nothing: style and pictures are inside."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{view}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def tag(name: str, text: object, kind: str = "") -> str:
    """An element around escaped text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<{name}{attribute}>{escape(text)}</{name}>"


def number(value: object) -> str:
    """A cell: four digits of a float, all of a whole number below a billion, words as they are."""
    if not isinstance(value, float | np.floating):
        return str(value)
    if np.isnan(value):
        return "–"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table, columns of numbers to the right."""
    kinds = [
        "n" if rows and all(isinstance(row[i], int | float | np.number) for row in rows) else ""
        for i in range(len(header))
    ]
    cell = lambda name, value, kind: (
        f"<{name}>{value.html}</{name}>"
        if isinstance(value, Raw)
        else tag(name, number(value), kind)
    )
    lines = ["".join(cell("th", word, kind) for word, kind in zip(header, kinds))]
    lines += ["".join(cell("td", value, kind) for value, kind in zip(row, kinds)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


class Raw:
    """HTML that this module made, for a cell."""

    def __init__(self, html: str):
        self.html = html


def color(name: str, names: Sequence[str]) -> str:
    """The color of a component: by what kind it is of, where that is known."""
    others = [other for other in names if kind_of(other) not in COLORS]
    kind = kind_of(name)
    return COLORS[kind] if kind in COLORS else SPARE[others.index(name) % len(SPARE)]


def legend(names: Sequence[str]) -> str:
    """Color and name of each component."""
    key = lambda name: f'<span class="key" style="background:{color(name, names)}"></span>'
    return "<p>" + "".join(key(name) + escape(name) for name in names) + "</p>"


def bar(names: Sequence[str], shares: np.ndarray) -> Raw:
    """Shares that add to 1 as one bar, with percent where there is room."""
    if not np.isfinite(shares).all():
        return Raw("–")
    pieces = [
        f'<span style="width:{100 * share:.2f}%;background:{color(name, names)}" '
        f'title="{escape(name)} {share:.1%}">{f"{share:.0%}" if share > 0.08 else ""}</span>'
        for name, share in zip(names, shares)
        if share > 0
    ]
    return Raw(f'<div class="bar">{"".join(pieces)}</div>')


def picture(data: bytes, words: str) -> str:
    """A PNG inside the page."""
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{text}">'
