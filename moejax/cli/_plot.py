"""`moejax plot`: lines, a heat map or a Pareto front of any columns of a sweep."""

import argparse
import dataclasses
from pathlib import Path

from moejax import report
from moejax._checks import lookup
from moejax.cli import _choose
from moejax.report import KINDS, Layout, Rows


EXAMPLES = f"""\
examples:
  moejax plot results/quickstart
  moejax plot results/quickstart --x batch --y tbt_ms --by policy --panel model \\
      --where 'variant == "b200"'
  moejax plot results/mine --kind heat --x batch --y system.gpu.hbm_bandwidth --value tbt_ms
  moejax plot results/mine --kind pareto --x tbt_ms --y throughput_per_gpu_tok_s \\
      --maximize throughput_per_gpu_tok_s --by policy --out front.svg

lines:   --y against --x, one line for each value of --by; shaded is the 95 % interval over seeds
heat:    --value as color over --x and --y
pareto:  rows in the plane of --x and --y, less is better unless --maximize names the column

Without any of --x, --y, --by, --panel and --where, a picture is chosen, and what it leaves out is
said.

{_choose.CONDITIONS}"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "plot",
        help="lines, a heat map or a Pareto front of any columns of a sweep",
        description="Draws columns of a sweep against each other (needs matplotlib).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _choose.add_options(parser)
    parser.add_argument("--kind", default="line", help=f"{', '.join(KINDS)} (default line)")
    for flag, text in (
        ("--x", "column along"),
        ("--y", "column upwards"),
        ("--by", "column of lines or colors"),
        ("--panel", "column of the axes side by side"),
        ("--value", "column of the colors of a heat map"),
    ):
        parser.add_argument(flag, metavar="COLUMN", help=text)
    parser.add_argument(
        "--maximize", metavar="COLUMN", action="append", default=[], help="of a Pareto front"
    )
    parser.add_argument("--title", default="", help="default: the folder")
    parser.add_argument("--out", metavar="FILE", help=".png, .svg or .pdf; default DIR/KIND-Y.png")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Writes one picture and says what is on it."""
    from moejax import plot

    lookup("kind", options.kind, dict.fromkeys(KINDS))
    asked = _choose.selection(options)
    every = _choose.read(options)
    rows = report.select(every, asked, means=False)
    over = report.averaged_axes(rows, asked.over)
    layout, rows, fixed = _layout(rows, over, options)
    title = options.title or rows.name
    figure = report.draw(rows, layout, over, title=title)
    name = f"{layout.kind}-{layout.value or layout.y}.png"
    out = Path(options.out) if options.out else Path(options.folder[0]) / name
    print(f"wrote {plot.save(figure, out)}: {_said(layout)}")
    for column, value in fixed.items():
        print(f"only {column} = {value} (choose with --where)")
    for remark in _choose.remarks(every):
        print(remark)


def _layout(rows: Rows, over, options: argparse.Namespace):
    """What goes where; the rows that are drawn; and what was chosen for whoever did not."""
    _check(options)
    given = {name: getattr(options, name) for name in ("x", "y", "by", "panel", "value")}
    given = {name: value for name, value in given.items() if value is not None}
    for name in (*given.values(), *options.maximize):
        rows[name]
    chosen = report.choose(rows, over)
    if chosen is None and not {"x", "y"} <= set(given):
        raise ValueError("no axis of several values or no result is a number: give --x and --y")
    if not given and not options.where and options.kind == "line" and chosen is not None:
        return chosen, *report.narrowed(rows, chosen, over)
    if options.kind == "line":
        chosen = chosen or Layout("line", given["x"], given["y"])
        # What is not given: an axis along, a result up. Lines and panels only as they are asked
        # for, or a picture would show more than it was told to.
        layout = Layout("line", chosen.x, chosen.y)
        return dataclasses.replace(layout, **given), rows, {}
    layout = Layout(options.kind, **given, maximize=tuple(options.maximize))
    return layout, rows, {}


def _check(options: argparse.Namespace) -> None:
    needed = {"line": (), "heat": ("x", "y", "value"), "pareto": ("x", "y")}[options.kind]
    for name in needed:
        if getattr(options, name) is None:
            raise ValueError(f"--kind {options.kind} needs --{name}")
    if options.value is not None and options.kind != "heat":
        raise ValueError("--value: allowed with --kind heat only")
    if options.by is not None and options.kind == "heat":
        raise ValueError("--by: not allowed with --kind heat; --panel draws several")
    if options.maximize and options.kind != "pareto":
        raise ValueError("--maximize: allowed with --kind pareto only")
    for name in options.maximize:
        if name not in (options.x, options.y):
            raise ValueError(f"--maximize {name}: allowed is --x or --y of the front")


def _said(layout: Layout) -> str:
    by = f" by {layout.by}" if layout.by else ""
    by += f", one panel for each {layout.panel}" if layout.panel else ""
    value = f"{layout.value} over {layout.x} and {layout.y}" if layout.value else ""
    return (value or f"{layout.y} over {layout.x}") + by
