"""`moejax best`: the rows of a sweep that are best, under conditions."""

import argparse

import numpy as np

from moejax import report
from moejax.cli import _choose
from moejax.cli._format import table, whole


EXAMPLES = f"""\
examples:
  moejax best results/quickstart --minimize tbt_ms --where 'policy == "sieve"' --where batch=64
  moejax best results/quickstart --maximize throughput_per_gpu_tok_s --where 'tbt_ms < 20' --top 5
  moejax best results/mine --minimize tbt_ms --column 'power_w = 700 + 12 * pim_ms' \\
      --where 'power_w < 750'
  moejax best results/mine --maximize tok_s_per_mm2 --join area.csv \\
      --column 'tok_s_per_mm2 = throughput_per_gpu_tok_s / area_mm2'
  moejax best results/mine --minimize tbt_ms --maximize throughput_per_gpu_tok_s

With several objectives: the rows that no other row beats in all of them (the Pareto front).

{_choose.CONDITIONS}"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "best",
        help="the best rows of a sweep under conditions, or its Pareto front",
        description="Prints the best rows of a sweep, the best first.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _choose.add_options(parser)
    _choose.add_objectives(parser, "; several leave the Pareto front")
    parser.add_argument("--top", type=whole(1), default=10, help="rows to print (default 10)")
    parser.add_argument("--show", metavar="COLUMNS", help="columns to print (default: what varied)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints one table, and how many rows there were to choose from."""
    every = _choose.read(options)
    asked = _choose.selection(options)
    rows = report.select(every, asked)
    goals = [*options.minimize, *options.maximize]
    found = report.best(rows, options.minimize, options.maximize, top=len(rows) or 1)
    shown = found.take(np.arange(min(len(found), options.top)))
    print(table(*_cells(shown, _columns(shown, goals, options))))
    print("\n" + _summary(every, rows, found, shown, goals, options, asked))


def _columns(rows: report.Rows, goals: list[str], options: argparse.Namespace) -> list[str]:
    if options.show is not None:
        names = [name.strip() for name in options.show.split(",")]
        for name in names:
            rows[name]
        return names
    named = [name for text in options.where for name in report.names_in(text, rows.columns)]
    own = [text.partition("=")[0].strip() for text in options.column]
    return report.worth_showing(rows, [*goals, *named, *own])


def _cells(rows: report.Rows, names: list[str]) -> tuple[list[str], list[list[str]]]:
    columns = [rows[name].tolist() for name in names]
    return names, [[_text(value) for value in line] for line in zip(*columns)]


def _text(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _summary(every, rows, found, shown, goals, options, asked) -> str:
    over = report.averaged_axes(every, asked.over)
    means = f", means over {', '.join(over)}" if over else ""
    lines = [f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} to choose from{means}"]
    if len(goals) > 1:
        lines[0] += f"; {len(found)} on the Pareto front of {', '.join(goals)}"
    if len(shown) < len(found) and len(goals) > 1:
        lines[0] += f", {len(shown)} printed (--top)"
    return "\n".join([*lines, *_choose.remarks(every)])
