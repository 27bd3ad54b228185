"""`moejax report`: one HTML file about a sweep."""

import argparse
from pathlib import Path

from moejax import report
from moejax.cli import _choose


EXAMPLES = f"""\
examples:
  moejax report results/quickstart
  moejax report results/quickstart --where 'policy == "sieve"' --out sieve.html
  moejax report results/mine --minimize tbt_ms --minimize power_w \\
      --column 'power_w = 700 + 12 * pim_ms'

{_choose.CONDITIONS}"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "report",
        help="one HTML file about a sweep: tables, pictures, what limits where",
        description="Writes one HTML file that loads nothing: the best rows, what limits where, "
        "pictures, failed rows by status, axes, versions and the resolved configuration.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _choose.add_options(parser)
    _choose.add_objectives(parser, " (default: the usual ones that are there)")
    parser.add_argument("--out", metavar="FILE", help="default: DIR/report.html")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Writes the page."""
    rows, asked = _choose.read(options), _choose.selection(options)
    chosen = report.select(rows, asked, means=False)
    folder = Path(options.folder[0])
    page = report.report(
        chosen,
        minimize=options.minimize,
        maximize=options.maximize,
        over=asked.over,
        conditions=options.where,
        # Those of the sweep file show all of its rows.
        pictures=[] if options.where else sorted(folder.glob("*.png")),
        config=_choose.config_of(options.folder[0]),
    )
    out = Path(options.out) if options.out else folder / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out}: {len(chosen)} rows, {len(page) / 1e6:.1f} MB")
