"""`moejax run`: a sweep file from start to rows, a summary and pictures."""

import argparse
import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moejax import sweep
from moejax.cli._format import use_cache, whole


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a sweep file: rows that last, a summary, pictures",
        description="Runs a sweep file and writes its rows to OUT/parts. Whatever stops it, the "
        "same command goes on where it was. The last process of several draws the pictures.",
        epilog="VALUES: 1,2,4 or names; low:high:count[:log]; low:high where it is sampled. "
        "seeds=16 are the seeds 0 to 15, as in a sweep file; seeds=3,5 are these two.",
    )
    parser.add_argument("file", help="for example sweeps/quickstart.py")
    parser.add_argument("--out", metavar="DIR", help="default: results/NAME")
    parser.add_argument("--trace", metavar="FILE", help="draw the routing from this trace instead")
    add = lambda flag, metavar, text: parser.add_argument(
        flag, metavar=metavar, action="append", default=[], help=text
    )
    add("--set", "AXIS=VALUES", "other values for an axis (or seeds, width), several times")
    add("--option", "NAME=VALUE", "an option of the sweep file, several times")
    parser.add_argument("--chunk", type=whole(1), metavar="N", help="tiles in a part")
    parser.add_argument("--shard", metavar="I/N", help="only the I-th of N parts of the work")
    parser.add_argument("--devices", type=whole(1), metavar="N", help="default: all of this host")
    parser.add_argument("--memory", type=_gigabytes, metavar="GB", help="of a device, for a chunk")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="keep rows that are there (default)")
    again.add_argument("--fresh", action="store_true", help="remove rows that are there first")
    parser.add_argument("--json-log", metavar="FILE", help="progress as JSON lines; - is stderr")
    parser.add_argument("--no-figures", action="store_true", help="rows and summary only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the sweep, or what is missing of it; then summary and pictures, if it is complete."""
    use_cache()
    given = _pairs("--option", options.option)
    given |= {"trace": options.trace} if options.trace is not None else {}
    # Before anything asks for a device.
    sweep.join_cluster()
    made, module = sweep.load_file(options.file, **given)
    changes = _pairs("--set", options.set)
    made = made.set({name: _values(name, text) for name, text in changes.items()})
    out = Path(options.out or Path("results") / Path(options.file).stem)
    try:
        result = _run(made, out, options)
    except KeyboardInterrupt:
        # It may have come before there was a manifest, in a long `prepare`.
        rows = sweep.load(out, partial=True).num_rows if (out / "manifest.json").is_file() else 0
        again = "the command without --fresh" if options.fresh else "the same command"
        print(f"{out}: {rows} of {made.num_rows} rows; {again} goes on from here")
        raise
    _say(result, out)
    if not result.complete:
        return
    if hasattr(module, "summary"):
        print(module.summary(result.columns))
    if hasattr(module, "figures") and not options.no_figures:
        _draw(module.figures, result.columns, given, out)


def _values(name: str, text: str) -> Any:
    """Of an axis; one number for `seeds` is how many, and there is one width."""
    values = sweep.parse_values(text)
    alone = name in ("seeds", "width") and isinstance(values, list) and len(values) == 1
    return values[0] if alone else values


def _run(made: sweep.Sweep, out: Path, options: argparse.Namespace) -> sweep.Result:
    with _watched(options.json_log) as progress:
        return sweep.run(
            made,
            out,
            resume=not options.fresh,
            chunk=options.chunk,
            devices=options.devices,
            shard=options.shard,
            memory=options.memory,
            progress=progress,
            file=options.file,
        )


def _say(result: sweep.Result, out: Path) -> None:
    rows, total = result.num_rows, result.manifest["rows"]
    print(
        f"{out}: {rows} rows" + ("" if result.complete else f" of {total}; others are not done yet")
    )
    words, counts = np.unique(result.columns.get("status", ()), return_counts=True)
    for word, count in zip(words.tolist(), counts.tolist()):
        if word != "ok":
            print(f"{count} rows are not okay: {word}")


def _draw(figures: Callable, table: dict[str, Any], options: dict[str, Any], out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (pip install 'moejax[plots]')")
        return
    from moejax import plot

    taken = inspect.signature(figures).parameters
    given = {name: value for name, value in options.items() if name in taken}
    for name, figure in figures(table, **given).items():
        print(f"wrote {plot.save(figure, out / f'{name}.png')}")


@contextlib.contextmanager
def _watched(log: str | None):
    """A bar on a terminal, or a log."""
    if log is None:
        yield None
    elif log == "-":
        yield sweep.JsonLog(sys.stderr)
    else:
        with open(log, "a") as file:
            yield sweep.JsonLog(file)


def _pairs(flag: str, words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{flag} {word}: allowed is NAME=VALUE")
        if name in found:
            raise ValueError(f"{flag} {name} is given twice")
        found[name] = value
    return found


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a positive number")
    return 1e9 * value
