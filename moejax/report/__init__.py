"""After a sweep: choose rows, find the best, say what limits where, and put it into one page.

Read in this order: `_rows.py` (`Rows`, `read`), `_expressions.py` (`evaluate`: arithmetic and
conditions on columns), `_select.py` (columns of your own, conditions, files joined), `_average.py`
(means over seeds), `_best.py`, `_limits.py`, `_pictures.py`, and `_page.py` with `_sections.py`
and `_html.py`. `moejax best`, `moejax plot` and `moejax report` are these functions on the
command line.
"""

from moejax.report._average import average as average
from moejax.report._best import best as best
from moejax.report._best import worth_showing as worth_showing
from moejax.report._expressions import evaluate as evaluate
from moejax.report._expressions import names_in as names_in
from moejax.report._limits import Limits as Limits
from moejax.report._limits import limits_of as limits_of
from moejax.report._page import report as report
from moejax.report._pictures import KINDS as KINDS
from moejax.report._pictures import Layout as Layout
from moejax.report._pictures import choose as choose
from moejax.report._pictures import draw as draw
from moejax.report._pictures import narrowed as narrowed
from moejax.report._rows import Rows as Rows
from moejax.report._rows import read as read
from moejax.report._rows import rows_of as rows_of
from moejax.report._select import Selection as Selection
from moejax.report._select import averaged_axes as averaged_axes
from moejax.report._select import select as select


__all__ = [
    "KINDS",
    "Layout",
    "Limits",
    "Rows",
    "Selection",
    "average",
    "averaged_axes",
    "best",
    "choose",
    "draw",
    "evaluate",
    "limits_of",
    "names_in",
    "narrowed",
    "read",
    "report",
    "rows_of",
    "select",
    "worth_showing",
]
