"""Options that choose rows, the same for every command that looks at results."""

import argparse
import json
from pathlib import Path
from typing import Any

from moejax import report
from moejax.report import Rows, Selection


CONDITIONS = """\
conditions and columns:
  Names of columns, numbers, text (in quotes or not), + - * / // % **, < <= > >= == != in,
  and or not, and abs ceil exp floor log log10 log2 max min round sqrt where. --where may be given
  several times; all must hold. A column of your own is --column NAME=EXPRESSION, or a CSV or
  Parquet file with --join: its columns are added wherever the columns that it shares with the
  sweep agree (one row for each system with its area, for example).
  Rows that failed never take part. Means over seeds are taken unless --over says otherwise;
  conditions on other columns than the seed are about the means."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The folder and what is asked of its rows."""
    parser.add_argument("folder", nargs="+", metavar="DIR", help="of moejax run; or of its shards")
    add = lambda flag, metavar, text: parser.add_argument(
        flag, metavar=metavar, action="append", default=[], help=text
    )
    add("--where", "CONDITION", "only rows for which this holds, such as 'tbt_ms < 20'")
    add("--column", "NAME=EXPR", "a column of your own, such as power_w='700 + 12*pim_ms'")
    add("--join", "FILE", "columns of your own from a CSV or Parquet file")
    parser.add_argument(
        "--over", metavar="AXES", help="average over these (default: seed; '' for none)"
    )


def add_objectives(parser: argparse.ArgumentParser, text: str) -> None:
    """`--minimize` and `--maximize`."""
    for flag in ("--minimize", "--maximize"):
        words = f"a column of which {'less' if 'min' in flag else 'more'} is better{text}"
        parser.add_argument(flag, metavar="COLUMN", action="append", default=[], help=words)


def selection(options: argparse.Namespace) -> Selection:
    """What the options ask for."""
    over = options.over
    names = None if over is None else [name.strip() for name in over.split(",") if name.strip()]
    return Selection(options.column, options.join, options.where, names)


def read(options: argparse.Namespace) -> Rows:
    """The rows of the folder; a line on what is missing goes to standard error by the caller."""
    return report.read(*options.folder)


def config_of(folder: str) -> Any:
    """The resolved configuration beside the rows, or None."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else None


def remarks(rows: Rows) -> list[str]:
    """What somebody who looks at the rows should know about them."""
    said = []
    if not rows.complete:
        total = rows.manifest.get("rows", "all")
        said.append(f"the sweep has not finished: {len(rows)} of {total} rows")
    if failed := len(rows) - int(rows.okay.sum()):
        said.append(f"{failed} of {len(rows)} rows failed and are left out")
    return said
