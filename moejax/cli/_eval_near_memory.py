"""`moejax eval` on a near-memory system: one row per placement."""

import argparse
import functools

import jax
import numpy as np

from moejax import routing
from moejax._checks import lookup
from moejax._status import Status
from moejax._units import GB, MS
from moejax.cli._format import table
from moejax.cli._progress import progress_line
from moejax.hardware import NMPSystem
from moejax.models import MODELS, MoEModel
from moejax.placement import METHODS, Placement
from moejax.serving import (
    NearMemoryReport,
    Workload,
    evaluate_placement,
    mean_and_interval,
    place,
    routing_source,
)


BASELINE = "tensor_parallel"
CONTEXT = 64.0
"""Cached tokens of a request where none are given, as HDA-MoE (arXiv 2609.08682) has it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What only near-memory systems take."""
    group = parser.add_argument_group("near-memory systems (nmp-...)")
    group.add_argument("--placement", help="names with commas between, or all (default)")
    group.add_argument("--fit", metavar="FILE", help="fit placements to this trace")
    group.add_argument(
        "--eval",
        metavar="FILE",
        dest="judge",
        help="draw the routing from this trace; several tokens of one sequence if it has too few",
    )
    group.add_argument("--accounting", help="counted (default), or published for the papers' units")


def run(
    model: MoEModel, system: NMPSystem, workload: Workload, options: argparse.Namespace
) -> None:
    """Prints one table with units, and where routing and placements come from."""
    accounting = "counted" if options.accounting is None else options.accounting
    names = _placements("all" if options.placement is None else options.placement)
    fit = None if options.fit is None else _trace(options.fit, model)
    key = jax.random.key(options.seed)
    place_one = functools.partial(
        place, model, system, workload, key=key, fit=fit, accounting=accounting
    )
    placed = lambda name: place_one(name, progress=progress_line(name))
    seeds = np.arange(options.seed, options.seed + options.seeds).astype(np.uint32)
    asked = names if BASELINE in names else [BASELINE, *names]
    about = accounting, not options.oversize
    results = {
        name: _columns(name, _reports(model, system, workload, placed(name), seeds, *about))
        for name in asked
    }
    print(_table(names, results))
    print(_footer(model, system, workload, results[names[0]], options))


def prepare(options: argparse.Namespace, model: MoEModel) -> None:
    """`--eval` is `--trace`, with `--reuse` where the batch has more requests than the trace."""
    if options.judge is not None:
        if options.trace is not None:
            raise ValueError("--eval and --trace both say what to draw from: give one")
        options.trace = options.judge
        options.reuse = options.reuse or options.batch > _trace(options.judge, model).num_sequences
    if options.context is None:
        options.context = CONTEXT


def _placements(text: str) -> list[str]:
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if name != "all":
            lookup("placement", name, METHODS)
        names += list(METHODS) if name == "all" else [name]
    return list(dict.fromkeys(names))


def _trace(path: str, model: MoEModel) -> routing.RoutingTrace:
    if model.name in MODELS:
        return routing.load(path, model=model.name)
    return routing.load(path, num_experts=model.num_experts)


@functools.partial(jax.jit, static_argnames=("accounting", "must_fit"))
def _reports(
    model, system, workload, placement: Placement, seeds, accounting: str, must_fit: bool
) -> NearMemoryReport:
    one = lambda seed: evaluate_placement(
        model,
        system,
        workload,
        placement,
        key=jax.random.key(seed),
        accounting=accounting,
        must_fit=must_fit,
    )
    # One draw after the other: messages of many batches at once would take much memory.
    return jax.lax.map(one, seeds)


def _columns(name: str, report: NearMemoryReport) -> dict[str, np.ndarray]:
    bad = np.asarray(report.status)
    if np.any(bad):
        status = Status(int(bad[bad != 0][0]))
        needed = ""
        if status == Status.OUT_OF_MEMORY:
            fullest = float(np.max(np.asarray(report.memory_bytes))) / GB
            needed = f"; the fullest node needs {fullest:.4g} GB (--oversize times it all the same)"
        raise ValueError(f"{name}: {status.message}{needed}")
    return {field: np.asarray(value) for field, value in vars(report).items()}


def _table(names: list[str], results: dict) -> str:
    header = (
        "placement", "tbt_ms", "tok/s/user", "tok/s", f"vs {BASELINE} (95%)",
        "comp/comm_ms", "attention/memory_ms", "max/mean load", "memory_gb",
    )  # fmt: skip
    rows = []
    for name in names:
        r = results[name]
        mean = {field: np.mean(values) for field, values in r.items()}
        gain, half = mean_and_interval(results[BASELINE]["tbt"] / r["tbt"])
        interval = "" if np.isnan(half) else f" +-{half:.3f}"
        rows.append((
            name,
            f"{mean['tbt'] / MS:.3f}",
            f"{mean['interactivity']:.1f}",
            f"{mean['throughput']:.0f}",
            f"{gain:.3f}x{interval}",
            f"{mean['comp_time'] / MS:.3f}/{mean['comm_time'] / MS:.3f}",
            f"{mean['attention_time'] / MS:.3f}/{mean['memory_time'] / MS:.3f}",
            f"{mean['load_imbalance']:.2f}",
            f"{mean['memory_bytes'] / GB:.2f}",
        ))  # fmt: skip
    return table(header, rows)


def _footer(model, system, workload, result, options: argparse.Namespace) -> str:
    capacity = float(system.dram_bytes) / GB
    fits = "fits" if np.all(result["memory_fits"]) else "DOES NOT FIT"
    fitted = "the routing above" if options.fit is None else f"the trace {options.fit}"
    draws = "one draw" if options.seeds == 1 else f"mean of {options.seeds} draws"
    lines = [
        f"{model.name} ({model.precision.name}) on {system.name}, batch {workload.batch}, "
        f"context {workload.context:g}, {draws}",
        f"routing: {routing_source(model, workload)}"
        + (", several tokens of one sequence" if workload.reuse else ""),
        f"placements fitted to {fitted}",
        f"memory: the fullest node of the first row {fits} in {capacity:.1f} GB",
        "nothing overlaps: tbt is the sum of the four times, each that of the slowest node",
    ]
    if options.changes:
        lines.insert(1, "set: " + ", ".join(options.changes))
    return "\n" + "\n".join(lines)
