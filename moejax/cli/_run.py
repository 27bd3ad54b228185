"""`moejax run`: a sweep file from start to tables and pictures.

A sweep file defines `rows(*, trace=None, progress=None)`, which yields lists of tidy rows (dicts of
column to value), and may define `summary(rows) -> str` and `figures(rows, *, trace=None)`, which
gives figures by name.
"""

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from moejax._progress import Progress
from moejax.cli._format import use_cache
from moejax.cli._store import save_rows


Row = dict[str, Any]


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a sweep file: rows to a table file, a summary, pictures",
        description="Runs a sweep file and writes OUT/rows.parquet (rows.npz without pyarrow) and "
        "its pictures (with matplotlib). What is computed when it stops early is kept.",
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
    rows: list[Row] = []
    try:
        rows.extend(_collect(sweep, options.trace))
    finally:
        if rows:
            print(f"wrote {save_rows(rows, out)}: {len(rows)} rows")
    if not rows:
        raise ValueError(f"{options.file}: rows() gave none")
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
    if not callable(getattr(sweep, "rows", None)):
        raise ValueError(f"{path} defines no rows(*, trace=None, progress=None)")
    return sweep


def _collect(sweep: ModuleType, trace: str | None) -> Iterator[Row]:
    progress = Progress(Path(sweep.__file__ or "sweep").stem)
    for chunk in sweep.rows(trace=trace, progress=progress):
        yield from chunk


def _draw(figures: Callable, rows: list[Row], trace: str | None, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (pip install 'moejax[plots]')")
        return
    from moejax import plot

    takes_trace = "trace" in inspect.signature(figures).parameters
    for name, figure in figures(rows, **({"trace": trace} if takes_trace else {})).items():
        print(f"wrote {plot.save(figure, out / f'{name}.png')}")
