"""`moejax run`: a sweep file from start to tables and pictures.

A sweep file defines `rows(*, trace=None, progress=None)`, which yields lists of tidy rows (dicts of
column to value), and may define `summary(rows) -> str` and `figures(rows, *, trace=None)`, which
gives figures by name.
"""

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from moejax.cli._format import use_cache
from moejax.cli._progress import Progress
from moejax.cli._store import check_row, save_rows


Row = dict[str, Any]


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a sweep file: rows to a table file, a summary, pictures",
        description="Runs a sweep file and writes OUT/rows.parquet (rows.npz without pyarrow) and "
        "its pictures (with matplotlib). If it stops early, OUT/partial_rows.* has what there is.",
    )
    parser.add_argument("file", help="for example sweeps/quickstart.py")
    parser.add_argument("--trace", metavar="FILE", help="draw the routing from this trace instead")
    parser.add_argument("--out", metavar="DIR", help="default: results/NAME")
    parser.add_argument("--no-figures", action="store_true", help="rows and summary only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the sweep; whatever happens, rows that are there are written."""
    use_cache()
    sweep = _load(Path(options.file))
    out = Path(options.out or Path("results") / Path(options.file).stem)
    # Before an hour of computing, not after it.
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    complete = False
    try:
        _collect(sweep, options, rows)
        complete = True
    finally:
        if rows:
            early = "" if complete else " (stopped early)"
            path = save_rows(rows, out, complete=complete)
            print(f"wrote {path}: {len(rows)} rows{early}")
    if not rows:
        raise ValueError(f"{options.file}: rows() gave no rows")
    if hasattr(sweep, "summary"):
        print(sweep.summary(rows))
    if hasattr(sweep, "figures") and not options.no_figures:
        _draw(sweep.figures, rows, options.trace, out)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no sweep file {path}")
    spec = importlib.util.spec_from_file_location(f"moejax_sweep_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    sweep = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sweep
    try:
        spec.loader.exec_module(sweep)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    except ImportError as error:
        raise ValueError(f"{path}: {error}") from None
    rows = getattr(sweep, "rows", None)
    if not callable(rows) or not _takes(rows, "trace", "progress"):
        raise ValueError(f"{path} defines no rows(*, trace=None, progress=None)")
    return sweep


def _takes(function: Callable, *names: str) -> bool:
    parameters = inspect.signature(function).parameters
    anything = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return anything or set(names) <= set(parameters)


def _collect(sweep: ModuleType, options: argparse.Namespace, rows: list[Row]) -> None:
    """Adds to `rows`, so that what is there stays when this stops early."""
    progress = Progress(Path(options.file).stem)
    try:
        for chunk in sweep.rows(trace=options.trace, progress=progress):
            if isinstance(chunk, dict):
                raise ValueError(f"{options.file}: rows() gave a dict; allowed are lists of dicts")
            for row in chunk:
                check_row(row, rows[0] if rows else row, f"{options.file}: row {len(rows)}")
                rows.append(row)
    finally:
        progress.close()


def _draw(figures: Callable, rows: list[Row], trace: str | None, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (pip install 'moejax[plots]')")
        return
    from moejax import plot

    options = {"trace": trace} if _takes(figures, "trace") else {}
    for name, figure in figures(rows, **options).items():
        print(f"wrote {plot.save(figure, out / f'{name}.png')}")
